"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) as in T5X, for models that were trained with it (T5, GTR).

transformers' and torch's optimizers of this name are not T5X's. Neither has its minimum size of a factored matrix, and
both factor the last two dimensions, regardless of size. torch's also caps the learning rate at 1 / sqrt(t), always
multiplies it by the parameter's RMS, and adds no epsilon to the squares. With matrices of at least 128 x 128, a given
learning rate and no weight decay, transformers' computes the same as this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

# The defaults of Algorithm 6 of the paper, which T5X uses too.
DECAY = 0.8  # In step t, second moments decay by 1 - t^-DECAY.
EPSILON_SQUARES, EPSILON_SCALE = 1e-30, 1e-3
CLIP = 1.0  # maximum RMS of an update
FACTORED_SIZE = 128  # T5X does not factor matrices with fewer rows or columns.


def factored_dimensions(shape: Sequence[int]) -> tuple[int, int] | None:
    """Returns the second largest and the largest dimension of a factored tensor; None if it is not factored."""
    if len(shape) < 2:
        return None
    smaller, larger = sorted(range(len(shape)), key=shape.__getitem__)[-2:]
    return (smaller, larger) if shape[smaller] >= FACTORED_SIZE else None


def moment_shapes(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the second moments of a parameter.

    A factored one has a moment per row and one per column: the means over the largest and over the second largest
    dimension, which are kept with size 1.
    """
    dimensions = factored_dimensions(shape)
    if dimensions is None:
        return {"exp_avg_sq": tuple(shape)}
    smaller, larger = dimensions
    return {
        "exp_avg_sq_row": tuple(1 if place == larger else size for place, size in enumerate(shape)),
        "exp_avg_sq_col": tuple(1 if place == smaller else size for place, size in enumerate(shape)),
    }


class Adafactor(torch.optim.Optimizer):
    """The optimizer Adafactor with an explicit learning rate and without momentum.

    With the gradient G of step t, from 1 on, and b = 1 - t^-0.8 (Algorithms 4 and 5 of the paper):

        R = b R + (1 - b) mean(G^2 + 1e-30, over columns);  C: the same over rows;  V = R C / mean(R)
        U = G / sqrt(V);  U = U / max(1, RMS(U))
        X = (1 - lr weight_decay) X - lr max(1e-3, RMS(X)) U

    V is not factored for vectors and small matrices. T5X can decay weights too, by (lr weight_decay) if its
    weight_decay_rate_lr_exponent is 1; it does not by default.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        weight_decay: Weight decay, which is multiplied by the learning rate, as in AdamW.
        parameter_scale: Multiply the update by the parameter's RMS (T5X: multiply_by_parameter_scale).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.0,
        parameter_scale: bool = True,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "parameter_scale": parameter_scale})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient, state = parameter.grad, self.state[parameter]
        if not state:
            state["step"] = 0
            for name, shape in moment_shapes(parameter.shape).items():
                state[name] = gradient.new_zeros(shape)
        state["step"] += 1
        mixing = state["step"] ** -DECAY
        squares = gradient.square().add_(EPSILON_SQUARES)
        dimensions = factored_dimensions(parameter.shape)
        if dimensions is None:
            update = state["exp_avg_sq"].lerp_(squares, mixing).rsqrt().mul_(gradient)
        else:
            smaller, larger = dimensions
            rows = state["exp_avg_sq_row"].lerp_(squares.mean(larger, keepdim=True), mixing)
            columns = state["exp_avg_sq_col"].lerp_(squares.mean(smaller, keepdim=True), mixing)
            update = gradient * (rows / rows.mean(smaller, keepdim=True)).rsqrt_() * columns.rsqrt()
        update.div_((_rms(update) / CLIP).clamp_(min=1.0))
        if group["parameter_scale"]:
            update.mul_(_rms(parameter).clamp_(min=EPSILON_SCALE))
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor)
    return norm / tensor.numel() ** 0.5
