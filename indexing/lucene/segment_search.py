"""Searches the Lucene segments of an index: blocks of queries in a job, a range of rows in a service."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter, MatchingRows
from riptide.indexing.corpus.row_sets import RowSet
from riptide.indexing.exact import Hits, empty_hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.lucene.lucene import SegmentSearch
from riptide.indexing.lucene.segments import segment_rows
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowRange
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.work.worker_tasks import Runner, WorkerTask

MAX_LUCENE_HITS = 1 << 24  # maximum number of hits in memory at once; selective filters need deep searches
BLOCK_QUERIES = 256  # minimum number of queries per task: a smaller task would mostly pay for its start


class SegmentedIndex(Protocol):
    """The interface of an index in Lucene segments: bm25/NAME, or an index of impacts."""

    @property
    def shards(self) -> list[tuple[Artifact, ArtifactPart]]:
        """The committed segments of the index, in the order of their rows."""

    def searcher(self, shard_range: slice = ...) -> Any:
        """Opens the segments in this process and returns their SegmentSearch, which searches those in `shard_range`."""

    def search(
        self,
        queries: Any,
        k: int,
        deleted: np.ndarray,
        *,
        threads: int = ...,
        allowed_rows: RowSet | np.ndarray | None = ...,
        searcher: Any = ...,
    ) -> Hits:
        """Returns the top k passages of each query.

        Args:
            queries: The queries.
            k: Hits per query.
            deleted: Rows to exclude, int64, ascending.
            threads: Threads that search.
            allowed_rows: Only these rows are hits, and `deleted` is not used: ascending. None: all rows.
            searcher: The open segments; None: `searcher` opens them.
        """

    def explain(self, queries: Any, rows: RowsOfQueries, searcher: Any) -> list[dict[int, ScoreParts]]:
        """Returns the terms of the scores of passages, by row, for each query.

        Args:
            queries: The queries.
            rows: The rows of the passages to explain, for each query.
            searcher: The open segments, which have these rows.
        """


def segments_in_range(index: SegmentedIndex, rows: RowRange) -> tuple[slice, RowRange]:
    """Returns the slice of an index's segments that belong to a range of rows, and the rows of these segments."""
    segment_ranges = segment_rows(index.shards)
    share = rows.select_shards(segment_ranges)
    first, *_, last = [*segment_ranges[share], *segment_ranges[share]] or [RowRange(0, 0)] * 2
    return share, RowRange(first.first_row, last.end)


class OpenSegments:
    """The opened segments of an index that belong to a range of rows, for a service. Thread-safe.

    Args:
        index: The index.
        corpus: The corpus, for its deleted rows and for filters.
        rows: The range of rows.
        threads: Threads of one search.

    Raises:
        InputError: If the index was made with another version of Lucene, or if there is no Java.
    """

    def __init__(self, index: SegmentedIndex, corpus: Corpus, rows: RowRange, threads: int = 1):
        self.index, self.corpus, self.threads = index, corpus, threads
        share, rows_of_segments = segments_in_range(index, rows)
        self._searcher = index.searcher(share) if index.shards[share] else None
        self._rows, self._matches = rows_of_segments, MatchingRows(corpus, rows_of_segments)

    def search(self, queries: Any, k: int, filter: Filter | None = None) -> Hits:
        """Returns the top k passages of each query that are not deleted; with a filter, among the matching ones."""
        if self._searcher is None:
            return empty_hits(len(queries), k)
        allowed_rows = None if filter is None else self._matches.rows(filter)
        deleted: np.ndarray = self.corpus.deleted
        return self.index.search(
            queries, k, deleted, threads=self.threads, allowed_rows=allowed_rows, searcher=self._searcher
        )

    def explain(self, queries: Any, rows: RowsOfQueries) -> list[dict[int, ScoreParts]]:
        """Returns the terms of those passages that are in these segments, by row, for each query."""
        local_rows = [[row for row in of_query if self._rows.first_row <= row < self._rows.end] for of_query in rows]
        if not any(local_rows):
            return [{} for _ in rows]
        return self.index.explain(queries, local_rows, self._searcher)


