"""Plans and carries out an erasure: artifacts with the passages are written again or removed; a receipt stays.

The plan is stored before anything changes. Each step may be repeated, so after an interruption the same command
continues, and so does one with other ids before its own erasure.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
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
from riptide.indexing.erasure.receipts import (
    BEGUN_ERASURE,
    is_of_ids,
    new_document,
    read_document,
    receipts,
    write_receipt,
)
from riptide.indexing.erasure.replacing import remove_artifact, replace_parts
from riptide.indexing.store.artifact import Artifact, remove_command
from riptide.indexing.store.chain import split_rows
from riptide.indexing.store.keys import without_generation
from riptide.indexing.store.sealed_json import PROVENANCE, add_own_hash, check_own_hash, parse_utc
from riptide.indexing.store.store import Store

Plan = dict[str, Any]
REMAINS = (  # what no command over the store reaches
    "copies and backups of the store, and versions of objects that a bucket keeps",
    "the memory of running servers until they are started again, and the caches of other nodes",
    "the source, files that were exported, logs, and the configurations of earlier commands",
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
            for part, places, local in split_rows(corpus.parts, rows):
                starts = np.append(document_starts(open_table(part)), part.part.rows)
                ends[places] = part.first_row + starts[np.searchsorted(starts, local, side="right")]
        for at, first, end in zip(positions.tolist(), rows.tolist(), ends.tolist(), strict=True):
            pieces_by_id[at].append(np.arange(first, end))
    return [np.unique(np.concatenate([np.empty(0, np.int64), *pieces])) for pieces in pieces_by_id]


def interrupted_erasure(store: Store) -> Plan | None:
    """Returns the plan of an erasure that was interrupted, which is carried out before any other; None without one.

    Raises:
        InputError: If an artifact that may hold passages is not complete.
    """
    plan = read_document(store, BEGUN_ERASURE)
    half_removed = {entry["artifact"] for entry in plan["artifacts"]} if plan else set()
    for key in store.incomplete_keys():
        kind = KINDS.get(key.partition("/")[0])
        if key not in half_removed and (kind is None or kind.changes or kind.is_affected):
            raise InputError(
                f"{store.url}/{key} is not complete and may hold the passages: complete it by its command, or remove "
                f"it ({remove_command(store.storage, key)})"
            )
    return plan


def plan_erasure(store: Store, file: str) -> Plan | None:
    """Plans the erasure of the passages of the ids in a file, one per line; returns None if all of them were erased.

    Raises:
        InputError: For an id that the corpus lacks.
    """
    lines = list(itertools.chain.from_iterable(read_ids(file)))
    ids = [id for _, id in lines]
    rows = find_rows(Corpus.open(store), ids)
    unknown = [line for line, its_rows in zip(lines, rows, strict=True) if not len(its_rows)]
    if len(unknown) == len(lines) and erased_before(store, ids):
        return None
    refuse_unknown_ids(file, unknown, "erased")
    return _plan(store, ids, np.unique(np.concatenate(rows)))


def erased_before(store: Store, ids: Sequence[str]) -> str | None:
    """Returns the file of the last receipt of exactly these ids, or None."""
    for file in reversed(receipts(store)):
        document = read_document(store, file)
        if document is not None and is_of_ids(document, ids):
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
    known = [read_document(store, file) for file in receipts(store)]  # rows of these may be there again, by a copy
    covered = [each["erasure"] for each in known if each and np.isin(each["rows"], rows).all()]
    return new_document(
        store,
        ids,
        rows=rows.tolist(),
        covers=covered,
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
    entry = {"artifact": key, "fingerprint": artifact.fingerprint, "action": action, **values}
    if action == "removed":
        file = f"{key}/{PROVENANCE}"
        entry["command"] = " ".join(check_own_hash(store.storage.read(file), f"{store.url}/{file}")["command"])
    return entry


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


def erase(store: Store, plan: Plan) -> None:
    """Carries out a plan, from the start or from where it was interrupted.

    Raises:
        InputError: If another erasure began at this moment.
    """
    store.storage.put_new(BEGUN_ERASURE, add_own_hash(plan))
    if read_document(store, BEGUN_ERASURE) != plan:
        raise InputError(f"{store.url}/{BEGUN_ERASURE}: another command began an erasure; run this one again after it")
    rows = np.array(plan["rows"], np.int64)
    for name, kind in KINDS.items():
        keys = [entry["artifact"] for entry in plan["artifacts"] if entry["artifact"].startswith(f"{name}/")]
        if kind.is_affected:
            for key in reversed(keys):
                remove_artifact(store, key)
        if not kind.changes:
            continue
        for generations in _artifacts(store, name):
            changes = list(kind.changes(generations, rows))
            for artifact in reversed(generations):
                if artifact.key in keys:
                    of_artifact = [change for change in changes if change.artifact is artifact]
                    replace_parts(store, artifact.key, of_artifact, plan["erasure"], plan["covers"])
    # Temporary files that killed writers left before the erasure; a later one has no erased passage.
    age_s = max(0.0, time.time() - parse_utc(plan["started"]))
    store.storage.delete_all([file for file, _ in store.storage.abandoned_writes(age_s)])
    write_receipt(store, plan)
