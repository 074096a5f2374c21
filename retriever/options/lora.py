"""Options of a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter


@dataclass(frozen=True, kw_only=True)
class LoraOptions(OptionGroup):
    """Options of a LoRA adapter, which changes weights W [out, in] to W + (alpha / rank) B A (Hu et al. 2021, 4.1)."""

    GROUP: ClassVar = "LoRA"

    rank: int = option(16, flag="lora-rank", minimum=1)
    """Rank r of the adapter's changes B A, A [r, in] and B [out, r]: more is closer to fine-tuning, and larger."""
    alpha: int = option(32, flag="lora-alpha", minimum=1)
    """The adapter's changes are scaled by this, divided by the rank."""
    dropout: float = option(0.05, flag="lora-dropout", share=True)
    """Fraction of the inputs of the adapter's layers that are dropped out before A."""
    targets: tuple[str, ...] | None = option(None, flag="lora-targets")
    """Names of the linear layers that are changed, or the ends of their names, or all-linear (all but a pooler).
    Default: those that PEFT names for the backbone's type, for example query and value of BERT and RoBERTa, as in the
    paper; other types need this option."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that an adapter cannot have."""
        super().__post_init__()
        if self.targets is not None and (not self.targets or not all(self.targets)):
            raise InputError(f"{Parameter('lora_targets')}: expected names of layers, or all-linear")
