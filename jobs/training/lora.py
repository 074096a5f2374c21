"""Options of a LoRA adapter on the command line."""

from __future__ import annotations

from jobs.common.cli import Common

from dataclasses import dataclass, fields

from retriever.errors import InputError
from retriever.systems.lora import require_peft
from retriever.training.lora_options import LoraOptions


@dataclass(frozen=True, kw_only=True)
class LoraTraining(Common):
    """Options of jobs that can train an adapter."""

    lora_rank: int = 16
    """Rank of the adapter's changes: more is closer to fine-tuning, and larger."""
    lora_alpha: int = 32
    """The adapter's changes are scaled by this, divided by the rank."""
    lora_dropout: float = 0.05
    """Fraction of the inputs of the adapter's layers that are dropped out."""
    lora_targets: tuple[str, ...] | None = None
    """Names of the linear layers that are changed, or all-linear (all but a pooler). Default: those that PEFT names for
    the backbone's type, for example query and value of BERT and RoBERTa; other types need this option."""

    def lora(self, train: str) -> LoraOptions | None:
        """Returns the options of the adapter; None if none is trained.

        Args:
            train: The value of --train.

        Raises:
            InputError: If an option has a bad value, if no adapter is trained and one is set, or if PEFT is missing.
        """
        if train == "lora":
            require_peft()
            return LoraOptions(
                rank=self.lora_rank, alpha=self.lora_alpha, dropout=self.lora_dropout, targets=self.lora_targets
            )
        for field in fields(LoraTraining):
            if field.name.startswith("lora_") and getattr(self, field.name) != field.default:
                raise InputError(
                    f"parameter {field.name} {getattr(self, field.name)}: only --train lora trains an "
                    f"adapter, found --train {train}"
                )
        return None
