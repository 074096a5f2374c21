"""The interface of a term of the loss of a dual encoder."""

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

BATCH_VECTORS = "dense"  # the output of a batch with the vectors of its queries, then those of its passages


@dataclass
class StepBatch:
    """The batch of a step, to which terms add outputs, chunks and arguments of their loss.

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
        """The place of each query's positive in `passages`, int64 [m]."""
        return self.groups[:, 0]


class EncodedChunk(NamedTuple):
    """The vectors of the texts of a chunk.

    Attributes:
        side: The side of the texts; None: they are stored vectors.
        vectors: float32 [n, dim].
        weights: The weights of the basic prompts of each query, float32 [n, N]; None: prompts are not computed.
    """

    side: Side | None
    vectors: torch.Tensor
    weights: torch.Tensor | None


class TrainedSystem(Protocol):
    """What a term may use of the system whose loss it is part of."""

    tuning: TuneOptions
    data: TrainingData | None

    @property
    def assignment(self) -> PromptAssignment | None:
        """Which of several prompts a text has; None if all texts of a side have the same one."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    @property
    def encoded_sides(self) -> tuple[Side, ...]:
        """The sides whose texts are encoded in training."""

    @property
    def similarity_temperature(self) -> float:
        """Similarities of the outputs of a batch are divided by it."""

    def compose(self, rows: np.ndarray) -> list[str]:
        """Returns the texts of passages."""

    def chunks(
        self,
        texts: Sequence[str],
        side: Side,
        rows: np.ndarray,
        prompt_numbers: np.ndarray | None = None,
        output: str = BATCH_VECTORS,
    ) -> list[BatchChunk]:
        """Cuts texts into chunks."""


Options = TypeVar("Options")


class LossTerm(Generic[Options]):
    """A term of the loss. A subclass has the class of its options, or overrides `is_used`; it overrides `loss`.

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
        """Returns whether the options of a training run ask for the term."""
        return cls.OPTIONS is not None and tuning.term_options(cls.OPTIONS) is not None

    @classmethod
    def check(cls, recipe: Recipe, tuning: TuneOptions) -> None:
        """Raises InputError if the term, or its absence, does not fit the vectors of the backbone."""

    def add_to(self, step: StepBatch) -> None:
        """Adds outputs, chunks and arguments of the loss to the batch of a step."""

    def row_outputs(self, side: Side) -> tuple[str, ...]:
        """Returns the names of further outputs that have a row for each text of a side."""
        return ()

    def outputs(self, chunk: BatchChunk, encoded: EncodedChunk) -> dict[str, torch.Tensor]:
        """Returns the term's outputs of a chunk by name, besides its vectors."""
        return {}

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the weighted term over the outputs of the whole batch, a scalar."""
        raise NotImplementedError(f"{type(self).__name__}: expected a method loss(outputs, batch)")


def query_and_passage_vectors(outputs: Mapping[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the vectors of the queries and of the passages of a batch, float32 [m, dim] and [p, dim]."""
    vectors, queries = outputs[BATCH_VECTORS], batch.arguments["queries"]
    return vectors[:queries], vectors[queries:]
