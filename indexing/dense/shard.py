"""Open shards: ranges of rows, with the FAISS files that find candidates and the vectors that score them.

`OpenShard` is one range. `DenseShard` is what a service keeps open in one process: all ranges of an index that it
serves; it starts no Ray tasks, and its hits equal those of `search` over the same artifacts with the same search
parameters. FAISS is imported when a shard with an index is opened: a process that also uses torch should import torch
first (see `riptide.indexing.dense.faiss_index`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter, MatchingRows
from riptide.indexing.corpus.row_sets import RowSet
from riptide.indexing.dense.explained_rows import explain_rows
from riptide.indexing.dense.factory import is_flat, is_graph
from riptide.indexing.dense.index import Index, IndexShard
from riptide.indexing.embeddings.dense_embeddings import Embeddings, fetch_rows
from riptide.indexing.exact import (
    Hits,
    OpenPart,
    available_threads,
    empty_hits,
    exact_search,
    merge_hits,
    rescore_candidates,
    search_open_parts,
)
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.store.chain import RowRange

if TYPE_CHECKING:
    from riptide.indexing.dense.faiss_search import Centroids, QueryLists

NONE_DELETED = np.empty(0, np.int64)
EXACT_SHARE = (
    20  # a graph search that keeps more than 1/20 of the remaining rows is hardly faster than scoring them all
)
EXACT_ROWS = 100_000  # with at most this many allowed rows in a shard, all of them are scored
# Unless FAISS searches them, converted vectors of at most this many rows stay in memory: 220 MiB for 384 dimensions.
OPEN_ROWS = 200_000
PARALLEL_QUERIES = 8  # minimum batch size at which several threads search the files of an index
PARALLEL_SCORES = 100_000  # minimum scores of open parts at which several threads compute them


def are_all_scored(num_allowed: int) -> bool:
    """Returns whether a search with a filter scores all rows of a shard that match it."""
    return num_allowed <= EXACT_ROWS


class OpenShard:
    """Searches a range of rows for whole blocks of queries, by a FAISS index or exactly. Thread-safe.

    Args:
        embeddings: The vectors.
        first_row, end: The rows.
        deleted: Rows to exclude, int64, ascending; those of other shards are ignored.
        index: The FAISS index of the rows; None: every vector is scored.
        is_graph: Whether the index is a graph.
        keeps_converted: Convert the vectors now, for all searches that score every vector. Ignored with an index.

    Attributes:
        open_parts: The converted vectors; empty if each search converts them.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        first_row: int,
        end: int,
        deleted: np.ndarray = NONE_DELETED,
        index: Any = None,
        *,
        is_graph: bool = False,
        keeps_converted: bool = False,
    ):
        self.embeddings, self.first_row, self.end, self.index = embeddings, first_row, end, index
        self.parts = embeddings.ranges(first_row, end)
        self._starts = np.array([first for first, _ in self.parts], np.int64)
        self._is_graph = is_graph
        self.deleted = deleted[(deleted >= first_row) & (deleted < end)]
        keeps_converted = keeps_converted and index is None
        self.open_parts: list[OpenPart] = []
        if keeps_converted:
            self.open_parts = [OpenPart(rows, first, self.deleted) for first, rows in self._open_vectors()]

    @classmethod
    def open(
        cls,
        shard: IndexShard,
        embeddings: Embeddings,
        deleted: np.ndarray = NONE_DELETED,
        *,
        keeps_converted: bool = False,
    ) -> OpenShard:
        """Opens a shard of an index. For a Flat index, the faster exact kernel scores the embeddings instead."""
        index, factory = None, shard.artifact.config["factory"]
        if not is_flat(factory):
            from riptide.indexing.dense.faiss_index import read_index

            index = read_index(shard.artifact.local_path(shard.part), mmap=True)
        return cls(
            embeddings,
            shard.first_row,
            shard.end,
            deleted,
            index,
            is_graph=is_graph(factory),
            keeps_converted=keeps_converted,
        )

    def search(
        self,
        queries: np.ndarray,
        k: int,
        *,
        effort: int,
        depth: int,
        threads: int | None,
        allowed_rows: RowSet | np.ndarray | None = None,
        query_lists: QueryLists | None = None,
    ) -> Hits:
        """Returns the top k of each query: the index finds candidates, which are scored exactly by float16 vectors.

        Args:
            queries: float32 [q, dim].
            k: Hits per query.
            effort: Search effort of the index, as `search_shard`; if rows are excluded, it grows by the ratio of rows
                to remaining rows (of an index with lists: only with `allowed_rows`).
            depth: Candidates per query, at least k.
            threads: Threads of the search; None: one for each core.
            allowed_rows: Consider only these rows, ascending, none of them deleted; None: all. Those of other shards
                are ignored. Up to EXACT_ROWS of them are all scored. More of them are scored for a query for
                which the index finds fewer than k, as for a graph without `allowed_rows`.
            query_lists: The lists of these queries, shared by the searches of several shards.
        """
        allowed_rows = self._rows_in_shard(allowed_rows)
        if self.index is None or (allowed_rows is not None and are_all_scored(len(allowed_rows))):
            return self.search_exact(queries, k, threads=threads, allowed_rows=allowed_rows)
        num_rows = self.end - self.first_row
        num_allowed = num_rows - len(self.deleted) if allowed_rows is None else len(allowed_rows)
        # A few deleted rows do not matter to lists, which a search reads to their ends.
        must_fill = self._is_graph or allowed_rows is not None
        if not num_allowed:
            return empty_hits(len(queries), k)
        if must_fill:
            effort = min(num_rows, -(-effort * num_rows // num_allowed))
        if self._is_graph and num_allowed < num_rows and effort * EXACT_SHARE > num_allowed:
            return self.search_exact(queries, k, threads=threads, allowed_rows=allowed_rows)
        rows = self.find_candidates(
            queries, depth, effort=effort, threads=threads, allowed_rows=allowed_rows, query_lists=query_lists
        )
        hits = self.rescore(queries, rows, k, threads)
        if must_fill:
            # The lists or the part of the graph near a query may hold excluded rows alone.
            few = np.flatnonzero(hits.rows[:, min(k, num_allowed) - 1] < 0)
            if len(few):
                exact = self.search_exact(queries[few], k, threads=threads, allowed_rows=allowed_rows)
                hits.scores[few], hits.rows[few] = exact
        return hits

    def search_exact(
        self, queries: np.ndarray, k: int, *, threads: int | None, allowed_rows: RowSet | np.ndarray | None = None
    ) -> Hits:
        """Returns the exact top k of each query; the arguments are those of `search`."""
        allowed_rows = self._rows_in_shard(allowed_rows)
        if allowed_rows is None:
            if self.open_parts:
                return search_open_parts(queries, self.open_parts, k, threads=threads)
            return exact_search(queries, self._open_vectors(), k, deleted=self.deleted, threads=threads)
        if not len(allowed_rows):
            return empty_hits(len(queries), k)
        if len(allowed_rows) <= EXACT_ROWS:
            rows = allowed_rows.rows()
            hits = exact_search(queries, [(0, self.embeddings.take(rows))], k, threads=threads)
            return Hits(hits.scores, np.where(hits.rows >= 0, rows[hits.rows], -1))
        return exact_search(queries, self._open_vectors(), k, deleted=allowed_rows.missing_rows(), threads=threads)

    def find_candidates(
        self,
        queries: np.ndarray,
        depth: int,
        *,
        effort: int,
        threads: int | None,
        allowed_rows: RowSet | None = None,
        query_lists: QueryLists | None = None,
    ) -> np.ndarray:
        """Returns candidate rows of the index, int64 [q, depth], padded with -1; the arguments are as for `search`."""
        from riptide.indexing.dense import faiss_search

        return faiss_search.search_shard(
            self.index,
            queries,
            depth,
            effort=effort,
            query_lists=query_lists,
            deleted=self.deleted,
            allowed_rows=allowed_rows,
            threads=threads,
        )

    def _rows_in_shard(self, rows: RowSet | np.ndarray | None) -> RowSet | None:
        """Returns the rows, given in ascending order, that are in the shard; None for None."""
        return None if rows is None else RowSet.of(rows, self.first_row, self.end)

    def rescore(self, queries: np.ndarray, rows: np.ndarray, k: int, threads: int | None) -> Hits:
        """Computes exact scores of the candidate rows of each query (int64 [q, any]); returns the top k.

        Only files of parts with candidates are read.
        """
        wanted = np.unique(rows[rows >= 0])
        owners = np.unique(np.searchsorted(self._starts, wanted, side="right") - 1)
        parts = fetch_rows([self.parts[owner] for owner in owners], wanted)
        return rescore_candidates(queries, rows, parts, k, threads)

    def check_files(self) -> None:
        """Fetches and checks the files of all vectors, which searches open when they need them."""
        for _ in self._open_vectors():
            pass

    def _open_vectors(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, vectors, memory-mapped) of each part. The file is open while the part is searched."""
        for first, vectors in self.parts:
            yield first, vectors.open()


class OpenShards:
    """Opens row ranges and shards for searches, either for each search or once per process. Thread-safe.

    Args:
        embeddings: The vectors.
        deleted: Rows to exclude, int64, ascending.
        stays_open: Keep what was opened, which takes the memory that an index takes on a server, including up to
            OPEN_ROWS converted vectors. A copy for another process opens them again for each search.
    """

    def __init__(self, embeddings: Embeddings, deleted: np.ndarray = NONE_DELETED, *, stays_open: bool = False):
        self.embeddings, self.deleted = embeddings, deleted
        self._open: dict[tuple[int, int, bool], OpenShard] | None = {} if stays_open else None
        self._keeps_converted = embeddings.num_rows <= OPEN_ROWS
        self._centroids: Centroids | None = None
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (self.embeddings, self.deleted)

    def open_rows(self, first_row: int, end: int) -> OpenShard:
        """Opens a range of rows for exact search."""
        if self._open is None:
            return OpenShard(self.embeddings, first_row, end, self.deleted)
        key = first_row, end, False
        with self._opening:
            if key not in self._open:
                self._open[key] = OpenShard(
                    self.embeddings, first_row, end, self.deleted, keeps_converted=self._keeps_converted
                )
            return self._open[key]

    def open_shard(self, shard: IndexShard) -> OpenShard:
        """Opens a shard of an index for search."""
        if self._open is None:
            return OpenShard.open(shard, self.embeddings, self.deleted)
        key = shard.first_row, shard.end, True
        with self._opening:
            if key not in self._open:
                self._open[key] = OpenShard.open(
                    shard, self.embeddings, self.deleted, keeps_converted=self._keeps_converted
                )
            return self._open[key]

    def open_centroids(self, factory: str) -> Centroids | None:
        """Returns the centroids of the index with this factory; None for Flat."""
        if self._open is None:
            return _new_centroids(factory)
        with self._opening:
            if self._centroids is None:
                self._centroids = _new_centroids(factory)
            return self._centroids


def _new_centroids(factory: str) -> Centroids | None:
    """Returns what converts the centroids of an index with this factory once; None for Flat."""
    if is_flat(factory):  # its searches do not load FAISS
        return None
    from riptide.indexing.dense.faiss_search import Centroids

    return Centroids()


def shards_in_range(index: Index, rows: RowRange) -> list[IndexShard]:
    """Returns the shards of an index that a range of rows is responsible for (`RowRange.select_shards`)."""
    return index.shards[rows.select_shards([(shard.first_row, shard.end) for shard in index.shards])]


def searched_row_ranges(embeddings: Embeddings, index: Index | None, rows: RowRange) -> list[tuple[int, int]]:
    """Returns the row ranges (first, end) that a DenseShard searches: one per index shard; without an index, `rows`."""
    if index is not None:
        return [(shard.first_row, shard.end) for shard in shards_in_range(index, rows)]
    return [(min(rows.first_row, embeddings.num_rows), min(rows.end, embeddings.num_rows))]


class DenseShard:
    """Dense search in a range of rows: in the index shards that belong to the range, or, without an index, in its rows.

    Args:
        corpus: The corpus, for its deleted rows and for filters.
        embeddings: The vectors.
        index: The index over them; None: every vector is scored.
        rows: The range of rows.
        threads: Threads of one search; None: one for each core.

    Raises:
        InputError: If the artifacts do not belong together.
    """

    def __init__(
        self, corpus: Corpus, embeddings: Embeddings, index: Index | None, rows: RowRange, threads: int | None = None
    ):
        self.corpus, self.embeddings, self.index = corpus, embeddings, index
        self._stretches = stretches = searched_row_ranges(embeddings, index, rows)
        deleted, is_exact = corpus.deleted, index is None or is_flat(index.factory)
        keeps = is_exact and sum(end - first for first, end in stretches) <= OPEN_ROWS
        if index is None:
            self._shards = [OpenShard(embeddings, *each, deleted, keeps_converted=keeps) for each in stretches]
        else:
            shards = shards_in_range(index, rows)
            self._shards = [OpenShard.open(each, embeddings, deleted, keeps_converted=keeps) for each in shards]
        for shard in self._shards:
            shard.check_files()
        self._centroids = None if index is None else _new_centroids(index.factory)
        self._matches = [MatchingRows(corpus, RowRange(first, end)) for first, end in stretches]
        cores = threads or available_threads()
        self._has_exact = any(shard.index is None for shard in self._shards)
        # torch, which replaces the kernel, uses its own threads, and their number is set per process.
        most = 1 if kernels.load_kernel() is None else cores
        # All parts, divided among the threads, if they are few and no index searches them; otherwise none.
        self._open_parts = divide_parts([part for shard in self._shards for part in shard.open_parts], most)
        together = min(most, max(len(self._shards), len(self._open_parts)))
        self._pool = ThreadPoolExecutor(together, thread_name_prefix="files") if together > 1 else None
        # Threads per shard; `together` shards are searched in parallel.
        self.threads = max(1, cores // max(1, min(together, len(self._shards))))

    def search(self, queries: np.ndarray, k: int, filter: Filter | None = None, *, exact: bool = False) -> Hits:
        """Returns the top k of each query in this range of rows; deleted rows are excluded.

        Args:
            queries: float32 [q, dim].
            k: Number of hits per query.
            filter: Consider matching rows only, as the `allowed_rows` ones of `OpenShard.search`.
            exact: Score every vector even if there is an index.
        """
        query_lists = self._centroids.query_lists() if self._centroids else None
        searches = [
            partial(self._search, shard, matches, queries, k, filter, query_lists, exact=exact)
            for shard, matches in zip(self._shards, self._matches, strict=True)
        ]
        # For a few queries, waking threads takes longer than probing lists or scoring a few vectors in one thread.
        is_parallel = len(queries) >= PARALLEL_QUERIES or self._has_exact
        if filter is None and self._open_parts:
            num_vectors = sum(len(part.vectors) for parts in self._open_parts for part in parts)
            is_parallel = len(queries) * num_vectors >= PARALLEL_SCORES
            searches = [partial(search_open_parts, queries, parts, k, threads=1) for parts in self._open_parts]
        if self._pool and is_parallel and searches:
            started = [self._pool.submit(search) for search in searches[1:]]
            hits = [searches[0](), *(future.result() for future in started)]
        else:
            hits = [search() for search in searches]
        return merge_hits(hits, k) if hits else empty_hits(len(queries), k)

    def search_slice(
        self, queries: np.ndarray, k: int, filter: Filter | None, first_row: int, end: int
    ) -> tuple[Hits, int]:
        """Scores every vector of the rows [first_row, end) that belong to this range, in one thread.

        Returns:
            The exact top k of each query, and the number of rows that were considered: those that match the filter and
            are not deleted.

        Raises:
            InputError: If the C++ kernel does not run: torch would change the threads of all searches of the process.
        """
        if kernels.load_kernel() is None:
            raise InputError(
                "certification needs the C++ kernel of exact search, which does not run on this machine (the log says "
                f"why): leave {Parameter('certify')} out"
            )
        hits, num_rows = [], 0
        for stretch, matches in zip(self._stretches, self._matches, strict=True):
            low, high = max(first_row, stretch[0]), min(end, stretch[1])
            if low < high:
                rows = OpenShard(self.embeddings, low, high, self.corpus.deleted)
                allowed_rows = None if filter is None else RowSet.of(matches.rows(filter), low, high)
                num_rows += high - low - len(rows.deleted) if allowed_rows is None else len(allowed_rows)
                hits.append(rows.search_exact(queries, k, threads=1, allowed_rows=allowed_rows))
        return (merge_hits(hits, k) if hits else empty_hits(len(queries), k)), num_rows

    def explain(self, queries: np.ndarray, rows: RowsOfQueries, *, exact: bool = False) -> list[dict[int, ScoreParts]]:
        """Returns the lists that hold those passages that are in these shards, by row, for each query.

        Args:
            queries: float32 [q, dim].
            rows: The rows of the passages, for each query.
            exact: Whether the search scored every vector even if there is an index.
        """
        local_rows = [
            [row for row in of_query if any(s.first_row <= row < s.end for s in self._shards)] for of_query in rows
        ]
        if exact or self.index is None or not self._shards:
            return explain_rows(self.embeddings, queries, local_rows)
        return explain_rows(self.embeddings, queries, local_rows, self._shards[0].index, self.index.effort)

    def _search(
        self,
        shard: OpenShard,
        matches: MatchingRows,
        queries: np.ndarray,
        k: int,
        filter: Filter | None,
        query_lists: QueryLists | None,
        *,
        exact: bool,
    ) -> Hits:
        allowed_rows = None if filter is None else matches.rows(filter)
        if exact or self.index is None:
            return shard.search_exact(queries, k, threads=self.threads, allowed_rows=allowed_rows)
        effort, depth = self.index.effort, max(k, self.index.depth)
        return shard.search(
            queries,
            k,
            effort=effort,
            depth=depth,
            threads=self.threads,
            allowed_rows=allowed_rows,
            query_lists=query_lists,
        )


def divide_parts(parts: Sequence[OpenPart], count: int) -> list[list[OpenPart]]:
    """Divides parts into at most `count` non-empty groups of neighbours with about the same number of rows."""
    ends = np.cumsum([len(part.vectors) for part in parts])
    groups: list[list[OpenPart]] = [[] for _ in range(count)]
    for part, end in zip(parts, ends, strict=True):
        groups[int((end - len(part.vectors) / 2) * count / ends[-1])].append(part)
    return [group for group in groups if group]
