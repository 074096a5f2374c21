"""Counts of texts that were cut to a length limit, and the sentence that reports them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING

from riptide.base.wording import Command

if TYPE_CHECKING:
    import numpy as np

SPLIT = f"split long documents into passages, as {Command('import-corpus', split_words='')} does"
NOUNS = ("queries", "passages", "sentences", "pairs")  # kinds of texts whose cuts training counts
MAX_CUT_SHARE = 0.05  # If more than this share of texts or tokens is cut, a warning is logged.


@dataclass(frozen=True)
class Cuts:
    """Counts of texts or pairs, and of those cut to a length limit. Counts can be added.

    Attributes:
        texts: Texts that were tokenised.
        tokens: Their tokens before they were cut; prefixes and special tokens are included.
        cut_texts: Texts that were cut.
        cut_tokens: Tokens that were cut off.
        limit: The limit, in tokens; the largest, if the texts had different limits.
        uncounted: Further texts that were not counted, because an earlier release tokenised them.
    """

    texts: int = 0
    tokens: int = 0
    cut_texts: int = 0
    cut_tokens: int = 0
    limit: int = 0
    uncounted: int = 0

    @classmethod
    def from_lengths(cls, lengths: np.ndarray, num_cut: np.ndarray, limit: int = 0) -> Cuts:
        """Counts the texts and their cuts from the lengths of texts after the cut and the tokens cut off.

        Args:
            lengths: Tokens of each text, int64 [texts].
            num_cut: Tokens that were cut off each text, int64 [texts].
            limit: The limit, in tokens.
        """
        cut_tokens = int(num_cut.sum())
        return cls(len(lengths), int(lengths.sum()) + cut_tokens, int((num_cut > 0).sum()), cut_tokens, limit)

    def __add__(self, other: Cuts) -> Cuts:
        sums = Cuts(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))
        return replace(sums, limit=max(self.limit, other.limit))

    @property
    def kept_tokens(self) -> int:
        """The number of tokens kept after the cut."""
        return self.tokens - self.cut_tokens

    @property
    def are_many(self) -> bool:
        """Whether more than MAX_CUT_SHARE of the texts or of their tokens were cut."""
        return self.cut_texts > MAX_CUT_SHARE * self.texts or self.cut_tokens > MAX_CUT_SHARE * self.tokens

    def to_dict(self) -> dict[str, int]:
        """Returns the counts as JSON-serialisable values for a record; `Cuts(**cuts.to_dict())` restores them."""
        counts = asdict(self)
        del counts["uncounted"]
        return counts

    def sentence(self, noun: str) -> str:
        """Describes the counts in a sentence; `noun` is a plural noun for the texts."""
        rest = f" ({self.uncounted:,} more {noun} were not counted)" if self.uncounted else ""
        counts = f"{self.cut_texts:,} of {self.texts:,} {noun} were cut to {self.limit:,} tokens{rest}"
        return f"{counts}; {_percentage(self.kept_tokens, self.tokens)} of all tokens were kept"

    def line(self, noun: str, step: str, max_length: int | None = None, split: str = SPLIT) -> str:
        """Describes the counts, with a warning and a remedy if many texts were cut.

        Args:
            noun: Plural noun for the texts.
            step: How to set a larger limit, for example "give a larger --passage-length".
            max_length: The largest limit that the model allows; None: any, or it is unknown.
            split: The remedy that needs no larger limit.
        """
        sentence = self.sentence(noun)
        if not self.are_many:
            return sentence
        if max_length is not None and self.limit >= max_length:
            return f"warning: {sentence}; {split}, because the model allows no more tokens"
        allowed = "" if max_length is None else f" (the model allows at most {max_length:,})"
        return f"warning: {sentence}; {step}{allowed}, or {split}"


def sum_of_cuts(cuts: Iterable[Cuts]) -> Cuts:
    """Adds up counts."""
    return sum(cuts, Cuts())


def _percentage(part: int, whole: int) -> str:
    """Formats a share as a percentage with one decimal; 0% and 100% appear only if they are exact."""
    thousandths = round(1000 * part / whole) if whole else 1000
    if part and not thousandths:
        return "less than 0.1%"
    if part < whole and thousandths == 1000:
        return "more than 99.9%"
    return f"{thousandths / 10:g}%"
