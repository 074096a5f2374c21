"""Makes the explanations of hits from the hits and the score parts of each source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from riptide.indexing.exact import Hits
from riptide.indexing.exact.score_parts import ScoreParts
from riptide.indexing.hit_sources.fusion import fuse, fusion_parts
from riptide.indexing.search.explanations import FusionName, HitExplanation, SourceExplanation


class SourceResult(NamedTuple):
    """The hits of a source for one query.

    Attributes:
        name: Name of the source.
        hits: Its hits [1, any].
        scores: The parts of the scores of its hits that are explained, by row. Rows of leaves that failed are missing.
    """

    name: str
    hits: Hits
    scores: dict[int, ScoreParts]


def rows_to_explain(rows: Sequence[int], hits: Hits) -> list[int]:
    """Returns those of the rows that are among the hits [1, any] of a source."""
    hit_rows = set(hits.rows[0].tolist())
    return [row for row in rows if row in hit_rows]


def explain_hits(
    rows: Sequence[int],
    sources: Sequence[SourceResult],
    weights: Sequence[float] | None,
    depth: int,
    reranked: Sequence[float | None],
    filter: str | None,
) -> list[HitExplanation]:
    """Explains hits of one query.

    Args:
        rows: The rows of the hits.
        sources: The hits and score parts of each source.
        weights: A weight per source; None: one source, or a fusion by reciprocal rank.
        depth: Number of passages that the fusion returned.
        reranked: The probability of the re-ranker for each row; None: it was not scored.
        filter: The filter of the search; None: there was none.
    """
    hits = [source.hits for source in sources]
    fused, parts = fuse(hits, depth, weights), fusion_parts(hits, weights)
    places = {row: place for place, row in enumerate(fused.rows[0].tolist())}
    ranks = [{row: rank for rank, row in enumerate(each.rows[0].tolist(), 1) if row >= 0} for each in hits]
    fusion: FusionName = "none"
    if len(sources) > 1:
        fusion = "reciprocal ranks" if weights is None else "weighted scores"

    def explain_source(row: int, number: int) -> SourceExplanation:
        source, weight = sources[number], 1.0 if weights is None else float(weights[number])
        rank, part = ranks[number].get(row), parts[number].get(row, 0.0)
        if rank is None:
            return SourceExplanation(source.name, weight, None, None, part)
        score, scored = float(source.hits.scores[0, rank - 1]), source.scores.get(row, ScoreParts())
        probed_list = None if filter else scored.probed_list
        return SourceExplanation(source.name, weight, rank, score, part, scored.terms, scored.other_terms, probed_list)

    return [
        HitExplanation(
            fusion,
            places[row] + 1,
            float(fused.scores[0, places[row]]),
            tuple(explain_source(row, number) for number in range(len(sources))),
            probability,
            filter,
        )
        for row, probability in zip(rows, reranked, strict=True)
    ]
