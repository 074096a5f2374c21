"""The FLOPS regulariser of sparse vectors (Paria et al. 2020), with the weights and the ramp of SPLADE's training."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from riptide.base.errors import DivergedError, InputError
from riptide.base.wording import Parameter
from riptide.retriever.losses.flops import MIN_WORDS, flops_loss, mean_words
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.options import SIDES, Side
from riptide.retriever.options.tuning import TuneOptions
from riptide.retriever.terms.term import BATCH_VECTORS, EncodedChunk, LossTerm, StepBatch, query_and_passage_vectors
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput

# The output of a batch that is the sum of the sparse vectors of a side.
TOTALS: dict[Side, str] = {"query": "query_total", "passage": "passage_total"}


class FlopsTerm(LossTerm):
    """The weighted FLOPS of queries and of passages; stored passages have none."""

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        """See LossTerm."""
        return tuning.flops is not None

    @classmethod
    def check(cls, recipe: Recipe, tuning: TuneOptions) -> None:
        """See LossTerm."""
        if recipe.is_sparse != cls.is_used(tuning):
            raise InputError(
                f"{recipe.folder}: pooling={recipe.pooling} flops={tuning.flops}: expected options of the FLOPS "
                "regulariser for pooling=splade, and none for other vectors"
            )

    def add_to(self, step: StepBatch) -> None:
        """Requests the sum of the vectors of each encoded side, and passes the number of the step to the loss."""
        step.outputs |= {TOTALS[side]: BatchOutput(self.system.dim) for side in self.system.encoded_sides}
        step.arguments["step"] = step.number

    def outputs(self, chunk: BatchChunk, encoded: EncodedChunk) -> dict[str, torch.Tensor]:
        """See LossTerm."""
        if encoded.side is None or BATCH_VECTORS not in chunk.rows:
            return {}
        return {TOTALS[encoded.side]: encoded.vectors.sum(0, keepdim=True)}

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the weighted FLOPS of the encoded sides, a scalar.

        Raises:
            DivergedError: If the vectors of one side have less than one word on average: then they find nothing.
        """
        options, step = self.system.tuning.flops, batch.arguments["step"]
        assert options is not None
        parts = zip(SIDES, query_and_passage_vectors(outputs, batch), strict=True)
        sides = {side: part.detach() for side, part in parts if side in self.system.encoded_sides}
        for side, vectors in sides.items():
            if (words := mean_words(vectors)) < MIN_WORDS:
                name = "flops_queries" if side == "query" else "flops_passages"
                raise DivergedError(
                    f"step {step + 1}: the sparse vectors of the {side} side have {words:.2f} non-zero words on "
                    f"average, expected at least {MIN_WORDS:g}: give a smaller {Parameter(name)} than "
                    f"{getattr(options, name.removeprefix('flops_')):g}, or a smaller lr, under another name"
                )
        weights = {"query": options.queries, "passage": options.passages}
        terms = [weights[side] * flops_loss(outputs[TOTALS[side]], len(vectors)) for side, vectors in sides.items()]
        return options.ramp_factor(step) * torch.stack(terms).sum()
