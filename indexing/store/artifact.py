"""Artifacts: folders that any number of processes write part by part. Once complete, only an erasure changes them.

`Artifact` reads a complete one, and `Draft` (riptide.indexing.store.draft) writes one. Its files:

KIND/NAME/manifest.begun.json   written first: pins inputs and configuration; a resume with others is refused
KIND/NAME/part-00007-HASH.npy   the bytes of a part, under a name that contains their hash
KIND/NAME/part-00007.json       the record of a part; the first process that writes it commits the part
KIND/NAME/records-HASH.list     the records of 250 parts of a draft, so that a resume reads few files
KIND/NAME/failed.json           bad input ended the command: the next command may replace the draft
KIND/NAME/provenance.json       command, host, times, versions: not part of the content or of any fingerprint
KIND/NAME/manifest.json         written last: the artifact is complete if this file exists
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.storage.cache import CorruptError, NodeCache, RangeFile, missing_file_error
from riptide.indexing.storage.storage import Storage
from riptide.indexing.store.keys import Key
from riptide.indexing.store.sealed_json import ARTIFACT_FORMAT_VERSION, MANIFEST, ArtifactPart, PartList, read_manifest

READABLE = {1: ("prompts", "models")}  # earlier format version -> kinds of artifacts that are still read
CHECKSUMS = "crc32"  # the fact of a part with the checksums of its blocks


class _Config(dict[str, Any]):
    """The configuration of an artifact. A missing setting raises a CorruptError that names the manifest."""

    def __init__(self, config: Mapping[str, Any], url: str):
        super().__init__(config)
        self._url = url

    def __missing__(self, name: str) -> Any:
        raise CorruptError(f"{self._url}/{MANIFEST}: config.{name}: missing; restore the file from a copy")


class Artifact:
    """A complete artifact, opened for reading."""

    def __init__(self, storage: Storage, cache: NodeCache, key: str):
        self.key = key
        self._storage, self._cache = storage, cache
        document, self.parts = read_manifest(storage, key)
        version = document["format"]
        if version != ARTIFACT_FORMAT_VERSION and document["kind"] not in READABLE.get(version, ()):
            remedy = "make it again in another store, or use the release that made it"
            if version > ARTIFACT_FORMAT_VERSION:
                remedy = "install a newer one"
            raise InputError(
                f"{storage.url}/{key}: it is of format {version}, this release reads format {ARTIFACT_FORMAT_VERSION}; "
                f"{remedy}"
            )
        self.kind: str = document["kind"]
        self.fingerprint: str = document["fingerprint"]
        self.inputs: dict[str, dict[str, str]] = document["inputs"]
        self.config: dict[str, Any] = _Config(document["config"], f"{storage.url}/{key}")
        self.notes: dict[str, Any] = document["notes"]
        self.erasures: list[str] = document.get("erasures", [])  # those whose passages its parts lack

    def __repr__(self) -> str:
        return f"Artifact({self.key!r})"

    @functools.cached_property
    def handle(self) -> Artifact:
        """The artifact without its parts, which reads files of given parts: small enough to be sent with each part."""
        handle = copy.copy(self)
        handle.parts = PartList(b"", np.zeros(1, np.int64), np.empty(0, np.int64))
        return handle

    @property
    def url(self) -> str:
        return f"{self._storage.url}/{self.key}"

    @property
    def name(self) -> str:
        return Key.parse(self.key).name

    @property
    def rows(self) -> int:
        return sum(int(self.numbered_parts(prefix).rows.sum()) for prefix in ("part", "shard"))

    def numbered_parts(self, prefix: str) -> PartList:
        """Returns the parts named PREFIX-00000, PREFIX-00001, … in order."""
        return self.parts.named(f"{prefix}-", f"{prefix}.")  # "." follows "-"

    def find_part(self, name: str) -> ArtifactPart | None:
        """Returns the part with a name; None if it is missing."""
        return next(iter(self.parts.named(name, f"{name}\0")), None)

    def part(self, name: str) -> ArtifactPart:
        """Returns the part with a name. Raises KeyError if it is missing."""
        if (part := self.find_part(name)) is None:
            raise KeyError(f"{self.url} has no part {name}")
        return part

    def local_path(self, part: ArtifactPart | str) -> Path:
        """Returns the path of a local file with the bytes of a part, which FAISS, Lucene and memory maps need.

        Raises:
            CorruptError: If the bytes are not those that were committed.
        """
        part = self.part(part) if isinstance(part, str) else part
        return self._cache.local_path(self._storage, f"{self.key}/{part.file}", part.bytes, part.sha256)

    def has_file(self, part: ArtifactPart) -> bool:
        """Returns whether this machine has the file of a part, so that `local_path` fetches nothing."""
        return self._cache.has_file(self._storage, f"{self.key}/{part.file}", part.bytes, part.sha256)

    def read_range(self, part: ArtifactPart, start: int, end: int) -> bytes:
        """Returns the bytes [start, end) of the file of a part from the storage. Only their number is checked.

        Raises:
            MissingFileError: If the file is missing.
            CorruptError: If the file is shorter.
        """
        name = f"{self.url}/{part.file}"
        try:
            data = self._storage.read_range(f"{self.key}/{part.file}", start, end)
        except FileNotFoundError as error:
            raise missing_file_error(name) from error
        if len(data) != end - start:
            raise CorruptError(f"{name}: bytes {start} to {end} are missing, {part.bytes} bytes were committed")
        return data

    def open_ranges(self, part: ArtifactPart) -> RangeFile | None:
        """Opens the file of a part in the storage, to read ranges of it; None if its record has no checksums."""
        checksums = part.facts.get(CHECKSUMS)
        if checksums is None:
            return None
        return RangeFile(self._storage, f"{self.key}/{part.file}", part.bytes, checksums)
