"""K-means gives the same bytes for any threads, engine and interruption, and centroids no worse than those of FAISS."""

from __future__ import annotations

import numpy as np
import pytest

from riptide.indexing.dense import kmeans
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import faiss
from riptide.indexing.dense.faiss_search import search_shard
from riptide.indexing.dense.kmeans import STRIDES, train_centroids
from riptide.indexing.dense.recall import recall_at
from riptide.indexing.exact import exact_search


class Memory:
    """A checkpoint in memory that keeps the centroids of all iterations."""

    def __init__(self) -> None:
        self.saved: list[np.ndarray] = []

    def load(self) -> tuple[int, np.ndarray] | None:
        return (len(self.saved), self.saved[-1]) if self.saved else None

    def save(self, iterations: int, centroids: np.ndarray) -> None:
        self.saved.append(centroids)
        assert iterations == len(self.saved)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    random = np.random.default_rng(0)
    centers = random.standard_normal((150, 48))
    drawn = centers[random.integers(150, size=12_000)] + 0.6 * random.standard_normal((12_000, 48))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float16)


def test_the_bytes_are_the_same_for_any_threads_and_without_the_kernel(vectors: np.ndarray) -> None:
    expected = train_centroids(vectors, 64, seed=0, threads=1)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)
    for threads in (2, 5):
        assert train_centroids(vectors, 64, seed=0, threads=threads).tobytes() == expected.tobytes()
    assert train_centroids(vectors, 64, seed=0, use_kernel=False).tobytes() == expected.tobytes()
    assert train_centroids(vectors, 64, seed=1).tobytes() != expected.tobytes()
    assert train_centroids(vectors.astype(np.float32), 64, seed=0).tobytes() == expected.tobytes()


def test_an_interrupted_training_continues_from_its_last_iteration(vectors: np.ndarray) -> None:
    whole = Memory()
    expected = train_centroids(vectors, 64, seed=0, checkpoint=whole)
    assert len(whole.saved) == len(STRIDES)
    for finished in range(1, len(STRIDES) + 1):
        rest = Memory()
        rest.saved = whole.saved[:finished]
        assert train_centroids(vectors, 64, seed=0, checkpoint=rest).tobytes() == expected.tobytes()
        assert len(rest.saved) == len(STRIDES)


def test_an_iteration_is_that_of_plain_numpy(vectors: np.ndarray) -> None:
    first = kmeans._first_centroids(vectors, 64, 0)
    scores = vectors.astype(np.float64) @ first.T.astype(np.float64)
    means = np.stack([vectors[scores.argmax(axis=1) == number].astype(np.float64).sum(axis=0) for number in range(64)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(kmeans._improve(vectors, first, None, True), means, atol=1e-6)


def test_centroids_without_vectors_take_half_of_the_largest_cluster() -> None:
    sums = np.array([[0.0, 0.0], [30.0, 90.0], [0.0, 0.0], [10.0, 0.0]])
    counts = np.array([0, 100, 0, 9])
    kmeans._split_largest(sums, counts)
    assert counts.tolist() == [25, 50, 25, 9]
    np.testing.assert_allclose(sums[[0, 2]], [[30, 90]] * 2, rtol=3e-3)
    assert len(np.unique(sums, axis=0)) == 4


def test_vectors_of_zeros_do_not_harm(vectors: np.ndarray) -> None:
    mixed = np.concatenate([np.zeros((3_000, 48), np.float16), vectors[:1_000]])
    assert np.isfinite(train_centroids(mixed, 40, seed=0)).all()


def test_recall_is_not_below_that_of_faiss(vectors: np.ndarray) -> None:
    """The same factory and sample, nothing re-scored: differences come from the lists."""
    queries = vectors[::30].astype(np.float32)
    exact = exact_search(queries, [(0, vectors)], 100).rows
    index = faiss.index_factory(48, "IVF128,Flat", faiss.METRIC_INNER_PRODUCT)
    sample = vectors[:8_192]
    index.train(sample.astype(np.float32))
    index.add(vectors.astype(np.float32))
    ours = fill_shard(train_quantizer(sample, "IVF128,Flat", seed=0), [vectors], 0)
    for nprobe in (1, 4, 16):
        theirs = recall_at(search_shard(index, queries, 100, effort=nprobe), exact, [100])[100]
        assert recall_at(search_shard(ours, queries, 100, effort=nprobe), exact, [100])[100] > theirs - 0.005
