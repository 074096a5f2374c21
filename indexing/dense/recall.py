"""Recall at k of approximate search: the share of the exact top k rows that it finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def recall_at(found_rows: np.ndarray, exact_rows: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
    """Returns k -> recall@k, the mean share of the exact top k among the first k found; rows int64 [q, >= k]."""
    width = max(ks, default=0)
    found_rows, exact_rows = found_rows[:, :width], exact_rows[:, :width]
    both = np.concatenate((found_rows, exact_rows), axis=1)
    order = np.argsort(both, axis=1, kind="stable")
    ordered = np.take_along_axis(both, order, axis=1)
    # A stable order puts the first column that holds a row at the start of the run of equal rows.
    starts = np.zeros_like(order)
    starts[:, 1:] = np.where(ordered[:, 1:] != ordered[:, :-1], np.arange(1, both.shape[1]), 0)
    np.maximum.accumulate(starts, axis=1, out=starts)
    columns = np.empty_like(order)
    np.put_along_axis(columns, order, np.take_along_axis(order, starts, axis=1), axis=1)
    found_at = columns[:, found_rows.shape[1] :]
    recalls = {}
    for k in ks:
        exists = exact_rows[:, :k] >= 0
        is_found = exists & (found_at[:, :k] < min(k, found_rows.shape[1]))
        counts = exists.sum(axis=1)
        shares = is_found.sum(axis=1)[counts > 0] / counts[counts > 0]
        recalls[k] = float(shares.mean()) if len(shares) else 1.0
    return recalls


def draw_queries(num_vectors: int, count: int, seed: int) -> np.ndarray:
    """Draws rows whose vectors serve as queries when recall is measured without real queries: int64, ascending."""
    return np.sort(np.random.default_rng(seed).choice(num_vectors, min(count, num_vectors), replace=False))
