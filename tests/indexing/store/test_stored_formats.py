"""Artifacts of an earlier format: models and prompts are read, all others are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from riptide.base.errors import InputError
from riptide.indexing.store.sealed_json import ARTIFACT_FORMAT_VERSION, add_own_hash, check_own_hash
from riptide.indexing.store.store import Store


def make(store: Store, kind: str, format: int) -> None:
    """Makes an artifact whose manifest says that it is of another format."""
    with store.create(kind, "old", config={"seed": 1}) as draft:
        draft.commit("file-00000", ".file", lambda path: path.write_bytes(b"{}"), rows=0)
    manifest = Path(store.url) / kind / "old" / "manifest.json"
    manifest.write_bytes(add_own_hash({**check_own_hash(manifest.read_bytes(), "manifest"), "format": format}))


@pytest.mark.parametrize("kind", ["models", "prompts"])
def test_models_and_prompts_of_format_1_are_read(tmp_path: Path, kind: str) -> None:
    store = Store(str(tmp_path))
    make(store, kind, 1)
    assert store.open(kind, "old").local_path("file-00000").read_bytes() == b"{}"


REMAKE = "make it again in another store, or use the release that made it"
LATER = ARTIFACT_FORMAT_VERSION + 1


@pytest.mark.parametrize(
    ("kind", "format", "remedy"),
    [("runs", 1, REMAKE), ("candidates", 1, REMAKE), ("models", LATER, "install a newer one")],
)
def test_other_formats_are_refused_in_one_line(tmp_path: Path, kind: str, format: int, remedy: str) -> None:
    store = Store(str(tmp_path))
    make(store, kind, format)
    with pytest.raises(InputError) as raised:
        store.open(kind, "old")
    assert str(raised.value) == (
        f"{store.url}/{kind}/old: it is of format {format}, this release reads format {ARTIFACT_FORMAT_VERSION}; "
        f"{remedy}"
    )
