"""What clients see of the models of a release."""

from __future__ import annotations

from pathlib import Path

import pytest

from riptide.serve.app import public_name


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("intfloat/e5-base-v2", "intfloat/e5-base-v2"),
        ("models/tuned", "models/tuned"),
        ("/srv/private/tuned", "tuned"),
        ("~/tuned", "tuned"),
        ("./tuned", "tuned"),
        ("../private/tuned/", "tuned"),
        ("private/models/tuned", "tuned"),
    ],
)
def test_the_name_of_a_model_shows_no_path_and_does_not_depend_on_the_working_folder(
    model: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert public_name(model) == shown
    if not model.startswith(("/", "~", ".")):
        (tmp_path / model).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name(model) == shown
