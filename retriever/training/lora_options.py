"""The options of a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass

from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """A layer of weights W [out, in] computes with W + (alpha / rank) B A (Hu et al. 2021, section 4.1).

    Attributes:
        rank: r, the rows of A [r, in] and the columns of B [out, r].
        alpha: Numerator of the scale of the change.
        dropout: Fraction of a layer's inputs that are dropped out before A.
        targets: Names of the linear layers, or the ends of their names; ("all-linear",): all but a pooler's. None:
            those that PEFT names for the backbone's type, the projections of queries and values as in the paper.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.05
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value that no adapter can have."""
        if self.rank < 1 or self.alpha < 1 or not 0 <= self.dropout < 1:
            raise InputError(
                f"parameter lora_rank {self.rank} parameter lora_alpha {self.alpha} parameter "
                f"lora_dropout {self.dropout}: expected at least 1, at least 1, and 0 to less than 1"
            )
        if self.targets is not None and (not self.targets or not all(self.targets)):
            raise InputError("parameter lora_targets: expected names of layers, or all-linear")
