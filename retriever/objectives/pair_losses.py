"""The registry of values of the option `loss`, and its other options. To add a loss, write it and add it to LOSSES."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter
from riptide.retriever.objectives.contrastive import CONTRASTIVE, SYMMETRIC, SYMMETRIC_SUM
from riptide.retriever.objectives.distillation import KL, MARGIN_MSE

LOSSES = {each.name: each for each in (CONTRASTIVE, SYMMETRIC, SYMMETRIC_SUM, KL, MARGIN_MSE)}
if TYPE_CHECKING:
    Loss = str  # Type checkers cannot evaluate the registry.
else:
    Loss = Literal[tuple(LOSSES)]
MAX_SCALE = 100.0  # maximum 1 / T of a learned temperature (CLIP, Radford et al. 2021, section 2.5)
# AdamW changes log T by about this much per step, so T can change by a factor of e in 1,000 steps. Learning rates of
# weights are too small for T: fine-tuning's 2e-5 changes it by 2 % in 1,000 steps.
TEMPERATURE_LR = 1e-3


@dataclass(frozen=True, kw_only=True)
class LossOptions(OptionGroup):
    """Options of the loss over judged pairs."""

    GROUP: ClassVar = "loss"

    loss: Loss = option(
        "contrastive", later=True, help="; ".join(f"{each.name}: {each.help}" for each in LOSSES.values()) + "."
    )
    contrastive_weight: float = option(0.0, minimum=0, later=True)
    """Add this times the contrastive loss to a distillation loss."""
    temperature: float | None = option(None, positive=True)
    """Similarities are divided by this. Default: 1, or 0.05 for vectors of length 1."""
    learn_temperature: bool = option(False, later=True)
    """Train the temperature, starting from --temperature, but not below 0.01 (CLIP). The artifact's notes have the
    learned value. Not with --zero 3."""
    temperature_lr: float | None = option(None, positive=True, later=True)
    """Peak learning rate of a learned temperature T, regardless of --lr. Default: 1e-3. One step of AdamW changes log T
    by about this much, so T can change by a factor of e in 1,000 steps."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        super().__post_init__()
        if self.contrastive_weight and not self.distills:
            raise InputError(
                f"{Parameter('contrastive_weight', self.contrastive_weight)} {Parameter('loss', self.loss)}: "
                "expected a distillation loss, to which it is added: "
                f"{' or '.join(name for name, each in LOSSES.items() if each.needs_teacher)}"
            )
        if self.learn_temperature and self.temperature is not None and self.temperature * MAX_SCALE < 1:
            raise InputError(
                f"{Parameter('learn_temperature')}, {Parameter('temperature', self.temperature)}: expected at least "
                f"{1 / MAX_SCALE}, below which a learned temperature does not fall"
            )
        if self.temperature_lr is not None and not self.learn_temperature:
            raise InputError(
                f"{Parameter('temperature_lr', self.temperature_lr)}: expected {Parameter('learn_temperature')} too, "
                "whose learning rate it is"
            )

    @property
    def distills(self) -> bool:
        """Whether the loss needs teacher scores from a re-ranker."""
        return LOSSES[self.loss].needs_teacher

    @property
    def is_symmetric(self) -> bool:
        """Whether the loss also has the direction from passages to the queries of the batch."""
        return LOSSES[self.loss].is_symmetric
