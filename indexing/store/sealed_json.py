"""Reads and writes the JSON documents of an artifact, which hold their own hash: manifests, records and marks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from riptide.base.cuts import Cuts, sum_of_cuts
from riptide.base.wording import printable
from riptide.indexing.store.cache import CorruptError
from riptide.indexing.store.storage import Storage

READERS = 16  # records that are read at the same time
ARTIFACT_FORMAT_VERSION = 2  # version of the format of artifacts, which manifests hold
MANIFEST, BEGUN, PROVENANCE, FAILED = "manifest.json", "manifest.begun.json", "provenance.json", "failed.json"


@dataclass(frozen=True, slots=True)  # a driver holds one for each part of a store
class ArtifactPart:
    """The record of a committed part. `name` identifies it in the artifact ("part-00007"), `file` is its file name."""

    name: str
    file: str
    rows: int
    bytes: int
    sha256: str
    facts: dict[str, Any] = field(default_factory=dict)  # further data, for example the input's hash


def sum_cuts(parts: Iterable[ArtifactPart]) -> Cuts:
    """Sums the numbers of texts that were cut to a length limit; parts of earlier releases count as uncounted."""
    stored = ((part.rows, part.facts.get("cuts")) for part in parts)
    return sum_of_cuts(Cuts(uncounted=rows) if counts is None else Cuts(**counts) for rows, counts in stored)


def canonical_json(value: Any) -> bytes:
    """Serialises a value as canonical JSON, for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fingerprint_of(value: Any) -> str:
    """Returns the sha256 (hex) of a JSON-able value in canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def add_own_hash(document: dict[str, Any]) -> bytes:
    """Serialises a document as JSON with its own sha256 in the field own_sha256."""
    return _indented({**document, "own_sha256": fingerprint_of(document)})


def check_own_hash(data: bytes, name: str) -> dict[str, Any]:
    """Parses the output of `add_own_hash` and checks its hash. Raises CorruptError if it differs."""
    try:
        sealed = json.loads(data)
        document = {key: value for key, value in sealed.items() if key != "own_sha256"}
        if sealed["own_sha256"] == fingerprint_of(document) and _is_indented(sealed, data):
            return document
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CorruptError(
        f"{name}: its bytes are not those that were written (own sha256 does not match); restore it, or remove the "
        "artifact and make it again"
    )


def _indented(document: Any) -> bytes:
    """Serialises a value as JSON text with sorted keys, each on a line that begins with a space per level."""
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _is_indented(document: Any, data: bytes) -> bool:
    """Returns whether `data` is `_indented(document)`."""
    with contextlib.suppress(TypeError):  # orjson refuses integers over 64 bits
        if _indented_quickly(document) == data:
            return True
    return _indented(document) == data


def _indented_quickly(document: Any) -> bytes:
    """Returns `_indented(document)` in a fraction of the time, except for some floats and for integers over 64 bits.

    json indents in Python only; orjson indents by two spaces, which are replaced level by level.
    """
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    level = b"\n"
    while (pair := level + b"  ") in text:
        text = text.replace(pair, level + b"\x01")  # no JSON text contains this byte
        level += b"\x01"
    return text.replace(b"\x01", b" ") + b"\n"


class ArtifactReference(NamedTuple):
    """The key and the fingerprint of an artifact that is an input of another one."""

    key: str
    fingerprint: str


class Identified(Protocol):
    """The interface of an artifact and of a reference to one."""

    @property
    def key(self) -> str:
        """The key of the artifact in the store."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the artifact's content."""


def begun_document(
    kind: str, inputs: Mapping[str, Identified], config: Mapping[str, Any], by_content: bool
) -> dict[str, Any]:
    """Returns the document of `manifest.begun.json` in JSON types, so that it equals the document that is read back."""
    lineage = {role: {"artifact": a.key, "fingerprint": a.fingerprint} for role, a in inputs.items()}
    document = {
        "format": ARTIFACT_FORMAT_VERSION,
        "kind": kind,
        "inputs": lineage,
        "config": config,
        "by_content": by_content,
    }
    return json.loads(canonical_json(document))


def read_begun(storage: Storage, key: str) -> dict[str, Any]:
    """Reads manifest.begun.json: the pinned inputs and configuration. Raises CorruptError, FileNotFoundError."""
    return check_own_hash(storage.read(f"{key}/{BEGUN}"), f"{storage.url}/{key}/{BEGUN}")


def pinned_config(storage: Storage, key: str) -> dict[str, Any] | None:
    """Returns the configuration of an artifact that is complete or has a part; None if it may still change."""
    with contextlib.suppress(FileNotFoundError):
        document = read_begun(storage, key)
        complete = storage.size(f"{key}/{MANIFEST}") is not None
        if complete or committed_parts(storage, key, fingerprint_of(document)):
            config: dict[str, Any] = document["config"]
            return config
    return None


