"""Computes the sparsity of query and passage vectors, and the FLOPS of a search with them (SPLADE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from riptide.retriever.encoding.sparse_vectors import SparseVectors


def sparsity_figures(queries: Sequence[SparseVectors], passages: Sequence[SparseVectors]) -> dict[str, float]:
    """Returns the sparsity statistics by name.

    "words of queries" and "words of passages" are the mean numbers of non-zero words. "FLOPS" is the mean number of
    non-zero products of a query and a passage. "regularised, SIDE" is the sum over words of the squared mean weight,
    which the FLOPS regulariser weighs.

    Args:
        queries: The vectors of the queries, in parts.
        passages: The vectors of the passages, in parts.
    """
    figures: dict[str, float] = {}
    shares: dict[str, np.ndarray] = {}
    for side, parts in (("queries", queries), ("passages", passages)):
        total, width = sum(map(len, parts)), parts[0].width
        counts, weights = np.zeros(width), np.zeros(width)
        for part in parts:
            counts += np.bincount(part.indices, minlength=width)
            weights += np.bincount(part.indices, part.values, width)
        shares[side] = counts / total
        figures[f"words of {side}"] = float(shares[side].sum())
        figures[f"regularised, {side}"] = float(np.square(weights / total).sum())
    return figures | {"FLOPS": float(shares["queries"] @ shares["passages"])}
