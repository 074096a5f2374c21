"""The FLOPS regulariser against a slow float64 reference, its gradient by finite differences, and its ramp."""

from __future__ import annotations

import pytest
import torch
from loss_checks import assert_gradient, random

from riptide.base.errors import InputError
from riptide.retriever.objectives.flops_term import FlopsOptions, flops_loss, mean_words


def slow_flops(vectors: torch.Tensor) -> float:
    """sum over words of (mean over the batch of v_w)^2, word by word."""
    rows = vectors.double().tolist()
    total = 0.0
    for word in range(len(rows[0])):
        mean = 0.0
        for row in rows:
            mean += row[word]
        total += (mean / len(rows)) ** 2
    return total


def test_it_is_the_sum_of_squared_means() -> None:
    vectors = random(7, 23).relu()
    for given in (vectors, vectors.float()):
        assert float(flops_loss(given.sum(0, keepdim=True), 7)) == pytest.approx(slow_flops(given), rel=1e-6)
    assert_gradient(lambda values: flops_loss(values.sum(0, keepdim=True), 7), vectors)


def test_its_weight_rises_quadratically() -> None:
    options = FlopsOptions(queries=1.0, passages=1.0, warm_up=4)
    assert [options.ramp_factor(step) for step in range(6)] == [1 / 16, 4 / 16, 9 / 16, 1.0, 1.0, 1.0]


def test_words_are_counted() -> None:
    assert mean_words(torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])) == 1.0


@pytest.mark.parametrize("change", [{"queries": -1.0}, {"passages": float("nan")}, {"warm_up": 0}])
def test_values_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"parameter flops_\w+ .*: expected at least"):
        FlopsOptions(**{"queries": 0.0, "passages": 0.0, "warm_up": 1, **change})  # type: ignore[arg-type]
