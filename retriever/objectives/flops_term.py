"""The FLOPS regulariser of sparse vectors (Paria et al. 2020), with the weights and the ramp of SPLADE training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from riptide.base.errors import DivergedError, InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.retriever.objectives.loss_term import (
    BATCH_VECTORS,
    EncodedChunk,
    LossTerm,
    StepBatch,
    query_and_passage_vectors,
)
from riptide.retriever.objectives.tune_options import PlannedRun, TermOptions, TuneOptions
from riptide.retriever.options import SIDES, VECTORS, Side
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput

if TYPE_CHECKING:
    import torch

    from riptide.retriever.model.recipe import Recipe

MIN_WORDS = 1.0  # If the mean number of non-zero words is lower, vectors cannot find passages.
# Names of the batch outputs with the sum of a side's sparse vectors.
TOTALS: dict[Side, str] = {"query": "query_total", "passage": "passage_total"}
# Weights for queries and passages from naver/splade's configurations; HYPER's printed 0.3 and 0.1 zero the vectors.
SOFTMAX_WEIGHTS = (3e-4, 1e-4)
MARGIN_MSE_WEIGHTS = (0.5, 0.4)
WARM_UP = 1 / 3  # default warm-up as a fraction of the steps: 50,000 of 150,000


@dataclass(frozen=True, kw_only=True)
class FlopsWeights(TermOptions):
    """Options of the FLOPS regulariser. None: the default depends on the loss and on the trained sides."""

    GROUP: ClassVar = "sparse vectors"
    NAME: ClassVar = "flops"

    queries: float | None = option(None, flag="flops-queries", minimum=0)
    """With sparse vectors: weight of the FLOPS regulariser of queries: larger values leave fewer words in a vector.
    Default: 3e-4, or 0.5 with --loss margin-mse (naver/splade)."""
    passages: float | None = option(None, flag="flops-passages", minimum=0)
    """With sparse vectors: weight of the FLOPS regulariser of passages. Default: 1e-4, or 0.4 with --loss margin-mse;
    not with --sides query, which does not encode them."""
    warm_up: float | None = option(None, flag="flops-warm-up")
    """With sparse vectors: fraction of the steps in which both weights rise quadratically from 0. Default: 1/3."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        super().__post_init__()
        self._check_warm_up()

    def _check_warm_up(self) -> None:
        if self.warm_up is not None and not 0 <= self.warm_up <= 1:
            raise InputError(f"{Parameter('flops_warm_up', self.warm_up)}: expected a fraction of the steps")

    def resolve(self, run: PlannedRun) -> FlopsWeights | None:
        """Returns the options with all values; None for dense vectors.

        Raises:
            InputError: If they are given for dense vectors or for vectors that are not trained, or with a time limit.
        """
        if VECTORS.get(run.pooling) != "sparse":
            self.refuse(
                f"regularises sparse vectors, and {Parameter('pooling')} is {run.pooling}: give "
                f"{Parameter('pooling', 'splade')}, or leave it out"
            )
            return None
        has_passages = run.tuning.sides != "query"
        if not has_passages:
            self.refuse(
                f"with {Parameter('sides', 'query')}, vectors of passages are stored, and no regulariser changes "
                "them: leave it out",
                "passages",
            )
        if run.max_minutes is not None:
            raise InputError(
                f"{Parameter('max_minutes', f'{run.max_minutes:g}')} with {Parameter('pooling', 'splade')}: the "
                "weights of the regulariser rise over a fraction of the steps, whose number must be known: give "
                f"{Parameter('steps')}"
            )
        queries, passages = MARGIN_MSE_WEIGHTS if run.tuning.loss == "margin-mse" else SOFTMAX_WEIGHTS
        return FlopsWeights(
            queries=queries if self.queries is None else self.queries,
            passages=(passages if has_passages else 0.0) if self.passages is None else self.passages,
            warm_up=WARM_UP if self.warm_up is None else self.warm_up,
        )

    def with_steps(self, steps: int) -> FlopsOptions:
        """Returns resolved options with the warm-up in steps."""
        return FlopsOptions(**{**vars(self), "warm_up": max(1, round((self.warm_up or 0.0) * steps))})


