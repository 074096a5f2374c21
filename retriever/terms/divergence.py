"""The regulariser of prompts that are computed from each query (HYPER, Eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from riptide.retriever.losses.divergence import regulariser
from riptide.retriever.options import Side
from riptide.retriever.options.tuning import TuneOptions
from riptide.retriever.terms.term import EncodedChunk, LossTerm, StepBatch
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput

WEIGHTS = "attention"  # the output of a batch that holds the weights of the basic prompts of each query


class DivergenceTerm(LossTerm):
    """The regulariser that compares the basic-prompt weights of every two queries of a batch (HYPER, Eq. 4)."""

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        """See LossTerm."""
        return tuning.divergence is not None

    def add_to(self, step: StepBatch) -> None:
        """Adds the weights of the basic prompts and the task of each query."""
        options, data = self.system.tuning.synthesis, self.system.data
        assert options is not None
        assert data is not None
        step.outputs[WEIGHTS] = BatchOutput(options.prompts, len(step.queries))
        step.arguments["tasks"] = torch.from_numpy(data.task_numbers_of(step.queries))

    def row_outputs(self, side: Side) -> tuple[str, ...]:
        """See LossTerm."""
        return (WEIGHTS,) if side == "query" else ()

    def outputs(self, chunk: BatchChunk, encoded: EncodedChunk) -> dict[str, torch.Tensor]:
        """See LossTerm."""
        return {} if encoded.weights is None else {WEIGHTS: encoded.weights}

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """See LossTerm."""
        options, weights = self.system.tuning.divergence, outputs[WEIGHTS]
        assert options is not None
        return regulariser(weights, batch.arguments["tasks"].to(weights.device), options)
