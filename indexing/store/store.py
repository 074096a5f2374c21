"""The class Store: all artifacts of a retrieval system under one folder or one prefix of a bucket."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from riptide.base.arguments import closest_name
from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter, shown
from riptide.indexing.storage.cache import CorruptError, NodeCache, node_cache
from riptide.indexing.storage.object_store import ObjectStorage
from riptide.indexing.storage.remote import RemoteStorage
from riptide.indexing.storage.s3 import S3Storage
from riptide.indexing.storage.storage import TEMPORARY, LocalStorage, Storage, is_text
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft, remove_command
from riptide.indexing.store.keys import BEGUN_ERASURE, ERASURES, MAX_NAME, Key, checkpoint_names, without_generation
from riptide.indexing.store.live_release import CURRENT, read_live_record
from riptide.indexing.store.sealed_json import (
    BEGUN,
    FAILED,
    MANIFEST,
    PROVENANCE,
    ArtifactReference,
    begun_document,
    check_own_hash,
    pinned_config,
    read_begun,
    read_failure,
    read_manifest,
)

TEMPORARY_AGE = 3600.0  # seconds without a write after which a temporary file or an upload counts as abandoned
ABANDONED_AGE = 86400.0  # the same for a superseded draft; longer, as one part may take hours
MADE_BY = {  # kind -> jobs that make artifacts of this kind
    "corpus": ("import-corpus",),
    "queries": ("import-corpus", "import-queries"),
    "embeddings": ("encode-corpus",),
    "index": ("build-index",),
    "bm25": ("build-bm25",),
    "topics": ("fit-topics",),
    "candidates": ("mine-negatives",),
    "scores": ("mine-negatives",),
    "negatives": ("mine-negatives",),
    "models": ("train-reranker", "train-retriever", "pretrain-rip"),
    "prompts": ("train-retriever", "tune-prompts", "pretrain-rip", "convert-prompts"),
    "sweeps": ("train-retriever",),
    "runs": ("search",),
    "releases": ("serve-search",),
}
MAX_GENERATIONS = 10_000  # of an artifact, as their names have four digits
GROWING = ("embeddings", "index", "bm25", "topics", "scores")  # kinds whose artifacts are made by generations
_PLURALS = {"index": "indexes", "bm25": "BM25 indexes"}  # plurals for messages, of kinds with a singular name
COPIES = "copying"  # folder of the marks of copies to this store that are in progress or were interrupted
_NO_ARTIFACTS = {"serving", "checkpoints", COPIES, ERASURES, TEMPORARY}  # folders of a store without artifacts
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SCHEMES: dict[str, type[RemoteStorage]] = {"s3": S3Storage, "gs": ObjectStorage, "az": ObjectStorage}
# Schemes that other programs use -> the one of the same service.
_OTHER_SCHEMES = {
    **dict.fromkeys(["s3a", "s3n"], "s3"),
    "gcs": "gs",
    **dict.fromkeys(["abfs", "abfss", "wasb", "wasbs", "azure"], "az"),
}
_LIKELY_SCHEMES = "|".join([*SCHEMES, *_OTHER_SCHEMES, "hdfs", "file", "http", "https", "ftp", "oss", "r2", "minio"])
_LIKE_URL = re.compile(
    rf"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)|(?P<known_scheme>{_LIKELY_SCHEMES})(:/*|//+)(?P<path>.*)",
    re.IGNORECASE,
)


class Store:
    """The artifacts in a folder or under a prefix of a bucket. Has no open files; workers receive it by pickle."""

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
        inputs: Mapping[str, Artifact | ArtifactReference] | None = None,
        config: Mapping[str, Any] | None = None,
        by_content: bool = False,
        abandoned_s: float | None = None,
    ) -> Draft:
        """Begins an artifact, or joins a draft with equal inputs and settings, which may be complete (`is_complete`).

        Args:
            kind: The kind of the artifact, its first folder.
            name: The name below it.
            inputs: The artifacts that it is made from, by role.
            config: The settings that shape its content.
            by_content: The fingerprint depends on the parts only (imports: the same content is the same artifact,
                regardless of its source).
            abandoned_s: As in Draft.begin.

        Raises:
            InputError: If a draft of other inputs or configuration has this name and may not be replaced.
        """
        document = begun_document(kind, inputs or {}, config or {}, by_content)
        return Draft(self.storage, self.cache, new_artifact_key(kind, name), document).begin(abandoned_s=abandoned_s)

    def open(self, kind: str, name: str = "") -> Artifact:
        """Opens a complete artifact. Raises InputError if it is missing or incomplete, CorruptError if damaged."""
        key = artifact_key(kind, name)
        try:
            return Artifact(self.storage, self.cache, key)
        except FileNotFoundError:
            raise InputError(self._describe_missing(key)) from None

    def names(self, kind: str) -> list[str]:
        """Returns the names of the complete artifacts of a kind; all generations of an artifact share one name."""
        names = {key.removeprefix(f"{kind}/") for key in self.keys(kind)}
        return sorted({without_generation(name) for name in names})

    def only_name(
        self,
        kind: str,
        name: str | None = None,
        fits: Callable[[dict[str, Any]], bool] | None = None,
        *,
        choice: str | None = None,
    ) -> str:
        """Returns `name`; if it is None, the name of the only artifact of the kind.

        Args:
            kind: The kind of the artifact.
            name: The name; None: the only one.
            fits: Says of an artifact's configuration whether the artifact counts as a candidate for the only one; None:
                all count. If none fits, all count, and the caller refuses what it gets for its own reason.
            choice: How the user names one of several, for the error; default: by the parameter of that kind.

        Raises:
            InputError: If it is missing or ambiguous.
        """
        names = self.names(kind)
        if name is None and fits is not None and len(names) > 1:
            names = [
                each for each in names if any(fits(made.config) for made in self.generations(kind, each)[-1:])
            ] or names
        if name is None and len(names) == 1:
            return names[0]
        if name is None and names:
            choice = choice or f"{Parameter(kind, 'NAME')}"
            raise InputError(
                f"{self.url} has several {_PLURALS.get(kind, kind)}: {', '.join(names)}; say which with {choice}"
            )
        if name is None or name not in names:
            raise InputError(self._describe_missing(artifact_key(kind, name or "")))
        return name

    def generations(self, kind: str, name: str = "") -> list[Artifact]:
        """Returns the complete generations g0000, g0001, … of an artifact that grows with its corpus, oldest first."""
        key = artifact_key(kind, name)
        generations = []
        for generation_key in self.keys(key):
            if re.fullmatch(r"g\d{4}", generation_key.removeprefix(f"{key}/")):
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    generations.append(Artifact(self.storage, self.cache, generation_key))
        return generations

    def keys(self, prefix: str = "") -> list[str]:
        """Returns the keys of the complete artifacts under a prefix, sorted."""
        return [key.removesuffix(f"/{MANIFEST}") for key in self.storage.find(prefix, {MANIFEST})]

    def incomplete_keys(self) -> list[str]:
        """Returns the keys of the artifacts that were begun and are not complete, sorted."""
        manifests = [key.rpartition("/") for key in self.storage.find("", {BEGUN, MANIFEST})]
        complete = {key for key, _, file in manifests if file == MANIFEST}
        return [key for key, _, file in manifests if file == BEGUN and key not in complete]

    def failed_drafts(self) -> dict[str, str]:
        """Returns the error messages of failed and abandoned drafts by key; the next command replaces such a draft."""
        errors = {key: read_failure(self.storage, key) for key in self.incomplete_keys()}
        return {key: error for key, error in errors.items() if error is not None}

    def describe_damaged(self) -> list[str]:
        """Returns one line per complete artifact whose manifest cannot be read."""
        problems = []
        for key in self.keys():
            try:
                Artifact(self.storage, self.cache, key)
            except FileNotFoundError:  # another process has removed it
                continue
            except CorruptError as error:
                problems.append(f"{error}")
        return problems

    def require_not_empty(self) -> Store:
        """Returns the store itself. Raises InputError if it is empty, as its path may be mistyped."""
        if self.storage.is_empty():
            raise InputError(f"{self.url}: there is no store here; {commands_that_make('corpus')} makes one")
        return self

    def dependents(self, key: str) -> list[str]:
        """Returns the keys of artifacts, complete or not, with `key` as an input; and CURRENT for the live release.

        Raises:
            CorruptError: For a release, if CURRENT is damaged, because the release may be the live one.
        """
        return self._dependents().get(key, []) + [CURRENT] * self._is_live(key)

    def _is_live(self, key: str) -> bool:
        """Returns whether an artifact is the live release. Raises CorruptError for a release if CURRENT is damaged."""
        current = read_live_record(self.storage) if key.startswith("releases/") else None
        return current is not None and key == f"releases/{current.release}"

    def _dependents(self) -> dict[str, list[str]]:
        """Returns by key of an artifact the sorted keys of the artifacts that have it as an input."""
        dependents: dict[str, list[str]] = {}
        for key in sorted({*self.keys(), *self.incomplete_keys()}):
            for needed in {entry["artifact"] for entry in self.inputs(key).values()} - {key}:
                dependents.setdefault(needed, []).append(key)
        return dependents

    def inputs(self, key: str) -> dict[str, dict[str, str]]:
        """Returns the inputs of an artifact by role; empty if neither of its manifests can be read."""
        return (self.manifest(key) or {"inputs": {}})["inputs"]

    def manifest(self, key: str) -> dict[str, Any] | None:
        """Reads the manifest of an artifact without its parts, or manifest.begun.json; None if neither can be read."""
        with contextlib.suppress(CorruptError, FileNotFoundError):
            return read_manifest(self.storage, key)[0]
        with contextlib.suppress(CorruptError, FileNotFoundError):
            return read_begun(self.storage, key)
        return None

    def pinned_config(self, key: str) -> dict[str, Any] | None:
        """Returns the configuration of an artifact that is complete or has parts, otherwise None."""
        return pinned_config(self.storage, key)

    def find_keys(self, key: str) -> list[str]:
        """Returns the keys of `KIND/NAME`: one artifact, or all its generations, oldest first.

        Raises:
            InputError: If there is no such artifact, complete or not.
        """
        kind, name = Key.parse(key)
        exact = artifact_key(kind, name)
        known = {*self.keys(exact), *self.incomplete_keys()}
        generations = sorted(each for each in known if re.fullmatch(rf"{re.escape(exact)}/g\d{{4}}", each))
        keys = [exact] if self.files_in_removal_order(exact) else generations
        if kind in _NO_ARTIFACTS or not keys:
            listing = f"{Command('store', 'list', store=shlex.quote(self.url))}"
            raise InputError(f"{self.url}/{key}: no such artifact; {listing} shows what there is")
        return keys

    def files_to_remove(self, key: str, *, with_dependents: bool = False) -> dict[str, list[tuple[str, int]]]:
        """Returns (key, size in bytes) of the files to delete per artifact, in a safe order of deletion.

        The checkpoints of its training are among them: a training of this name would resume from them. An artifact
        comes after those that were made from it, so an interrupted removal leaves none without its inputs.

        Args:
            key: The key; without a generation it stands for all of them.
            with_dependents: Include the artifacts that were made from it.

        Returns:
            The files by the key of their artifact.

        Raises:
            InputError: If there is no such artifact, if another one needs it, or if the live release would be removed.
        """
        wanted, dependents = self.find_keys(key), self._dependents()
        removed = _dependents_first(wanted, dependents)
        needed_by = [each for each in removed if each not in wanted]
        if needed_by and not with_dependents:
            direct_dependents = sorted({other for each in wanted for other in dependents.get(each, ())} - set(wanted))
            raise InputError(
                f"{self.url}/{key} is needed by {', '.join(direct_dependents)}: remove those first, or give "
                f"{Parameter('with_dependents')}, which removes everything that was made from it"
            )
        if live := [other for other in removed if self._is_live(other)]:
            raise InputError(
                f"{self.url}/{key} is needed by {CURRENT}, as {live[0]} is live: serve another release, or end "
                f"its servers and remove serving ({remove_command(self.storage, 'serving')})"
            )
        checkpoints = self.checkpoint_files()

        def own_checkpoints(artifact: str) -> list[tuple[str, int]]:
            names = checkpoint_names(*Key.parse(artifact))
            return [(file, size) for file, size in checkpoints if file.split("/")[1] in names]

        return {each: self.files_in_removal_order(each) + own_checkpoints(each) for each in removed}

    def checkpoint_files(self) -> list[tuple[str, int]]:
        """Returns (key, size in bytes) of the files of all checkpoints; latest.json files come first."""
        files = self.storage.list("checkpoints")
        return sorted(files, key=lambda entry: (not entry[0].endswith("/latest.json"), entry[0]))

    def remove(self, key: str, *, with_dependents: bool = False) -> int:
        """Removes an artifact; returns the number of bytes freed. Arguments and errors as for `files_to_remove`."""
        removed = self.files_to_remove(key, with_dependents=with_dependents)
        for files in removed.values():
            self.delete_files(files)
        return sum(size for files in removed.values() for _, size in files)

    def delete_files(self, files: Iterable[tuple[str, int]]) -> None:
        """Deletes files of `files_to_remove` in their order; records, and then data files, are deleted in batches."""
        for _, group in itertools.groupby(files, key=lambda entry: _removal_rank(entry[0])):
            self.storage.delete_all([key for key, _ in group])

    def superseded_drafts(self) -> list[str]:
        """Returns the keys of incomplete generations that no command resumes, as a later generation covers their rows.

        Only an index, or topics, can skip generations. A generation that another one was made from has lost its
        manifest and is needed.
        """
        complete = self.keys()
        return [
            key
            for key in self.incomplete_keys()
            if re.fullmatch(r"(index|bm25|topics)/[^/]+/g\d{4}", key)
            and any(other > key and other[:-4] == key[:-4] and self._is_readable(other) for other in complete)
            and not self.dependents(key)
        ]

    def garbage_files(self) -> list[tuple[str, int]]:
        """Returns (key, size in bytes) of the files that nothing refers to, in a safe order of deletion.

        These are the bytes of writers that lost a race; temporary files, uploads and failed drafts after TEMPORARY_AGE;
        and superseded generations after ABANDONED_AGE. Files of an artifact with a damaged manifest are never included,
        and none of a complete artifact while an erasure is in progress, which stores files before it names them.
        """
        unnamed = []
        ages = dict.fromkeys(self.failed_drafts(), TEMPORARY_AGE) | dict.fromkeys(
            self.superseded_drafts(), ABANDONED_AGE
        )
        for key, age in ages.items():
            files = self.files_in_removal_order(key)
            with contextlib.suppress(FileNotFoundError):  # another process is removing it
                if files and max(self.storage.write_time(file) for file, _ in files) < time.time() - age:
                    unnamed += files
        for key in self.keys():
            with contextlib.suppress(CorruptError, FileNotFoundError):  # damaged, or removed by another process
                # In this order: a listed file is that of an erasure in progress, or the manifest read later names it.
                files = list(self.storage.list(key))
                if self.storage.size(BEGUN_ERASURE) is not None:
                    break
                named = {part.file for part in Artifact(self.storage, self.cache, key).parts}
                for file, size in files:
                    name = file.removeprefix(f"{key}/")
                    if "/" not in name and not name.endswith(".json") and name not in named:
                        unnamed.append((file, size))
        return unnamed + self.storage.abandoned_writes(TEMPORARY_AGE)

    def files_in_removal_order(self, key: str) -> list[tuple[str, int]]:
        """Returns (key, size in bytes) of an artifact's files in a safe order of deletion.

        If the deletion is interrupted anywhere, a draft with some pending parts remains, which can be resumed: no
        record is without its bytes.
        """
        files = [(file, size) for file, size in self.storage.list(key) if file.rpartition("/")[0] == key]
        return sorted(files, key=lambda entry: _removal_rank(entry[0]))

    def _is_readable(self, key: str) -> bool:
        """Returns whether the manifest of a complete artifact can be read."""
        try:
            Artifact(self.storage, self.cache, key)
        except (CorruptError, FileNotFoundError):
            return False
        return True

    def copy_marks(self) -> dict[str, dict[str, Any]]:
        """Returns the marks of copies to this store that are in progress or were interrupted, by their files.

        A mark has the source, and the keys of the artifacts to copy; None: the whole source.
        """
        marks = {}
        for file, _ in self.storage.list(COPIES):
            with contextlib.suppress(CorruptError, FileNotFoundError):
                marks[file] = {"keys": None, **check_own_hash(self.storage.read(file), file)}
        return marks

    def _describe_missing(self, key: str) -> str:
        self.require_not_empty()
        kind, name = Key.parse(key)
        for mark in self.copy_marks().values():
            keys, source = mark["keys"], mark["source"]
            if keys is None or any(f"{each}/".startswith(f"{key}/") for each in keys):
                part = [] if keys is None else [without_generation(keys[-1])]
                copy = f"{Command('store', 'copy', *part, store=shlex.quote(source), to=shlex.quote(self.url))}"
                return f"{self.url}/{key}: not there, as the copy from {source} is not complete: continue it by {copy}"
        commands = commands_that_make(kind)
        for draft in self.incomplete_keys():
            if draft == key or draft.startswith(f"{key}/"):  # a generation of `key`, or `key` itself
                by = f" ({commands})" if commands else ""
                return f"{self.url}/{draft} was begun and is not complete: run the command that makes it again{by}"
        names = self.names(kind)
        remedy = f"; {commands} makes one" if commands else ""
        if name.partition("/")[0] not in names and (close := closest_name(name, names)):
            remedy = f"; did you mean {close}?"
        return f"{self.url}/{key}: there is no such artifact (complete {kind}: {', '.join(names) or 'none'}){remedy}"


def commands_that_make(kind: str) -> str:
    """Returns the names of the commands that make artifacts of a kind, for a message; "" if there are none."""
    *others, last = [f"{Command(job)}" for job in MADE_BY.get(kind, ())] or [""]
    return f"{', '.join(others)} or {last}" if others else last


def repeated_command(kind: str, name: str) -> str:
    """Returns text for a message: the command that makes the next generation of KIND/NAME with the same options."""
    [job] = MADE_BY[kind]
    return f"{Command(job, name=name)} again, with the same options"


def _dependents_first(keys: Sequence[str], dependents: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns `keys` and all their direct and indirect dependents, each key after its dependents."""
    ordered: dict[str, None] = {}
    visited: set[str] = set()  # guards against cycles: an artifact deleted by hand may be made again from a dependent
    pending = list(keys)
    while pending:
        key = pending[-1]
        if key in visited:
            ordered[pending.pop()] = None
        else:
            visited.add(key)
            pending += [each for each in dependents.get(key, ()) if each not in visited]
    return list(ordered)


