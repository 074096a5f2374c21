"""Compares probability distributions, for example the mean attention of tasks (HYPER, Fig. 2)."""

from __future__ import annotations

import numpy as np

from riptide.indexing.measures.vectors import unit_vectors


def cosines(distributions: np.ndarray) -> np.ndarray:
    """Computes the cosine of each pair of distributions: float64 [n, n].

    Args:
        distributions: float [n, N], rows of sum 1.
    """
    rows = unit_vectors(distributions)
    return np.clip(rows @ rows.T, -1.0, 1.0)


def divergences(distributions: np.ndarray) -> np.ndarray:
    """Computes the Jensen-Shannon divergence of each pair of distributions: float64 [n, n], 0 to ln 2 nats.

    JS(a, b) = H((a + b) / 2) - (H(a) + H(b)) / 2, where H is the entropy (HYPER, Eq. 4).

    Args:
        distributions: float [n, N], rows of sum 1.
    """
    rows = distributions.astype(np.float64)
    entropy = _entropy(rows)
    of_means = np.stack([_entropy((row + rows) / 2) for row in rows])
    return np.maximum(of_means - (entropy[:, None] + entropy) / 2, 0.0)


def _entropy(rows: np.ndarray) -> np.ndarray:
    """Computes the entropy of each distribution in nats: [..., N] -> [...]."""
    logarithms = np.log(rows, out=np.zeros_like(rows), where=rows > 0)
    entropy: np.ndarray = -(rows * logarithms).sum(-1)
    return entropy