def pinned_content(begun: dict[str, Any]) -> dict[str, Any]:
    """Returns the document without attempt and model names; equal if inputs and configuration are equal."""
    return {name: value for name, value in begun.items() if name not in ("attempt", "models")}


def read_failure(storage: Storage, key: str) -> str | None:
    """Returns the error message of a draft that is marked as failed or abandoned, otherwise None.

    None without a mark, if an earlier draft has it, or if an abandoned draft has a part: another command continued it.
    """
    with contextlib.suppress(FileNotFoundError, CorruptError):
        document = read_begun(storage, key)
        mark = read_mark(storage, key, document)
        if mark is None or (mark.get("abandoned") and committed_parts(storage, key, fingerprint_of(document))):
            return None
        return mark["error"]
    return None


def read_mark(storage: Storage, key: str, document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Reads failed.json; returns None if it is missing, damaged, or the mark of an earlier draft."""
    with contextlib.suppress(FileNotFoundError, CorruptError):
        mark = check_own_hash(storage.read(f"{key}/{FAILED}"), f"{storage.url}/{key}/{FAILED}")
        if mark["begun"] == fingerprint_of(document):
            return mark
    return None


def committed_parts(
    storage: Storage,
    key: str,
    identity: str,
    known: Mapping[str, ArtifactPart] | None = None,
    files: Mapping[str, int] | None = None,
) -> list[ArtifactPart]:
    """Lists the committed parts of the draft with this identity, sorted by name, and reads their records.

    Args:
        storage: The storage.
        key: The key of the artifact.
        identity: The identity of the draft.
        known: Parts of the draft by name whose records were read or written before. They are not read again as long
            as both the record and the file that it names exist: a record of a draft does not change.
        files: A listing of the artifact: sizes by key. None: it is listed now.
    """
    known, others = known or {}, {MANIFEST, BEGUN, PROVENANCE, FAILED}
    files = dict(storage.list(key)) if files is None else files
    parts, unknown = [], []
    for path in files:
        name, suffix = path.removeprefix(f"{key}/")[:-5], path[-5:]
        if suffix != ".json" or "/" in name or f"{name}{suffix}" in others:
            continue
        if (part := known.get(name)) and f"{key}/{part.file}" in files:
            parts.append(part)
        else:
            unknown.append(path)
    with ThreadPoolExecutor(READERS) as threads:
        records = threads.map(functools.partial(record_unless_removed, storage), unknown)
        parts += [record[0] for record in records if record is not None and record[1] == identity]
    return sorted(parts, key=lambda part: part.name)


def seconds_since_work(storage: Storage, key: str) -> float | None:
    """Returns the seconds since a command last wrote to, or renewed (`keep_alive`), a draft.

    None if the command has marked that it ended, or if there is no draft.
    """
    times = [written for path, written in storage.write_times(key).items() if path.rpartition("/")[0] == key]
    with contextlib.suppress(FileNotFoundError, CorruptError):
        if read_mark(storage, key, read_begun(storage, key)) is not None:
            return None
    return time.time() - max(times) if times else None


def read_record(storage: Storage, key: str) -> tuple[ArtifactPart, str]:
    """Reads the record of a part; returns (part, identity of its draft). Raises CorruptError."""
    document = check_own_hash(storage.read(key), f"{storage.url}/{key}")
    identity = document.pop("begun")
    part = ArtifactPart(**document)
    if not key.endswith(f"/{part.name}.json"):
        raise CorruptError(f"{storage.url}/{key}: the record of {part.name} under another name")
    return part, identity


def record_unless_removed(storage: Storage, key: str) -> tuple[ArtifactPart, str] | None:
    """Reads a record as `read_record`; returns None if another process has removed it."""
    try:
        return read_record(storage, key)
    except FileNotFoundError:
        return None


def provenance(started: float) -> dict[str, Any]:
    """Returns the content of provenance.json: the command, the host, the times and the package versions.

    Args:
        started: When its work started, in seconds since 1970.
    """
    import importlib.metadata as metadata

    packages = ("riptide", "torch", "transformers", "faiss-cpu", "faiss-gpu", "pyarrow", "ray", "numpy")
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": [printable(word) for word in (os.path.basename(sys.argv[0]), *sys.argv[1:])],
        "host": platform.node(),
        "started": format_utc(started),
        "finished": format_utc(time.time()),
        "versions": versions,
    }


def format_utc(seconds: float) -> str:
    """Formats a time, in seconds since 1970, as text in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
