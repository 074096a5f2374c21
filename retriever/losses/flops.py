"""The FLOPS regulariser of sparse vectors (Paria et al. 2020), with the weights and the ramp of SPLADE's training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from retriever.errors import InputError

# Weights for queries and passages in naver/splade's configurations; HYPER's printed 0.3 and 0.1 zero the vectors.
SOFTMAX_WEIGHTS = (3e-4, 1e-4)
MARGIN_MSE_WEIGHTS = (0.5, 0.4)
WARM_UP = 1 / 3  # fraction of the steps: 50,000 of 150,000
MIN_WORDS = 1.0  # mean number of non-zero words, below which vectors find nothing


@dataclass(frozen=True, kw_only=True)
class FlopsOptions:
    """Options of the regulariser.

    Attributes:
        queries: Weight for the vectors of queries.
        passages: Weight for the vectors of passages.
        warm_up: Steps in which both weights rise, by the square of the fraction of these steps.
    """

    queries: float
    passages: float
    warm_up: int

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        weights = (self.queries, self.passages)
        if min(weights) < 0 or not all(map(math.isfinite, weights)) or self.warm_up < 1:
            raise InputError(
                f"flops_queries={self.queries} flops_passages={self.passages} warm_up={self.warm_up}: "
                "expected weights of 0 or more, and at least 1 step"
            )

    def ramp(self, step: int) -> float:
        """Returns the factor of both weights at a step, counted from 0: min(1, t / T)^2, where t counts from 1."""
        return min(1.0, (step + 1) / self.warm_up) ** 2


def flops(total: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the sum over words of (batch mean of v_w)^2, a scalar.

    Args:
        total: The sum of the vectors of a batch, float [1, words].
        count: The number of vectors.
    """
    return (total / count).square().sum()


def mean_words(vectors: torch.Tensor) -> float:
    """Returns the mean number of non-zero words of vectors, float [n, words]."""
    return float((vectors != 0).sum()) / max(1, len(vectors))
