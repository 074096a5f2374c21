"""Random vectors, and gradients of losses compared with finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

Loss = Callable[[torch.Tensor], torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_sum_exp(values: list[float]) -> float:
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))


def gradient_of(loss: Loss, values: torch.Tensor) -> torch.Tensor:
    """Returns the gradient that the loss propagates to its argument."""
    leaf = values.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


def finite_differences(loss: Loss, values: torch.Tensor, width: float = 1e-5) -> torch.Tensor:
    """Returns the central differences of the loss by each number of its argument, float64."""
    result = torch.empty_like(values)
    for place in np.ndindex(*values.shape):
        above, below = values.clone(), values.clone()
        above[place] += width
        below[place] -= width
        result[place] = (loss(above) - loss(below)) / (2 * width)
    return result


def assert_gradient(loss: Loss, values: torch.Tensor) -> None:
    gradient = gradient_of(loss, values)
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient, finite_differences(loss, values), atol=1e-8, rtol=1e-5)


def assert_gradients(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], queries: torch.Tensor, passages: torch.Tensor
) -> None:
    """Asserts the gradient of a loss by its queries and by its passages."""
    assert_gradient(lambda values: loss(values, passages), queries)
    assert_gradient(lambda values: loss(queries, values), passages)
