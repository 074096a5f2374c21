"""The regulariser of the weights of basic prompts (HYPER, Eq. 4): a Jensen-Shannon divergence over pairs of queries."""

from __future__ import annotations

import torch

from riptide.retriever.options.synthesis import DivergenceOptions

_TINY = 1e-30  # a weight of 0 has the logarithm of this: 0 times it is 0, and its gradient is finite


def divergences(weights: torch.Tensor) -> torch.Tensor:
    """Returns the Jensen-Shannon divergence of each pair of distributions, in nats: between 0 and ln 2.

    JS(a, b) = H((a + b) / 2) - (H(a) + H(b)) / 2, where H is the entropy.

    Args:
        weights: float [n, N], rows of sum 1.

    Returns:
        float [n, n], symmetric, 0 on the diagonal.
    """
    entropy = _entropy(weights)
    return _entropy((weights[:, None] + weights[None]) / 2) - (entropy[:, None] + entropy[None]) / 2


def mean_divergences(weights: torch.Tensor, tasks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean divergence over pairs of two queries of one task, and over pairs of different tasks.

    Args:
        weights: float [n, N], rows of sum 1.
        tasks: The task of each query, int64 [n].

    Returns:
        Two scalars; 0 if a batch has no such pair.
    """
    divergence = divergences(weights)
    same = tasks[:, None] == tasks[None]
    pairs = (same & ~torch.eye(len(tasks), dtype=torch.bool, device=same.device), ~same)
    within, between = ((divergence * chosen).sum() / chosen.sum().clamp(min=1) for chosen in pairs)
    return within, between


def regulariser(weights: torch.Tensor, tasks: torch.Tensor, options: DivergenceOptions) -> torch.Tensor:
    """Returns the weighted regulariser, a scalar: the mean over pairs of one task minus that over pairs of two tasks.

    The paper sums over ordered pairs, so that the weight would grow with the batch; here each of both terms is the mean
    over its pairs, without the pairs of a query with itself, whose divergence is 0.

    Args:
        weights: float [n, N], rows of sum 1.
        tasks: The task of each query, int64 [n].
        options: The weight, and which of the terms count.
    """
    within, between = mean_divergences(weights, tasks)
    return options.weight * (options.alignment * within - options.uniformity * between)


def _entropy(weights: torch.Tensor) -> torch.Tensor:
    """Returns the entropy of distributions in nats: [..., N] -> [...]."""
    return -(weights * weights.clamp(min=_TINY).log()).sum(-1)
