"""Recall at k of approximate search: the share of the exact top k rows that it finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def recall_at(found_rows: np.ndarray, exact_rows: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
    """Returns k -> recall@k, the mean share of the exact top k among the first k found; rows int64 [q, >= k]."""
    recalls = {}
    for k in ks:
        shares = []
        for found, exact in zip(found_rows[:, :k], exact_rows[:, :k], strict=True):
            expected = exact[exact >= 0]
            if len(expected):
                shares.append(np.isin(expected, found).mean())
        recalls[k] = float(np.mean(shares)) if shares else 1.0
    return recalls


def draw_queries(num_vectors: int, count: int, seed: int) -> np.ndarray:
    """Draws rows whose vectors serve as queries when recall is measured without real queries: int64, ascending."""
    return np.sort(np.random.default_rng(seed).choice(num_vectors, min(count, num_vectors), replace=False))
