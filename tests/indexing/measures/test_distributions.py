"""Similarities of distributions: against loops over single numbers, and against the training's regulariser."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from riptide.indexing.measures.distributions import cosines, divergences
from riptide.retriever.objectives.divergence_term import divergences as divergences_of_training

ROWS = np.random.default_rng(0).dirichlet(np.ones(5), 4)
ROWS[3] = [0, 0.5, 0.5, 0, 0]  # zeros: 0 log 0 is 0


def plain_cosine(a: np.ndarray, b: np.ndarray) -> float:
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def plain_divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Returns KL(a, m) / 2 + KL(b, m) / 2 with m the mean, which is the definition."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += sum(p / 2 * math.log(2 * p / (x + y)) for p in (x, y) if p > 0)
    return total


def test_similarities_equal_plain_loops() -> None:
    pairs = [(a, b) for a in ROWS for b in ROWS]
    np.testing.assert_allclose(cosines(ROWS).ravel(), [plain_cosine(a, b) for a, b in pairs], atol=1e-12)
    expected = [plain_divergence(a, b) for a, b in pairs]
    np.testing.assert_allclose(divergences(ROWS).ravel(), expected, atol=1e-12)
    np.testing.assert_allclose(divergences_of_training(torch.from_numpy(ROWS)).ravel(), expected, atol=1e-6)


def test_distributions_without_a_common_word_have_the_largest_divergence() -> None:
    rows = np.eye(2)
    assert divergences(rows)[0, 1] == pytest.approx(math.log(2))
    assert cosines(rows)[0, 1] == 0
