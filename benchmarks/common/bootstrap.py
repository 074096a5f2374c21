"""95% intervals of means over queries, by a bootstrap: the queries are drawn again, with replacement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS_OVER_SETS = 10_000


def interval(values: np.ndarray, draws: int = 2_000) -> list[float]:
    """Returns the mean over queries and the ends of its 95% interval.

    Args:
        values: float64 [queries].
        draws: Number of bootstrap samples.
    """
    random = np.random.default_rng(0)
    means = [values[random.integers(0, len(values), len(values))].mean() for _ in range(draws)]
    return [float(values.mean()), *map(float, np.percentile(means, [2.5, 97.5]))]


def interval_over_sets(values_by_set: Sequence[np.ndarray], seed: int = 0) -> dict[str, float]:
    """Returns the mean over sets of the mean over queries, with the ends of its 95% interval: mean, low, high.

    Queries are drawn within each set.

    Args:
        values_by_set: For each set, a value of each query, for example a difference: float64 [queries].
        seed: Seed of the draws.
    """
    random = np.random.default_rng(seed)
    means = np.zeros(DRAWS_OVER_SETS)
    for values in values_by_set:
        uniform = np.full(len(values), 1 / len(values))
        counts = random.multinomial(len(values), uniform, size=DRAWS_OVER_SETS)
        means += counts @ values / len(values) / len(values_by_set)
    low, high = np.percentile(means, [2.5, 97.5])
    mean = float(np.mean([values.mean() for values in values_by_set]))
    return {"mean": mean, "low": float(low), "high": float(high)}
