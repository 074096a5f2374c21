"""Artifacts: directories that never change once complete, written part by part by anyone at any time.

KIND/NAME/manifest.begun.json   first: pins inputs and configuration, so that a resume with others is refused
KIND/NAME/part-00007-HASH.npy   a part's bytes, under a name that holds their hash
KIND/NAME/part-00007.json       its record; whoever writes this one first has committed the part
KIND/NAME/provenance.json       command, host, times, versions: beside the content, outside every fingerprint
KIND/NAME/manifest.json         last: its existence means complete
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from indexing.cache import CorruptError, NodeCache, file_sha256
from indexing.storage import Storage, full_disk
from retriever.errors import InputError

FORMAT = 1
MANIFEST, BEGUN, PROVENANCE = "manifest.json", "manifest.begun.json", "provenance.json"


@dataclass(frozen=True)
class Part:
    """A committed file. `name` is its place in the artifact ("part-00007"), `file` where the bytes are."""

    name: str
    file: str
    rows: int
    bytes: int
    sha256: str
    facts: dict[str, Any] = field(default_factory=dict)  # what else is known of it: input's hash, source's line


def canonical(value: Any) -> bytes:
    """JSON with one spelling only, for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fingerprint_of(value: Any) -> str:
    """sha256 (hex) over a JSON-able value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def seal(document: dict[str, Any]) -> bytes:
    """A JSON document that carries its own sha256."""
    sealed = {**document, "own_sha256": fingerprint_of(document)}
    return (json.dumps(sealed, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The document of `seal`. Raises CorruptError where one byte of it differs."""
    try:
        document = json.loads(data)
        del document["own_sha256"]
        if seal(document) == data:
            return document
    except (ValueError, KeyError, TypeError):
        pass
    raise CorruptError(f"{name}: its bytes are not those that were written (own sha256 does not match)")


class Artifact:
    """A complete artifact, for reading."""

    def __init__(self, storage: Storage, cache: NodeCache, key: str):
        self.key = key
        self._storage, self._cache = storage, cache
        document = unseal(storage.read(f"{key}/{MANIFEST}"), f"{storage.url}/{key}/{MANIFEST}")
        if document["format"] != FORMAT:
            raise InputError(f"{storage.url}/{key}: format {document['format']}, this riptide reads {FORMAT}")
        self.kind: str = document["kind"]
        self.fingerprint: str = document["fingerprint"]
        self.inputs: dict[str, dict[str, str]] = document["inputs"]
        self.config: dict[str, Any] = document["config"]
        self.notes: dict[str, Any] = document["notes"]
        self.parts = [Part(**part) for part in document["parts"]]

    @property
    def url(self) -> str:
        return f"{self._storage.url}/{self.key}"

    @property
    def rows(self) -> int:
        return sum(part.rows for part in [*self.group("part"), *self.group("shard")])

    def group(self, prefix: str) -> list[Part]:
        """The parts PREFIX-00000, PREFIX-00001, … in order."""
        return [part for part in self.parts if part.name.rpartition("-")[0] == prefix]

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def local(self, part: Part | str) -> Path:
        """A local file with the part's bytes (FAISS, Lucene and memory maps need one). Raises CorruptError."""
        part = self.part(part) if isinstance(part, str) else part
        return self._cache.local(self._storage, f"{self.key}/{part.file}", part.bytes, part.sha256)


class Reference(NamedTuple):
    """An artifact as another one's input."""

    key: str
    fingerprint: str


