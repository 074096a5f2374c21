"""Alignment and uniformity of vectors (Wang and Isola 2020; used in DPTDR's Table 8 and Topic-DPR's Eq. 8 and 9).

Lower values of both are better. Topic-DPR measures vectors of length 1 (`unit_vectors`), DPTDR raw vectors.
"""

from __future__ import annotations

import math

import numpy as np

_BLOCK = 1_024  # number of rows whose distances to all vectors are in memory at once


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Scales vectors to length 1, float64 [n, dim]; zero vectors are unchanged."""
    exact = vectors.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return exact / np.where(lengths > 0, lengths, 1.0)


def alignment(one: np.ndarray, other: np.ndarray) -> float:
    """Computes the alignment of pairs of vectors: the mean of |x - x+|^2 over rows (Topic-DPR, Eq. 8).

    Args:
        one: float [n, dim].
        other: float [n, dim]; row i is the partner of row i of `one`.
    """
    return float(((one.astype(np.float64) - other.astype(np.float64)) ** 2).sum(axis=1).mean())


def uniformity(vectors: np.ndarray) -> float:
    """Returns the uniformity of vectors, log mean e^(-2 |x - y|^2) over all pairs of different rows (Topic-DPR, Eq. 9).

    The sum is computed in float64 and relative to its largest term, so it does not underflow for distant vectors.

    Args:
        vectors: float [n, dim], at least two rows.
    """
    exact = vectors.astype(np.float64)
    exact -= exact.mean(axis=0)  # keeps the distances, and reduces cancellation in the difference below
    squares = (exact**2).sum(axis=1)
    largest, total = -math.inf, 0.0
    for start in range(0, len(exact) - 1, _BLOCK):
        rows = slice(start, min(start + _BLOCK, len(exact)))
        distances = squares[rows, None] + squares[None, start:] - 2 * (exact[rows] @ exact[start:].T)
        exponents = -2 * np.maximum(distances, 0.0)
        exponents[np.tril_indices(len(exponents), 0, exponents.shape[1])] = -np.inf  # counts each pair once
        block = float(exponents.max())
        if block > largest:
            total, largest = total * math.exp(largest - block), block
        total += float(np.exp(exponents - largest).sum())
    num_pairs = len(exact) * (len(exact) - 1) // 2
    return largest + math.log(total) - math.log(num_pairs)


def mean_cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Computes the mean cosine of corresponding rows of two arrays, float [n, dim] both (Topic-DPR, Table 3)."""
    return float((unit_vectors(one) * unit_vectors(other)).sum(axis=1).mean())
