"""Losses over the vectors of a whole batch: pure functions, and their registry.

contrastive    contrastive losses, of one side and symmetric
distillation   losses that follow the scores of a teacher
category       losses with categories or topics of passages
temperature    the temperature, fixed or learned
flops          the FLOPS regulariser of sparse vectors
divergence     the regulariser of computed prompts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from riptide.retriever.losses.category import category_loss, category_overlap, topic_loss, weighted_positives_loss
from riptide.retriever.losses.contrastive import (
    both_directions_loss,
    contrastive_loss,
    own_passages_loss,
    symmetric_loss,
)
from riptide.retriever.losses.distillation import kl_loss, margin_mse_loss, teacher_logits
from riptide.retriever.losses.temperature import LearnedTemperature
from riptide.retriever.options.losses import Loss
from riptide.retriever.options.tuning import NegativesFrom

__all__ = [
    "CONTRASTIVE",
    "DISTILLATION",
    "BatchLabels",
    "LearnedTemperature",
    "batch_loss",
    "category_loss",
    "category_overlap",
    "contrastive_loss",
    "kl_loss",
    "margin_mse_loss",
    "own_passages_loss",
    "symmetric_loss",
    "teacher_logits",
    "topic_loss",
    "weighted_positives_loss",
]


CONTRASTIVE: dict[str, Callable[..., torch.Tensor]] = {
    "contrastive": contrastive_loss,
    "symmetric": symmetric_loss,
    "symmetric-sum": both_directions_loss,
}
"""Losses over the positives of queries: arguments of `contrastive_loss`."""
DISTILLATION: dict[str, Callable[..., torch.Tensor]] = {"kl": kl_loss, "margin-mse": margin_mse_loss}
"""Losses over the scores of a teacher: arguments of `kl_loss`."""


class BatchLabels(NamedTuple):
    """Which passages of a batch answer a query, and what a teacher says about them.

    Attributes:
        positives: The passage that answers each query, int64 [m].
        ignored: Passages that also answer a query: bool [m, p].
        groups: The passages that were drawn for each query, the positive first: int64 [m, g]; None if no loss needs
            them.
        teacher: The teacher's logits of these, NaN for passages without one: float32 [m, g]; None without a teacher.
    """

    positives: torch.Tensor
    ignored: torch.Tensor
    groups: torch.Tensor | None = None
    teacher: torch.Tensor | None = None

    def to(self, device: torch.device) -> BatchLabels:
        """Returns the labels on a device."""
        optional = (self.groups, self.teacher)
        moved = (None if each is None else each.to(device) for each in optional)
        return BatchLabels(self.positives.to(device), self.ignored.to(device), *moved)


def batch_loss(
    loss: Loss,
    queries: torch.Tensor,
    passages: torch.Tensor,
    labels: BatchLabels,
    temperature: float = 1.0,
    contrastive_weight: float = 0.0,
    negatives_from: NegativesFrom = "batch",
) -> torch.Tensor:
    """Returns a loss of a batch by its name.

    Args:
        loss: The name of the loss, in CONTRASTIVE or DISTILLATION.
        queries: float32 [m, d].
        passages: float32 [p, d].
        labels: The labels of the batch; distillation losses need the teacher's.
        temperature: Similarities are divided by it.
        contrastive_weight: A distillation loss is increased by this times the contrastive loss.
        negatives_from: "batch": the contrastive loss is `contrastive_loss`, over all passages; "own": it is
            `own_passages_loss`, over the passages that were drawn for a query, which needs the groups of the labels.

    Returns:
        The loss, a scalar.
    """

    def contrast(name: str) -> torch.Tensor:
        if negatives_from == "batch":
            return CONTRASTIVE[name](queries, passages, labels.positives, temperature, labels.ignored)
        assert labels.groups is not None, "own negatives need the groups of the labels"
        return own_passages_loss(queries, passages, labels.groups, temperature, labels.ignored)

    if loss in CONTRASTIVE:
        return contrast(loss)
    assert labels.groups is not None, "a distillation loss needs the labels of a teacher"
    assert labels.teacher is not None, "a distillation loss needs the labels of a teacher"
    total = DISTILLATION[loss](queries, passages, labels.groups, labels.teacher, temperature)
    return total + contrastive_weight * contrast("contrastive") if contrastive_weight else total
