"""Reads and writes the JSON documents of an artifact, which hold their own hash: manifests, records and marks."""

from __future__ import annotations

import bisect
import calendar
import contextlib
import functools
import hashlib
import io
import itertools
import json
import operator
import os
import platform
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import orjson

from riptide.base.cuts import Cuts, sum_of_cuts
from riptide.base.wording import printable
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.storage.storage import Storage

READERS = 16  # records that are read at the same time
RECORDS_AT_ONCE = 1_024  # records whose reading is submitted at once
ARTIFACT_FORMAT_VERSION = 2  # version of the format of artifacts, which manifests hold
MANIFEST, BEGUN, PROVENANCE, FAILED = "manifest.json", "manifest.begun.json", "provenance.json", "failed.json"
LIST_SUFFIX = ".list"  # of the files of a draft that hold the records of many parts
RECORDS_PER_LIST = 250  # a resume reads N / 250 lists and at most 249 records: the fewest files for N = 62,500
PARTS_AT_ONCE = 256  # parts of a manifest that are parsed or serialised at a time
_FIELDS = {"kind": str, "fingerprint": str, "inputs": dict, "config": dict, "notes": dict}  # their types in a manifest
# The text of a manifest before its parts, which are its last field, between two of them, and after them.
_FIRST_PART, _NEXT_PART, _END = b'\n "parts": [\n', b",\n", b"\n ]\n}\n"