def search_blocks(task: WorkerTask, num_queries: int, block_of: Callable[[int, int], Any], runner: Runner) -> Hits:
    """Spreads queries over workers in blocks, and returns the hits of all queries in their order.

    Args:
        task: Searches a block of queries: an item is (number of the first query, block).
        num_queries: The number of queries.
        block_of: Returns the block of the queries from a first number to an end.
        runner: What spreads the blocks over workers.
    """
    pieces = max(1, num_queries // BLOCK_QUERIES)
    bounds = np.linspace(0, num_queries, pieces + 1).astype(int).tolist()
    blocks = [(first, block_of(first, end)) for first, end in itertools.pairwise(bounds)]
    by_block = {first: hits for (first, _), hits in runner.run(task, blocks)}
    return Hits(*(np.concatenate(column) for column in zip(*(by_block[first] for first, _ in blocks), strict=True)))


def search_segments(
    searcher: SegmentSearch,
    queries: Sequence[str],
    k: int,
    deleted: np.ndarray,
    allowed_rows: RowSet | np.ndarray | None,
    threads: int,
) -> Hits:
    """Returns the top k passages of each query; arguments as for `SegmentedIndex.search`."""
    if allowed_rows is None:
        return search_undeleted(searcher, queries, k, deleted, threads)
    return search_among(searcher, queries, k, allowed_rows, threads)


def search_undeleted(
    searcher: SegmentSearch, queries: Sequence[str], k: int, deleted: np.ndarray, threads: int
) -> Hits:
    """Returns the top k rows of each query that are not deleted; searches deeper until there are k."""
    if not len(deleted):
        return searcher.search(queries, k, threads=threads)
    depth = k + min(len(deleted), max(16, k // 8))
    return _search_deeper(searcher, queries, k, depth, lambda rows: ~np.isin(rows, deleted), threads)


def search_among(
    searcher: SegmentSearch, queries: Sequence[str], k: int, allowed_rows: RowSet | np.ndarray, threads: int
) -> Hits:
    """Returns the top k of each query among rows, which ascend; searches deeper until there are k."""
    rows = allowed_rows if isinstance(allowed_rows, RowSet) else RowSet(allowed_rows)
    if not len(rows):
        return empty_hits(len(queries), k)
    depth = int(min(searcher.num_documents, 1.5 * k * searcher.num_documents / max(1, len(rows)) + 16))
    return _search_deeper(searcher, queries, k, depth, rows.contains, threads, len(rows))


def _search_deeper(
    searcher: SegmentSearch,
    queries: Sequence[str],
    k: int,
    depth: int,
    accepts: Callable[[np.ndarray], np.ndarray],
    threads: int,
    num_allowed: int | None = None,
) -> Hits:
    """Returns the top k of each query among the rows for which `accepts` (int64 -> bool) is true.

    Searches to `depth`, and doubles it until there are k hits, or `num_allowed`: the number of rows that can be
    accepted.
    """
    expected = k if num_allowed is None else min(k, num_allowed)
    scores, rows = empty_hits(len(queries), k)

    def search(numbers: np.ndarray) -> np.ndarray:
        """Searches the queries with these numbers; returns whether each has all of its hits: bool [numbers]."""
        hits = searcher.search([queries[int(number)] for number in numbers], depth, threads=threads)
        is_accepted = (hits.rows >= 0) & accepts(hits.rows)
        order = np.argsort(~is_accepted, axis=1, kind="stable")[:, :k]
        is_hit = np.take_along_axis(is_accepted, order, axis=1)
        width = order.shape[1]
        rows[numbers, :width] = np.where(is_hit, np.take_along_axis(hits.rows, order, axis=1), -1)
        scores[numbers, :width] = np.where(is_hit, np.take_along_axis(hits.scores, order, axis=1), -np.inf)
        enough: np.ndarray = is_accepted.sum(axis=1) >= expected
        return enough | (hits.rows[:, -1] < 0) | (depth >= searcher.num_documents)

    pending = np.arange(len(queries))
    while len(pending):
        blocks = np.array_split(pending, -(-len(pending) * depth // MAX_LUCENE_HITS))
        is_done = np.concatenate([search(numbers) for numbers in blocks if len(numbers)])
        pending, depth = pending[~is_done], min(2 * depth, searcher.num_documents)
    return Hits(scores, rows)
