"""Alignment and uniformity: worked out by hand, and against slow loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from riptide.indexing.measures import vectors
from riptide.indexing.measures.vectors import alignment, mean_cosine, uniformity, unit_vectors


def test_values_worked_out_by_hand() -> None:
    """Of (0,0), (1,0), (0,2): squared distances 1, 4 and 5."""
    points = np.array([[0, 0], [1, 0], [0, 2]], np.float16)
    assert alignment(points, points[::-1].copy()) == pytest.approx((4 + 0 + 4) / 3)
    assert uniformity(points) == pytest.approx(np.log((np.exp(-2) + np.exp(-8) + np.exp(-10)) / 3))
    assert uniformity(points.astype(np.float64) * 100) == pytest.approx(-20_000 - np.log(3))  # no underflow
    assert unit_vectors(points).tolist() == [[0, 0], [1, 0], [0, 1]]
    assert mean_cosine(np.array([[2, 0], [1, 1]]), np.array([[3, 0], [-1, -1]])) == pytest.approx(0)


@pytest.mark.parametrize("count", [2, 3, 8, 9, 30])
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_uniformity_is_that_of_a_slow_loop(monkeypatch: pytest.MonkeyPatch, count: int, scale: float) -> None:
    """Over several blocks, with a common offset and two equal rows."""
    monkeypatch.setattr(vectors, "_BLOCK", 4)
    rows = np.random.default_rng(count).normal(5, scale, (count, 6)).astype(np.float32)
    rows[-1] = rows[0]
    distances = [
        math.fsum((float(a) - float(b)) ** 2 for a, b in zip(rows[i], rows[j], strict=True))
        for i in range(count)
        for j in range(i + 1, count)
    ]
    expected = math.log(math.fsum(math.exp(-2 * distance) for distance in distances) / len(distances))
    assert uniformity(rows) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_alignment_is_that_of_a_slow_loop() -> None:
    one, other = np.random.default_rng(0).normal(size=(2, 20, 5)).astype(np.float16)
    expected = math.fsum(
        math.fsum((float(a) - float(b)) ** 2 for a, b in zip(x, y, strict=True))
        for x, y in zip(one, other, strict=True)
    )
    assert alignment(one, other) == pytest.approx(expected / 20, rel=1e-12)
    cosine = mean_cosine(one, other)
    assert alignment(unit_vectors(one), unit_vectors(other)) == pytest.approx(2 - 2 * cosine)
