"""The store: every artifact of a retrieval system under one folder or S3 prefix."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from indexing.artifact import (
    BEGUN,
    MANIFEST,
    Artifact,
    Draft,
    Reference,
    begun_document,
    unseal,
)
from indexing.cache import CorruptError, NodeCache, node_cache
from indexing.s3 import S3Storage
from indexing.storage import TEMPORARY, LocalStorage, Storage
from retriever.errors import InputError

TEMPORARY_AGE = 3600.0  # seconds after which a file or an upload that nobody went on with is no longer being written
ABANDONED_AGE = 86400.0  # the same of a begun artifact, to which hours of work add one object
CURRENT = "serving/current.json"  # the one object that changes: which release is live
_NO_ARTIFACTS = {"serving", "checkpoints", TEMPORARY}  # what else lies in a store
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Store:
    """A local folder or `s3://bucket/prefix`. Small and without open files, so it travels to workers as it is."""

    def __init__(self, url: str, *, cache: NodeCache | None = None):
        self.storage = open_storage(url)
        self.url = self.storage.url
        self.cache = cache or node_cache()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def create(
        self,
        kind: str,
        name: str = "",
        *,
        inputs: Mapping[str, Artifact | Reference] | None = None,
        config: Mapping[str, Any] | None = None,
        by_content: bool = False,
    ) -> Draft:
        """Begin an artifact, or go on with the same one; `draft.complete` says that nothing is left to do.

        Raises InputError where one of other inputs or configuration was begun under that name. `by_content`: the
        fingerprint is that of the parts (imports: the same content is the same artifact, wherever it came from).
        """
        key = artifact_key(kind, name)
        return Draft(
            self.storage, self.cache, key, begun_document(kind, inputs or {}, config or {}, by_content)
        ).begin()

    def open(self, kind: str, name: str = "") -> Artifact:
        """A complete artifact. Raises InputError in one line if it is not there or not complete."""
        key = artifact_key(kind, name)
        try:
            return Artifact(self.storage, self.cache, key)
        except FileNotFoundError:
            raise InputError(self._why_missing(key)) from None

    def names(self, kind: str) -> list[str]:
        """Names of the complete artifacts of a kind, generations of one counted once."""
        found = {key.removeprefix(f"{kind}/") for key in self.keys(kind)}
        return sorted({re.sub(r"/g\d{4}$", "", name) for name in found})

    def only(self, kind: str, name: str | None = None) -> str:
        """`name`, or the one name of that kind. Raises InputError where there is none, or several to choose from."""
        names = self.names(kind)
        if name is None and len(names) == 1:
            return names[0]
        if name is None and names:
            raise InputError(f"{self.url} has several {kind}: {', '.join(names)}; say which with --{kind} NAME")
        if name is None or name not in names:
            raise InputError(self._why_missing(artifact_key(kind, name or "")))
        return name

    def generations(self, kind: str, name: str = "") -> list[Artifact]:
        """The complete generations g0000, g0001, … of an artifact that grows with its corpus, oldest first."""
        key = artifact_key(kind, name)
        found = [k for k in self.keys(key) if re.fullmatch(r"g\d{4}", k.removeprefix(f"{key}/"))]
        return [Artifact(self.storage, self.cache, k) for k in sorted(found)]

    def keys(self, prefix: str = "") -> list[str]:
        """Keys of the complete artifacts under a prefix."""
        end = f"/{MANIFEST}"
        return sorted(key.removesuffix(end) for key, _ in self.storage.list(prefix) if key.endswith(end))

    def incomplete(self) -> list[str]:
        """Keys of the artifacts that were begun and not ended."""
        end = f"/{BEGUN}"
        begun = {key.removesuffix(end) for key, _ in self.storage.list("") if key.endswith(end)}
        return sorted(begun - set(self.keys()))

    def require(self) -> Store:
        """Raises InputError unless something is there: a mistyped path is no empty store."""
        if self.storage.empty():
            raise InputError(f"{self.url}: there is no store here; jobs/import_corpus.py --store {self.url} makes one")
        return self

    def dependents(self, key: str) -> list[str]:
        """Keys of the other artifacts, complete or not, that were made from this one; CURRENT for the live release."""
        others = {*self.keys(), *self.incomplete()} - {key}
        found = [o for o in others if any(entry["artifact"] == key for entry in self.inputs(o).values())]
        live = self.storage.read_tagged(CURRENT)
        return sorted([*found, *([CURRENT] if live and key == f"releases/{json.loads(live[0])['release']}" else [])])

    def inputs(self, key: str) -> dict[str, dict[str, str]]:
        """What an artifact was made from, by whichever of its two manifests can be read; nothing where none can."""
        for file in (MANIFEST, BEGUN):
            with contextlib.suppress(CorruptError, FileNotFoundError):
                return unseal(self.storage.read(f"{key}/{file}"), key)["inputs"]
        return {}

    def removable(self, key: str) -> list[tuple[str, int]]:
        """(key, bytes) of an artifact's files, complete or not, in the order to delete them.

        Raises InputError for what is no artifact, and where another one needs it.
        """
        kind, _, name = key.partition("/")
        files = self._removal(artifact_key(kind, name)) if kind not in _NO_ARTIFACTS else []
        if not files:
            raise InputError(f"{self.url}/{key}: no such artifact; jobs/store.py list shows what there is")
        if needed_by := self.dependents(key):
            raise InputError(f"{self.url}/{key} is needed by {', '.join(needed_by)}: remove those first")
        return files

    def remove(self, key: str) -> int:
        """Remove an artifact and give back the bytes freed. Raises InputError as `removable` does."""
        files = self.removable(key)
        for name, _ in files:
            self.storage.delete(name)
        return sum(size for _, size in files)

    def superseded(self) -> list[str]:
        """Keys of the index generations that were begun and that nothing will end: a later one took their rows.

        Only an index leaves generations out; one that another was made from has lost its manifest, and is needed.
        """
        complete = self.keys()
        return [
            key
            for key in self.incomplete()
            if re.fullmatch(r"(index|bm25)/[^/]+/g\d{4}", key)
            and any(other > key and other[:-4] == key[:-4] for other in complete)
            and not self.dependents(key)
        ]

    def garbage(self) -> list[tuple[str, int]]:
        """(key, bytes) of what nothing names or ends, in the order to delete it.

        Losers of a race; temporary files and uploads after TEMPORARY_AGE; superseded generations after ABANDONED_AGE.
        """
        found = []
        for key in self.superseded():
            files = self._removal(key)
            with contextlib.suppress(FileNotFoundError):  # somebody else removes it
                if files and max(self._modified(file) for file, _ in files) < time.time() - ABANDONED_AGE:
                    found += files
        for key in self.keys():
            with contextlib.suppress(CorruptError):  # what is damaged is for `verify` to name, and not to be touched
                named = {part.file for part in Artifact(self.storage, self.cache, key).parts}
                for file, size in self.storage.list(key):
                    name = file.removeprefix(f"{key}/")
                    if "/" not in name and not name.endswith(".json") and name not in named:
                        found.append((file, size))
        if isinstance(self.storage, LocalStorage):
            for path in sorted((self.storage.root / TEMPORARY).glob("*")):
                if path.stat().st_mtime < time.time() - TEMPORARY_AGE:
                    found.append((f"{TEMPORARY}/{path.name}", path.stat().st_size))
        if isinstance(self.storage, S3Storage):
            found += self.storage.uploads(TEMPORARY_AGE)
        return found

    def _removal(self, key: str) -> list[tuple[str, int]]:
        """An artifact's (key, bytes) in an order such that, killed midway, no record is without its bytes."""

        def order(entry: tuple[str, int]) -> int:
            name = entry[0].rpartition("/")[2]
            return {MANIFEST: 0, BEGUN: 3}.get(name, 1 if name.endswith(".json") else 2)

        return sorted([(k, size) for k, size in self.storage.list(key) if k.rpartition("/")[0] == key], key=order)

    def _modified(self, key: str) -> float:
        """When `key` was written, in seconds since 1970. Raises FileNotFoundError."""
        if isinstance(self.storage, S3Storage):
            return self.storage.modified(key)
        assert isinstance(self.storage, LocalStorage)
        return self.storage.path(key).stat().st_mtime

    def _why_missing(self, key: str) -> str:
        self.require()
        for begun in self.incomplete():
            if begun == key or begun.startswith(f"{key}/"):  # a generation of it, or the one thing of its kind
                return f"{self.url}/{begun} was begun and is not complete: run the command that makes it again"
        kind = key.partition("/")[0]
        names = ", ".join(self.names(kind)) or "none"
        return f"{self.url}/{key}: there is no such artifact (complete {kind}: {names})"


def artifact_key(kind: str, name: str = "") -> str:
    """`kind/name`. Raises InputError for a name that is no plain file name (generations: NAME/g0000)."""
    pieces = [p for p in name.split("/") if p] if name else []
    if not _NAME.fullmatch(kind):
        raise InputError(f"{kind!r} is no kind of artifact; jobs/store.py list shows what there is")
    if any(not _NAME.fullmatch(piece) for piece in pieces) or len(pieces) > 2:
        raise InputError(f"name {name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit")
    return "/".join([kind, *pieces])


def generation(number: int) -> str:
    """`g0007`: the folder of a generation."""
    return f"g{number:04d}"


def open_storage(url: str) -> Storage:
    """`s3://bucket/prefix` or a local folder (made when the first object is written)."""
    if url.startswith("s3://"):
        return S3Storage(url)
    if "://" in url:
        raise InputError(f"store {url}: only a local folder or s3://bucket/prefix can hold a store")
    return LocalStorage(url)
