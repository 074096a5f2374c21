"""The regulariser of mixtures against a slow float64 reference, and its gradient by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from divergence_cases import slow_means
from loss_checks import assert_gradient, random

from riptide.base.errors import InputError
from riptide.retriever.objectives.divergence_term import DivergenceOptions, divergences, mean_divergences, regulariser

TASKS = torch.tensor([0, 0, 1, 2, 1, 0])


def test_it_is_the_equation() -> None:
    weights = torch.softmax(3 * random(6, 4), 1)
    for given in (weights, weights.float()):
        within, between = slow_means(weights.tolist(), TASKS.tolist())
        assert [float(value) for value in mean_divergences(given, TASKS)] == pytest.approx([within, between], rel=2e-6)
        for alignment, uniformity in ((True, True), (True, False), (False, True)):
            options = DivergenceOptions(weight=0.3, alignment=alignment, uniformity=uniformity)
            expected = 0.3 * (alignment * within - uniformity * between)
            assert float(regulariser(given, TASKS, options)) == pytest.approx(expected, rel=1e-5)


def test_its_gradient_is_that_of_finite_differences() -> None:
    options = DivergenceOptions(weight=0.7)
    assert_gradient(lambda scores: regulariser(torch.softmax(scores, 1), TASKS, options), 3 * random(6, 4))


def test_one_task_and_one_query_have_no_pairs() -> None:
    weights = torch.softmax(random(3, 4), 1)
    assert float(mean_divergences(weights, torch.zeros(3, dtype=torch.int64))[1]) == 0
    assert [float(value) for value in mean_divergences(weights[:1], torch.zeros(1, dtype=torch.int64))] == [0, 0]


def test_a_weight_of_zero_has_a_finite_divergence_and_gradient() -> None:
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    matrix = divergences(weights)
    assert matrix[0, 1].item() == pytest.approx(math.log(2))
    matrix.sum().backward()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()


@pytest.mark.parametrize(
    "change", [{"weight": -1.0}, {"weight": float("nan")}, {"alignment": False, "uniformity": False}]
)
def test_values_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"parameter divergence_weight .*: expected"):
        DivergenceOptions(**change)  # type: ignore[arg-type]
