"""The loss of judged pairs: contrastive losses (DPTDR, Eq. 3), and distillation of a re-ranker."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from riptide.retriever.losses import BatchLabels, batch_loss, teacher_logits
from riptide.retriever.options.tuning import TuneOptions
from riptide.retriever.terms.term import LossTerm, StepBatch, query_and_passage_vectors
from riptide.retriever.training.system import Batch


class PairTerm(LossTerm):
    """One of the losses of `batch_loss`. The loss of positives with a common category takes its place."""

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        """See LossTerm."""
        return tuning.categories is None

    def add_to(self, step: StepBatch) -> None:
        """Adds the passages that were drawn for each query, and their scores by the teacher, if the loss needs them."""
        options, data = self.system.tuning, self.system.data
        assert data is not None
        if options.negatives_from == "own" or options.distills:
            step.arguments["groups"] = torch.from_numpy(step.groups)
        if options.distills:
            scores = [data.teacher_scores(*each) for each in zip(step.queries, step.rows, strict=True)]
            step.arguments["teacher"] = teacher_logits(torch.from_numpy(np.stack(scores)))

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """See LossTerm."""
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
