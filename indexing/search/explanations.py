"""The explanation of a hit: what each source contributed, the fusion, the re-ranker and the filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from riptide.indexing.exact.score_parts import ProbedList, TermScore

FusionName = Literal["none", "reciprocal ranks", "weighted scores"]


@dataclass(frozen=True)
class SourceExplanation:
    """What one source contributed to a hit.

    Attributes:
        source: Name of the source.
        weight: Weight of the source in the fusion; 1 without weights.
        rank: Rank of the passage among the hits of the source, from 1; None: the source did not find it.
        score: Score of the source; None: the source did not find it.
        part: Its part of the fused score. The sum of all parts is the fused score.
        terms: The terms with the largest scores; None: the source has no terms, or did not find the passage.
        other_terms: Sum of the scores of all other terms.
        probed_list: The inverted list of an index that holds the passage; None: there are no lists, or a filter
            decided which vectors were scored.
    """

    source: str
    weight: float
    rank: int | None
    score: float | None
    part: float
    terms: tuple[TermScore, ...] | None = None
    other_terms: float = 0.0
    probed_list: ProbedList | None = None


@dataclass(frozen=True)
class HitExplanation:
    """Why a passage is a hit.

    Attributes:
        fusion: How the sources were fused; "none" with a single source.
        rank: Rank of the passage after fusion and before re-ranking, from 1. It counts passages, also if the hits are
            documents.
        score: Score after fusion and before re-ranking.
        sources: What each source contributed.
        reranker: Probability of the re-ranker; None: it did not score the passage.
        filter: The filter that the passage matches; None: there was no filter.
    """

    fusion: FusionName
    rank: int
    score: float
    sources: tuple[SourceExplanation, ...]
    reranker: float | None = None
    filter: str | None = None
