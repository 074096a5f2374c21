"""The loss over judged pairs: contrastive losses (DPTDR, Eq. 3) and distillation from a re-ranker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from riptide.retriever.objectives.category_term import CategoryOptions
from riptide.retriever.objectives.contrastive import contrastive_loss, own_passages_loss
from riptide.retriever.objectives.distillation import teacher_logits
from riptide.retriever.objectives.loss_term import LossTerm, StepBatch, query_and_passage_vectors
from riptide.retriever.objectives.pair_losses import LOSSES, Loss
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.tuning import NegativesFrom
from riptide.retriever.training.system import Batch

if TYPE_CHECKING:
    import torch


class BatchLabels(NamedTuple):
    """The relevance labels of a batch's passages, and the teacher's logits.

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
        """Moves the labels to a device."""
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
    """Computes the loss with a given name over a batch.

    Args:
        loss: The name of the loss, in LOSSES.
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

    function = LOSSES[loss].function

    def contrast(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        if negatives_from == "batch":
            return function(queries, passages, labels.positives, temperature, labels.ignored)
        assert labels.groups is not None, "own negatives need the groups of the labels"
        return own_passages_loss(queries, passages, labels.groups, temperature, labels.ignored)

    if not LOSSES[loss].needs_teacher:
        return contrast(function)
    assert labels.groups is not None, "a distillation loss needs the labels of a teacher"
    assert labels.teacher is not None, "a distillation loss needs the labels of a teacher"
    total = function(queries, passages, labels.groups, labels.teacher, temperature)
    return total + contrastive_weight * contrast(contrastive_loss) if contrastive_weight else total


class PairTerm(LossTerm[None]):
    """The loss term over judged pairs; it is not used if passages with a common category are positives."""

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        """Whether judged pairs define the positives, not common categories."""
        return tuning.term_options(CategoryOptions) is None

    def add_to(self, step: StepBatch) -> None:
        """Adds the passages drawn for each query and their teacher logits, if the loss needs them."""
        import torch

        options, data = self.system.tuning, self.system.data
        assert data is not None
        needs_teacher = LOSSES[options.loss].needs_teacher
        if options.negatives_from == "own" or needs_teacher:
            step.arguments["groups"] = torch.from_numpy(step.groups)
        if needs_teacher:
            scores = [data.teacher_scores(*each) for each in zip(step.queries, step.rows, strict=True)]
            step.arguments["teacher"] = teacher_logits(torch.from_numpy(np.stack(scores)))

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the loss of judged pairs over the batch, a scalar."""
        options, (queries, passages) = self.system.tuning, query_and_passage_vectors(outputs, batch)
        labels = BatchLabels(**{name: batch.arguments[name] for name in BatchLabels._fields if name in batch.arguments})
        return batch_loss(
            options.loss,
            queries,
            passages,
            labels.to(queries.device),
            self.system.similarity_temperature,
            options.contrastive_weight,
            options.negatives_from,
        )
