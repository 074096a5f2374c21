"""Reads the terms of a BM25 score from Lucene's explanation, a tree of values with descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from riptide.indexing.exact.score_parts import ScoreParts, TermScore, parts_of_terms

_WEIGHT = re.compile(r"weight\(\w+:(.*) in \d+\) \[", re.DOTALL)  # the description of the score of a term
_FIELDS = {"freq": "frequency", "dl": "length", "avgdl": "mean_length"}


def parts_of_explanation(explanation: dict[str, Any]) -> ScoreParts:
    """Returns the terms of the score of a passage.

    Args:
        explanation: Lucene's Explanation as JSON: {"value", "description", "details"}.
    """
    return parts_of_terms(_term_scores(explanation))


def _term_scores(node: dict[str, Any]) -> Iterator[TermScore]:
    """Yields the terms of a node and of the nodes below it."""
    match = _WEIGHT.match(node["description"])
    if match is None:
        for detail in node["details"] or ():
            yield from _term_scores(detail)
        return
    values = {name: float(value) for name, value in _named_values(node)}
    idf = values["idf"]
    known = {field: values[name] for name, field in _FIELDS.items() if name in values}
    yield TermScore(match[1], float(node["value"]), idf * values.get("boost", 1.0), values["tf"], idf, **known)


def _named_values(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the first word of the description and the value of all nodes below a node, such as ("idf", 2.1)."""
    for detail in node["details"] or ():
        yield detail["description"].split(",", 1)[0].split(" ", 1)[0], detail["value"]
        yield from _named_values(detail)
