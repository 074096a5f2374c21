"""An open shard: a range of rows, with the FAISS file that finds candidates and the vectors that score them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from riptide.indexing.dense.factory import is_flat
from riptide.indexing.dense.index import IndexShard
from riptide.indexing.embeddings.embeddings import Embeddings
from riptide.indexing.exact import Hits, empty_hits, exact_search, rescore_candidates

NONE_DELETED = np.empty(0, np.int64)
EXACT_ROWS = 100_000  # allowed rows of a shard up to which all of them are scored


class OpenShard:
    """A range of rows that is searched for whole blocks of queries. Thread-safe.

    Args:
        embeddings: The vectors.
        first_row, end: The rows.
        deleted: Rows to exclude, int64, ascending; those of other shards are ignored.
        index: The FAISS index of the rows; None: every vector is scored.
    """

    def __init__(
        self, embeddings: Embeddings, first_row: int, end: int, deleted: np.ndarray = NONE_DELETED, index: Any = None
    ):
        self.embeddings, self.first_row, self.end, self.index = embeddings, first_row, end, index
        self.parts = embeddings.read_range(first_row, end)
        self.deleted = deleted[(deleted >= first_row) & (deleted < end)]

    @classmethod
    def open(cls, shard: IndexShard, embeddings: Embeddings, deleted: np.ndarray = NONE_DELETED) -> OpenShard:
        """Opens a shard of an index. The rows of a Flat index are scored in the embeddings, with the faster kernel."""
        index = None
        if not is_flat(shard.artifact.config["factory"]):
            from riptide.indexing.dense.faiss_index import read_index

            index = read_index(shard.artifact.local_path(shard.part), mmap=True)
        return cls(embeddings, shard.first_row, shard.end, deleted, index)

    def search(
        self,
        queries: np.ndarray,
        k: int,
        *,
        nprobe: int,
        depth: int,
        threads: int | None,
        allowed_rows: np.ndarray | None = None,
    ) -> Hits:
        """Returns the top k of each query: candidates of the index, scored again by their float16 vectors.

        Args:
            queries: float32 [q, dim].
            k: Hits per query.
            nprobe: Lists to probe; with `allowed_rows`, the number grows by the ratio of rows to allowed rows.
            depth: Candidates per query, at least k.
            threads: Threads of the search; None: one for each core.
            allowed_rows: Consider only these rows, int64, ascending, none of them deleted; None: all. Those of other
                shards are ignored. Up to EXACT_ROWS of them are all scored.
        """
        allowed_rows = self._rows_in_shard(allowed_rows)
        if self.index is None or (allowed_rows is not None and len(allowed_rows) <= EXACT_ROWS):
            return self.search_exact(queries, k, threads=threads, allowed_rows=allowed_rows)
        if allowed_rows is not None:
            nprobe = -(-nprobe * (self.end - self.first_row) // len(allowed_rows))
        rows = self.find_candidates(queries, depth, nprobe=nprobe, threads=threads, allowed_rows=allowed_rows)
        return self.rescore(queries, rows, k, threads)

    def search_exact(
        self, queries: np.ndarray, k: int, *, threads: int | None, allowed_rows: np.ndarray | None = None
    ) -> Hits:
        """Returns the exact top k of each query; arguments as of `search`."""
        allowed_rows = self._rows_in_shard(allowed_rows)
        if allowed_rows is None:
            return exact_search(queries, self.parts, k, deleted=self.deleted, threads=threads)
        if not len(allowed_rows):
            return empty_hits(len(queries), k)
        if len(allowed_rows) <= EXACT_ROWS:
            hits = exact_search(queries, [(0, self.embeddings.take(allowed_rows))], k, threads=threads)
            return Hits(hits.scores, np.where(hits.rows >= 0, allowed_rows[hits.rows], -1))
        others = np.setdiff1d(np.arange(self.first_row, self.end), allowed_rows, assume_unique=True)
        return exact_search(queries, self.parts, k, deleted=others, threads=threads)

    def find_candidates(
        self,
        queries: np.ndarray,
        depth: int,
        *,
        nprobe: int,
        threads: int | None,
        allowed_rows: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the candidates of the index, int64 [q, depth], -1 for none; arguments as of `search`."""
        from riptide.indexing.dense import faiss_index

        return faiss_index.search_shard(
            self.index, queries, depth, nprobe=nprobe, deleted=self.deleted, allowed_rows=allowed_rows, threads=threads
        )

    def _rows_in_shard(self, rows: np.ndarray | None) -> np.ndarray | None:
        """Returns those of some ascending rows that are in the shard."""
        return None if rows is None else rows[slice(*np.searchsorted(rows, [self.first_row, self.end]))]

    def rescore(self, queries: np.ndarray, rows: np.ndarray, k: int, threads: int | None) -> Hits:
        """Scores the candidate rows of each query (int64 [q, any]) by their vectors; returns the best k."""
        return rescore_candidates(queries, rows, self.parts, k, threads)


class OpenShards:
    """Opens ranges of rows and shards for searches, again for each, or keeps them open in this process. Thread-safe.

    Args:
        embeddings: The vectors.
        deleted: Rows to exclude, int64, ascending.
        stays_open: Keep what was opened, which takes the memory that an index takes on a server. A copy for another
            process opens them again for each search.
    """

    def __init__(self, embeddings: Embeddings, deleted: np.ndarray = NONE_DELETED, *, stays_open: bool = False):
        self.embeddings, self.deleted = embeddings, deleted
        self._open: dict[tuple[int, int, bool], OpenShard] | None = {} if stays_open else None
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (self.embeddings, self.deleted)

    def open_rows(self, first_row: int, end: int) -> OpenShard:
        """Opens a range of rows, which is searched without an index."""
        if self._open is None:
            return OpenShard(self.embeddings, first_row, end, self.deleted)
        key = first_row, end, False
        with self._opening:
            if key not in self._open:
                self._open[key] = OpenShard(self.embeddings, first_row, end, self.deleted)
            return self._open[key]

    def open_shard(self, shard: IndexShard) -> OpenShard:
        """Opens a shard of an index."""
        if self._open is None:
            return OpenShard.open(shard, self.embeddings, self.deleted)
        key = shard.first_row, shard.end, True
        with self._opening:
            if key not in self._open:
                self._open[key] = OpenShard.open(shard, self.embeddings, self.deleted)
            return self._open[key]
