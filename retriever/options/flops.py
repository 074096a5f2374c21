"""Options of the FLOPS regulariser of sparse vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.options import OptionGroup, option
from riptide.base.wording import Parameter

# Weights for queries and passages in naver/splade's configurations; HYPER's printed 0.3 and 0.1 zero the vectors.
SOFTMAX_WEIGHTS = (3e-4, 1e-4)
MARGIN_MSE_WEIGHTS = (0.5, 0.4)
WARM_UP = 1 / 3  # fraction of the steps: 50,000 of 150,000


@dataclass(frozen=True, kw_only=True)
class FlopsWeights(OptionGroup):
    """Weights of the regulariser. None: the default depends on the loss and on what is trained."""

    GROUP: ClassVar = "sparse vectors"

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

    def resolve(self, steps: int, loss: str, *, has_passages: bool) -> FlopsOptions:
        """Returns the options with the missing values filled in for a training run of `steps` steps.

        Args:
            steps: Steps of the run.
            loss: The loss to which the regulariser is added.
            has_passages: Whether passages are encoded, so that their vectors can be regularised.
        """
        queries, passages = MARGIN_MSE_WEIGHTS if loss == "margin-mse" else SOFTMAX_WEIGHTS
        share = WARM_UP if self.warm_up is None else self.warm_up
        return FlopsOptions(
            queries=queries if self.queries is None else self.queries,
            passages=(passages if has_passages else 0.0) if self.passages is None else self.passages,
            warm_up=max(1, round(share * steps)),
        )


@dataclass(frozen=True, kw_only=True)
class FlopsOptions(FlopsWeights):
    """Options of the regulariser.

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
