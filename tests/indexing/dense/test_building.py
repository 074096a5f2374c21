"""The search parameters of an index, chosen for a recall that is measured with vectors of the corpus as queries."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_embeddings import ArrayEmbeddings
from runners import InlineRunner

from riptide.indexing.dense.building import (
    SearchDepthsTask,
    candidates_by_depth,
    choose_search_parameters,
    without_own_row,
)
from riptide.indexing.dense.factory import DEPTHS, candidate_depths, search_efforts
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import write_index
from riptide.indexing.dense.index import IndexShard
from riptide.indexing.work.worker_tasks import WorkerTask

TRUTH = np.arange(100)[None].repeat(5, axis=0)


def found(share: float) -> np.ndarray:
    """Rows of which `share` are among the true ones."""
    rows = TRUTH.copy()
    rows[:, int(100 * share) :] += 1_000
    return rows


def test_the_smallest_effort_and_then_the_smallest_depth_that_reach_the_recall() -> None:
    efforts = []

    def search(effort: int) -> dict[int, np.ndarray]:
        efforts.append(effort)
        return {200: found(min(1, effort / 8 - 0.1)), 400: found(min(1, effort / 8))} if effort > 1 else {200: found(0)}

    setting = choose_search_parameters(search, TRUTH, search_efforts("IVF64,SQ8"), 0.95)
    assert (setting.effort, setting.depth, setting.reached) == (8, 400, True)
    assert setting.recall == {10: 1.0, 100: 1.0}
    assert efforts == [1, 2, 4, 8]


def test_the_best_is_told_where_the_recall_is_out_of_reach() -> None:
    setting = choose_search_parameters(
        lambda effort: {200: found(0.5 if effort < 4 else 0.6)}, TRUTH, (1, 2, 4, 8, 16), 0.95
    )
    assert (setting.effort, setting.reached) == (4, False)
    assert setting.at == pytest.approx(0.6)


def test_a_flat_index_has_nothing_to_probe() -> None:
    assert choose_search_parameters(lambda effort: {200: found(1.0)}, TRUTH, search_efforts("Flat"), 1.0).reached


def test_the_search_of_a_graph_keeps_at_least_the_candidates_that_a_build_measures() -> None:
    efforts = search_efforts("HNSW32,SQ8")
    assert efforts == [100, 200, 400, 800, 1600, 3200, 6400, 12800]
    assert [candidate_depths("HNSW32,SQ8", effort) for effort in (100, 400)] == [(100,), (100, 200, 400)]
    assert all(max(candidate_depths("PCA64,HNSW32", effort)) <= effort for effort in efforts)
    assert candidate_depths("IVF65536_HNSW32,RaBitQ", 1) == DEPTHS


def test_a_query_that_is_a_passage_does_not_count_itself() -> None:
    rows = np.array([[7, 1, 2], [3, 9, 4], [5, 6, 8]])
    np.testing.assert_array_equal(without_own_row(rows, np.array([7, 9, 0])), [[1, 2], [3, 4], [5, 6]])


def test_the_hits_of_many_shards_are_folded_as_they_come(tmp_path: Path) -> None:
    """The best so far and one shard's are all that is held; what comes out is brute force over what a depth reaches."""
    vectors = np.random.default_rng(0).normal(size=(2_400, 8)).astype(np.float16)
    queries = vectors[:20].astype(np.float32)
    products = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    shards = []
    reached = {depth: np.full_like(products, -np.inf) for depth in DEPTHS}
    for first in range(0, 2_400, 400):
        file = tmp_path / f"{first}.faiss"
        write_index(fill_shard(train_quantizer(queries, "Flat", seed=0), [vectors[first : first + 400]], first), file)
        shards.append(IndexShard(ArrayEmbeddings(vectors, file=file), "", first, first + 400))  # type: ignore[arg-type]
        for depth, scores in reached.items():
            best = first + np.argsort(-products[:, first : first + 400], axis=1)[:, :depth]
            np.put_along_axis(scores, best, np.take_along_axis(products, best, 1), 1)
    alive: list[weakref.ref] = []
    held = []

    class Watched(InlineRunner):
        """Counts the hits that are still in memory after each shard."""

        def run(self, task: WorkerTask, items: Iterable[Any], **options: Any) -> Iterator[tuple[Any, Any]]:
            for item, hits in super().run(task, items, **options):
                alive.append(weakref.ref(hits.rows))
                held.append(sum(each() is not None for each in alive))
                yield item, hits
                del hits

    task = SearchDepthsTask(ArrayEmbeddings(vectors), queries, 1_500, 1, DEPTHS)  # type: ignore[arg-type]
    found = candidates_by_depth(shards, task, Watched())
    assert list(found) == list(DEPTHS)
    for depth, rows in found.items():
        some = min(1_500, 6 * depth)
        np.testing.assert_array_equal(rows[:, :some], np.argsort(-reached[depth], axis=1, kind="stable")[:, :some])
        assert (rows[:, some:] == -1).all()
    assert len(held) == 6
    assert max(held) <= 2
