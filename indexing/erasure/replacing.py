"""Replaces parts of a complete artifact. Its manifest changes by one write, so a reader sees the old or the new one.

An artifact keeps its fingerprint, so those that were made from it stay valid: no part of it differs but in the rows of
erased passages, which no search finds. Its manifest lists the erasures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from riptide.indexing.erasure.part_changes import PartChange
from riptide.indexing.store.artifact import CHECKSUMS, Artifact
from riptide.indexing.store.cache import BLOCK_BYTES, block_checksums, file_sha256
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
from riptide.indexing.store.storage import explain_disk_errors
from riptide.indexing.store.store import Store


def replace_parts(
    store: Store, key: str, changes: Iterable[PartChange], erasure: str, covered: Sequence[str] = ()
) -> None:
    """Writes parts of an artifact again, then removes the files of the old ones; continues an interrupted call.

    Args:
        store: The store.
        key: The key of the artifact.
        changes: The parts to write; not read if the manifest has the erasure.
        erasure: The name of the erasure.
        covered: The names of earlier erasures of the same rows.
    """
    document, parts = read_manifest(store.storage, key)
    if erasure not in document.get("erasures", []):
        by_name = {part.name: part for part in parts}
        for change in changes:
            by_name[change.name] = _write_part(store, key, change)
        document["erasures"] = sorted({*document.get("erasures", []), *covered, erasure})
        ordered = [by_name[name] for name in sorted(by_name)]
        store.storage.put(f"{key}/{MANIFEST}", manifest_bytes(document, ordered))
    _remove_old_files(store, key)


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


def _remove_old_files(store: Store, key: str) -> None:
    """Makes the records those of the manifest, and removes the files that it does not name."""
    artifact = Artifact(store.storage, store.cache, key)
    identity = fingerprint_of(read_begun(store.storage, key))
    named = set()
    for part in artifact.parts:
        named.add(part.file)
        path = f"{key}/{part.name}.json"
        record = record_unless_removed(store.storage, path)
        if record is None or record[0] != part:
            store.storage.put(path, add_own_hash({**part.document(), "begun": identity}))
    for file, _ in list(store.storage.list(key)):
        name = file.removeprefix(f"{key}/")
        if "/" not in name and not name.endswith(".json") and name not in named:
            store.cache.discard(name)
            store.storage.delete(file)
