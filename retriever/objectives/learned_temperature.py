"""A temperature that is trained with the model, as in CLIP."""

from __future__ import annotations

import math

import torch
from torch import nn

from riptide.retriever.objectives.pair_losses import MAX_SCALE


class LearnedTemperature(nn.Module):
    """The trained temperature T, stored as the parameter log(1 / T); similarities are multiplied by 1 / T, at most 100.

    The module returns the square root of 1 / T. The vectors of both sides are multiplied by it, so that each
    similarity is multiplied by 1 / T, and the gradient reaches the parameter through the vectors: it is summed over
    chunks and workers as that of any other weight.

    Args:
        temperature: The temperature before the first step, at least 0.01.
    """

    def __init__(self, temperature: float):
        super().__init__()
        # The shape is [1] because DeepSpeed cannot broadcast tensors without dimensions.
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)], dtype=torch.float32))

    def forward(self) -> torch.Tensor:
        """Returns the square root of 1 / T, float32 [1], with a gradient to the parameter."""
        with torch.no_grad():  # A step may exceed the limit; the parameter is clamped before it is used.
            self.log_scale.clamp_(max=math.log(MAX_SCALE))
        return (self.log_scale / 2).exp()

    @torch.no_grad()
    def value(self) -> float:
        """Returns the temperature T."""
        return float(self().double() ** -2)
