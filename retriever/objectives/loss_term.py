"""The interface of a term of a dual encoder's loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from riptide.retriever.objectives.tune_options import TermOptions, TuneOptions
from riptide.retriever.options import Side
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput

if TYPE_CHECKING:
    import torch

    from riptide.retriever.forward.prompt_rows import PromptAssignment
    from riptide.retriever.model.recipe import Recipe
    from riptide.retriever.training.training_data import TrainingData

BATCH_VECTORS = "dense"  # name of the batch output that holds the vectors of queries, then those of passages


@dataclass
class StepBatch:
    """The batch of a step, to which terms add outputs, chunks and arguments of their losses.

    Attributes:
        number: The number of the step, from 0.
        queries: The numbers of the training queries, int64 [m].
        rows: For each query, the rows of the passages that were drawn for it, the positive first: int64 [m, g].
        passages: The different rows among them, ascending: int64 [p].
        groups: The places of `rows` in `passages`, int64 [m, g].
        rank: The rank of this worker.
        world: The number of workers.
        outputs: The outputs of the whole batch.
        chunks: The chunks of this worker.
        arguments: Arguments of the losses, equal on all workers.
    """

    number: int
    queries: np.ndarray
    rows: np.ndarray
    passages: np.ndarray
    groups: np.ndarray
    rank: int
    world: int
    outputs: dict[str, BatchOutput] = field(default_factory=dict)
    chunks: list[BatchChunk] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def positives(self) -> np.ndarray:
        """The index in `passages` of each query's positive, int64 [m]."""
        return self.groups[:, 0]


class EncodedChunk(NamedTuple):
    """The encoded texts of a chunk: their side, vectors, and basic-prompt weights.

    Attributes:
        side: The side of the texts; None: they are stored vectors.
        vectors: float32 [n, dim].
        weights: The weights of the basic prompts of each query, float32 [n, N]; None: prompts are not computed.
    """

    side: Side | None
    vectors: torch.Tensor
    weights: torch.Tensor | None


class TrainedSystem(Protocol):
    """The interface of a trained system that loss terms use."""

    tuning: TuneOptions
    data: TrainingData | None

    @property
    def assignment(self) -> PromptAssignment | None:
        """The assignment of prompts to texts; None if all texts of a side have the same prompt."""

    @property
    def dim(self) -> int:
        """The dimension of a vector."""

    @property
    def encoded_sides(self) -> tuple[Side, ...]:
        """The sides whose texts are encoded in training."""

    @property
    def similarity_temperature(self) -> float:
        """The divisor of similarities between output vectors."""

    def compose(self, rows: np.ndarray) -> list[str]:
        """Returns the texts of passages by row, with titles as the options say."""

    def chunks(
        self,
        texts: Sequence[str],
        side: Side,
        rows: np.ndarray,
        prompt_numbers: np.ndarray | None = None,
        output: str = BATCH_VECTORS,
    ) -> list[BatchChunk]:
        """Splits texts into chunks for the forward pass."""


Options = TypeVar("Options")


class LossTerm(Generic[Options]):
    """The base of a loss term. A subclass sets `OPTIONS` or overrides `is_used`, and overrides `loss`.

    Its module imports torch within functions, so that `--help`, which has its options, does not wait for it.

    Args:
        system: The system whose loss it is part of.
    """

    OPTIONS: ClassVar[type[TermOptions] | None] = None

    def __init__(self, system: TrainedSystem):
        self.system = system
        self.options = cast(Options, self.OPTIONS and system.tuning.term_options(self.OPTIONS))

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        """Whether the options of a training run enable the term."""
        return cls.OPTIONS is not None and tuning.term_options(cls.OPTIONS) is not None

    @classmethod
    def check(cls, recipe: Recipe, tuning: TuneOptions) -> None:
        """Raises InputError if the term, or its absence, does not fit the vectors of the backbone."""

    def add_to(self, step: StepBatch) -> None:
        """Adds the outputs, chunks and loss arguments that the term needs to the batch of a step."""

    def row_outputs(self, side: Side) -> tuple[str, ...]:
        """Returns the names of the term's outputs that have one row for each text of a side, besides the vectors."""
        return ()

    def outputs(self, chunk: BatchChunk, encoded: EncodedChunk) -> dict[str, torch.Tensor]:
        """Returns the term's outputs of a chunk by name, besides the vectors."""
        return {}

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the weighted loss term over the outputs of the whole batch, a scalar."""
        raise NotImplementedError(f"{type(self).__name__}: expected a method loss(outputs, batch)")


def query_and_passage_vectors(outputs: Mapping[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the query and passage vectors of a batch, float32 [m, dim] and [p, dim]."""
    vectors, queries = outputs[BATCH_VECTORS], batch.arguments["queries"]
    return vectors[:queries], vectors[queries:]
