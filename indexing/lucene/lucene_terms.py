"""Reads the terms of a score from Lucene's explanation, a tree of values with descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from riptide.indexing.exact.score_parts import ScoreParts, TermScore, parts_of_terms

_WEIGHT = re.compile(r"weight\(\w+:(.*) in \d+\) \[", re.DOTALL)  # the description of the score of a term
_FIELDS = {"freq": "frequency", "dl": "length", "avgdl": "mean_length"}


def parts_of_explanation(explanation: dict[str, Any]) -> ScoreParts:
    """Returns the terms of the BM25 score of a passage.

    Args:
        explanation: Lucene's Explanation as JSON: {"value", "description", "details"}.
    """
    return parts_of_terms(_term_score(term, node) for term, node in terms_of_explanation(explanation))


def terms_of_explanation(explanation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the terms of the score of a passage, each with the node of its part of the score."""
    match = _WEIGHT.match(explanation["description"])
    if match is not None:
        yield match[1], explanation
        return
    for detail in explanation["details"] or ():
        yield from terms_of_explanation(detail)


def _term_score(term: str, node: dict[str, Any]) -> TermScore:
    values = {name: float(value) for name, value in _named_values(node)}
    idf = values["idf"]
    counts = {field: values[name] for name, field in _FIELDS.items() if name in values}
    return TermScore(term, float(node["value"]), idf * values.get("boost", 1.0), values["tf"], idf, **counts)


def _named_values(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the first word of the description and the value of all nodes below a node, such as ("idf", 2.1)."""
    for detail in node["details"] or ():
        yield detail["description"].split(",", 1)[0].split(" ", 1)[0], detail["value"]
        yield from _named_values(detail)
