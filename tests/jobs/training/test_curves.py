"""The picture of a training run is drawn without the backend of the program that trains."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

from riptide.jobs.training.curves import CurveWriter


def test_a_picture_keeps_the_backend_of_the_program(tmp_path: Path) -> None:
    """A program may show figures too; the title, text with dollar signs, is no formula."""
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        curve = [[1, 0.5, 0.1, None], [2, 0.25, 0.05, 0.75]]
        picture = CurveWriter(tmp_path / "new", title="$_$", quality="dev MRR@10").draw(curve)
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(before)
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "new" / "curves.json").read_text()) == curve
