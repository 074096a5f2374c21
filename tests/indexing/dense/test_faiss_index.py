"""FAISS indexes are compared with exact search, masks with what they mask, and files byte for byte."""

import functools
import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from kernels import must_load

from riptide.base.errors import InputError
from riptide.indexing.dense import faiss_filling, faiss_search
from riptide.indexing.dense.factory import choose_factory, is_flat, is_graph, num_lists, training_size
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import (
    check_factory,
    faiss,
    limited_threads,
    read_index,
    row_bytes,
    write_index,
)
from riptide.indexing.dense.faiss_search import Centroids, search_shard
from riptide.indexing.dense.recall import recall_at
from riptide.indexing.exact import OpenPart, exact_search, rescore_candidates
from riptide.process.native import cpu_info

DIM = 64
FACTORIES = [
    "Flat",
    "SQ8",
    "IVF16,Flat",
    "IVF16,SQ8",
    "IVF16,PQ8",
    "IVF16,PQ16x4fs",
    "IVF16,PQ32x4fsr",
    "IVF16,RaBitQ",
    "IVF16,RaBitQfs",
    "IVF16,RaBitQ4",
    "PCA32,IVF16,SQ8",
    "PCA32,IVF16,PQ16x4fs",
    "PCA32,SQ8",
    "RR64,IVF16,RaBitQ",
    "IVF16_HNSW32,RaBitQ",
    "HNSW16",
    "HNSW16,SQ8",
    "PCA32,HNSW16,SQ8",
]


@pytest.fixture(scope="module")
def vectors():
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((30, DIM))
    drawn = centers[rng.integers(30, size=5_000)] + 0.5 * rng.standard_normal((5_000, DIM))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float16)


@pytest.fixture(scope="module")
def queries(vectors):
    noise = 0.05 * np.random.default_rng(1).standard_normal((40, DIM))
    return (vectors[::125].astype(np.float32) + noise).astype(np.float32)


@pytest.fixture(scope="module")
def trained(vectors):
    """trained(factory): a quantizer of all vectors, trained once for all tests, which copy it."""
    return functools.cache(lambda factory: train_quantizer(vectors.astype(np.float32), factory, seed=0))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def filled(trained, parts, threads):
    return faiss.serialize_index(fill_shard(trained, parts, 10**10, threads=threads)).tobytes()


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_shard_has_the_same_bytes_for_any_fill_threads(factory, vectors, monkeypatch):
    """Parts of several blocks; also the bytes of FAISS's own add, block by block, by one thread.

    On some CPUs the sums of FAISS's own add depend on the number of threads.
    """
    monkeypatch.setattr(faiss_filling, "ADD_ROWS", 700)
    trained = train_quantizer(vectors[:1_500].astype(np.float32), factory, seed=3)
    assert trained.ntotal == 0
    assert trained.metric_type == faiss.METRIC_INNER_PRODUCT
    parts = [vectors[:3_000], vectors[3_000:]]
    expected = filled(trained, parts, 1)
    assert all(filled(trained, parts, threads) == expected for threads in (2, 5))
    assert trained.ntotal == 0
    index = faiss.clone_index(trained)
    if "IVF" in factory:
        for start, end in itertools.pairwise([*range(0, 3_000, 700), *range(3_000, 5_000, 700), 5_000]):
            with limited_threads(1):
                index.add_with_ids(vectors[start:end].astype(np.float32), np.arange(start, end) + 10**10)
        assert faiss.serialize_index(index).tobytes() == expected


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_quantizer_has_the_same_bytes_for_any_threads(factory, vectors):
    """Also for any number of threads of the process, which Ray and users set."""
    sample = vectors[:1_500]
    expected = faiss.serialize_index(train_quantizer(sample, factory, seed=3, threads=1)).tobytes()
    before = faiss.omp_get_max_threads()
    try:
        for threads in (1, 2, 3):
            faiss.omp_set_num_threads(threads)
            assert (
                faiss.serialize_index(train_quantizer(sample, factory, seed=3, threads=threads)).tobytes() == expected
            )
    finally:
        faiss.omp_set_num_threads(before)


SCRIPT = """
import hashlib, os, sys
import numpy as np
if sys.argv[1] == "one core":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import faiss
x = np.random.default_rng(0).standard_normal((3_000, 387), dtype=np.float32)
trained = train_quantizer(x, "PCA120,IVF4,SQ8", seed=0)
print(hashlib.sha256(faiss.serialize_index(fill_shard(trained, [x], 0))).hexdigest())
"""


