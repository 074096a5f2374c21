"""A term of the loss that the project does not have. Its value is a constant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from riptide.base.option_fields import option
from riptide.retriever.objectives.loss_term import LossTerm, query_and_passage_vectors
from riptide.retriever.objectives.tune_options import PlannedRun, TermOptions
from riptide.retriever.training.system import Batch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ToyOptions(TermOptions):
    """Options of the term."""

    GROUP: ClassVar = "toy term"
    NAME: ClassVar = "toy"

    weight: float = option(0.0, flag="toy-weight", minimum=0)
    """Weight of the toy term."""

    def resolve(self, run: PlannedRun) -> ToyOptions | None:
        """Returns the options; None if the weight is 0."""
        return self if self.weight else None


class ToyTerm(LossTerm[ToyOptions]):
    """A term whose value is its weight."""

    OPTIONS = ToyOptions

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """See LossTerm."""
        queries, _ = query_and_passage_vectors(outputs, batch)
        return 0 * queries.sum() + self.options.weight
