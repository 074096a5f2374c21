"""Replaces parts of a complete artifact. Its manifest changes by one write, so a reader sees the old or the new one.

An artifact keeps its fingerprint, so those that were made from it stay valid: no part of it differs but in the rows of
erased passages, which no search finds. Its manifest lists the erasures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from riptide.base.errors import InputError
from riptide.indexing.erasure.part_changes import PartChange
from riptide.indexing.storage.cache import BLOCK_BYTES, CorruptError, block_checksums, file_sha256
from riptide.indexing.storage.storage import explain_disk_errors
from riptide.indexing.store.artifact import CHECKSUMS, Artifact
from riptide.indexing.store.sealed_json import (
    MANIFEST,
    ArtifactPart,
    add_own_hash,
    fingerprint_of,
    manifest_bytes,
    read_begun,
    read_manifest,
    record_unless_removed,
)
from riptide.indexing.store.store import Store


def replace_parts(
    store: Store,
    key: str,
    changes: Iterable[PartChange],
    erasure: str,
    covered: Sequence[str] = (),
    require: Callable[[], object] = lambda: None,
    on_part: Callable[[int], object] = lambda count: None,
) -> None:
    """Writes parts of an artifact again, then removes the files of the old ones; continues an interrupted call.

    Args:
        store: The store.
        key: The key of the artifact.
        changes: The parts to write; not read if the manifest has the erasure.
        erasure: The name of the erasure.
        covered: The names of earlier erasures of the same rows.
        require: Raises an error if another command has taken over the erasure; called before anything is replaced.
        on_part: Called with 1 for each part that was written.

    Raises:
        InputError: If another command replaces parts of the artifact.
        CorruptError: If a file that the new manifest names is missing or cut.
    """
    tagged = store.storage.read_tagged(f"{key}/{MANIFEST}")
    document, parts = read_manifest(store.storage, key)
    if erasure not in document.get("erasures", []):
        by_name = {part.name: part for part in parts}
        for change in changes:
            by_name[change.name] = _write_part(store, key, change)
            on_part(1)
        document["erasures"] = sorted({*document.get("erasures", []), *covered, erasure})
        ordered = [by_name[name] for name in sorted(by_name)]
        _require_files(store, key, ordered, dict(store.storage.list(key)))
        require()
        data = manifest_bytes(document, ordered)
        path = f"{key}/{MANIFEST}"
        is_replaced = tagged is not None and store.storage.compare_and_swap(path, data, tagged[1])
        if not is_replaced and store.storage.read(path) != data:  # equal if the acknowledgement was lost
            raise InputError(f"{store.url}/{key}/{MANIFEST}: another command has replaced it; run the command again")
    _remove_old_files(store, key, require)


def _require_files(store: Store, key: str, parts: Iterable[ArtifactPart], sizes: Mapping[str, int]) -> None:
    """Raises CorruptError if the file of a part is missing or has another size. sizes: a listing of the artifact."""
    for part in parts:
        if sizes.get(f"{key}/{part.file}") != part.bytes:
            raise CorruptError(f"{store.url}/{key}/{part.file}: missing or cut; restore it, or remove {key}")


def remove_artifact(store: Store, key: str) -> None:
    """Removes an artifact, or what an interrupted removal left of it, and what this machine has fetched of it."""
    files = store.files_in_removal_order(key)
    for file, _ in files:
        store.cache.discard(file.rpartition("/")[2])
    store.delete_files(files)


def _write_part(store: Store, key: str, change: PartChange) -> ArtifactPart:
    """Writes the file of a part under a name that ends with its hash, and returns the part."""
    facts = {**(change.part.facts if change.part else {}), **change.facts}
    with store.storage.temporary_file(change.suffix) as path:
        with explain_disk_errors(path):
            rows = change.write(path)
            digest, size = file_sha256(path), path.stat().st_size
            if facts.pop(CHECKSUMS, None) and size > BLOCK_BYTES:
                facts[CHECKSUMS] = block_checksums(path)
        file = f"{change.name}-{digest[:16]}{change.suffix}"
        store.storage.put(f"{key}/{file}", path)
    return ArtifactPart(change.name, file, rows, size, digest, facts)


def _remove_old_files(store: Store, key: str, require: Callable[[], object]) -> None:
    """Makes the records those of the manifest, and removes the files that it does not name."""
    # In this order: a file listed before `require` is not that of a later erasure, whose manifest would name it.
    sizes = dict(store.storage.list(key))
    require()
    artifact = Artifact(store.storage, store.cache, key)
    _require_files(store, key, artifact.parts, sizes)
    identity = fingerprint_of(read_begun(store.storage, key))
    named = {part.file for part in artifact.parts}
    old = [name for name in (file.removeprefix(f"{key}/") for file in sizes) if _is_data(name) and name not in named]
    old_parts = {name.rpartition("-")[0] for name in old}  # the records of the other parts are those of the manifest
    for part in artifact.parts:
        path = f"{key}/{part.name}.json"
        if part.name in old_parts or path not in sizes:
            record = record_unless_removed(store.storage, path)
            if record is None or record[0] != part:
                store.storage.put(path, add_own_hash({**part.document(), "begun": identity}))
    for name in old:
        store.cache.discard(name)
        store.storage.delete(f"{key}/{name}")


def _is_data(name: str) -> bool:
    """Returns whether a file of an artifact is no document."""
    return "/" not in name and not name.endswith(".json")
