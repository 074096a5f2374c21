"""Search on the cluster: every shard or stretch of rows is searched by a task, with whole blocks of queries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from indexing.embeddings import Embeddings
from indexing.exact import Hits, exact_search, merge, rescore_pieces
from indexing.faiss_index import read_index, search_shard
from indexing.index import Index, Shard
from indexing.tasks import node_cores, num_slots, run_tasks

STRETCH_ROWS = 2_000_000  # of exact search, at most in one task: work is left for nodes that join


def search_exact(
    embeddings: Embeddings,
    queries: np.ndarray,
    k: int,
    deleted: np.ndarray,
    *,
    end: int | None = None,
) -> Hits:
    """The exact top k of queries float32 [q, dim] over the rows [0, end), less the `deleted` ones."""
    end = embeddings.num_rows if end is None else end
    cores = node_cores()
    stretches = _stretches(0, end, num_slots(cores))
    found = run_tasks(exact_stretch, stretches, embeddings, queries, k, deleted, cores, num_cpus=cores)
    return folded((hits for _, hits in found), k)


def exact_stretch(
    stretch: tuple[int, int], embeddings: Embeddings, queries: np.ndarray, k: int, deleted: np.ndarray, threads: int
) -> Hits:
    """One task of `search_exact`: the rows [first, end)."""
    return exact_search(queries, embeddings.between(*stretch), k, deleted=deleted, threads=threads)


def search_dense(
    index: Index,
    embeddings: Embeddings,
    queries: np.ndarray,
    k: int,
    deleted: np.ndarray,
    *,
    nprobe: int | None = None,
    depth: int | None = None,
) -> Hits:
    """The top k of queries float32 [q, dim]: each shard's candidates by probing, scored again by their float16 vectors.

    `depth`: candidates per query and shard; at least k. `nprobe` and `depth` default to what the build measured.
    """
    cores = node_cores()
    depth = max(k, depth or index.depth)
    shared = (embeddings, queries, k, deleted, nprobe or index.nprobe, depth, cores)
    found = run_tasks(dense_shard, index.shards, *shared, num_cpus=cores)
    return folded((hits for _, hits in found), k)


def dense_shard(
    shard: Shard,
    embeddings: Embeddings,
    queries: np.ndarray,
    k: int,
    deleted: np.ndarray,
    nprobe: int,
    depth: int,
    threads: int,
) -> Hits:
    """One task of `search_dense`. Where the index is flat its rows are scored in the embeddings."""
    mine = deleted[(deleted >= shard.first_row) & (deleted < shard.end)]
    pieces = embeddings.between(shard.first_row, shard.end)
    if shard.artifact.config["factory"] == "Flat":
        return exact_search(queries, pieces, k, deleted=mine, threads=threads)
    faiss_index = read_index(shard.artifact.local(shard.part), mmap=True)
    rows = search_shard(faiss_index, queries, depth, nprobe=nprobe, deleted=mine, threads=threads)
    return rescore_pieces(queries, rows, pieces, k, threads)


def folded(found: Iterable[Hits], k: int) -> Hits:
    """The best k of all, merged two at a time as they arrive: only one waits, and any order gives the same bytes."""
    best: Hits | None = None
    for hits in found:
        best = merge([hits] if best is None else [best, hits], k)
    assert best is not None
    return best


def _stretches(first_row: int, end: int, slots: int) -> Sequence[tuple[int, int]]:
    """One for each task that runs at once now, or a multiple of them so that none is longer than STRETCH_ROWS."""
    count = slots * max(1, -(-(end - first_row) // (STRETCH_ROWS * slots)))
    bounds = np.linspace(first_row, end, max(1, min(count, end - first_row)) + 1).astype(np.int64)
    return [(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