class Draft:
    """An artifact being written; can be sent to workers, each of which commits parts of its own.

    with store.create(...) as draft: a clean end writes the manifest, an exception leaves the parts for a resume.
    """

    def __init__(self, storage: Storage, cache: NodeCache, key: str, begun: dict[str, Any]):
        self.key = key
        self._storage, self._cache, self._begun = storage, cache, begun
        self._notes: dict[str, Any] = {}
        self._started = time.time()
        self._identity = fingerprint_of(begun)  # in every record: parts of another draft under this name do not count
        self.complete = False

    @property
    def url(self) -> str:
        return f"{self._storage.url}/{self.key}"

    @property
    def config(self) -> dict[str, Any]:
        return self._begun["config"]

    def begin(self) -> Self:
        """Pin inputs and configuration, or find that they are pinned. Raises InputError where others are."""
        if not self._storage.put_new(f"{self.key}/{BEGUN}", seal(self._begun)):
            pinned = read_begun(self._storage, self.key)
            if pinned != self._begun:
                raise InputError(f"{self.url} was begun otherwise: {differences(pinned, self._begun)}; {_REMEDY}")
        self.complete = self._storage.size(f"{self.key}/{MANIFEST}") is not None
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and not self.complete:
            self.finish()

    def committed(self) -> dict[str, Part]:
        """The parts that are there, by name: what an earlier, interrupted run left, and other workers."""
        others = {f"{self.key}/{file}" for file in (MANIFEST, BEGUN, PROVENANCE)}
        keys = [key for key, _ in self._storage.list(self.key) if key.endswith(".json") and key not in others]
        with ThreadPoolExecutor(16) as threads:
            records = threads.map(functools.partial(read_record, self._storage), keys)
            parts = [part for part, begun in records if begun == self._identity]
        return {part.name: part for part in sorted(parts, key=lambda part: part.name)}

    def find(self, name: str) -> Part | None:
        """The part `name` if it is committed: by an earlier try whose end nobody heard of, or by another writer."""
        try:
            part, begun = read_record(self._storage, f"{self.key}/{name}.json")
        except FileNotFoundError:
            return None
        return part if begun == self._identity else None

    def commit(self, name: str, suffix: str, write: Callable[[Path], object], *, rows: int, **facts: Any) -> Part:
        """Have `write(path)` make a file, make it the part `name`, and give back the part: an earlier writer's, if any.

        Two steps: the bytes go under a name of their own, then the record is written if there is none. A loser's
        bytes, should they differ, are removed again. What fails on the way leaves at most bytes without a record,
        which are no part and which the next try replaces.
        """
        if done := self.find(name):
            return done
        path = self._storage.scratch(suffix)
        try:
            with full_disk(path):
                write(path)
                digest, size = file_sha256(path), path.stat().st_size
            file = f"{name}-{digest[:16]}{suffix}"
            self._storage.put(f"{self.key}/{file}", path)
        finally:
            path.unlink(missing_ok=True)
        part = Part(name, file, rows, size, digest, facts)
        record, document = f"{self.key}/{name}.json", seal({**asdict(part), "begun": self._identity})
        if self._storage.put_new(record, document):
            return part
        winner, begun = read_record(self._storage, record)
        if begun != self._identity:  # of an artifact that was removed while this writer's predecessor lived on
            self._storage.put(record, document)
            return part
        if winner.file != file:
            self._storage.delete(f"{self.key}/{file}")
        return winner

    def local(self, part: Part) -> Path:
        return self._cache.local(self._storage, f"{self.key}/{part.file}", part.bytes, part.sha256)

    def note(self, **notes: Any) -> None:
        """Add what was measured (recall, statistics) to the manifest, outside the fingerprint."""
        self._notes |= notes

    def finish(self) -> None:
        """Write the manifest: from now on the artifact is complete and never changes."""
        committed = self.committed().values()
        self._check_finished(committed)
        parts = [asdict(part) for part in committed]
        identity = {"kind": self._begun["kind"], "inputs": _fingerprints(self._begun["inputs"])}
        if self._begun["by_content"]:
            identity["content"] = [[part["name"], part["sha256"]] for part in parts]
        else:
            identity["config"] = self._begun["config"]
        manifest = {k: v for k, v in self._begun.items() if k != "by_content"}
        manifest |= {"fingerprint": fingerprint_of(identity), "parts": parts, "notes": self._notes}
        self._storage.put(f"{self.key}/{PROVENANCE}", seal(self._provenance()))
        self._storage.put_new(f"{self.key}/{MANIFEST}", seal(manifest))
        self.complete = True

    def _check_finished(self, parts: Iterable[Part]) -> None:
        """Raises InputError where somebody removed the draft, or a part's bytes, while it was being written."""
        sizes = dict(self._storage.list(self.key))
        if f"{self.key}/{BEGUN}" not in sizes or read_begun(self._storage, self.key) != self._begun:
            raise InputError(f"{self.url}: it was removed while it was being made; run the command again")
        for part in parts:
            if sizes.get(f"{self.key}/{part.file}") != part.bytes:
                raise CorruptError(f"{self.url}/{part.file}: missing or cut; remove {self.key} and make it anew")

    def _provenance(self) -> dict[str, Any]:
        import importlib.metadata as metadata

        packages = ("riptide", "torch", "transformers", "faiss-cpu", "faiss-gpu", "pyarrow", "ray", "numpy")
        versions = {"python": platform.python_version()}
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return {
            "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
            "host": platform.node(),
            "started": _utc(self._started),
            "finished": _utc(time.time()),
            "versions": versions,
        }


def begun_document(
    kind: str, inputs: Mapping[str, Artifact | Reference], config: Mapping[str, Any], by_content: bool
) -> dict[str, Any]:
    """What `manifest.begun.json` pins. JSON-plain, so that it compares equal after a round trip."""
    lineage = {role: {"artifact": a.key, "fingerprint": a.fingerprint} for role, a in inputs.items()}
    document = {"format": FORMAT, "kind": kind, "inputs": lineage, "config": config, "by_content": by_content}
    return json.loads(canonical(document))


def read_begun(storage: Storage, key: str) -> dict[str, Any]:
    """What an artifact's manifest.begun.json pins. Raises CorruptError, FileNotFoundError."""
    return unseal(storage.read(f"{key}/{BEGUN}"), f"{storage.url}/{key}/{BEGUN}")


def read_record(storage: Storage, key: str) -> tuple[Part, str]:
    """The part whose record is `key`, and which draft it is of. Raises CorruptError."""
    document = unseal(storage.read(key), f"{storage.url}/{key}")
    begun = document.pop("begun")
    part = Part(**document)
    if not key.endswith(f"/{part.name}.json"):
        raise CorruptError(f"{storage.url}/{key}: the record of {part.name} under another name")
    return part, begun


_REMEDY = "give the same options, another name, or remove it with jobs/store.py remove"


def _fingerprints(inputs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {role: entry["fingerprint"] for role, entry in inputs.items()}


def differences(pinned: dict[str, Any], asked: dict[str, Any]) -> str:
    """`config.nlist 64, now 128`: every leaf in which two documents differ."""
    pinned_leaves, asked_leaves = dict(_leaves(pinned)), dict(_leaves(asked))
    names = [n for n in {**pinned_leaves, **asked_leaves} if pinned_leaves.get(n) != asked_leaves.get(n)]
    return ", ".join(f"{n} {_short(pinned_leaves.get(n))}, now {_short(asked_leaves.get(n))}" for n in names)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
