"""Options of prompts that are computed from each query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter

Mix = Literal["before", "after"]
Attention = Literal["learned", "uniform"]

MAX_TEMPERATURE = 1_000_000  # At this temperature, all weights are equal.


@dataclass(frozen=True, kw_only=True)
class BasicPromptOptions(OptionGroup):
    """Options of the mixture of basic prompts for each query. None: HYPER's value, or that of the continued network."""

    GROUP: ClassVar = "synthesised prompts"

    prompts: int | None = option(None, flag="basic-prompts", minimum=1)
    """With --prompt synthesised: number of basic prompts, which are mixed for each query. Default: 20
    (HYPER)."""
    bottleneck: int | None = option(None, flag="prompt-bottleneck", minimum=1)
    """With --prompt synthesised or per-task: size of the hidden layer of the prefix encoder, which makes keys and
    values for all layers. Default: 100 (HYPER)."""
    temperature: float | None = option(None, flag="prompt-temperature", positive=True)
    """With --prompt synthesised: the scores of the basic prompts are divided by this before their softmax; smaller
    values choose fewer of them. Default: e (HYPER)."""
    mix: Mix | None = None
    """With --prompt synthesised: before: the prefix encoder reads the weighted sum of the basic prompts (HYPER's
    paper); after: it reads each basic prompt, and its outputs are summed (the authors' code), so that they can be kept,
    which serves faster and needs more memory. Default: before."""
    attention: Attention | None = None
    """With --prompt synthesised: learned: the weights of the basic prompts depend on the query; uniform: all have the
    same weight, so that all queries have one prompt. Default: learned."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that a synthesiser cannot have."""
        super().__post_init__()
        if (self.temperature or 0) > MAX_TEMPERATURE:
            raise InputError(
                f"{Parameter('prompt_temperature', self.temperature)}: expected at most {MAX_TEMPERATURE:,}"
            )


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions(BasicPromptOptions):
    """Options of the synthesiser; the defaults are HYPER's.

    Attributes:
        prompts: Number of basic prompts (N).
        bottleneck: Size of the hidden layer of the prefix encoder (d_p).
        temperature: The scores of the basic prompts are divided by it (tau).
        length: Tokens of a basic prompt, and so of each query's prompt (m).
        hidden: Size of the hidden layer over a query's words (d_h).
    """

    prompts: int = 20
    bottleneck: int = 100
    temperature: float = math.e
    mix: Mix = "before"
    attention: Attention = "learned"
    length: int = option(100, minimum=1)
    hidden: int = option(400, flag="prompt-hidden", minimum=1)
