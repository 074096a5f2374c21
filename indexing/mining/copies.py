"""Finds the copies of given passages in a corpus: other passages with the same title and text.

Runs of white space count as one space. Texts are compared by 64-bit hashes, part by part of the corpus, so only the
hashes of the given passages and one part of the corpus are in memory. Two different texts share a hash with a
probability of 2^-64 per pair: about 1 in 4 million for the 500,000 positives and 8.8 million passages of MS MARCO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from riptide.indexing.corpus.corpus import Corpus, open_table
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowPart
from riptide.indexing.store.draft import Draft
from riptide.indexing.work.worker_tasks import PYTHON_CORE, Allocation, Report, Runner, WorkerResources, ignore_progress

PART = "copies"  # the name of the part that `commit_copies` writes
_BLOCK = 65_536  # number of given passages whose texts are in memory at once


@dataclass(frozen=True)
class CopyGroups:
    """The groups of passages that have the same title and text.

    Attributes:
        hashes: uint64 [n], ascending; the passages of a group have the same hash.
        rows: int64 [n], ascending within a group.
    """

    hashes: np.ndarray
    rows: np.ndarray

    def other_rows(self, lists: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns for each list of rows the rows of its groups that it lacks: int64, ascending, without duplicates."""
        order = np.argsort(self.rows)
        rows, hashes = self.rows[order], self.hashes[order]
        every = np.concatenate([*lists, np.empty(0, np.int64)])
        is_known = np.isin(every, rows)
        others = [np.empty(0, np.int64)] * len(lists)
        lengths = [len(each) for each in lists]
        for number in np.unique(np.repeat(np.arange(len(lists)), lengths)[is_known]):
            given_rows = lists[number]
            groups = np.unique(hashes[np.isin(rows, given_rows)])
            starts, ends = (np.searchsorted(self.hashes, groups, side=side) for side in ("left", "right"))
            members = [self.rows[start:end] for start, end in zip(starts, ends, strict=True)]
            others[number] = np.setdiff1d(np.concatenate(members), given_rows)
        return others


@dataclass(frozen=True)
class MatchTask:
    """A worker task that finds the passages of a corpus part with one of the hashes (uint64, ascending, not empty)."""

    hashes: np.ndarray
    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[RowPart, Report], tuple[np.ndarray, np.ndarray]]:
        """Returns a function that searches a part; it returns rows int64 [n] and their hashes uint64 [n]."""
        return lambda part, report: self._match(part)

    def _match(self, part: RowPart) -> tuple[np.ndarray, np.ndarray]:
        table = open_table(part)
        hashes = text_hashes(table["title"].to_pylist(), table["text"].to_pylist())
        # np.isin would sort all hashes again for each part.
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        at = np.flatnonzero(self.hashes[places] == hashes)
        return part.first_row + at, hashes[at]


def text_hashes(titles: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    """Returns a hash of each title and text, uint64 [n]; runs of white space count as one space."""
    folded = (f"{' '.join(title.split())}\n{' '.join(text.split())}" for title, text in zip(titles, texts, strict=True))
    return np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in folded), np.uint64, len(texts))


def find_copies(
    corpus: Corpus, rows: np.ndarray, runner: Runner, count: Callable[[int], None] = ignore_progress
) -> CopyGroups:
    """Finds the groups of two or more passages that include a given one; deleted passages are excluded.

    Args:
        corpus: The corpus.
        rows: The given passages, int64 [any].
        runner: What spreads the parts of the corpus over workers.
        count: Called with the number of passages of each part that is done.
    """
    hashes, members = np.empty(0, np.uint64), np.empty(0, np.int64)
    distinct_rows = np.unique(rows)
    for first in range(0, len(distinct_rows), _BLOCK):
        passages = corpus.passages(distinct_rows[first : first + _BLOCK])
        digests = text_hashes([passage.title for passage in passages], [passage.text for passage in passages])
        hashes = np.union1d(hashes, digests)
    matched = []
    for part, match in runner.run(MatchTask(hashes), corpus.parts if len(distinct_rows) else []):
        matched.append(match)
        count(part.part.rows)
    if matched:
        members, hashes = (np.concatenate(column) for column in zip(*matched, strict=True))
        is_present = ~np.isin(members, corpus.deleted)
        order = np.lexsort((members[is_present], hashes[is_present]))
        members, hashes = members[is_present][order], hashes[is_present][order]
        same = np.concatenate([[False], hashes[1:] == hashes[:-1], [False]])
        grouped = same[1:] | same[:-1]
        members, hashes = members[grouped], hashes[grouped]
    else:
        hashes = hashes[:0]
    return CopyGroups(hashes, members)


def commit_copies(draft: Draft, copies: CopyGroups) -> None:
    """Commits the groups of copies as a part of an artifact."""
    table = pa.table({"hash": pa.array(copies.hashes), "row": pa.array(copies.rows)})
    draft.commit(PART, ".parquet", lambda path: pq.write_table(table, path, compression="zstd"), rows=len(table))


def read_copies(artifact: Artifact | Draft) -> CopyGroups:
    """Reads the groups of copies of an artifact or draft; empty groups if it lacks the part."""
    part = artifact.find_part(PART)
    if part is None:
        return CopyGroups(np.empty(0, np.uint64), np.empty(0, np.int64))
    table = pq.read_table(artifact.local_path(part))
    return CopyGroups(table["hash"].to_numpy(), table["row"].to_numpy())
