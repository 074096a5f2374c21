"""The bytes of manifests, and artifacts of earlier formats: models and prompts are read, others refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riptide.base.errors import InputError
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.storage.storage import LocalStorage
from riptide.indexing.store.sealed_json import (
    ARTIFACT_FORMAT_VERSION,
    MANIFEST,
    PARTS_AT_ONCE,
    ArtifactPart,
    add_own_hash,
    check_own_hash,
    manifest_bytes,
    read_manifest,
)
from riptide.indexing.store.store import Store

DOCUMENT: dict[str, Any] = {
    "config": {},
    "fingerprint": "0a",
    "format": ARTIFACT_FORMAT_VERSION,
    "inputs": {},
    "kind": "runs",
    "notes": {},
}


def make(store: Store, kind: str, format: int) -> None:
    """Makes an artifact whose manifest says that it is of another format."""
    with store.create(kind, "old", config={"seed": 1}) as draft:
        draft.commit("file-00000", ".file", lambda path: path.write_bytes(b"{}"), rows=0)
    manifest = Path(store.url) / kind / "old" / "manifest.json"
    manifest.write_bytes(add_own_hash({**check_own_hash(manifest.read_bytes(), "manifest"), "format": format}))


def stored_parts(count: int) -> list[ArtifactPart]:
    """Returns parts whose facts have values that JSON modules write differently."""
    facts: dict[str, Any] = {"text": 'é "x"\n  {\n', "float": 1e16, "none": None, "list": [[1, []], {}]}
    return [
        ArtifactPart(f"part-{number:05d}", f"part-{number:05d}.npy", number, 1, "0a", facts if number % 3 else {})
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 2, PARTS_AT_ONCE + 1])
def test_a_manifest_is_written_and_read_in_batches_of_parts(tmp_path: Path, count: int) -> None:
    document = {**DOCUMENT, "config": {"parts": [], "lr": 1e-7}, "notes": {"é": 0.5}}
    parts, file = stored_parts(count), tmp_path / "runs/r" / MANIFEST
    expected = add_own_hash({**document, "parts": [part.document() for part in parts]})
    assert manifest_bytes(document, parts) == expected
    file.parent.mkdir(parents=True)
    file.write_bytes(expected)
    read, parts_read = read_manifest(LocalStorage(str(tmp_path)), "runs/r")
    assert read == document
    assert (list(parts_read), parts_read.rows.tolist()) == (parts, [part.rows for part in parts])
    assert list(parts_read[1:]) == parts[1:]
    assert list(parts_read.named("part-00001", "part-00003")) == parts[1:3]


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    """Each byte is changed, removed or doubled in turn."""
    storage, file = LocalStorage(str(tmp_path)), tmp_path / "runs/r" / MANIFEST
    file.parent.mkdir(parents=True)
    whole = manifest_bytes(DOCUMENT, stored_parts(2))
    for at in range(len(whole)):
        for byte in (bytes([whole[at] ^ 1]), b"", whole[at : at + 1] * 2):
            damaged = whole[:at] + byte + whole[at + 1 :]
            file.write_bytes(damaged)
            with pytest.raises(CorruptError, match="its bytes are not those that were written"):
                read_manifest(storage, "runs/r")


def test_a_manifest_with_fields_of_other_types_is_refused(tmp_path: Path) -> None:
    """Its own hash is right, as of one that was written by hand."""
    storage, file = LocalStorage(str(tmp_path)), tmp_path / "runs/r" / MANIFEST
    file.parent.mkdir(parents=True)
    changes: list[dict[str, Any]] = [{"format": "2"}, {"format": 2.0}, {"format": None}, {"kind": 1}, {"inputs": []}]
    changes += [{"config": None}, {"notes": None}, {"fingerprint": None}]
    manifests = [manifest_bytes({**DOCUMENT, **change}, []) for change in changes]
    manifests.append(manifest_bytes({name: DOCUMENT[name] for name in DOCUMENT if name != "notes"}, []))
    manifests.append(manifest_bytes(DOCUMENT, [replace(stored_parts(1)[0], rows=-1)]))
    for manifest in manifests:
        file.write_bytes(manifest)
        with pytest.raises(CorruptError, match="its bytes are not those that were written"):
            read_manifest(storage, "runs/r")


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