def artifact_key(kind: str, name: str = "") -> str:
    """Returns the key `kind/name`. Raises InputError if `name` is no plain file name (generations: NAME/g0000)."""
    pieces = [p for p in name.split("/") if p] if name else []
    if not _NAME.fullmatch(kind):
        raise InputError(f"{shown(repr(kind))} is not a kind of artifact; expected KIND/NAME, for example index/minilm")
    if any(not _NAME.fullmatch(piece) for piece in pieces) or len(pieces) > 2:
        raise InputError(
            f"name {shown(repr(name))}: use letters, digits, '.', '_' and '-', starting with a letter or digit"
        )
    for piece in (kind, *pieces):
        if len(piece) > MAX_NAME:
            raise InputError(f"name {piece[:40]!r}...: found {len(piece)} characters, expected at most {MAX_NAME}")
    return "/".join([kind, *pieces])


def new_artifact_key(kind: str, name: str) -> str:
    """Returns the key of an artifact to make. Raises InputError for a slash, except in NAME/gNNNN of a generation."""
    is_generation = kind in GROWING and re.fullmatch(r"[^/]+/g\d{4}", name)
    if "/" in name and not is_generation:
        check_name(kind, name)
    return artifact_key(kind, name)


def check_name(kind: str, name: str) -> None:
    """Raises InputError if `name` is not a valid name for an artifact, with or without generations."""
    if not name or "/" in name:
        raise InputError(f"name {shown(repr(name))}: expected a name without '/', as in {kind}/NAME")
    artifact_key(kind, name)