@dataclass(frozen=True, slots=True)
class ArtifactPart:
    """The record of a committed part. `name` identifies it in the artifact ("part-00007"), `file` is its file name."""

    name: str
    file: str
    rows: int
    bytes: int
    sha256: str
    facts: dict[str, Any] = field(default_factory=dict)  # further data, for example the input's hash

    def document(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class PartList(Sequence[ArtifactPart]):
    """The parts of a manifest, in the order of their names. Each is parsed when it is accessed.

    A driver holds such a list for each artifact of a store: the text of the parts takes less memory than their objects.

    Args:
        text: The bytes of the manifest.
        starts: The offset of each part, and that of a part that would follow the last one: int64 [n + 1].
        rows: The number of rows of each part: int64 [n].
    """

    def __init__(self, text: bytes, starts: np.ndarray, rows: np.ndarray):
        self._text, self._starts, self.rows = text, starts, rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ArtifactPart: ...

    @overload
    def __getitem__(self, index: slice) -> PartList: ...

    def __getitem__(self, index: int | slice) -> ArtifactPart | PartList:
        if isinstance(index, slice):
            first, end, _ = index.indices(len(self))
            return PartList(self._text, self._starts[first : max(first, end) + 1], self.rows[first:end])
        number = range(len(self))[index]
        start, end = self._starts[number], self._starts[number + 1] - len(_NEXT_PART)
        return ArtifactPart(**orjson.loads(self._text[start:end]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartList) and list(self) == list(other)

    def named(self, first: str, end: str) -> PartList:
        """Returns the parts whose names are in [first, end), in order; they are found by bisection."""
        name = operator.attrgetter("name")
        start = bisect.bisect_left(self, first, key=name)
        return self[start : bisect.bisect_left(self, end, start, key=name)]


class PartRecords(Mapping[str, ArtifactPart]):
    """Committed parts by name, each parsed when it is accessed.

    A driver that resumes holds those of a draft: the text of a part takes less memory than its object.

    Args:
        parts: The parts.
    """

    def __init__(self, parts: Iterable[ArtifactPart] = ()):
        self._texts: dict[str, bytes] = {}
        for part in parts:
            self.add(part)

    def __getitem__(self, name: str) -> ArtifactPart:
        return ArtifactPart(**orjson.loads(self._texts[name]))

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, part: ArtifactPart) -> None:
        """Adds a part, or replaces the one with its name."""
        self._texts[part.name] = canonical_json(part.document())

    def select(self, names: Iterable[str]) -> PartRecords:
        """Returns a copy with these parts, in this order."""
        copy = PartRecords()
        copy._texts = {name: self._texts[name] for name in list(names)}
        return copy


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
    raise _damaged_error(name)


def _damaged_error(name: str) -> CorruptError:
    """Returns the error for a document whose bytes are not those that were written."""
    return CorruptError(
        f"{name}: its bytes are not those that were written (own sha256 does not match); restore it, or remove the "
        "artifact and make it again"
    )


def manifest_bytes(document: Mapping[str, Any], parts: Collection[ArtifactPart]) -> bytes:
    """Returns the bytes of manifest.json: those of `add_own_hash` for the document with the field `parts`.

    Parts are serialised in batches, so only the result takes memory in proportion to their number.

    Args:
        document: The other fields, whose names precede `parts` in the alphabet.
        parts: The parts, in the order of their names.
    """

    def batches() -> Iterator[list[dict[str, Any]]]:
        remaining = iter(parts)
        while batch := [part.document() for part in itertools.islice(remaining, PARTS_AT_ONCE)]:
            yield batch

    frame = _indented({**document, "own_sha256": _manifest_hash(document, batches()), "parts": []})
    if not parts:
        return frame
    text = io.BytesIO()
    text.write(frame.removesuffix(b"]\n}\n"))
    for number, batch in enumerate(batches()):
        entries = _indented(batch).removeprefix(b"[\n").removesuffix(b"\n]\n")
        text.write((_NEXT_PART if number else b"\n") + b" " + entries.replace(b"\n", b"\n "))
    text.write(_END)
    return text.getvalue()


def read_manifest(storage: Storage, key: str) -> tuple[dict[str, Any], PartList]:
    """Reads and checks manifest.json of an artifact; returns the document without its parts, and the parts.

    Parts are parsed in batches, so only the bytes of the file take memory in proportion to their number.

    Raises:
        CorruptError: If the bytes are not those that were written.
        FileNotFoundError: If the file is missing.
    """
    text = storage.read(f"{key}/{MANIFEST}")
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        document, parts = _parse_manifest(text)
        if _has_fields(document) and not (parts.rows < 0).any():
            return document, parts
    raise _damaged_error(f"{storage.url}/{key}/{MANIFEST}")


def _parse_manifest(text: bytes) -> tuple[dict[str, Any], PartList]:
    """Parses the bytes of manifest.json as `read_manifest`. Raises ValueError and others if they are damaged."""
    frame, starts = text, np.zeros(1, np.int64)
    first = text.find(_FIRST_PART) + len(_FIRST_PART)
    if first >= len(_FIRST_PART) and text.endswith(_END):
        frame = text[: first - 1] + b"]\n}\n"
        following = (match.end() for match in re.compile(rb",\n(?=  \{\n)").finditer(text, first))
        end = len(text) - len(_END) + len(_NEXT_PART)
        starts = np.fromiter(itertools.chain([first], following, [end]), np.int64)
    sealed = json.loads(frame)
    document = {field: value for field, value in sealed.items() if field not in ("own_sha256", "parts")}
    rows = np.empty(len(starts) - 1, np.int64)

    def batches() -> Iterator[list[dict[str, Any]]]:
        for number in range(0, len(rows), PARTS_AT_ONCE):
            next_number = min(number + PARTS_AT_ONCE, len(rows))
            entries = b"\n" + text[starts[number] : starts[next_number] - len(_NEXT_PART)]
            data = b"[" + entries.replace(b"\n ", b"\n") + b"\n]\n"  # without the indentation of the field `parts`
            batch = orjson.loads(data)
            if not _is_indented(batch, data):
                raise ValueError("not the text of these parts")
            rows[number:next_number] = [part["rows"] for part in batch]
            yield batch

    is_same = sealed["own_sha256"] == _manifest_hash(document, batches())
    if sealed["parts"] or not is_same or not _is_indented(sealed, frame):
        raise ValueError("not the document that was written")
    return document, PartList(text, starts, rows)


def _has_fields(document: Mapping[str, Any]) -> bool:
    """Returns whether the fields of a manifest have their types; one of a later format may have others."""
    version = document["format"]
    is_later = type(version) is int and version > ARTIFACT_FORMAT_VERSION
    return is_later or (type(version) is int and all(type(document[name]) is kind for name, kind in _FIELDS.items()))


def _manifest_hash(document: Mapping[str, Any], batches: Iterable[list[dict[str, Any]]]) -> str:
    """Returns the `fingerprint_of` a manifest: of the document with the parts, given in batches, as its last field."""
    digest = hashlib.sha256(canonical_json({**document, "parts": []}).removesuffix(b"]}"))
    for number, batch in enumerate(batches):
        digest.update((b"," if number else b"") + canonical_json(batch)[1:-1])
    digest.update(b"]}")
    return digest.hexdigest()


def _indented(document: Any) -> bytes:
    """Serialises a value as JSON text with sorted keys, each on a line that begins with a space per level."""
    with contextlib.suppress(TypeError):  # orjson refuses integers over 64 bits
        if orjson.dumps(document, option=orjson.OPT_SORT_KEYS) == canonical_json(document):
            return _indented_quickly(document)
    return _indented_slowly(document)


def _indented_slowly(document: Any) -> bytes:
    """Returns `_indented(document)`, by the module that defines how numbers are written."""
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _is_indented(document: Any, data: bytes) -> bool:
    """Returns whether `data` is `_indented(document)`."""
    with contextlib.suppress(TypeError):  # orjson refuses integers over 64 bits
        if _indented_quickly(document) == data:
            return True
    return _indented_slowly(document) == data


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
        if complete or has_part(storage, key, fingerprint_of(document)):
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
        if mark is None or (mark.get("abandoned") and has_part(storage, key, fingerprint_of(document))):
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
    storage: Storage, key: str, identity: str, known: PartRecords, files: Mapping[str, int]
) -> PartRecords:
    """Returns the committed parts of the draft with this identity, in the order of their names; reads their records.

    Args:
        storage: The storage.
        key: The key of the artifact.
        identity: The identity of the draft.
        known: Parts of the draft, from their records or from lists of records. They are not read again as long as the
            record exists, and the file that it names is the only one of the part: another record names another file.
        files: A listing of the artifact, ordered by key: sizes by key.
    """
    names, unknown = [], []
    before = ("", "")  # the two paths before a record, where the files of its part are
    for path in files:
        if _is_record(key, path):
            name = path.removeprefix(f"{key}/").removesuffix(".json")
            part_files = [other for other in before if other.startswith(f"{key}/{name}-")]
            if name in known and part_files == [f"{key}/{known[name].file}"]:
                names.append(name)
            else:
                unknown.append(name)
        before = (before[1], path)
    parts = known.select(names)
    for part in read_records(storage, key, identity, unknown):
        parts.add(part)
    return parts.select(sorted(parts))


