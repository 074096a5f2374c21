"""Verifies a store: hashes all files of its artifacts again, and reports damaged and missing files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.storage.storage import OutsideKeyError
from riptide.indexing.store.live_release import CURRENT, read_live_record
from riptide.indexing.store.sealed_json import (
    BEGUN,
    FAILED,
    MANIFEST,
    PROVENANCE,
    ArtifactPart,
    check_own_hash,
    read_manifest,
    read_record,
)
from riptide.indexing.store.store import Store

ATTEMPTS = 5  # attempts to check an artifact that other processes write or remove at the same time
_DATA_FILE = re.compile(r".*-[0-9a-f]{16}\.\w+")


@dataclass(frozen=True)
class Finding:
    """The result of checking one file. problem: None if the file is intact. bytes: number of hashed bytes."""

    file: str
    problem: str | None = None
    bytes: int = 0


def verify(store: Store, limit: int | None = None, keys: Collection[str] | None = None) -> Iterator[Finding]:
    """Yields a Finding for each file, artifact by artifact, then for problems of lineage and of the live release.

    An artifact that another process removes meanwhile has no problem.

    Args:
        store: The store.
        limit: Hash at most this many parts of each artifact; None: all.
        keys: Check these artifacts only, and not the live release; None: all.
    """
    manifests: dict[str, dict[str, Any]] = {}
    listed = _list_artifacts(store) if keys is None else {key: _list_artifacts(store, key).get(key, {}) for key in keys}
    for key, files in listed.items():
        folder = _ArtifactCheck(store, key, files)
        problems = []
        for finding in folder.findings(limit):
            if finding.problem:
                problems.append(finding)
            else:
                yield finding
        for _ in range(ATTEMPTS):
            present = _list_artifacts(store, key).get(key, {}) if problems else folder.files
            if present == folder.files:
                break
            folder = _ArtifactCheck(store, key, present)
            problems = [finding for finding in folder.findings(limit) if finding.problem] if present else []
        yield from problems
        if folder.manifest is not None:
            manifests[key] = folder.manifest
    for key, manifest in manifests.items():
        for entry in manifest["inputs"].values():
            if problem := _lineage_problem(store, key, entry, manifests):
                yield problem
    if keys is None:
        yield from _check_live_release(store)


class _ArtifactCheck:
    """Checks the documents and parts of one artifact."""

    def __init__(self, store: Store, key: str, files: dict[str, int]):
        self.store, self.key, self.files = store, key, files
        self.read: dict[str, dict[str, Any]] = {}
        self.complete_parts: Sequence[ArtifactPart] = []  # those of the manifest
        self.records: dict[str, ArtifactPart] = {}

    @property
    def manifest(self) -> dict[str, Any] | None:
        return self.read.get(MANIFEST)

    @property
    def parts(self) -> dict[str, ArtifactPart]:
        """The parts by name, from the manifest, or from the records if the artifact is incomplete."""
        if self.manifest is None:
            return self.records
        return {part.name: part for part in self.complete_parts}

    def findings(self, limit: int | None) -> Iterator[Finding]:
        """Yields the findings of all checks of the artifact; hashes at most `limit` parts."""
        yield from self.check_documents()
        yield from self.check_agreement()
        for part in list(self.parts.values())[:limit]:
            yield _check_part(self.store, self.key, part)

    def check_documents(self) -> Iterator[Finding]:
        """Checks that every JSON file matches its own hash, and that a record has the name of its part."""
        for file in sorted(f for f in self.files if f.endswith(".json")):
            name = f"{self.key}/{file}"
            try:
                if file == MANIFEST:
                    self.read[file], self.complete_parts = read_manifest(self.store.storage, self.key)
                elif file in (BEGUN, PROVENANCE, FAILED):
                    self.read[file] = check_own_hash(self.store.storage.read(name), f"{self.store.url}/{name}")
                else:
                    part, _ = read_record(self.store.storage, name)
                    self.records[part.name] = part
                yield Finding(name)
            except CorruptError as error:
                yield Finding(name, f"{error}")
            except FileNotFoundError:
                yield _problem_finding(self.store, name, "the file is missing")

    def check_agreement(self) -> Iterator[Finding]:
        """Checks that every document exists and is consistent with the manifest."""
        if BEGUN not in self.files:
            yield _problem_finding(self.store, f"{self.key}/{BEGUN}", "the file is missing")
        if PROVENANCE in self.files and MANIFEST not in self.files:
            yield _problem_finding(
                self.store, f"{self.key}/{MANIFEST}", "missing: lost, or the last step of its job is pending"
            )
        if self.manifest is None:
            return
        if PROVENANCE not in self.files:
            yield _problem_finding(self.store, f"{self.key}/{PROVENANCE}", "the file is missing")
        begun = self.read.get(BEGUN)
        if begun is not None and any(self.manifest[k] != begun[k] for k in ("kind", "inputs", "config")):
            yield _problem_finding(self.store, f"{self.key}/{BEGUN}", f"does not fit {MANIFEST}")
        parts = self.parts
        for name in {**parts, **self.records}:
            file = f"{self.key}/{name}.json"
            if f"{name}.json" not in self.files:
                yield _problem_finding(self.store, file, "the file is missing")
            elif name in self.records and self.records[name] != parts.get(name):
                yield _problem_finding(self.store, file, f"does not fit {MANIFEST}")


def _check_part(store: Store, key: str, part: ArtifactPart) -> Finding:
    name = f"{key}/{part.file}"
    try:
        size = store.storage.size(name)
    except OutsideKeyError as error:
        return Finding(name, f"{store.url}/{key}/{MANIFEST}: {error}")
    if size is None:
        return _problem_finding(store, name, "the file is missing")
    if size != part.bytes:
        return _problem_finding(store, name, f"{size} bytes, {part.bytes} were committed")
    try:
        digest = store.storage.sha256(name)
    except FileNotFoundError:
        return _problem_finding(store, name, "the file is missing")
    if digest != part.sha256:
        return _problem_finding(store, name, "its sha256 is not the committed one")
    return Finding(name, None, size)


def _lineage_problem(
    store: Store, key: str, entry: dict[str, str], manifests: dict[str, dict[str, Any]]
) -> Finding | None:
    """Checks an input of an artifact after reading both again, as they may have changed; returns a problem or None."""
    if "://" in entry["artifact"] or entry["artifact"].startswith("/"):
        return None  # the input is in another store
    name, expected = f"{entry['artifact']}/{MANIFEST}", entry["fingerprint"]
    source = manifests.get(entry["artifact"])
    if source is None or source["fingerprint"] != expected:
        try:
            source, _ = read_manifest(store.storage, entry["artifact"])
        except (CorruptError, FileNotFoundError):
            source = None
        except OutsideKeyError as error:
            return Finding(f"{key}/{MANIFEST}", f"{store.url}/{key}/{MANIFEST}: {error}")
    actual = source["fingerprint"] if source else None
    if actual == expected or store.storage.size(f"{key}/{MANIFEST}") is None:
        return None
    state = f"there is {actual[:12]}" if actual else "which is missing or damaged"
    return _problem_finding(store, name, f"{key} was made from {expected[:12]}, {state}")


def _check_live_release(store: Store) -> Iterator[Finding]:
    """Checks serving/current.json, and that the live release is complete."""
    try:
        current = read_live_record(store.storage)
    except CorruptError as error:
        yield Finding(CURRENT, f"{error}")
        return
    if current is None:
        return
    yield Finding(CURRENT)
    release = f"releases/{current.release}/{MANIFEST}"
    if store.storage.size(release) is None:
        yield _problem_finding(store, release, f"{CURRENT} names it as the live release, which is missing")


def _problem_finding(store: Store, name: str, problem: str) -> Finding:
    return Finding(name, f"{store.url}/{name}: {problem}")


def _list_artifacts(store: Store, prefix: str = "") -> dict[str, dict[str, int]]:
    """Lists the files of all artifacts, also incomplete and damaged ones: size in bytes by file, by key."""
    folders: dict[str, dict[str, int]] = defaultdict(dict)
    for key, size in store.storage.list(prefix):
        folder, _, file = key.rpartition("/")
        folders[folder][file] = size
    return {
        key: files
        for key, files in sorted(folders.items())
        if {MANIFEST, BEGUN, PROVENANCE} & set(files) or any(_DATA_FILE.fullmatch(file) for file in files)
    }