@pytest.mark.skipif("avx2" not in cpu_info()[0], reason="needs AVX2")
def test_the_bytes_do_not_depend_on_cores_and_the_environment():
    """With OpenBLAS's kernels for Haswell, whose sums depend on the number of threads that share a product."""
    cases = [("all", {}), ("one core", {}), ("all", {"OMP_NUM_THREADS": "1"}), ("all", {"OPENBLAS_NUM_THREADS": "1"})]
    digests = set()
    for cores, variables in cases:
        environment = {**os.environ, "OPENBLAS_CORETYPE": "HASWELL", **variables}
        command = [sys.executable, "-c", SCRIPT, cores]
        digests.add(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300).stdout)
    assert len(digests) == 1


def test_training_takes_no_gpu_that_faiss_sees(vectors, monkeypatch):
    sample = vectors.astype(np.float32)
    expected = faiss.serialize_index(train_quantizer(sample, "IVF4,SQ8", seed=0)).tobytes()
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    assert faiss.serialize_index(train_quantizer(sample, "IVF4,SQ8", seed=0)).tobytes() == expected


@pytest.mark.parametrize("factory", ["HNSW16,SQ8", "HNSW32", "IVF16,SQ8", "IVF16,PQ32x4fsr", "PCA32,SQ8", "Flat"])
def test_the_bytes_of_a_row_are_those_of_a_file(factory, trained, vectors):
    sizes = [len(faiss.serialize_index(fill_shard(trained(factory), [vectors[:n]], 0))) for n in (2_000, 5_000)]
    assert (sizes[1] - sizes[0]) / 3_000 == pytest.approx(row_bytes(factory, DIM), rel=0.05)