def read_records(storage: Storage, key: str, identity: str, names: Sequence[str]) -> Iterator[ArtifactPart]:
    """Reads the records of parts of the draft with this identity, concurrently; skips records that are missing."""
    with ThreadPoolExecutor(READERS) as threads:
        for first in range(0, len(names), RECORDS_AT_ONCE):  # each waiting call takes more memory than its record
            paths = [f"{key}/{name}.json" for name in names[first : first + RECORDS_AT_ONCE]]
            for record in threads.map(functools.partial(record_unless_removed, storage), paths):
                if record is not None and record[1] == identity:
                    yield record[0]


def record_list(identity: str, parts: Collection[ArtifactPart]) -> tuple[str, bytes]:
    """Returns the file name and the bytes of a list of the records of committed parts of a draft, sealed."""
    data = manifest_bytes({"begun": identity}, parts)
    return f"records-{hashlib.sha256(data).hexdigest()[:16]}{LIST_SUFFIX}", data


def read_record_lists(storage: Storage, paths: Sequence[str], identity: str) -> Iterator[ArtifactPart]:
    """Reads the parts of lists of records, concurrently; skips lists that are damaged, missing, or of another draft."""
    with ThreadPoolExecutor(READERS) as threads:
        for first in range(0, len(paths), READERS):  # bounds the texts in memory
            lists = threads.map(lambda path: _read_record_list(storage, path, identity), paths[first : first + READERS])
            yield from itertools.chain.from_iterable(lists)


def _read_record_list(storage: Storage, path: str, identity: str) -> Sequence[ArtifactPart]:
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        document, parts = _parse_manifest(storage.read(path))
        if document == {"begun": identity}:
            return parts
    return ()


def has_part(storage: Storage, key: str, identity: str) -> bool:
    """Returns whether the draft with this identity has a committed part. It reads records until it finds one."""
    paths = (path for path, _ in storage.list(key) if _is_record(key, path))
    with ThreadPoolExecutor(READERS) as threads:
        sizes = itertools.chain([1], itertools.repeat(READERS))  # the first record is usually one
        while batch := list(itertools.islice(paths, next(sizes))):
            records = threads.map(functools.partial(record_unless_removed, storage), batch)
            if any(record is not None and record[1] == identity for record in records):
                return True
    return False


def _is_record(key: str, path: str) -> bool:
    """Returns whether a path of a file of an artifact is that of the record of a part."""
    name = path.removeprefix(f"{key}/")
    return name.endswith(".json") and "/" not in name and name not in (MANIFEST, BEGUN, PROVENANCE, FAILED)


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

    packages = ("riptide", "torch", "transformers", "tokenizers", "faiss-cpu", "faiss-gpu", "pyarrow", "ray", "numpy")
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


def parse_utc(text: str) -> float:
    """Returns the seconds since 1970 of a time that `format_utc` has formatted."""
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
