"""Every byte of a store, hashed again: each damaged or missing file is named."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from indexing.artifact import BEGUN, MANIFEST, PROVENANCE, Part, read_record, unseal
from indexing.cache import CorruptError
from indexing.store import Store

_DATA = re.compile(r".*-[0-9a-f]{16}\.\w+")


@dataclass(frozen=True)
class Finding:
    """What is said of one file: `problem` is None where it is as committed."""

    file: str
    problem: str | None = None
    bytes: int = 0


def verify(store: Store, limit: int | None = None) -> Iterator[Finding]:
    """One Finding per file, in the order of the keys (at most `limit` parts of each artifact are hashed)."""
    fingerprints: dict[str, str] = {}
    lineage: dict[str, dict[str, dict[str, str]]] = {}
    for key, files in _folders(store).items():
        checked = _Folder(store, key, files)
        yield from checked.documents()
        yield from checked.agreement()
        for part in list(checked.parts.values())[:limit]:
            yield _hashed(store, key, part)
        if checked.manifest is not None:
            fingerprints[key] = checked.manifest["fingerprint"]
            lineage[key] = checked.manifest["inputs"]
    for key, inputs in lineage.items():
        for entry in inputs.values():
            found = fingerprints.get(entry["artifact"])
            if found != entry["fingerprint"]:
                name = f"{entry['artifact']}/{MANIFEST}"
                there = f"there is {found[:12]}" if found else "which is missing"
                yield _bad(store, name, f"{key} was made from {entry['fingerprint'][:12]}, {there}")


class _Folder:
    """One artifact's documents, read and compared."""

    def __init__(self, store: Store, key: str, files: dict[str, int]):
        self.store, self.key, self.files = store, key, files
        self.read: dict[str, dict[str, Any]] = {}
        self.records: dict[str, Part] = {}

    @property
    def manifest(self) -> dict[str, Any] | None:
        return self.read.get(MANIFEST)

    @property
    def parts(self) -> dict[str, Part]:
        """By the manifest, or by the records where there is none."""
        if self.manifest is None:
            return self.records
        return {part["name"]: Part(**part) for part in self.manifest["parts"]}

    def documents(self) -> Iterator[Finding]:
        """Every JSON file: sealed, and in its place."""
        for file in sorted(f for f in self.files if f.endswith(".json")):
            name = f"{self.key}/{file}"
            try:
                if file in (BEGUN, MANIFEST, PROVENANCE):
                    self.read[file] = unseal(self.store.storage.read(name), f"{self.store.url}/{name}")
                else:
                    part, _ = read_record(self.store.storage, name)
                    self.records[part.name] = part
                yield Finding(name)
            except (CorruptError, FileNotFoundError) as error:
                yield Finding(name, str(error))

    def agreement(self) -> Iterator[Finding]:
        """What should be there is, and says the same as the manifest."""
        if BEGUN not in self.files:
            yield _bad(self.store, f"{self.key}/{BEGUN}", "the file is missing")
        if PROVENANCE in self.files and MANIFEST not in self.files:
            yield _bad(self.store, f"{self.key}/{MANIFEST}", "missing: lost, or the last step of its job is left to do")
        if self.manifest is None:
            return
        if PROVENANCE not in self.files:
            yield _bad(self.store, f"{self.key}/{PROVENANCE}", "the file is missing")
        begun = self.read.get(BEGUN)
        if begun is not None and any(self.manifest[k] != begun[k] for k in ("kind", "inputs", "config")):
            yield _bad(self.store, f"{self.key}/{BEGUN}", f"does not fit {MANIFEST}")
        for name in {**self.parts, **self.records}:
            file = f"{self.key}/{name}.json"
            if f"{name}.json" not in self.files:
                yield _bad(self.store, file, "the file is missing")
            elif name in self.records and (
                name not in self.parts or asdict(self.records[name]) != asdict(self.parts[name])
            ):
                yield _bad(self.store, file, f"does not fit {MANIFEST}")


def _hashed(store: Store, key: str, part: Part) -> Finding:
    name = f"{key}/{part.file}"
    size = store.storage.size(name)
    if size is None:
        return _bad(store, name, "the file is missing")
    if size != part.bytes:
        return _bad(store, name, f"{size} bytes, {part.bytes} were committed")
    if store.storage.sha256(name) != part.sha256:
        return _bad(store, name, "its sha256 is not the committed one")
    return Finding(name, None, size)


def _bad(store: Store, name: str, problem: str) -> Finding:
    return Finding(name, f"{store.url}/{name}: {problem}")


def _folders(store: Store) -> dict[str, dict[str, int]]:
    """Key -> file -> bytes of whatever is an artifact, or was one."""
    folders: dict[str, dict[str, int]] = defaultdict(dict)
    for key, size in store.storage.list(""):
        folder, _, file = key.rpartition("/")
        folders[folder][file] = size
    return {
        key: files
        for key, files in sorted(folders.items())
        if {MANIFEST, BEGUN, PROVENANCE} & set(files) or any(_DATA.fullmatch(file) for file in files)
    }
