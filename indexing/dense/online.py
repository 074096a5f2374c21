"""Searchers that stay open in one process and answer batches, for a service; they start no Ray tasks.

Their hits equal those of `search` over the same artifacts with the same search parameters. FAISS is imported when a
shard with an index is opened: a process that also uses torch should import torch first (see
`riptide.indexing.dense.faiss_index`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.corpus.row_ranges import MatchingRows
from riptide.indexing.dense.index import Index, IndexShard
from riptide.indexing.dense.shard import OpenShard
from riptide.indexing.embeddings.embeddings import Embeddings
from riptide.indexing.exact import Hits, OpenPart, available_threads, empty_hits, merge_hits, search_open_parts
from riptide.indexing.exact import kernel as kernels
from riptide.indexing.store.chain import RowRange

OPEN_ROWS = 200_000  # rows of a shard without an index up to which its vectors stay converted in memory
PARALLEL_QUERIES = 8  # queries of a batch from which on the files of an index are searched by several threads


def shards_in_range(index: Index, rows: RowRange) -> list[IndexShard]:
    """Returns the shards of an index that belong to a range of rows."""
    return index.shards[rows.select_shards([(shard.first_row, shard.end) for shard in index.shards])]


def searched_row_ranges(embeddings: Embeddings, index: Index | None, rows: RowRange) -> list[tuple[int, int]]:
    """Returns the rows that a DenseShard of a range searches, as (first row, end): of each shard of the index."""
    if index is not None:
        return [(shard.first_row, shard.end) for shard in shards_in_range(index, rows)]
    return [(min(rows.first_row, embeddings.num_rows), min(rows.end, embeddings.num_rows))]


class DenseShard:
    """Dense search in a range of rows: in the FAISS files of an index that belong to it, or in exactly these rows.

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
        stretches = searched_row_ranges(embeddings, index, rows)
        if index is None:
            self._shards = [OpenShard(embeddings, first, end, corpus.deleted) for first, end in stretches]
        else:
            self._shards = [OpenShard.open(shard, embeddings, corpus.deleted) for shard in shards_in_range(index, rows)]
        cores = threads or available_threads()
        together = min(cores, len(self._shards))
        self._has_exact = any(shard.index is None for shard in self._shards)
        if self._has_exact and kernels.load_kernel() is None:
            together = 1  # torch uses its own threads, whose number is a setting of the process
        # Threads of the search of one shard; shards are searched in parallel.
        self.threads = max(1, cores // max(1, together))
        self._pool = ThreadPoolExecutor(together, thread_name_prefix="files") if together > 1 else None
        self._matches = [MatchingRows(corpus, RowRange(first, end)) for first, end in stretches]
        is_small = sum(end - first for first, end in stretches) <= OPEN_ROWS
        self._parts = [
            [OpenPart(vectors, row, shard.deleted) for row, vectors in shard.parts]
            if shard.index is None and is_small
            else None
            for shard in self._shards
        ]

    def search(self, queries: np.ndarray, k: int, filter: Filter | None = None, *, exact: bool = False) -> Hits:
        """Returns the top k of each query among this shard's rows that are not deleted.

        Args:
            queries: float32 [q, dim].
            k: Number of hits per query.
            filter: Consider matching rows only, as the `allowed_rows` ones of `OpenShard.search`.
            exact: Score every vector even if there is an index.
        """

        def search(number: int) -> Hits:
            parts = self._parts[number]
            if parts is not None and filter is None:
                return search_open_parts(queries, parts, k)
            return self._search(self._shards[number], self._matches[number], queries, k, filter, exact=exact)

        # Probing for a few queries takes less time than waking threads.
        is_parallel = len(queries) >= PARALLEL_QUERIES or self._has_exact
        run = self._pool.map if self._pool and is_parallel else map
        hits = list(run(search, range(len(self._shards))))
        return merge_hits(hits, k) if hits else empty_hits(len(queries), k)

    def _search(
        self,
        shard: OpenShard,
        matches: MatchingRows,
        queries: np.ndarray,
        k: int,
        filter: Filter | None,
        *,
        exact: bool,
    ) -> Hits:
        allowed_rows = None if filter is None else matches.rows(filter)
        if exact or self.index is None:
            return shard.search_exact(queries, k, threads=self.threads, allowed_rows=allowed_rows)
        nprobe, depth = self.index.nprobe, max(k, self.index.depth)
        return shard.search(queries, k, nprobe=nprobe, depth=depth, threads=self.threads, allowed_rows=allowed_rows)
