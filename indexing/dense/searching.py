"""Dense and exact search: each shard, or stretch of rows, is searched by one task with whole blocks of queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from indexing.dense.faiss_index import read_index, search_shard
from indexing.dense.index import Index, Shard
from indexing.embeddings.embeddings import Embeddings
from indexing.exact import Hits, exact_search, merge, rescore_pieces
from indexing.store.chain import split_range
from indexing.work.tasks import ALL_CORES, Place, Report, Resources, Runner

STRETCH_ROWS = 500_000  # rows of one task at most, so that nodes that join find work


def search_exact(
    embeddings: Embeddings,
    queries: np.ndarray,
    k: int,
    deleted: np.ndarray,
    runner: Runner,
    *,
    end: int | None = None,
) -> Hits:
    """Returns the exact top k of each query.

    Args:
        embeddings: The vectors to search.
        queries: float32 [q, dim].
        k: Hits per query.
        deleted: Rows to exclude, int64, ascending.
        runner: What spreads stretches of rows over workers.
        end: Search the rows [0, end); None: all rows.
    """
    task = SearchExactTask(embeddings, queries, k, deleted)
    stretches = _stretches(embeddings.num_rows if end is None else end)
    return folded((hits for _, hits in runner.run(task, stretches)), k)


@dataclass(frozen=True)
class SearchExactTask:
    """Searches a stretch of rows (first, end) exactly."""

    embeddings: Embeddings
    queries: np.ndarray
    k: int
    deleted: np.ndarray
    resources: Resources = ALL_CORES

    def open(self, place: Place) -> Callable[[tuple[int, int], Report], Hits]:
        """Returns the worker."""

        def search(stretch: tuple[int, int], report: Report) -> Hits:
            pieces = self.embeddings.between(*stretch)
            return exact_search(self.queries, pieces, self.k, deleted=self.deleted, threads=place.cores)

        return search


def search_dense(
    index: Index,
    embeddings: Embeddings,
    queries: np.ndarray,
    k: int,
    deleted: np.ndarray,
    runner: Runner,
    *,
    nprobe: int | None = None,
    depth: int | None = None,
) -> Hits:
    """Returns the top k of each query: candidates from an index, scored again by their float16 vectors.

    Args:
        index: The FAISS index.
        embeddings: The vectors that it was built from.
        queries: float32 [q, dim].
        k: Hits per query.
        deleted: Rows to exclude, int64, ascending.
        runner: What spreads the shards over workers.
        nprobe: Lists to probe; None: the number that the build measured.
        depth: Candidates per query and shard, raised to k; None: the number that the build measured.
    """
    task = SearchShardTask(embeddings, queries, k, deleted, nprobe or index.nprobe, max(k, depth or index.depth))
    return folded((hits for _, hits in runner.run(task, index.shards)), k)


@dataclass(frozen=True)
class SearchShardTask:
    """Searches a shard. The rows of a flat index are scored in the embeddings."""

    embeddings: Embeddings
    queries: np.ndarray
    k: int
    deleted: np.ndarray
    nprobe: int
    depth: int
    resources: Resources = ALL_CORES

    def open(self, place: Place) -> Callable[[Shard, Report], Hits]:
        """Returns the worker."""
        return lambda shard, report: self._search(shard, place.cores)

    def _search(self, shard: Shard, threads: int) -> Hits:
        deleted = self.deleted[(self.deleted >= shard.first_row) & (self.deleted < shard.end)]
        pieces = self.embeddings.between(shard.first_row, shard.end)
        if shard.artifact.config["factory"] == "Flat":
            return exact_search(self.queries, pieces, self.k, deleted=deleted, threads=threads)
        index = read_index(shard.artifact.local(shard.part), mmap=True)
        rows = search_shard(index, self.queries, self.depth, nprobe=self.nprobe, deleted=deleted, threads=threads)
        return rescore_pieces(self.queries, rows, pieces, self.k, threads)


def folded(hits: Iterable[Hits], k: int) -> Hits:
    """Returns the best k of all hits. They are merged as they arrive, and any order gives the same bytes."""
    best: Hits | None = None
    for each in hits:
        best = merge([each] if best is None else [best, each], k)
    assert best is not None
    return best


def _stretches(end: int) -> Sequence[tuple[int, int]]:
    """Splits the rows [0, end) into stretches of at most STRETCH_ROWS. The hits do not depend on the cut."""
    return split_range(0, end, max(1, -(-end // STRETCH_ROWS)))