@pytest.mark.parametrize(("dim", "out"), [(64, 33), (300, 64), (387, 120), (768, 100), (1_024, 256)])
def test_searches_find_the_same_for_any_threads(dim, out):
    """Odd dimensions beyond 320 too, which one thread searches."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((4_097, dim)).astype(np.float32)
    for factory, count in ((f"RR{out},IVF4,Flat", 4_097), ("Flat", 999)):
        index = fill_shard(train_quantizer(vectors[:500], factory, seed=0), [vectors[:count]], 0)
        found = [search_shard(index, vectors, 5, effort=1, threads=threads) for threads in (1, 2, 3)]
        assert all(np.array_equal(rows, found[0]) for rows in found[1:])


def test_the_seed_decides(vectors, tmp_path):
    digests = []
    for seed in (1, 2):
        write_index(train_quantizer(vectors.astype(np.float32), "IVF16,SQ8", seed=seed), tmp_path / "trained")
        digests.append(digest(tmp_path / "trained"))
    assert digests[0] != digests[1]


@pytest.mark.parametrize("factory", FACTORIES)
def test_finds_what_exact_search_finds(factory, trained, vectors, queries, tmp_path):
    """All lists probed and many candidates re-scored: what is missing is what the codes cannot tell apart."""
    first_row = 10**10
    write_index(fill_shard(trained(factory), [vectors], first_row), tmp_path / "shard")
    rows = search_shard(read_index(tmp_path / "shard"), queries, 1_000, effort=16)
    mapped = search_shard(read_index(tmp_path / "shard", mmap=True), queries, 1_000, effort=16)
    np.testing.assert_array_equal(mapped, rows)
    assert rows.shape == (40, 1_000)
    assert rows.dtype == np.int64
    assert rows.min() >= first_row
    rescored = rescore_candidates(queries, rows, [(first_row, vectors)], 100)
    exact = exact_search(queries, [(first_row, vectors)], 100)
    assert recall_at(rescored.rows, exact.rows, [100])[100] > 0.98
    if factory == "Flat":
        np.testing.assert_array_equal(rescored.rows, exact.rows)
        assert rescored.scores.tobytes() == exact.scores.tobytes()


@pytest.mark.parametrize("factory", FACTORIES)
def test_deleted_rows_are_skipped_and_replaced(factory, trained, vectors, queries):
    """Masking happens inside of the search: the depth asked for is filled with live rows."""
    index = fill_shard(trained(factory), [vectors], 1_000)
    deleted = np.setdiff1d(np.arange(1_000, 6_000), np.arange(1_000, 6_000, 3))
    around = np.concatenate([[3], deleted, [10**9]])
    effort = 2_000 if is_graph(factory) else 16  # a graph search counts excluded rows too
    rows = search_shard(index, queries, 500, effort=effort, deleted=around)
    assert (rows >= 0).all()
    assert not np.isin(rows, deleted).any()
    exact = exact_search(queries, [(1_000, vectors)], 50, deleted=deleted)
    assert recall_at(rescore_candidates(queries, rows, [(1_000, vectors)], 50).rows, exact.rows, [50])[50] > 0.98


@pytest.mark.parametrize("factory", [each for each in FACTORIES if "IVF" in each])
def test_lists_are_found_once_for_all_shards_with_the_candidates_of_faiss(
    factory, trained, vectors, queries, monkeypatch
):
    shards = [
        fill_shard(trained(factory), [vectors[:2_000]], 0),
        fill_shard(trained(factory), [vectors[2_000:]], 2_000),
    ]
    expected = []
    for shard in shards:
        faiss.extract_index_ivf(shard).nprobe = 3
        expected.append(shard.search(queries, 50)[1])
    searched = []
    original = Centroids.search

    def search(*arguments):
        searched.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(Centroids, "search", search)
    query_lists = Centroids().query_lists()
    for shard, rows in zip(shards, expected, strict=True):
        np.testing.assert_array_equal(search_shard(shard, queries, 50, effort=3, query_lists=query_lists), rows)
    assert len(searched) == 1


@pytest.mark.skipif(not must_load(), reason="kernels run on Linux")
def test_centroids_are_converted_once_for_the_exact_kernel(trained, queries, monkeypatch):
    converted = []

    def convert(vectors, first_row):
        converted.append(vectors)
        return OpenPart(vectors, first_row)

    monkeypatch.setattr(faiss_search, "OpenPart", convert)
    quantizer = faiss.extract_index_ivf(trained("IVF16,SQ8")).quantizer
    centroids = Centroids()
    for block in (queries[:1], queries):
        scores, lists = quantizer.search(block, 5)
        found = centroids.search(quantizer, block, 5, 1)
        np.testing.assert_array_equal(found[1], lists)
        np.testing.assert_allclose(found[0], scores, rtol=1e-5)
    assert len(converted) == 1


@pytest.mark.parametrize("factory", ["Flat", "IVF4,RaBitQ"])
def test_depth_beyond_the_shard(factory, vectors, queries):
    index = fill_shard(train_quantizer(vectors[:10].astype(np.float32), factory, seed=0), [vectors[:10]], 5)
    rows = search_shard(index, queries, 30, effort=100)
    np.testing.assert_array_equal(np.sort(rows[:, :10]), np.tile(np.arange(5, 15), (40, 1)))
    assert (rows[:, 10:] == -1).all()
    assert (search_shard(index, queries, 30, effort=100, deleted=np.arange(5, 15)) == -1).all()


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("Nope", "could not parse"),
        ("", "could not parse"),
        ("IVF16", "could not parse"),
        ("IVF16,PQ15", "multiple of the number of subquantizers"),
        ("IVF0,Flat", "lists"),
        ("IVF99999999999,Flat", "lists"),
        ("HNSW32,PQ16", "not supported"),
        ("NSG32", "not supported"),
        ("IVF16(SQ8),Flat", "not supported"),
        ("IVF16_NSG8,Flat", "not supported"),
        ("IVF16(PCA8,HNSW8),Flat", "not supported"),
        ("IDMap,Flat", "not supported"),
        ("IVF16,PQ16,RFlat", "not supported"),
        ("PQ16", "not supported"),
        ("L2norm,IVF8,Flat", "not supported"),
    ],
)
def test_bad_factories_are_refused_in_one_line(factory, reason):
    with pytest.raises(InputError, match=reason) as error:
        check_factory(factory, DIM)
    assert "\n" not in str(error.value)
    assert repr(factory) in str(error.value)


def test_a_graph_of_float32_vectors_needs_no_training(vectors, queries):
    graph = fill_shard(train_quantizer(vectors[:0].astype(np.float32), "HNSW16", seed=0), [vectors], 0)
    rows = search_shard(graph, queries, 50, effort=200)
    assert recall_at(rows, exact_search(queries, [(0, vectors)], 50).rows, [50])[50] > 0.98


def test_too_few_vectors_to_train(vectors):
    with pytest.raises(InputError, match="needs 1024 vectors or more to train on, found 500: take Flat, IVF12"):
        train_quantizer(vectors[:500].astype(np.float32), "IVF1024,Flat", seed=0)
    with pytest.raises(InputError, match="needs 256 vectors"):
        train_quantizer(vectors[:100].astype(np.float32), "IVF16,PQ16", seed=0)


def test_bad_arrays_are_refused(vectors, queries, tmp_path):
    flat = train_quantizer(vectors.astype(np.float32), "Flat", seed=0)
    bad = vectors.copy()
    bad[7, 7] = np.inf
    with pytest.raises(InputError, match="NaN or Inf"):
        fill_shard(flat, [bad], 0)
    with pytest.raises(InputError, match="NaN or Inf"):
        train_quantizer(bad.astype(np.float32), "IVF16,Flat", seed=0)
    with pytest.raises(InputError, match=r"expected \[n, 64\]"):
        fill_shard(flat, [vectors[:, :5]], 0)
    with pytest.raises(InputError, match=r"expected \[q, 64\]"):
        search_shard(flat, queries[:, :5], 10, effort=1)
    with pytest.raises(InputError, match="effort is 0"):
        search_shard(flat, queries, 10, effort=0)
    (tmp_path / "text").write_text("no index")
    for name in ("text", "missing"):
        with pytest.raises(InputError, match="not a FAISS index"):
            read_index(tmp_path / name)


@pytest.mark.parametrize("dim", [1, 5, 33, 384, 768, 4096])
@pytest.mark.parametrize("recall", [0.8, 0.95, 0.999])
@pytest.mark.parametrize("num_vectors", [1, 10, 10**4, 10**5, 10**6, 2 * 10**7, 10**9])
def test_every_choice_can_be_made(num_vectors, recall, dim):
    factory = choose_factory(num_vectors, dim, recall)
    check_factory(factory, dim)
    assert training_size(factory, num_vectors) <= num_vectors


def test_only_an_index_without_lists_codes_and_transforms_is_flat() -> None:
    assert is_flat("Flat")
    assert [num_lists(factory) for factory in ("IVF64,Flat", "IVF2k_HNSW32,SQ8", "IVF1M,PQ8", "SQ8")] == [
        64,
        2048,
        1 << 20,
        0,
    ]
    assert not any(map(is_flat, ("IVF64,Flat", "PCA64,Flat", "SQ8")))


def test_choices_follow_size_and_memory():
    assert choose_factory(1_000, 384, 0.95) == "Flat"
    assert choose_factory(400_000, 384, 0.95).startswith("IVF2048,")
    sizes = []
    for memory in (None, 2 * 10**9, 10**9, 5 * 10**8):
        factory = choose_factory(21_000_000, 384, 0.95, memory)
        check_factory(factory, 384)
        sizes.append(factory.removeprefix("IVF16384,"))
    assert sizes == ["PQ192x4fsr", "PQ96x4fs", "PQ48x4fs", "PQ24x4fs"]
    assert choose_factory(400_000, 384, 0.999) == "IVF2048,SQ8"
    assert choose_factory(400_000, 383, 0.95) == "IVF2048,RaBitQ"
    with pytest.raises(InputError, match="fits 1000000 bytes"):
        choose_factory(21_000_000, 384, 0.95, 10**6)
    assert [choose_factory(21_000_000, 384, 0.95, 8 * 10**8, shards) for shards in (1, 8)] == [
        "IVF16384,PQ48x4fs",
        "IVF16384,PQ24x4fs",
    ]
    with pytest.raises(InputError, match="cannot choose"):
        choose_factory(0, 384, 0.95)


def test_recall_counts_what_exists():
    found = np.array([[1, 2, 3, -1], [9, 8, 7, 6]])
    exact = np.array([[2, 1, 5, -1], [1, 2, -1, -1]])
    assert recall_at(found, exact, [2, 4]) == {2: pytest.approx(0.5), 4: pytest.approx((2 / 3 + 0) / 2)}
    random = np.random.default_rng(0)
    for _ in range(200):  # rows that repeat, rows that do not exist, and fewer columns than k
        found, exact = (random.integers(-1, 8, (5, width)) for width in random.integers(0, 7, 2))
        for k, recall in recall_at(found, exact, [1, 3, 9]).items():
            pairs = [
                ([row for row in truth[:k] if row >= 0], hits[:k]) for truth, hits in zip(exact, found, strict=True)
            ]
            shares = [sum(row in hits for row in truth) / len(truth) for truth, hits in pairs if truth]
            assert recall == pytest.approx(sum(shares) / len(shares) if shares else 1.0)
