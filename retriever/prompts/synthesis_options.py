"""Options of prompts that are computed from each query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from retriever.errors import InputError

Mix = Literal["before", "after"]
Attention = Literal["learned", "uniform"]

MOST_TEMPERATURE = 1_000_000  # makes all weights equal


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions:
    """Options of the synthesiser; the defaults are the paper's.

    Attributes:
        prompts: Number of basic prompts (N).
        length: Tokens of a basic prompt, and so of each query's prompt (m).
        hidden: Size of the hidden layer over a query's words (d_h).
        bottleneck: Size of the hidden layer of the prefix encoder (d_p).
        temperature: The scores of the basic prompts are divided by it (tau).
        mix: "before": the prefix encoder reads the weighted sum of the basic prompts (the paper). "after": it reads
            each basic prompt, and its outputs are summed (the authors' code), so that they can be kept.
        attention: "learned": the weights depend on the query. "uniform": all basic prompts have the same weight.
    """

    prompts: int = 20
    length: int = 100
    hidden: int = 400
    bottleneck: int = 100
    temperature: float = math.e
    mix: Mix = "before"
    attention: Attention = "learned"

    def __post_init__(self) -> None:
        """Raises InputError for a value that no synthesiser can have."""
        if (bad := find_bad_value(vars(self))) is not None:
            name, expected = bad
            raise InputError(f"{name}={getattr(self, name)!r} of the prompts of queries: expected {expected}")


def find_bad_value(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the first field whose value no synthesiser can have, and what is expected; None if all are good.

    Args:
        values: Values of fields of SynthesisOptions by name; some fields may be missing.
    """
    for name in ("prompts", "length", "hidden", "bottleneck"):
        if values.get(name, 1) < 1:
            return name, "at least 1"
    temperature = values.get("temperature", math.e)
    if not 0 < temperature <= MOST_TEMPERATURE:
        return "temperature", f"more than 0, at most {MOST_TEMPERATURE:,}"
    for name, allowed in (("mix", get_args(Mix)), ("attention", get_args(Attention))):
        if values.get(name, allowed[0]) not in allowed:
            return name, " or ".join(allowed)
    return None


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions:
    """Options of the regulariser of the weights (HYPER, Eq. 4).

    Attributes:
        weight: The loss is increased by this times the regulariser (lambda_c).
        alignment: Queries of one task are drawn together.
        uniformity: Queries of different tasks are pushed apart.
    """

    weight: float = 1.0
    alignment: bool = True
    uniformity: bool = True

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise InputError(f"weight={self.weight} of the prompt regulariser: expected 0 or more")
        if self.weight and not (self.alignment or self.uniformity):
            raise InputError(
                f"weight={self.weight} of the prompt regulariser: expected alignment or uniformity, which are both "
                "off: give weight 0"
            )
