"""Graphs (HNSW): the hits that remain if rows are deleted or filtered, compared with exact search."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from array_embeddings import ArrayEmbeddings

from riptide.indexing.dense import shard as shards
from riptide.indexing.dense.factory import effort_name, is_graph, training_size
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.recall import recall_at
from riptide.indexing.dense.shard import OpenShard
from riptide.indexing.exact import Hits, exact_search

DIM, FIRST, ROWS, CLUSTERS = 32, 700, 6_000, 20


@functools.cache
def clustered() -> tuple[np.ndarray, np.ndarray]:
    """Returns the vectors, of which the row decides the cluster, and one query of each cluster."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((CLUSTERS, DIM))
    vectors = centers[np.arange(ROWS) % CLUSTERS] + 0.3 * rng.standard_normal((ROWS, DIM))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float16), (centers / np.linalg.norm(centers, axis=1, keepdims=True)).astype(np.float32)


@functools.cache
def graph() -> Any:
    vectors = clustered()[0]
    return fill_shard(train_quantizer(vectors.astype(np.float32), "HNSW16,SQ8", seed=0), [vectors], FIRST)


def search(k: int, deleted: np.ndarray = shards.NONE_DELETED, allowed_rows: np.ndarray | None = None) -> Hits:
    rows = ArrayEmbeddings(clustered()[0], FIRST)
    shard = OpenShard(rows, FIRST, FIRST + ROWS, deleted, graph(), is_graph=True)  # type: ignore[arg-type]
    return shard.search(clustered()[1], k, effort=100, depth=100, threads=1, allowed_rows=allowed_rows)


def exact(k: int, excluded: np.ndarray) -> Hits:
    vectors, queries = clustered()
    return exact_search(queries, [(FIRST, vectors)], k, deleted=excluded)


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.02])
def test_deleted_rows_cost_no_recall(kept: float) -> None:
    deleted = np.flatnonzero(np.random.default_rng(1).random(ROWS) >= kept) + FIRST
    hits = search(50, deleted)
    assert not np.isin(hits.rows, deleted).any()
    assert recall_at(hits.rows, exact(50, deleted).rows, [50])[50] > 0.98


def test_queries_near_which_all_rows_are_excluded_are_searched_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk through the graph sees rows of the query's own cluster, of which none is left."""
    monkeypatch.setattr(shards, "EXACT_ROWS", 10)
    monkeypatch.setattr(shards, "EXACT_SHARE", 0)
    rows = np.arange(FIRST, FIRST + ROWS)
    excluded = rows[(rows - FIRST) % CLUSTERS < 10]
    expected = exact(100, excluded)
    for hits in (search(100, excluded), search(100, allowed_rows=np.setdiff1d(rows, excluded))):
        assert (hits.rows >= 0).all()
        assert not np.isin(hits.rows, excluded).any()
        assert recall_at(hits.rows, expected.rows, [100])[100] > 0.95
    remaining = rows[-3:]
    np.testing.assert_array_equal(search(5, np.setdiff1d(rows, remaining)).rows >= 0, [[1, 1, 1, 0, 0]] * CLUSTERS)
    assert (search(5, rows).rows == -1).all()


def test_a_graph_of_which_little_is_left_is_searched_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk would keep most rows: it takes longer than scoring those that are left."""
    monkeypatch.setattr(OpenShard, "find_candidates", None)
    deleted = np.arange(FIRST, FIRST + ROWS)[1_000:]
    np.testing.assert_array_equal(search(50, deleted).rows, exact(50, deleted).rows)


def test_an_hnsw_of_centroids_makes_no_graph() -> None:
    assert [is_graph(each) for each in ("HNSW32", "PCA64,HNSW32,SQ8", "IVF64_HNSW32,SQ8", "IVF64,SQ8")] == [
        *(True, True, False, False)
    ]
    assert [effort_name(each) for each in ("HNSW32_SQ8", "Flat")] == ["ef_search", "nprobe"]
    assert [training_size(each, 10**6) for each in ("HNSW32", "HNSW32,Flat", "HNSW32,SQ8")] == [0, 0, 65_536]
