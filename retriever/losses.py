"""Losses over the vectors of a whole batch; pure functions."""

from __future__ import annotations

import torch


def contrastive_loss(
    queries: torch.Tensor,
    passages: torch.Tensor,
    positives: torch.Tensor,
    temperature: float = 1.0,
    ignored: torch.Tensor | None = None,
) -> torch.Tensor:
    """DPTDR, Eq. 3: the mean over queries of -log(e^s(q,p+) / (e^s(q,p+) + sum_j e^s(q,p-_j))), s = q.p / temperature.

    queries float32 [m, d], passages float32 [p, d]; positives int64 [m]: the passage that answers each; every other one
    is a negative, but for ignored bool [m, p] (those that answer the query as well). A scalar.
    """
    scores = queries @ passages.T / temperature
    if ignored is not None:
        scores = scores.masked_fill(ignored, float("-inf"))
    return torch.nn.functional.cross_entropy(scores, positives)
