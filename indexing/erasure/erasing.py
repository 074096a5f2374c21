"""Plans and carries out an erasure: artifacts with the passages are written again or removed; a receipt stays.

The plan is stored before anything changes, and as long as it is there, other commands begin no artifact. Each step may
be repeated. The same command resumes it; a command with other ids first resumes it, then does its own.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, document_starts, first_passage, open_table
from riptide.indexing.corpus.ids import hash_ids, open_buckets, rows_with_hashes
from riptide.indexing.corpus.importing import read_ids, refuse_unknown_ids
from riptide.indexing.erasure.kinds import KINDS
from riptide.indexing.erasure.progress import RunningErasure, interrupted_plan, running_erasure
from riptide.indexing.erasure.receipts import content_hash, has_ids, new_plan, read_document, receipts, restored
from riptide.indexing.erasure.replacing import remove_artifact, replace_parts
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import split_rows
from riptide.indexing.store.draft import remove_command
from riptide.indexing.store.keys import without_generation
from riptide.indexing.store.sealed_json import PROVENANCE, check_own_hash
from riptide.indexing.store.store import MADE_BY, TEMPORARY_AGE, Store

Plan = dict[str, Any]
REMAINS = (  # what an erasure does not reach
    "copies and backups of the store, and versions of objects that a bucket keeps",
    "the memory of running servers until they are started again, and the caches of other nodes",
    "the source, files that were exported, logs, and the configurations of earlier commands",
    "the beginnings of rows that an import has left out as invalid",
    "the ids in judgements, and hashes of source files and of files of ids in the configurations of a corpus",
)


def find_rows(corpus: Corpus, ids: Sequence[str]) -> list[np.ndarray]:
    """Returns all rows of the passages of each id, deleted ones too: int64, ascending; none for an unknown id.

    In a split corpus the ids are ids of documents.
    """
    names = [first_passage(id) for id in ids] if corpus.is_split else list(ids)
    hashes = hash_ids(names)
    pieces_by_id: list[list[np.ndarray]] = [[] for _ in ids]
    for artifact in corpus.generations:
        positions, rows = rows_with_hashes(open_buckets(artifact, hashes), hashes)
        is_same = [name == names[at] for name, at in zip(corpus.ids(rows), positions.tolist(), strict=True)]
        positions, rows = positions[is_same], rows[is_same]
        ends = rows + 1
        if corpus.is_split:
            for part, places, local_rows in split_rows(corpus.parts, rows):
                starts = np.append(document_starts(open_table(part)), part.part.rows)
                ends[places] = part.first_row + starts[np.searchsorted(starts, local_rows, side="right")]
        for at, first, end in zip(positions.tolist(), rows.tolist(), ends.tolist(), strict=True):
            pieces_by_id[at].append(np.arange(first, end))
    return [np.unique(np.concatenate([np.empty(0, np.int64), *pieces])) for pieces in pieces_by_id]


def interrupted_erasure(store: Store) -> Plan | None:
    """Returns the plan of an erasure that was interrupted, which is carried out before any other; None without one.

    Raises:
        InputError: If an artifact that may hold passages is not complete.
    """
    plan = interrupted_plan(store)
    require_complete(store, plan)
    return plan


def require_complete(store: Store, plan: Plan | None) -> None:
    """Raises InputError if an artifact that may hold passages is not complete, unless the plan removes it."""
    half_removed = {entry["artifact"] for entry in plan["artifacts"]} if plan else set()
    for key in store.incomplete_keys():
        kind = KINDS.get(key.partition("/")[0])
        if key not in half_removed and (kind is None or kind.changes or kind.is_affected):
            raise InputError(
                f"{store.url}/{key} is not complete and may hold the passages: complete it by its command, or remove "
                f"it ({remove_command(store.storage, key)})"
            )


def plan_erasure(store: Store, file: str) -> Plan | None:
    """Plans the erasure of the passages of the ids in a file, one per line; returns None if all of them were erased.

    Those that an older copy of an artifact brought back are erased again.

    Raises:
        InputError: For an id that the corpus lacks.
    """
    lines = list(itertools.chain.from_iterable(read_ids(file)))
    ids = [id for _, id in lines]
    rows = find_rows(Corpus.open(store), ids)
    unknown = [line for line, its_rows in zip(lines, rows, strict=True) if not len(its_rows)]
    if len(unknown) == len(lines) and (file_of_receipt := erased_before(store, ids)):
        receipt = read_document(store, file_of_receipt)
        if receipt is None or not any(restored(store, receipt)):
            return None
        return _plan(store, ids, np.array(receipt["rows"], np.int64))
    refuse_unknown_ids(file, unknown, "erased")
    return _plan(store, ids, np.unique(np.concatenate(rows)))


def erased_before(store: Store, ids: Sequence[str]) -> str | None:
    """Returns the file of the last receipt of exactly these ids, or None."""
    for file in reversed(receipts(store)):
        document = read_document(store, file)
        if document is not None and has_ids(document, ids):
            return file
    return None


def _plan(store: Store, ids: Sequence[str], rows: np.ndarray) -> Plan:
    """Finds what holds the rows: int64, ascending."""
    artifacts, remains = [], []
    for name, kind in KINDS.items():
        for generations in _artifacts(store, name):
            if kind.changes:
                changes = sorted(kind.changes(generations, rows), key=lambda change: change.artifact.key)
                for key, group in itertools.groupby(changes, key=lambda change: change.artifact.key):
                    parts = [change.part for change in group]
                    size = sum(part.bytes for part in parts if part)
                    artifacts.append(_entry(store, key, "rewritten", parts=len(parts), bytes=size))
            affected = [kind.is_affected(each, rows) for each in generations] if kind.is_affected else []
            if any(affected):  # a generation needs those before it
                for artifact in generations[affected.index(True) :]:
                    size = sum(part.bytes for part in artifact.parts)
                    artifacts.append(_entry(store, artifact.key, "removed", parts=len(artifact.parts), bytes=size))
            if kind.remains and any(artifact.inputs for artifact in generations):
                remains.append(f"{without_generation(generations[0].key)}: {kind.remains}")
    # A copy may have brought back the rows of these.
    earlier_receipts = [read_document(store, file) for file in receipts(store)]
    covered_erasures = [each["erasure"] for each in earlier_receipts if each and np.isin(each["rows"], rows).all()]
    return new_plan(
        store,
        ids,
        rows=rows.tolist(),
        covers=covered_erasures,
        artifacts=artifacts,
        judgements=_count_judgements(store, ids),
        remains=[*remains, *REMAINS],
    )


def _artifacts(store: Store, kind: str) -> list[list[Artifact]]:
    """Returns the artifacts of a kind, each as the list of its generations."""
    groups: dict[str, list[Artifact]] = {}
    for key in store.keys(kind):
        artifact = Artifact(store.storage, store.cache, key)
        groups.setdefault(without_generation(key), []).append(artifact)
    return list(groups.values())


def _entry(store: Store, key: str, action: str, **values: int) -> dict[str, Any]:
    """Returns the entry of an artifact in a plan; that of a removed one has the command that made it."""
    artifact = Artifact(store.storage, store.cache, key)
    identity = {"fingerprint": artifact.fingerprint, "content": content_hash(artifact)}
    entry = {"artifact": key, **identity, "action": action, **values}
    if action == "removed" and (command := _command_of(store, key)):
        entry["command"] = command
    return entry


def _command_of(store: Store, key: str) -> str:
    """Returns the command that made an artifact, quoted for a shell; "" if its record has no riptide command."""
    file = f"{key}/{PROVENANCE}"
    with contextlib.suppress(CorruptError, FileNotFoundError):  # `verify` reports a damaged record
        program, *arguments = check_own_hash(store.storage.read(file), f"{store.url}/{file}")["command"]
        job = program.removesuffix(".py").replace("_", "-")  # of `python jobs/build_index.py`
        if program == "riptide":
            return shlex.join([program, *arguments])
        if any(job in jobs for jobs in MADE_BY.values()):
            return shlex.join(["riptide", job, *arguments])
    return ""


def _count_judgements(store: Store, ids: Sequence[str]) -> dict[str, int]:
    """Returns the number of judgements that name one of the ids, by query set; sets without one are left out."""
    counts: dict[str, int] = {}
    for [artifact] in _artifacts(store, "queries"):
        for part in artifact.numbered_parts("qrels"):
            with pq.ParquetFile(artifact.local_path(part)) as file:
                is_named = pc.is_in(file.read(["corpus_id"])["corpus_id"], pa.array(ids, pa.string()))
            if count := pc.sum(is_named).as_py():
                counts[artifact.key] = counts.get(artifact.key, 0) + count
    return counts


def erase(store: Store, plan: Plan, on_part: Callable[[int], object] = lambda count: None) -> Plan:
    """Carries out a plan, from the start or from where it was interrupted.

    Args:
        store: The store.
        plan: The plan.
        on_part: Called with the number of parts that were written again or removed.

    Returns:
        The receipt.

    Raises:
        InputError: If another command carries out an erasure, or if an artifact that may hold passages is not complete.
    """
    with running_erasure(store, plan) as running:
        try:
            require_complete(store, plan)
        except InputError:
            if running.created:
                running.withdraw()
            raise
        _carry_out(running, plan["artifacts"], on_part)
        # Before the plan was stored, or between two attempts, other artifacts may have been completed or restored.
        while later_entries := _later_entries(running):
            running.extend(later_entries)
            _carry_out(running, later_entries, on_part)
        return running.finish(_remove_temporary_files(store))


def _later_entries(running: RunningErasure) -> list[dict[str, Any]]:
    """Returns the entries of artifacts that hold the rows and were not changed; requires all to be complete."""
    store, plan = running.store, running.plan
    require_complete(store, plan)
    entries = _plan(store, (), np.array(plan["rows"], np.int64))["artifacts"]
    return [
        entry
        for entry in entries
        if entry["action"] == "removed"
        or plan["erasure"] not in Artifact(store.storage, store.cache, entry["artifact"]).erasures
    ]


def _carry_out(running: RunningErasure, entries: Sequence[Plan], on_part: Callable[[int], object]) -> None:
    """Writes artifacts again or removes them."""
    store, plan, rows = running.store, running.plan, np.array(running.plan["rows"], np.int64)
    num_parts = {entry["artifact"]: entry["parts"] for entry in entries}
    for name, kind in KINDS.items():
        keys = [key for key in num_parts if key.startswith(f"{name}/")]
        if kind.is_affected:
            for key in reversed(keys):
                running.require()
                remove_artifact(store, key)
                on_part(num_parts[key])
        if not kind.changes or not keys:
            continue
        for generations in _artifacts(store, name):
            changes = list(kind.changes(generations, rows))
            for artifact in reversed(generations):
                if artifact.key in keys:
                    of_artifact = (change for change in changes if change.artifact is artifact)
                    replace_parts(
                        store, artifact.key, of_artifact, plan["erasure"], plan["covers"], running.require, on_part
                    )


def _remove_temporary_files(store: Store) -> list[str]:
    """Removes the temporary files of writers that were killed; returns a line about those that may still be in use."""
    for file, _ in store.storage.abandoned_writes(TEMPORARY_AGE):
        store.storage.delete(file)
    if younger := len(store.storage.abandoned_writes(0)):
        minutes = f"{TEMPORARY_AGE / 60:.0f} minutes"
        return [f"{younger:,} temporary files of the last {minutes}, which commands may use; later, gc removes them"]
    return []
