"""Quantises weights of sparse vectors to impacts: integers, which Lucene stores as term frequencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.retriever.encoding.sparse_vectors import SparseVectors

SCALE = 100  # impacts per unit of a weight, as in Anserini's SPLADE indexes
EMPTY = "empty"  # the reserved word of a passage without words; all other words are numbers
EXACT = 1 << 24  # integer scores below this are exact in Lucene's float32
_MAX_IMPACT = (1 << 31) - 1  # limit of an impact, and of the sum of a text, which Lucene stores in an int


@dataclass(frozen=True)
class Impacts:
    """The quantised weights of texts in CSR form; weights that round to 0 are left out.

    Attributes:
        words: The words of each text, ascending: int32 [numbers].
        impacts: rint(100 v) of each weight v: int64 [numbers].
        offsets: Where the numbers of each text begin, and the end of the last one: int64 [texts + 1].
    """

    words: np.ndarray
    impacts: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of_row(self, text: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (words, impacts) of one text."""
        place = slice(self.offsets[text], self.offsets[text + 1])
        return self.words[place], self.impacts[place]


def quantise(vectors: SparseVectors, label: Callable[[int], str]) -> Impacts:
    """Quantises all weights v to rint(100 v), computed in float64.

    Args:
        vectors: The vectors.
        label: Names a vector in messages, by its number.

    Raises:
        InputError: If a weight is not finite or below 0, or if the impacts of a vector sum to more than 2^31 - 1.
    """
    for number, reason in unquantisable_vectors(vectors).items():
        raise InputError(f"{label(number)}: {reason}")
    scaled, rows = _scaled_weights(vectors)
    is_kept = scaled > 0
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows[is_kept], minlength=len(vectors)))])
    return Impacts(vectors.indices[is_kept], scaled[is_kept].astype(np.int64), offsets.astype(np.int64))


def unquantisable_vectors(vectors: SparseVectors) -> dict[int, str]:
    """Returns the vectors that cannot be quantised: the reason by number of the vector."""
    scaled, rows = _scaled_weights(vectors)
    reasons: dict[int, str] = {}
    for number in np.flatnonzero(~((scaled >= 0) & (scaled <= _MAX_IMPACT))):
        word, weight = vectors.indices[number], vectors.values[number]
        reason = (
            f"the weight {weight:g} of word {word} does not fit an impact: expected 0 to {_MAX_IMPACT / SCALE:,.0f}"
        )
        reasons.setdefault(int(rows[number]), reason)
    totals = np.bincount(rows, scaled, len(vectors))
    for row in np.flatnonzero(totals > _MAX_IMPACT):
        reason = (
            f"its weights sum to {totals[row] / SCALE:,.0f}, expected at most {_MAX_IMPACT / SCALE:,.0f}: "
            "Lucene counts the impacts of a text in 31 bits"
        )
        reasons.setdefault(int(row), reason)
    return reasons


def _scaled_weights(vectors: SparseVectors) -> tuple[np.ndarray, np.ndarray]:
    """Returns rint(100 v) of each weight v, float64 [numbers], and the number of its vector, int64 [numbers]."""
    scaled: np.ndarray = np.rint(SCALE * vectors.values.astype(np.float64))
    return scaled, np.repeat(np.arange(len(vectors)), vectors.counts)


def document_texts(impacts: Impacts) -> Iterator[str]:
    """Yields each passage as text for Lucene's analyzer: `word|frequency ...`, or EMPTY without words."""
    for number in range(len(impacts)):
        words, counts = impacts.of_row(number)
        yield " ".join(map("%d|%d".__mod__, zip(words.tolist(), counts.tolist(), strict=True))) or EMPTY


def query_texts(impacts: Impacts) -> list[str]:
    """Returns each query in the syntax of Lucene's parser: `word^weight ...`; "" for a query without words."""
    return [
        " ".join(map("%d^%d".__mod__, zip(*(part.tolist() for part in impacts.of_row(number)), strict=True)))
        for number in range(len(impacts))
    ]


def exact_scores(queries: Impacts, number: int, passages: Impacts, width: int) -> np.ndarray:
    """Computes the exact scores of passages for query `number`: int64 [passages]. width: size of the vocabulary."""
    weights = np.zeros(width, np.int64)
    words, impacts = queries.of_row(number)
    weights[words] = impacts
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(weights[passages.words] * passages.impacts)])
    scores: np.ndarray = sums[passages.offsets[1:]] - sums[passages.offsets[:-1]]
    return scores
