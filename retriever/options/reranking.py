"""Options of training a cross-encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.option_fields import OptionGroup, option
from riptide.retriever.options.encoding import TitlePolicy

PairLoss = Literal["bce", "listwise"]


@dataclass(frozen=True, kw_only=True)
class PairOptions(OptionGroup):
    """Options of the batches, texts and loss of a cross-encoder."""

    GROUP: ClassVar = "batches and loss"

    batch: int = option(32, minimum=1)
    """Queries per step, summed over all workers. Each has one positive."""
    negatives_per_query: int = option(4, minimum=1)
    """Mined negatives per query and step."""
    loss: PairLoss = "bce"
    """bce: scores are probabilities that a passage answers the query, which denoising needs; listwise: cross-entropy of
    the positive of a query among its negatives, which ranks as well, but its scores are not probabilities."""
    max_length: int = option(256, group="texts", minimum=1)
    """Maximum number of tokens of query and passage together, special tokens included. Of a longer pair the longer text
    is cut; the job says how many pairs of its batches were."""
    title: TitlePolicy = option("space", group="texts")
    """Separator between a passage's title and its text; none: leave out the title."""


@dataclass(frozen=True, kw_only=True)
class CrossEncoderOptions(PairOptions):
    """Options of a cross-encoder; seed: of its batches and of a new head."""

    seed: int = option(0, minimum=0)
