"""Spherical k-means: the centroids of inverted lists, by exact assignment, with the same bytes for any threads.

An iteration assigns each vector to the centroid with the largest inner product, and replaces each centroid by the
normalised sum of its vectors. Both steps are exact or in a fixed order (`riptide.indexing.exact.nearest`), so that an
interrupted training continues from the centroids of its last iteration and ends with the bytes of an uninterrupted one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from riptide.indexing.exact.nearest import NearestTargets, sum_by_target

# The share of the sample that each iteration uses: every n-th vector. The first iterations move centroids far, and a
# part of the vectors shows the direction as well as all of them.
STRIDES = (4, 4, 4, 4, 2, 2, 2, 1, 1, 1)
MIN_POINTS = 16  # smallest mean number of vectors per centroid in an iteration
SPLIT = 1 / 1024  # relative difference between the two centroids of a cluster that is split, as in FAISS


class Checkpoint(Protocol):
    """The interface of the store of the centroids of the last iteration."""

    def load(self) -> tuple[int, np.ndarray] | None:
        """Returns the number of finished iterations and their centroids, float32 [k, dim]; None: there are none."""

    def save(self, iterations: int, centroids: np.ndarray) -> None:
        """Saves the centroids, float32 [k, dim], after a number of iterations."""


class NoCheckpoint:
    """A Checkpoint that saves nothing."""

    def load(self) -> None:
        """Returns None."""

    def save(self, iterations: int, centroids: np.ndarray) -> None:
        """Does nothing."""


def train_centroids(
    sample: np.ndarray,
    count: int,
    *,
    seed: int,
    threads: int | None = None,
    checkpoint: Checkpoint | None = None,
    use_kernel: bool = True,
) -> np.ndarray:
    """Returns the centroids of a sample: float32 [count, dim], each of norm 1.

    Args:
        sample: float16 or float32 [n, dim], at least `count` vectors.
        count: Number of centroids.
        seed: Seed of the first centroids, which are vectors of the sample.
        threads: CPU threads; None: all that this process may use. They do not change the result.
        checkpoint: Saves the centroids after each iteration; if it has some, training continues from them.
        use_kernel: Use the compiled kernel if it runs on this machine; otherwise torch.
    """
    checkpoint = checkpoint or NoCheckpoint()
    finished, centroids = checkpoint.load() or (0, _first_centroids(sample, count, seed))
    for iteration, stride in enumerate(strides_of(len(sample), count)[finished:], start=finished + 1):
        vectors = np.ascontiguousarray(sample[::stride])
        centroids = _improve(vectors, centroids, threads, use_kernel)
        checkpoint.save(iteration, centroids)
    return centroids


def strides_of(size: int, count: int) -> list[int]:
    """Returns the stride of each iteration over a sample of `size` vectors for `count` centroids."""
    most = max(1, size // (MIN_POINTS * count))
    return [min(stride, most) for stride in STRIDES]


def _first_centroids(sample: np.ndarray, count: int, seed: int) -> np.ndarray:
    rows = np.sort(np.random.default_rng(seed).choice(len(sample), count, replace=False))
    return _normalise(sample[rows].astype(np.float64))


def _improve(vectors: np.ndarray, centroids: np.ndarray, threads: int | None, use_kernel: bool) -> np.ndarray:
    """Returns the centroids after one iteration."""
    nearest = NearestTargets(centroids, threads=threads, use_kernel=use_kernel).find(vectors)
    sums = sum_by_target(vectors, nearest, len(centroids), threads=threads, use_kernel=use_kernel)
    counts = np.bincount(nearest, minlength=len(centroids))
    # Vectors that cancel each other out have no direction; their centroid stays.
    zero = (counts > 0) & ~sums.any(axis=1)
    sums[zero] = centroids[zero]
    _split_largest(sums, counts)
    return _normalise(sums)


def _split_largest(sums: np.ndarray, counts: np.ndarray) -> None:
    """Gives each centroid without vectors half of the largest cluster; changes sums [k, dim] and counts [k]."""
    sign = np.where(np.arange(sums.shape[1]) % 2, -SPLIT, SPLIT)
    for empty in np.flatnonzero(counts == 0):
        largest = int(counts.argmax())
        sums[empty] = sums[largest] * (1 + sign)
        sums[largest] *= 1 - sign
        counts[empty] = counts[largest] // 2
        counts[largest] -= counts[empty]


def _normalise(vectors: np.ndarray) -> np.ndarray:
    """Returns float64 vectors [n, dim] with norm 1, as float32; a vector of zeros stays."""
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return (vectors / np.where(norms > 0, norms, 1)[:, None]).astype(np.float32)
