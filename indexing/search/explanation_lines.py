"""Formats explanations of hits as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from riptide.indexing.exact.score_parts import TermScore
from riptide.indexing.search.explanations import HitExplanation, SourceExplanation
from riptide.indexing.search.snippets import one_line

SHOWN_TERMS = 10  # maximum number of terms that are printed


def explanation_lines(explanation: HitExplanation, rank: int) -> list[str]:
    """Returns the lines that explain a hit.

    Args:
        explanation: The explanation.
        rank: Rank of the hit in the result.
    """
    lines = [line for source in explanation.sources for line in _source_lines(source)]
    if explanation.fusion != "none":
        sides = " + ".join(f"{source.part:.6f}" for source in explanation.sources)
        lines.append(f"fusion by {explanation.fusion}: {sides} = {explanation.score:.6f}, rank {explanation.rank}")
    if explanation.reranker is not None:
        lines.append(f"re-ranker: {explanation.reranker:.6f}, rank {explanation.rank} -> {rank}")
    if explanation.filter:
        lines.append(f"filter: {one_line(explanation.filter)}")
    return lines


def _source_lines(source: SourceExplanation) -> Iterator[str]:
    """Yields the lines of one source."""
    if source.score is None:
        yield f"{source.source}: not found"
        return
    yield f"{source.source}: score {source.score:.6f}, rank {source.rank}"
    if (of := source.probed_list) is not None:
        place = "not probed" if of.rank is None else f"rank {of.rank}"
        yield f"  list {of.number} of {of.lists:,} ({place}; {of.probed:,} probed)"
    if source.terms is None:
        return
    yield from (f"  {_describe_term(term)}" for term in source.terms[:SHOWN_TERMS])
    rest = source.other_terms + sum(term.score for term in source.terms[SHOWN_TERMS:])
    if len(source.terms) > SHOWN_TERMS:
        yield f"  {rest:.6f}  all other terms"


def _describe_term(term: TermScore) -> str:
    text = f"{term.score:.6f}  {one_line(term.term)}: {term.query_weight:.6g} x {term.passage_weight:.6g}"
    if term.idf is None:
        return text
    details = [f"idf {term.idf:.6g}"]
    if term.frequency is not None:
        details.append(f"frequency {term.frequency:g}")
    if term.length and term.mean_length:
        details.append(f"length {term.length:g} (mean {term.mean_length:.1f})")
    return f"{text}  ({', '.join(details)})"
