"""Dense and exact search on workers: one task searches a shard, or a range of rows, for all queries at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from riptide.indexing.dense.index import Index, IndexShard
from riptide.indexing.dense.shard import OpenShards
from riptide.indexing.exact import Hits, merge_hits
from riptide.indexing.store.chain import split_range
from riptide.indexing.work.worker_tasks import ALL_CORES, Allocation, Report, Runner, WorkerResources

STRETCH_ROWS = 500_000  # maximum rows per task, so that nodes that join later find remaining tasks


def search_exact(
    shards: OpenShards,
    queries: np.ndarray,
    k: int,
    runner: Runner,
    *,
    allowed_rows: np.ndarray | None = None,
    end: int | None = None,
) -> Hits:
    """Returns the exact top k of each query.

    Args:
        shards: Opens the vectors to search.
        queries: float32 [q, dim].
        k: Hits per query.
        runner: What spreads stretches of rows over workers.
        allowed_rows: Consider only these rows, as `OpenShard.search`; None: all.
        end: Search the rows [0, end); None: all rows.
    """
    task = SearchExactTask(shards, queries, k, allowed_rows)
    stretches = _split_rows(shards.embeddings.num_rows if end is None else end)
    return merge_results((hits for _, hits in runner.run(task, stretches)), k)


@dataclass(frozen=True)
class SearchExactTask:
    """The task that searches a range of rows (first, end) exactly."""

    shards: OpenShards
    queries: np.ndarray
    k: int
    allowed_rows: np.ndarray | None
    resources: WorkerResources = ALL_CORES

    def open(self, allocation: Allocation) -> Callable[[tuple[int, int], Report], Hits]:
        """Returns the function that searches a range of rows."""

        def search(stretch: tuple[int, int], report: Report) -> Hits:
            open_shard = self.shards.open_rows(*stretch)
            return open_shard.search_exact(
                self.queries, self.k, threads=allocation.cores, allowed_rows=self.allowed_rows
            )

        return search


def search_dense(
    index: Index,
    shards: OpenShards,
    queries: np.ndarray,
    k: int,
    runner: Runner,
    *,
    allowed_rows: np.ndarray | None = None,
    effort: int | None = None,
    depth: int | None = None,
) -> Hits:
    """Returns the top k of each query: an index finds candidates, whose exact scores come from their float16 vectors.

    Args:
        index: The FAISS index.
        shards: Opens its shards, with the vectors that it was built from.
        queries: float32 [q, dim].
        k: Hits per query.
        runner: What spreads the shards over workers.
        allowed_rows: Consider only these rows, as `OpenShard.search`; None: all.
        effort: Search effort (nprobe or efSearch) of the index; None: the one that the build measured.
        depth: Candidates per query and shard, raised to k; None: the number that the build measured.
    """
    effort, depth = effort or index.effort, max(k, depth or index.depth)
    task = SearchShardTask(shards, queries, k, allowed_rows, effort, depth, index.factory)
    return merge_results((hits for _, hits in runner.run(task, index.shards)), k)


@dataclass(frozen=True)
class SearchShardTask:
    """The task that searches a shard. For a flat index, all embeddings in the row range of the shard are scored."""

    shards: OpenShards
    queries: np.ndarray
    k: int
    allowed_rows: np.ndarray | None
    effort: int
    depth: int
    factory: str
    resources: WorkerResources = ALL_CORES

    def open(self, allocation: Allocation) -> Callable[[IndexShard, Report], Hits]:
        """Returns the function that searches a shard."""
        centroids = self.shards.open_centroids(self.factory)
        query_lists = centroids.query_lists() if centroids else None

        def search(shard: IndexShard, report: Report) -> Hits:
            open_shard = self.shards.open_shard(shard)
            return open_shard.search(
                self.queries,
                self.k,
                effort=self.effort,
                depth=self.depth,
                threads=allocation.cores,
                allowed_rows=self.allowed_rows,
                query_lists=query_lists,
            )

        return search


def merge_results(hits: Iterable[Hits], k: int) -> Hits:
    """Merges hits as they arrive and returns the top k of each query; any order of arrival gives the same bytes."""
    best: Hits | None = None
    for each in hits:
        best = merge_hits([each] if best is None else [best, each], k)
    assert best is not None
    return best


def _split_rows(end: int) -> Sequence[tuple[int, int]]:
    """Splits the rows [0, end) into ranges of at most STRETCH_ROWS. The hits do not depend on the split."""
    return split_range(0, end, max(1, -(-end // STRETCH_ROWS)))
