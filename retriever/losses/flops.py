"""The FLOPS regulariser of sparse vectors (Paria et al. 2020), with the weights and the ramp of SPLADE's training."""

from __future__ import annotations

import torch

MIN_WORDS = 1.0  # mean number of non-zero words, below which vectors find nothing


def flops_loss(vector_sum: torch.Tensor, num_vectors: int) -> torch.Tensor:
    """Returns the sum over words of (batch mean of v_w)^2, a scalar.

    Args:
        vector_sum: The sum of the vectors of a batch, float [1, words].
        num_vectors: The number of vectors.
    """
    return (vector_sum / num_vectors).square().sum()


def mean_words(vectors: torch.Tensor) -> float:
    """Returns the mean number of non-zero words of vectors, float [n, words]."""
    return float((vectors != 0).sum()) / max(1, len(vectors))
