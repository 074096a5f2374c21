"""The parts of the score of a hit in one source: terms with their weights, or the probed list of an index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RowsOfQueries = Sequence[Sequence[int]]  # the rows of the passages to explain, for each query
MAX_TERMS = 50  # maximum number of terms of an explanation; the scores of smaller ones are added up


@dataclass(frozen=True)
class TermScore:
    """A term of a score. Its score is query_weight * passage_weight.

    Attributes:
        term: The term of the index: for BM25 after stemming, for sparse vectors a token of the encoder's vocabulary.
        score: Its part of the score.
        query_weight: For BM25 idf times the number of times that the query has the term; for sparse vectors the impact
            in the query.
        passage_weight: For BM25 the saturated and length-normalised frequency (tf), for sparse vectors the impact.
        idf: Inverse document frequency; None: no BM25.
        frequency: Number of times that the passage has the term; None: no BM25.
        length: Number of terms of the passage as Lucene stores it, in steps; None: no BM25.
        mean_length: Mean number of terms of a passage; None: no BM25.
    """

    term: str
    score: float
    query_weight: float
    passage_weight: float
    idf: float | None = None
    frequency: float | None = None
    length: float | None = None
    mean_length: float | None = None


@dataclass(frozen=True)
class ProbedList:
    """The inverted list of an index that holds a passage.

    Attributes:
        number: Number of the list.
        rank: Rank of the list among those that the query probed, from 1; None: it was not probed, and the passage was
            found because all vectors were scored.
        probed: Number of probed lists (nprobe).
        lists: Number of lists of the index.
    """

    number: int
    rank: int | None
    probed: int
    lists: int


@dataclass(frozen=True)
class ScoreParts:
    """The parts of the score of a passage. The score is the sum of those of its terms and of `other_terms`.

    Attributes:
        terms: The terms with the largest scores, at most MAX_TERMS; None: the source has no terms.
        other_terms: Sum of the scores of all other terms.
        probed_list: The list of the passage; None: the source has no inverted lists.
    """

    terms: tuple[TermScore, ...] | None = None
    other_terms: float = 0.0
    probed_list: ProbedList | None = None


def parts_of_terms(terms: Iterable[TermScore]) -> ScoreParts:
    """Returns the largest terms, and the sum of the scores of the others."""
    in_order = sorted(terms, key=lambda term: (-term.score, term.term))
    rest = sum((term.score for term in in_order[MAX_TERMS:]), 0.0)
    return ScoreParts(tuple(in_order[:MAX_TERMS]), rest)
