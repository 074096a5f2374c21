"""The loss of positives with a common category (Topic-DPR, Eq. 3 and 4), in place of that of judged pairs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from riptide.retriever.losses import category_loss, category_overlap
from riptide.retriever.options.tuning import TuneOptions
from riptide.retriever.terms.term import LossTerm, StepBatch, query_and_passage_vectors
from riptide.retriever.training.system import Batch


class CategoryTerm(LossTerm):
    """All passages of a batch that share a category with a query's own positive are positives of the query."""

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        """See LossTerm."""
        return tuning.categories is not None

    def add_to(self, step: StepBatch) -> None:
        """Adds the overlaps of the categories of each query's positive and of each passage, float32 [m, p]."""
        data = self.system.data
        assert data is not None
        assert data.categories is not None, "positives by category need the categories of passages"
        rho = category_overlap(torch.from_numpy(data.categories.multi_hot(step.passages)))
        step.arguments["rho"] = rho[torch.from_numpy(step.positives)]

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """See LossTerm."""
        options, both = self.system.tuning.categories, query_and_passage_vectors(outputs, batch)
        assert options is not None
        rho, positives, ignored = (batch.arguments[name].to(both[0].device) for name in ("rho", "positives", "ignored"))
        return category_loss(*both, rho, self.system.similarity_temperature, options.weight, positives, ignored)
