"""Copies artifacts to another store, byte for byte: for backups, and from one cloud to another.

An artifact is copied after those that it was made from, its parts in any order, its manifest last. So the target can be
used at any time, and a copy that was killed continues with the missing parts. While a copy is in progress or was
interrupted, a mark in the target names its source and its artifacts; a command that misses one of them there says so.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Command
from riptide.indexing.storage.cache import CorruptError, MissingFileError, file_sha256
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft, keep_alive
from riptide.indexing.store.live_release import CURRENT, parse_live_record
from riptide.indexing.store.sealed_json import (
    BEGUN,
    MANIFEST,
    PROVENANCE,
    ArtifactPart,
    add_own_hash,
    check_own_hash,
    fingerprint_of,
)
from riptide.indexing.store.store import COPIES, Store

THREADS = 4  # parts that are copied at the same time; each storage sends the pieces of a part in parallel too


@dataclass(frozen=True)
class CopyPlan:
    """What a copy would do.

    Attributes:
        keys: The keys of all artifacts of the copy, each after those that it was made from.
        pending: Those that the target lacks, in this order.
        is_whole: Whether they are all complete artifacts of the source.
    """

    keys: Sequence[str]
    pending: Sequence[Artifact]
    is_whole: bool

    @property
    def size(self) -> int:
        """The bytes of all parts of the pending artifacts."""
        return sum(part.bytes for artifact in self.pending for part in artifact.parts)

    @property
    def present(self) -> list[str]:
        """The keys of the artifacts that the target has."""
        pending = {artifact.key for artifact in self.pending}
        return [key for key in self.keys if key not in pending]

    def covers(self, keys: Sequence[str] | None) -> bool:
        """Returns whether the copy has these artifacts; None: all of the source."""
        return self.is_whole if keys is None else set(keys) <= set(self.keys)


def plan_copy(source: Store, target: Store, keys: Sequence[str] | None = None) -> CopyPlan:
    """Compares two stores before a copy.

    Args:
        source: The store to copy from.
        target: The store to copy to.
        keys: The artifacts to copy, with all that they were made from; None: all complete ones.

    Raises:
        InputError: If an artifact is not complete, or if the target has another one under its name.
    """
    pending: list[Artifact] = []
    ordered = _inputs_first(source, source.keys() if keys is None else keys)
    for key in ordered:
        artifact = _open(source, key)
        try:
            existing = Artifact(target.storage, target.cache, key)
        except FileNotFoundError:
            pending.append(artifact)
            continue
        if existing.fingerprint != artifact.fingerprint:
            raise InputError(
                f"{existing.url} is another artifact, {existing.fingerprint[:12]}, than {artifact.url}, "
                f"{artifact.fingerprint[:12]}: copy to another store, or remove the one in the target"
            )
        if existing.erasures != artifact.erasures:
            raise InputError(
                f"{existing.url} has {len(existing.erasures)} erasures of passages, {artifact.url} has "
                f"{len(artifact.erasures)}: copy to another store, or remove the one in the target"
            )
    return CopyPlan(ordered, pending, is_whole=keys is None)


def copy_artifacts(
    source: Store, target: Store, plan: CopyPlan, on_part: Callable[[ArtifactPart, bool], object]
) -> Iterator[Artifact]:
    """Copies the pending artifacts of a plan; yields each when it is complete in the target.

    Args:
        source: The store to copy from.
        target: The store to copy to.
        plan: The result of `plan_copy`.
        on_part: Called with each copied part, and whether an earlier copy made it.

    Raises:
        CorruptError: If the bytes of a file of the source are not the committed ones.
        InputError: If the target has other parts under the name of an artifact.
    """
    if plan.pending:
        mark = {"source": source.url, "keys": None if plan.is_whole else [*plan.keys]}
        target.storage.require_conditional_writes()
        target.storage.put(f"{COPIES}/{fingerprint_of(mark)[:16]}.json", add_own_hash(mark))
    for artifact in plan.pending:
        _copy_artifact(source, target, artifact, on_part)
        yield artifact
    # Also without pending artifacts: a copy may have been killed between its last one and this. The marks of other
    # artifacts and of other sources stay, as those copies may be in progress.
    for file, other in target.copy_marks().items():
        if other["source"] == source.url and plan.covers(other["keys"]):
            target.storage.delete(file)


def copy_live_record(source: Store, target: Store) -> str | None:
    """Makes the live release of the source live in a target that has none; returns its id.

    None if the source has no live release, or if the target lacks its artifact or has a live release.
    """
    tagged = source.storage.read_tagged(CURRENT)
    if tagged is None:
        return None
    release = parse_live_record(source.storage, tagged[0]).release
    is_copied = target.storage.size(f"releases/{release}/{MANIFEST}") is not None
    return release if is_copied and target.storage.put_new(CURRENT, tagged[0]) else None


def _copy_artifact(
    source: Store, target: Store, artifact: Artifact, on_part: Callable[[ArtifactPart, bool], object]
) -> None:
    """Copies the parts, then the manifest of an artifact, by the same commits as those of a job that makes it."""
    key = artifact.key
    begun, _ = _read_document(source, f"{key}/{BEGUN}")
    _, provenance = _read_document(source, f"{key}/{PROVENANCE}")
    draft = Draft(target.storage, target.cache, key, begun).begin()
    existing = draft.committed_parts()
    draft.list_records()
    with keep_alive([draft]), ThreadPoolExecutor(THREADS) as threads:
        commits = {}
        for part in artifact.parts:
            suffix = part.file.removeprefix(f"{part.name}-{part.sha256[:16]}")
            fetch = functools.partial(_fetch, source, artifact, part)
            commits[threads.submit(draft.commit, part.name, suffix, fetch, rows=part.rows, **part.facts)] = part
        try:
            for commit in as_completed(commits):
                part = commits[commit]
                if commit.result() != part:
                    raise InputError(
                        f"{draft.url}/{part.file}: the target has other bytes of this part, {commit.result().file}: "
                        f"copy to another store, or remove {key} there"
                    )
                on_part(part, part.name in existing)
                draft.list_records([part.name] if part.name not in existing else [])
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    draft.add_notes(**artifact.notes)
    draft.finish(provenance, artifact)


def _fetch(source: Store, artifact: Artifact, part: ArtifactPart, path: Path) -> None:
    """Writes the bytes of a part to a local file, and checks them."""
    name = f"{artifact.key}/{part.file}"
    try:
        source.storage.fetch(name, path)
    except FileNotFoundError as error:
        raise _missing_file_error(source, name) from error
    if path.stat().st_size != part.bytes or file_sha256(path) != part.sha256:
        raise CorruptError(f"{source.url}/{name}: its bytes are not the committed ones; {_remedy(source)}")


def _open(source: Store, key: str) -> Artifact:
    try:
        return Artifact(source.storage, source.cache, key)
    except FileNotFoundError as error:
        raise _missing_file_error(source, f"{key}/{MANIFEST}") from error


def _read_document(source: Store, name: str) -> tuple[dict[str, Any], bytes]:
    """Reads and checks a JSON document of an artifact; returns it and its bytes."""
    try:
        data = source.storage.read(name)
    except FileNotFoundError as error:
        raise _missing_file_error(source, name) from error
    return check_own_hash(data, f"{source.url}/{name}"), data


def _missing_file_error(source: Store, name: str) -> MissingFileError:
    return MissingFileError(f"{source.url}/{name}: the file is missing; {_remedy(source)}")


def _remedy(source: Store) -> str:
    command = f"{Command('verify', store=shlex.quote(source.url))}"
    return f"{command} names every such file; restore it, or remove its artifact first"


def _inputs_first(source: Store, keys: Sequence[str]) -> list[str]:
    """Returns keys and those of all that they were made from in the same store, each after its inputs."""
    ordered: dict[str, None] = {}
    visited: set[str] = set()
    pending = list(reversed(keys))
    while pending:
        key = pending[-1]
        if key in visited:
            ordered[pending.pop()] = None
            continue
        visited.add(key)
        needed = sorted({entry["artifact"] for entry in source.inputs(key).values()}, reverse=True)
        pending += [each for each in needed if each not in visited and "://" not in each and not each.startswith("/")]
    return list(ordered)
