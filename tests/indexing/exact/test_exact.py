"""Exact search is compared with a brute-force loop in float64, on both of its paths (the compiled kernel and torch)."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from kernels import must_load

from riptide.base.errors import InputError
from riptide.indexing.exact import (
    ExactSearch,
    Hits,
    OpenPart,
    exact_search,
    kernel,
    merge_hits,
    rescore_candidates,
    search_open_parts,
)
from riptide.indexing.exact.torch_pass import sum_columns

NEEDS_KERNEL = pytest.mark.skipif(not must_load(), reason="kernels run on Linux")
PATHS = [
    pytest.param(False, id="torch"),
    pytest.param(True, id="kernel", marks=NEEDS_KERNEL),
]


def brute_force(queries, vectors, k, first_row=0, deleted=()):
    """The specification: float64 inner products, rounded to float32, sorted by score then row."""
    live = np.setdiff1d(np.arange(len(vectors)) + first_row, np.asarray(deleted, np.int64))
    scores = np.full((len(queries), k), -np.inf, np.float32)
    rows = np.full((len(queries), k), -1, np.int64)
    for i, query in enumerate(queries.astype(np.float64)):
        s = np.array([np.dot(query, v) for v in vectors[live - first_row].astype(np.float64)], np.float32)
        order = np.lexsort((live, -s))[:k]
        scores[i, : len(order)], rows[i, : len(order)] = s[order], live[order]
    return Hits(scores, rows)


def assert_same(found, expected):
    assert found.scores.dtype == np.float32
    assert found.rows.dtype == np.int64
    np.testing.assert_array_equal(found.rows, expected.rows)
    assert found.scores.tobytes() == expected.scores.tobytes()


def clustered(num, dim, seed, num_clusters=20, spread=0.5):
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((num_clusters, dim))
    vectors = centers[rng.integers(num_clusters, size=num)] + spread * rng.standard_normal((num, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("use_kernel", PATHS)
@pytest.mark.parametrize("dim", [1, 5, 32, 33, 384, 768])
@pytest.mark.parametrize(
    ("num_queries", "num_vectors", "k"), [(1, 1, 1), (1, 700, 10), (33, 1500, 20), (70, 3000, 200), (40, 50, 100)]
)
def test_equals_brute_force(use_kernel, dim, num_queries, num_vectors, k):
    queries = clustered(num_queries, dim, 1)
    vectors = clustered(num_vectors, dim, 2).astype(np.float16)
    found = exact_search(queries, [(7, vectors)], k, use_kernel=use_kernel)
    assert_same(found, brute_force(queries, vectors, k, first_row=7))


@pytest.mark.parametrize("use_kernel", PATHS)
def test_same_bytes_for_any_split_and_threads(use_kernel):
    queries, vectors = clustered(65, 48, 1), clustered(20_000, 48, 2).astype(np.float16)
    expected = exact_search(queries, [(0, vectors)], 50, threads=1, use_kernel=use_kernel)
    assert_same(expected, brute_force(queries, vectors, 50))
    for num_parts in (1, 3, 7):
        bounds = np.linspace(0, len(vectors), num_parts + 1).astype(int)
        parts = [(int(a), vectors[a:b]) for a, b in itertools.pairwise(bounds)]
        for threads in (1, 2, 5):
            assert_same(exact_search(queries, parts, 50, threads=threads, use_kernel=use_kernel), expected)
            assert_same(exact_search(queries, parts[::-1], 50, threads=threads, use_kernel=use_kernel), expected)
        shards = [exact_search(queries, [part], 50, use_kernel=use_kernel) for part in parts]
        assert_same(merge_hits(shards, 50), expected)
        assert_same(merge_hits(shards[::-1], 50), expected)


@pytest.mark.parametrize("use_kernel", PATHS)
def test_large_k_and_many_queries(use_kernel):
    queries, vectors = clustered(300, 24, 3), clustered(6_000, 24, 4).astype(np.float16)
    assert_same(exact_search(queries, [(0, vectors)], 1500, use_kernel=use_kernel), brute_force(queries, vectors, 1500))


@pytest.mark.parametrize("use_kernel", PATHS)
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_adversarial_order(use_kernel, order):
    """Scores that rise with the row make every threshold useless by the time the next row comes."""
    queries, vectors = clustered(40, 40, 1, num_clusters=1, spread=0.2), clustered(30_000, 40, 2).astype(np.float16)
    scores = vectors.astype(np.float32) @ queries[0]
    vectors = vectors[np.argsort(scores if order == "ascending" else -scores)]
    assert_same(exact_search(queries, [(0, vectors)], 100, use_kernel=use_kernel), brute_force(queries, vectors, 100))


@pytest.mark.parametrize("use_kernel", PATHS)
def test_ties_are_ordered_by_row(use_kernel):
    queries = clustered(10, 64, 1)
    vectors = np.tile(clustered(30, 64, 2).astype(np.float16), (200, 1))
    expected = brute_force(queries, vectors, 70)
    assert_same(exact_search(queries, [(0, vectors)], 70, use_kernel=use_kernel), expected)
    backwards = [(a, vectors[a : a + 1000]) for a in range(5000, -1, -1000)]
    assert_same(exact_search(queries, backwards, 70, use_kernel=use_kernel), expected)


@pytest.mark.parametrize("use_kernel", PATHS)
def test_all_equal_and_zero_queries(use_kernel):
    """Every row ties: no bound can drop one before it is scored."""
    queries = np.concatenate([clustered(3, 16, 1), np.zeros((2, 16), np.float32)])
    vectors = np.tile(clustered(1, 16, 2).astype(np.float16), (9_000, 1))
    found = exact_search(queries, [(100, vectors)], 30, use_kernel=use_kernel)
    np.testing.assert_array_equal(found.rows, np.tile(np.arange(100, 130), (5, 1)))
    assert_same(found, brute_force(queries, vectors, 30, first_row=100))


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 31, 32, 768])
def test_sums_of_a_gpu_do_not_depend_on_the_number_of_pairs(dim):
    products = torch.from_numpy(np.random.default_rng(0).standard_normal((300, dim)))
    sums = sum_columns(products)
    np.testing.assert_allclose(sums, [math.fsum(row) for row in products.tolist()], rtol=1e-12, atol=1e-12)
    assert torch.equal(sums[7:9], sum_columns(products[7:9]))


@pytest.mark.parametrize("use_kernel", PATHS)
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 1.0])
def test_deleted_rows(use_kernel, share):
    rng = np.random.default_rng(0)
    queries, vectors = clustered(35, 20, 1), clustered(8_000, 20, 2).astype(np.float16)
    deleted = np.sort(rng.choice(8_000, int(share * 8_000), replace=False)) + 1000
    expected = brute_force(queries, vectors, 60, first_row=1000, deleted=deleted)
    around = np.concatenate([[0, 999], deleted, [9_000, 10**9]])  # rows of other parts are no concern of this one
    parts = [(1000, vectors[:3000]), (4000, vectors[3000:])]
    assert_same(exact_search(queries, parts, 60, deleted=around, use_kernel=use_kernel), expected)


@pytest.mark.parametrize("use_kernel", PATHS)
def test_negative_scores(use_kernel):
    rng = np.random.default_rng(0)
    queries = np.abs(rng.standard_normal((40, 50))).astype(np.float32)
    vectors = -np.abs(rng.standard_normal((5_000, 50))).astype(np.float16)
    assert_same(exact_search(queries, [(0, vectors)], 30, use_kernel=use_kernel), brute_force(queries, vectors, 30))


@pytest.mark.parametrize("use_kernel", PATHS)
@pytest.mark.parametrize("query_norm", [1e-30, 1e-6, 1.0, 1e12])
def test_norms_that_differ_widely(use_kernel, query_norm):
    """Dot similarity: one passage's norm is 10^9 times another's, and outliers stand beside ordinary ones."""
    rng = np.random.default_rng(0)
    queries = (clustered(40, 60, 1) * query_norm).astype(np.float32)
    norms = 10.0 ** rng.uniform(-5, 4, 6_000)
    vectors = (clustered(6_000, 60, 2) * norms[:, None]).astype(np.float16)
    vectors[17] = 60_000
    vectors[4_000] = -60_000
    assert_same(exact_search(queries, [(0, vectors)], 100, use_kernel=use_kernel), brute_force(queries, vectors, 100))


@pytest.mark.parametrize("use_kernel", PATHS)
def test_close_scores_are_told_apart(use_kernel):
    """Scores that differ by less than bfloat16 resolves: only the error bound keeps the right ones."""
    rng = np.random.default_rng(0)
    base = clustered(1, 100, 1)
    queries = base + 1e-3 * rng.standard_normal((33, 100)).astype(np.float32)
    vectors = (base + 2e-4 * rng.standard_normal((12_000, 100))).astype(np.float16)
    assert_same(exact_search(queries, [(0, vectors)], 40, use_kernel=use_kernel), brute_force(queries, vectors, 40))


@pytest.mark.parametrize("use_kernel", PATHS)
def test_float32_vectors_and_memory_maps(use_kernel, tmp_path):
    queries, vectors = clustered(20, 70, 1), clustered(3_000, 70, 2)
    assert_same(exact_search(queries, [(0, vectors)], 30, use_kernel=use_kernel), brute_force(queries, vectors, 30))
    np.save(tmp_path / "part.npy", vectors.astype(np.float16))
    mapped = np.load(tmp_path / "part.npy", mmap_mode="r")
    expected = brute_force(queries, vectors.astype(np.float16), 30)
    assert_same(exact_search(queries, [(0, mapped)], 30, use_kernel=use_kernel), expected)
    assert_same(exact_search(queries, [(0, mapped[:1000]), (1000, mapped[1000:])], 30, use_kernel=use_kernel), expected)


@pytest.mark.parametrize("use_kernel", PATHS)
def test_result_may_be_asked_between_parts(use_kernel):
    queries, vectors = clustered(34, 20, 1), clustered(2_000, 20, 2).astype(np.float16)
    search = ExactSearch(queries, 25, use_kernel=use_kernel)
    assert_same(search.result(), brute_force(queries, vectors[:0], 25))
    for a in range(0, 2_000, 10):
        search.add(vectors[a : a + 10], a)
        if a in (0, 10, 30, 1_000):
            assert_same(search.result(), brute_force(queries, vectors[: a + 10], 25))
    assert_same(search.result(), brute_force(queries, vectors, 25))


@pytest.mark.parametrize("use_kernel", PATHS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_parts_that_stay_open_are_searched_again_and_again(use_kernel, dtype):
    vectors = clustered(5_000, 83, 2).astype(dtype)
    deleted = np.array([0, 7, 1_999, 2_000, 4_999])
    alive = np.setdiff1d(np.arange(5_000), deleted)
    edges = [(0, 2_000), (2_000, 2_000), (2_000, 2_003), (2_003, 5_000)]
    parts = [OpenPart(vectors[low:high], low, deleted) for low, high in edges]
    for count, k in ((1, 10), (3, 200), (70, 10), (2, 6_000)):
        queries = clustered(count, 83, count)
        search = ExactSearch(queries, k, threads=1, use_kernel=use_kernel)
        for part in parts:
            search.add_open_part(part)
        found, expected = search.result(), brute_force(queries, vectors[alive], k)
        rows = np.where(expected.rows >= 0, alive[expected.rows], -1)
        assert_same(found, Hits(expected.scores, rows))
        for threads in (1, 3, None):
            assert_same(search_open_parts(queries, parts, k, threads=threads), found)
    with pytest.raises(InputError, match="83 columns, expected 20"):
        search_open_parts(clustered(1, 20, 1), parts, 1)
    for shape in ((5, 0), (5,), ()):
        with pytest.raises(InputError, match=r"expected \[n, dim\]"):
            OpenPart(np.empty(shape, np.float16), 0)
    vectors[4_000, 3] = np.nan
    with pytest.raises(InputError, match="row 4000 has NaN"):
        search_open_parts(clustered(1, 83, 1), [OpenPart(vectors[2_003:], 2_003)], 1)


@pytest.mark.parametrize("use_kernel", PATHS)
def test_rows_beyond_32_bits(use_kernel):
    queries, vectors = clustered(5, 20, 1), clustered(500, 20, 2).astype(np.float16)
    expected = brute_force(queries, vectors, 10, first_row=10**12)
    assert_same(exact_search(queries, [(10**12, vectors)], 10, use_kernel=use_kernel), expected)


@pytest.mark.parametrize("use_kernel", PATHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_numbers_are_refused(use_kernel, bad):
    queries, vectors = clustered(5, 20, 1), clustered(3_000, 20, 2).astype(np.float16)
    vectors[2_345, 3] = bad
    with pytest.raises(InputError, match="row 12345"):
        exact_search(queries, [(10_000, vectors)], 10, use_kernel=use_kernel)
    deleted = np.array([12_345])
    assert exact_search(queries, [(10_000, vectors)], 10, use_kernel=use_kernel, deleted=deleted).rows.min() >= 10_000
    queries[2, 1] = bad
    with pytest.raises(InputError, match="query 2"):
        exact_search(queries, [(0, vectors[:100])], 10, use_kernel=use_kernel)


@pytest.mark.parametrize("use_kernel", PATHS)
def test_bad_shapes_are_refused(use_kernel):
    with pytest.raises(InputError, match=r"expected \[n, 20\]"):
        exact_search(clustered(5, 20, 1), [(0, clustered(9, 21, 1))], 10, use_kernel=use_kernel)
    with pytest.raises(InputError, match="float64"):
        exact_search(clustered(5, 20, 1), [(0, np.zeros((9, 20)))], 10, use_kernel=use_kernel)
    with pytest.raises(InputError, match="k is 0"):
        ExactSearch(clustered(5, 20, 1), 0, use_kernel=use_kernel)
    with pytest.raises(InputError, match="queries have shape"):
        ExactSearch(np.zeros(20, np.float32), 1, use_kernel=use_kernel)
    assert exact_search(np.zeros((0, 20), np.float32), [(0, clustered(9, 20, 1))], 3).rows.shape == (0, 3)


@pytest.mark.parametrize("use_kernel", PATHS)
def test_rescore(use_kernel):
    rng = np.random.default_rng(0)
    queries, vectors = clustered(30, 50, 1), clustered(4_000, 50, 2).astype(np.float16)
    expected = brute_force(queries, vectors, 40, first_row=500)
    others = rng.integers(500, 4_500, size=(30, 100))
    rows = rng.permuted(np.concatenate([expected.rows, others, np.full((30, 7), -1)], axis=1), axis=1)
    assert_same(rescore_candidates(queries, rows, [(500, vectors)], 40, use_kernel=use_kernel), expected)
    few = rescore_candidates(queries, expected.rows[:, :5], [(500, vectors)], 8, use_kernel=use_kernel)
    np.testing.assert_array_equal(few.rows[:, :5], expected.rows[:, :5])
    np.testing.assert_array_equal(few.scores[:, :5], expected.scores[:, :5])
    assert (few.rows[:, 5:] == -1).all()
    assert np.isneginf(few.scores[:, 5:]).all()
    for row in (499, 4_500):
        with pytest.raises(InputError, match="candidate rows reach"):
            rescore_candidates(queries, np.full((30, 1), row), [(500, vectors)], 8, use_kernel=use_kernel)


@NEEDS_KERNEL
@pytest.mark.parametrize("dim", [5, 384])
@pytest.mark.parametrize("num_queries", [1, 3, 12, 13, 70])
def test_kernel_without_matrix_units(dim, num_queries):
    """The products in registers, which CPUs without matrix units use; a few queries are multiplied in another order."""
    queries, vectors = clustered(num_queries, dim, 1), clustered(9_000, dim, 2).astype(np.float16)
    search = kernel.KernelSearch(kernel.load_kernel(), queries, 30, 2, amx=False)
    search.add(vectors, 0, np.empty(0, np.int64))
    found = merge_hits([Hits(*hits) for hits in search.partial_hits()], 30)
    assert_same(found, brute_force(queries, vectors, 30))


def test_failed_compilation_is_told_and_torch_takes_over(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "exact_kernel.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr(kernel, "SOURCE", broken)
    monkeypatch.setattr(kernel, "load_kernel", functools.cache(kernel.load_kernel.__wrapped__))
    queries, vectors = clustered(5, 20, 1), clustered(500, 20, 2).astype(np.float16)
    for _ in range(2):
        assert_same(exact_search(queries, [(0, vectors)], 10), brute_force(queries, vectors, 10))
    assert [r.message.startswith("exact search runs in torch") for r in caplog.records] == [True]


def test_merge_orders_ties_by_row_and_pads():
    a = Hits(np.array([[3, 2, -np.inf]], np.float32), np.array([[9, 8, -1]]))
    b = Hits(np.array([[3, 2, 2]], np.float32), np.array([[1, 2, 11]]))
    merged = merge_hits([a, b], 6)
    np.testing.assert_array_equal(merged.rows, [[1, 9, 2, 8, 11, -1]])
    np.testing.assert_array_equal(merged.scores, np.array([[3, 3, 2, 2, 2, -np.inf]], np.float32))
    np.testing.assert_array_equal(merge_hits([b, a], 2).rows, [[1, 9]])
    np.testing.assert_array_equal(merge_hits([a], 5).rows, [[9, 8, -1, -1, -1]])