@dataclass(frozen=True, kw_only=True)
class FlopsOptions(FlopsWeights):
    """Resolved options of the FLOPS regulariser in a training run.

    Attributes:
        queries: Weight for the vectors of queries.
        passages: Weight for the vectors of passages.
        warm_up: Steps in which both weights rise, by the square of the fraction of these steps.
    """

    queries: float = option()
    passages: float = option()
    warm_up: int = option()

    def _check_warm_up(self) -> None:
        if self.warm_up < 1:
            raise InputError(f"{Parameter('flops_warm_up', self.warm_up)}: expected at least 1 step")

    def ramp_factor(self, step: int) -> float:
        """Returns the factor of both weights at a step, counted from 0: min(1, t / T)^2, where t counts from 1."""
        return min(1.0, (step + 1) / self.warm_up) ** 2

    def check(self, tuning: TuneOptions) -> None:
        """Raises InputError if passages have a weight although their vectors are stored and not trained."""
        if self.passages and tuning.sides == "query":
            raise InputError(
                f"{Parameter('flops_passages', f'{self.passages:g}')}: expected 0 with {Parameter('sides', 'query')}, "
                "as vectors of passages are stored, and no regulariser changes them"
            )


def flops_loss(vector_sum: torch.Tensor, num_vectors: int) -> torch.Tensor:
    """Returns the FLOPS regulariser, a scalar: the sum over words of (batch mean of v_w)^2.

    Args:
        vector_sum: The sum of the vectors of a batch, float [1, words].
        num_vectors: The number of vectors.
    """
    return (vector_sum / num_vectors).square().sum()


def mean_words(vectors: torch.Tensor) -> float:
    """Returns the mean number of non-zero words per vector, float [n, words]."""
    return float((vectors != 0).sum()) / max(1, len(vectors))


class FlopsTerm(LossTerm[FlopsOptions]):
    """The weighted FLOPS regulariser of queries and passages; it ignores stored passage vectors."""

    OPTIONS = FlopsWeights

    @classmethod
    def check(cls, recipe: Recipe, tuning: TuneOptions) -> None:
        """Raises InputError unless the regulariser is used exactly if vectors are sparse."""
        weights = tuning.term_options(FlopsWeights)
        if weights is None and recipe.is_sparse:
            raise InputError(
                f"{recipe.folder}: {Parameter('pooling', recipe.pooling)}: found no weights of the FLOPS regulariser, "
                f"expected {Parameter('flops_queries')} and {Parameter('flops_passages')} for sparse vectors"
            )
        if weights is not None and not recipe.is_sparse:
            raise InputError(
                f"{recipe.folder}: {Parameter('flops_queries', weights.queries)} and "
                f"{Parameter('flops_passages', weights.passages)}: expected no weights of the FLOPS regulariser for "
                f"dense vectors, which {Parameter('pooling', recipe.pooling)} makes"
            )

    def add_to(self, step: StepBatch) -> None:
        """Declares an output with the vector sum of each encoded side, and passes the step number to the loss."""
        step.outputs |= {TOTALS[side]: BatchOutput(self.system.dim) for side in self.system.encoded_sides}
        step.arguments["step"] = step.number

    def outputs(self, chunk: BatchChunk, encoded: EncodedChunk) -> dict[str, torch.Tensor]:
        """Returns the sum of a chunk's encoded vectors, float32 [1, dim]."""
        if encoded.side is None or BATCH_VECTORS not in chunk.rows:
            return {}
        return {TOTALS[encoded.side]: encoded.vectors.sum(0, keepdim=True)}

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the weighted FLOPS regulariser of the encoded sides, a scalar.

        Raises:
            DivergedError: If the vectors of one side have less than one word on average: then they find nothing.
        """
        import torch

        options, step = self.options, batch.arguments["step"]
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
