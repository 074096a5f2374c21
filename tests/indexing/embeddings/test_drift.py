"""Vectors of an encoder are compared with stored ones: their directions and lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.indexing.embeddings.drift import Drift, min_similarity, similarity


@pytest.mark.parametrize(
    ("second", "expected"),
    [((4, 3), 24 / 25), ((6, 8), 0.8), ((-4, 3), 0), ((0, 0), 0), ((3, 4, 0), 0), ((math.nan, 4), math.nan)],
)
def test_a_similarity_is_the_cosine_of_vectors_of_equal_length_and_less_for_others(
    second: tuple[float, ...], expected: float
) -> None:
    first, zero = np.array([3.0, 4.0]), np.zeros(2)
    assert similarity(first, np.array(second)) == pytest.approx(expected, nan_ok=True)
    assert min_similarity([zero, first], [zero, np.array(second)]) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("similarity", "shown", "bound", "is_refused"),
    [
        (1.0, "1.00000", None, False),
        (0.999, "0.99900", None, False),
        (0.99899999, "0.99899", 0.999, False),
        (0.99, "0.99000", 0.999, False),
        (0.98999999, "0.98999", 0.99, True),
        (math.nan, "nan", 0.99, True),
    ],
)
def test_a_drift_is_no_problem_a_warning_or_refused(
    similarity: float, shown: str, bound: float | None, is_refused: bool
) -> None:
    drift = Drift("store/embeddings/e/g0000", similarity, 8, "node-7")
    assert (drift.shown, drift.is_refused, drift.problem is None) == (shown, is_refused, bound is None)
    if bound is not None:
        expected = f"smallest similarity {shown} of 8 passages, expected at least {bound}: use the versions"
        assert (
            f"store/embeddings/e/g0000: the encoder on node-7 gives other vectors than those stored: {expected}"
            in str(drift.problem)
        )
    if is_refused:
        with pytest.raises(InputError, match="other vectors than those stored"):
            drift.refuse()
    else:
        drift.refuse()
