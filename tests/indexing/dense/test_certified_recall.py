"""Recall of approximate search: per query, and the confidence interval of its mean."""

from __future__ import annotations

import numpy as np
import pytest

from riptide.indexing.dense.certified_recall import mean_interval, recall_of_hits, selectivity_class
from riptide.indexing.exact import Hits


def recalls_of_window(kind: str, generator: np.random.Generator) -> np.ndarray:
    """Returns the recalls of 1,000 queries: of ten dependent hits, which drift, or of hits that are lost together."""
    if kind == "all or nothing":
        return (generator.random(1_000) > 0.02).astype(float)
    if kind == "drift":
        shares = np.linspace(0.9, 0.995, 1_000)
        return generator.binomial(10, generator.beta(8 * shares, 8 * (1 - shares))) / 10
    return generator.beta(0.5, 0.5, 1_000)  # far from 1


@pytest.mark.parametrize("kind", ["all or nothing", "drift", "far from 1"])
@pytest.mark.parametrize("sample", [3, 30, 300])
def test_the_interval_covers_the_mean_of_the_window_in_95_percent(kind: str, sample: int) -> None:
    generator = np.random.default_rng(7)
    widths, covered = [], 0
    for _ in range(60):
        window = recalls_of_window(kind, generator)
        mean, lower, upper = mean_interval(generator.choice(window, sample, replace=False))
        assert 0 <= lower <= mean <= upper <= 1
        covered += lower <= window.mean() <= upper
        widths.append(upper - lower)
    assert covered >= 57
    assert np.mean(widths) < {3: 1.0, 30: 0.45, 300: 0.14}[sample]


def test_an_interval_narrows_with_the_sample_and_grows_with_the_confidence() -> None:
    assert [round(mean_interval(np.ones(n)).lower, 2) for n in (1, 20, 500)] == [0.01, 0.76, 0.99]
    assert mean_interval(np.ones(20)).upper == 1.0
    assert mean_interval(np.zeros(20))[:2] == (0.0, 0.0)
    values = np.linspace(0.5, 1, 50)
    assert mean_interval(values, 0.99).lower < mean_interval(values, 0.9).lower


def test_recall_counts_hits_with_the_score_of_the_last_exact_hit() -> None:
    exact = Hits(
        np.array([[3, 2, 1], [3, 2, -np.inf], [-np.inf] * 3, [3, 2, 2]], np.float32),
        np.array([[7, 8, 9], [1, 2, -1], [-1, -1, -1], [1, 2, 3]]),
    )
    approximate = Hits(
        np.array([[3, 1, 0.5], [2, -np.inf, -np.inf], [-np.inf] * 3, [3, 2, 2]], np.float32),
        np.array([[7, 9, 4], [2, -1, -1], [-1, -1, -1], [1, 5, 6]]),
    )
    np.testing.assert_allclose(recall_of_hits(approximate, exact), [2 / 3, 1 / 2, np.nan, 1])


def test_classes_of_filters() -> None:
    shares = (None, 1.0, 0.1001, 0.1, 0.01, 0.0099, 0.0)
    assert [selectivity_class(share) for share in shares] == ["none", *[">10%"] * 2, *["1-10%"] * 2, *["<1%"] * 2]