def generation(number: int) -> str:
    """Returns the folder name of a generation, for example `g0007`. Raises InputError for one that no reader finds."""
    if number >= MAX_GENERATIONS:
        raise InputError(
            f"g{number}: an artifact has at most {MAX_GENERATIONS:,} generations; import the source as it is now into "
            "another store"
        )
    return f"g{number:04d}"


def open_storage(url: str) -> Storage:
    """Opens the storage of an address of SCHEMES, or of a local folder, which the first write creates.

    Raises:
        InputError: If the URL is mistyped, or if the path is not a folder or not accessible to this user.
    """
    if not url.strip() or "\0" in url or not is_text(url):
        raise InputError(
            f"store {shown(repr(url))}: expected a folder or s3://bucket/prefix: UTF-8 text without NUL characters"
        )
    scheme, separator, _ = url.partition("://")
    if separator and scheme in SCHEMES:
        return SCHEMES[scheme](url)
    if mistyped := _LIKE_URL.fullmatch(url.strip()):
        raise InputError(f"store {shown(repr(url))}: {_correct_form(**mistyped.groupdict())}")
    storage = LocalStorage(url)
    try:
        if not stat.S_ISDIR(os.stat(storage.root).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "this is a file")
    except FileNotFoundError:
        pass  # the first write creates the folder
    except OSError as error:
        raise InputError(f"store {url}: {error.strerror}; expected a folder or s3://bucket/prefix") from error
    return storage


def _removal_rank(file: str) -> int:
    """Returns the rank of a file of an artifact in the order of its removal; records come before data files."""
    name = file.rpartition("/")[2]
    return {MANIFEST: 0, PROVENANCE: 1, FAILED: 4, BEGUN: 5}.get(name, 2 if name.endswith(".json") else 3)


def _correct_form(scheme: str | None, rest: str | None, known_scheme: str | None, path: str | None) -> str:
    """Returns advice on the correct form of an invalid store URL."""
    kind, place = (scheme or known_scheme or "").lower(), (rest or path or "").strip("/")
    if (service := _OTHER_SCHEMES.get(kind, kind)) in SCHEMES:
        return f"did you mean {service}://{place or 'bucket/prefix'}?"
    if kind == "file":
        return f"a local folder is written as a plain path, such as /{place or 'data/store'}"
    known = " or ".join(f"{scheme}://" for scheme in SCHEMES)
    return f"only a local folder or a prefix of a bucket, {known}bucket/prefix, can hold a store, not {kind}:"
