"""The Jensen-Shannon regulariser of prompts that are computed from each query (HYPER, Eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.retriever.objectives.loss_term import EncodedChunk, LossTerm, StepBatch
from riptide.retriever.objectives.tune_options import PlannedRun, TermOptions, TuneOptions
from riptide.retriever.options import Side
from riptide.retriever.options.synthesis import BasicPromptOptions
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput

if TYPE_CHECKING:
    import torch

WEIGHTS = "attention"  # name of the batch output with each query's weights of the basic prompts
# The logarithm of a weight of 0 is replaced by log(1e-30): the product with 0 is 0, and its gradient is finite.
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class DivergenceWeights(TermOptions):
    """Options of the regulariser of basic-prompt weights (HYPER, Eq. 4). None: the default depends on the tasks."""

    GROUP: ClassVar = BasicPromptOptions.GROUP
    NAME: ClassVar = "divergence"

    weight: float | None = option(None, flag="divergence-weight", minimum=0)
    """With --prompt synthesised: add this times the prompt regulariser to the loss (HYPER: lambda_c): the mean
    Jensen-Shannon divergence of the weights of two queries of one task, minus that of two queries of different tasks.
    Default: 1 if batches mix several tasks (our choice; HYPER's 0.1 is the weight of sums over all pairs of a batch),
    otherwise 0."""
    alignment: bool = True
    """--no-alignment: leave the term of two queries of one task, which draws them together, out of the prompt
    regulariser."""
    uniformity: bool = True
    """--no-uniformity: leave the term of two queries of different tasks, which pushes them apart, out of the prompt
    regulariser."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        super().__post_init__()
        if self.weight and not (self.alignment or self.uniformity):
            raise InputError(
                f"{Parameter('divergence_weight', f'{self.weight:g}')}: expected alignment or uniformity, which "
                f"are both off: "
                "give 0, or leave it out"
            )

    def resolve(self, run: PlannedRun) -> DivergenceOptions | None:
        """Returns the resolved options; None if prompts are not computed from queries or the weight is 0.

        Raises:
            InputError: If the regulariser has nothing to act on.
        """
        synthesis = run.tuning.synthesis
        if run.tuning.parametrisation != "synthesised" or synthesis is None:
            return None
        default = 1.0 if run.mixes_tasks and synthesis.attention == "learned" else 0.0
        weight = default if self.weight is None else self.weight
        if weight == 0:
            reason = (
                f"the prompt regulariser has weight 0 here, so nothing changes: give "
                f"{Parameter('divergence_weight')}, or leave it out"
            )
            self.refuse(reason, "alignment", "uniformity")
            return None
        if synthesis.attention == "uniform":
            raise InputError(
                f"{Parameter('attention', 'uniform')} {Parameter('divergence_weight', f'{weight:g}')}: all queries "
                "have the same weights, which the regulariser cannot change: give 0, or leave it out"
            )
        if not self.alignment and not run.mixes_tasks:
            raise InputError(
                f"{Parameter('alignment', False)} {Parameter('divergence_weight', f'{weight:g}')}: no batch has "
                "queries of different tasks, so nothing is left to regularise: give "
                f"{Parameter('also_train')} with {Parameter('batches', 'mixed')}, or weight 0"
            )
        return DivergenceOptions(weight=weight, alignment=self.alignment, uniformity=self.uniformity)


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions(DivergenceWeights):
    """Resolved options of the regulariser in a training run."""

    weight: float = 1.0

    def check(self, tuning: TuneOptions) -> None:
        """Raises InputError unless prompts are computed from each query with learned weights."""
        if tuning.parametrisation != "synthesised" or tuning.synthesis is None:
            raise InputError(
                f"{Parameter('divergence_weight', f'{self.weight:g}')}: found the parametrisation "
                f"{tuning.parametrisation}, expected synthesised, as the regulariser is for prompts that are computed "
                "from each query"
            )
        if tuning.synthesis.attention == "uniform":
            raise InputError(
                f"{Parameter('divergence_weight', f'{self.weight:g}')}: expected 0 with "
                f"{Parameter('attention', 'uniform')}, as all queries have the same weights, which the regulariser "
                "cannot change"
            )


def divergences(weights: torch.Tensor) -> torch.Tensor:
    """Returns the Jensen-Shannon divergence of each pair of distributions, in nats: between 0 and ln 2.

    JS(a, b) = H((a + b) / 2) - (H(a) + H(b)) / 2, where H is the entropy.

    Args:
        weights: float [n, N], rows of sum 1.

    Returns:
        float [n, n], symmetric, 0 on the diagonal.
    """
    entropy = _entropy(weights)
    return _entropy((weights[:, None] + weights[None]) / 2) - (entropy[:, None] + entropy[None]) / 2


def mean_divergences(weights: torch.Tensor, tasks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean divergence over query pairs of one task, and over query pairs of different tasks.

    Args:
        weights: float [n, N], rows of sum 1.
        tasks: The task of each query, int64 [n].

    Returns:
        Two scalars; 0 if a batch has no such pair.
    """
    import torch

    divergence = divergences(weights)
    same = tasks[:, None] == tasks[None]
    pairs = (same & ~torch.eye(len(tasks), dtype=torch.bool, device=same.device), ~same)
    within, between = ((divergence * chosen).sum() / chosen.sum().clamp(min=1) for chosen in pairs)
    return within, between


def regulariser(weights: torch.Tensor, tasks: torch.Tensor, options: DivergenceOptions) -> torch.Tensor:
    """Returns the weighted regulariser, a scalar: mean over pairs of one task minus mean over pairs of two tasks.

    The paper sums over ordered pairs, so that the weight would grow with the batch; here each of both terms is the mean
    over its pairs, without the pairs of a query with itself, whose divergence is 0.

    Args:
        weights: float [n, N], rows of sum 1.
        tasks: The task of each query, int64 [n].
        options: The weight, and which of the terms count.
    """
    within, between = mean_divergences(weights, tasks)
    return options.weight * (options.alignment * within - options.uniformity * between)


def _entropy(weights: torch.Tensor) -> torch.Tensor:
    """Returns the entropy of distributions in nats: [..., N] -> [...]."""
    return -(weights * weights.clamp(min=_TINY).log()).sum(-1)


class DivergenceTerm(LossTerm[DivergenceOptions]):
    """The regulariser that compares the basic-prompt weights of every two queries of a batch (HYPER, Eq. 4)."""

    OPTIONS = DivergenceWeights

    def add_to(self, step: StepBatch) -> None:
        """Declares the output with the basic-prompt weights of the queries, and adds the task of each query."""
        import torch

        options, data = self.system.tuning.synthesis, self.system.data
        assert options is not None
        assert data is not None
        step.outputs[WEIGHTS] = BatchOutput(options.prompts, len(step.queries))
        step.arguments["tasks"] = torch.from_numpy(data.task_numbers_of(step.queries))

    def row_outputs(self, side: Side) -> tuple[str, ...]:
        """Returns the name of the output with basic-prompt weights, which only queries have."""
        return (WEIGHTS,) if side == "query" else ()

    def outputs(self, chunk: BatchChunk, encoded: EncodedChunk) -> dict[str, torch.Tensor]:
        """Returns the basic-prompt weights of a chunk of queries."""
        return {} if encoded.weights is None else {WEIGHTS: encoded.weights}

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Returns the regulariser over all queries of the batch, a scalar."""
        weights = outputs[WEIGHTS]
        return regulariser(weights, batch.arguments["tasks"].to(weights.device), self.options)
