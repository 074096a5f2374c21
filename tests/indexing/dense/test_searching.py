"""Search: candidates over many pieces, hits in any order of arrival, stretches of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_embeddings import ArrayEmbeddings
from kernels import must_load
from runners import InlineRunner

from riptide.base.errors import InputError
from riptide.indexing.dense import dense_search
from riptide.indexing.dense.shard import OpenShards
from riptide.indexing.exact import Hits, exact_search, merge_hits, rescore_candidates
from riptide.indexing.exact import top_k as exact_module

DIM, ROWS, FIRST = 24, 4_000, 700
Pieces = list[tuple[int, np.ndarray]]
NEEDS_KERNEL = pytest.mark.skipif(not must_load(), reason="kernels run on Linux")
PATHS = [False, pytest.param(True, marks=NEEDS_KERNEL)]


def vectors_and_queries(num_queries: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Small integers, so that many scores are equal, and some that are not."""
    rng = np.random.default_rng(0)
    vectors = rng.integers(-1, 2, size=(ROWS, DIM)).astype(np.float16)
    vectors[::3] += rng.normal(size=vectors[::3].shape).astype(np.float16)
    return vectors, rng.integers(-1, 2, size=(num_queries, DIM)).astype(np.float32)


def pieces_of(vectors: np.ndarray, count: int) -> Pieces:
    """Uneven ones, the last first, and an empty one."""
    cuts = np.random.default_rng(count).choice(np.arange(1, ROWS), count - 1, replace=False)
    bounds = [0, *sorted(cuts.tolist()), ROWS]
    pieces = [(FIRST + a, vectors[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces[::-1], (FIRST + ROWS, vectors[:0])]


def candidates(num_queries: int) -> np.ndarray:
    """int64 [q, 300]: spread ones, all in one place, few, none; some twice."""
    rng = np.random.default_rng(1)
    rows = rng.integers(FIRST, FIRST + ROWS, size=(num_queries, 300))
    rows[::5] = FIRST + 1_000 + rng.permuted(np.tile(np.arange(300), (len(rows[::5]), 1)), axis=1)
    rows[1::5, 7:] = -1
    rows[2] = -1
    rows[3, 100:200] = rows[3, :100]
    return rows


def same_bytes(found: Hits, expected: Hits) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("use_kernel", PATHS)
@pytest.mark.parametrize("count", [1, 10, 40])
def test_candidates_of_many_pieces_score_as_each_piece_by_itself(count: int, use_kernel: bool) -> None:
    vectors, queries = vectors_and_queries()
    rows, pieces = candidates(len(queries)), pieces_of(vectors, count)
    alone = []
    for first, piece in pieces:
        here = np.where((rows >= first) & (rows < first + len(piece)), rows, -1)
        alone.append(rescore_candidates(queries, here, [(first, piece)], 80, use_kernel=use_kernel))
    rescored = rescore_candidates(queries, rows, pieces, 80, use_kernel=use_kernel)
    same_bytes(rescored, merge_hits(alone, 80))
    for query in range(len(queries)):  # and as one matrix product, sorted
        mine = np.unique(rows[query][rows[query] >= 0])
        scores = (vectors[mine - FIRST].astype(np.float64) @ queries[query].astype(np.float64)).astype(np.float32)
        best = np.lexsort((mine, -scores))[:80]
        np.testing.assert_array_equal(rescored.rows[query, : len(best)], mine[best])
        np.testing.assert_array_equal(rescored.scores[query, : len(best)], scores[best])
        assert (rescored.rows[query, len(best) :] == -1).all()


@pytest.mark.parametrize("use_kernel", PATHS)
def test_all_rows_as_candidates_are_exact_search(use_kernel: bool) -> None:
    vectors, queries = vectors_and_queries(9)
    rows = np.tile(np.arange(FIRST, FIRST + ROWS), (9, 1))
    expected = exact_search(queries, [(FIRST, vectors)], 100, use_kernel=use_kernel)
    same_bytes(rescore_candidates(queries, rows, pieces_of(vectors, 40), 100, use_kernel=use_kernel), expected)


@pytest.mark.parametrize("limit", [1 << 20, 64])
def test_the_work_is_that_of_the_candidates_however_many_the_pieces(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places that are handed to the scoring, real ones and padding, in arrays of at most `limit`."""
    vectors, queries = vectors_and_queries(400)
    rows = candidates(400)
    rows[3] = -1
    asked: list[int] = []
    original: Callable[..., Any] = exact_module._pair_scorer

    def counting(*arguments: Any) -> Callable[..., np.ndarray]:
        score = original(*arguments)

        def counted(query_ids: np.ndarray, local: np.ndarray, piece: np.ndarray) -> np.ndarray:
            asked.append(local.size)
            assert local.shape[0] == 1 or local.size <= limit
            return score(query_ids, local, piece)

        return counted

    monkeypatch.setattr(exact_module, "_pair_scorer", counting)
    monkeypatch.setattr(exact_module, "CANDIDATES", limit)
    expected = rescore_candidates(queries, rows, [(FIRST, vectors)], 20)
    for count in (10, 40, 400):
        asked.clear()
        same_bytes(rescore_candidates(queries, rows, pieces_of(vectors, count), 20), expected)
        real = sum(len(np.unique(mine[mine >= 0])) for mine in rows)
        assert real <= sum(asked) < 2 * real


def test_a_candidate_outside_of_all_pieces_is_refused() -> None:
    vectors, queries = vectors_and_queries(2)
    pieces = [(FIRST, vectors[:100]), (FIRST + 200, vectors[200:300])]
    for row in (FIRST - 1, FIRST + 150, FIRST + 300):
        with pytest.raises(InputError, match=f"candidate rows reach from {row} to {row}, expected 700 to 999"):
            rescore_candidates(queries, np.full((2, 1), row), pieces, 3)
    with pytest.raises(InputError, match="expected none"):
        rescore_candidates(queries, np.full((2, 1), 5), [], 3)
    assert (rescore_candidates(queries, np.full((2, 1), -1), [], 3).rows == -1).all()


def test_hits_fold_to_the_same_bytes_in_any_order_of_arrival() -> None:
    """Of five stretches with many equal scores across them, in all orders; only one result waits at a time."""
    vectors, queries = vectors_and_queries(20)
    vectors = np.sign(vectors)
    parts = [(FIRST + a, vectors[a : a + 800]) for a in range(0, ROWS, 800)]
    hits = [exact_search(queries, [part], 30) for part in parts]
    expected = exact_search(queries, parts, 30)
    assert (expected.scores[:, 1:] == expected.scores[:, :-1]).mean() > 0.5
    assert all(len({(row - FIRST) // 800 for row in rows}) > 1 for rows in expected.rows.tolist())
    for order in itertools.permutations(hits):
        same_bytes(dense_search.merge_results(iter(order), 30), expected)


@pytest.mark.parametrize(("longest", "tasks"), [(10_000, 1), (1_500, 3)])
def test_the_hits_do_not_depend_on_the_stretches(longest: int, tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of the stretches arrive in reverse order."""
    vectors, queries = vectors_and_queries(5)
    runner = InlineRunner(cores=2, order=lambda items: list(items)[::-1])
    monkeypatch.setattr(dense_search, "STRETCH_ROWS", longest)
    deleted = np.array([3, 2_500])
    found = dense_search.search_exact(OpenShards(ArrayEmbeddings(vectors), deleted), queries, 10, runner)  # type: ignore[arg-type]
    same_bytes(found, exact_search(queries, [(0, vectors)], 10, deleted=deleted))
    ran = runner.items("SearchExactTask")
    assert len(ran) == tasks
    assert max(end - first for first, end in ran) <= longest
    assert [first for first, _ in ran[:-1]] == [end for _, end in ran[1:]]
