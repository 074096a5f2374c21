"""Parses and formats the grammar that names hit sources in search, mining, evaluation and serving.

bm25  bm25:NAME          Lucene's BM25; without a name the one called bm25, or the only one
exact:EMB                every vector of embeddings EMB
index:NAME               a FAISS index, its candidates scored again by the vectors
splade:NAME              an index of impacts, over sparse embeddings
A+B+…                    several of these, by reciprocal rank
0.4*A+0.6*B              several, by the weighted sum of their scores, min-max normalised for each query
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.hit_sources.registry import KINDS, all_forms, find_kind
from riptide.indexing.hit_sources.search_options import NEEDS, SearchOptions
from riptide.indexing.hit_sources.source_kind import SourceKind

MAX_WEIGHT = 1e9  # keeps sums of weighted scores finite in float32
_WEIGHTED = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\*(.+)")


@dataclass(frozen=True)
class SourceTerm:
    """A single source in an expression. name: "" if the expression has only the kind."""

    kind: SourceKind
    name: str


@dataclass(frozen=True)
class SourceExpression:
    """A parsed source: a single source or a fusion.

    Attributes:
        source: The text.
        terms: The sources that are searched, at least one.
        weights: A weight per source; None: one source, or a fusion by reciprocal rank.
    """

    source: str
    terms: tuple[SourceTerm, ...]
    weights: tuple[float, ...] | None

    def check_distinct(self, sources: Sequence[str]) -> None:
        """Raises InputError if two terms are the same source. sources: the terms with all names filled in."""
        if len(set(sources)) < len(sources):
            raise InputError(f"source {self.source!r}: a source is given twice")

    def unused_options(self, options: SearchOptions) -> list[str]:
        """Returns the names of options that are set but that no term uses."""
        used = {name for term in self.terms for name in term.kind.options}
        names = [field.name for field in fields(options)]
        return [name for name in names if getattr(options, name) is not None and name not in used]


def parse_source(source: str) -> SourceExpression:
    """Parses a source into terms and weights. Raises InputError if it does not follow the grammar."""
    # The look-behind keeps the time linear: a run of spaces is searched from its first space only.
    source = re.sub(r"(?<!\s)\s*([+*])\s*", r"\1", source.strip())
    pieces = source.split("+")
    if len(pieces) == 1:
        return SourceExpression(source, (_parse_term(source),), None)
    if not all(piece.strip() for piece in pieces):
        raise InputError(f"source {source!r}: expected a source on both sides of each +")
    matches = [_WEIGHTED.fullmatch(piece) for piece in pieces]
    if any(matches) and not all(matches):
        raise InputError(f"source {source!r}: give every one of the sources a weight, or none")
    names = [match[2] if match else piece for match, piece in zip(matches, pieces, strict=True)]
    terms = tuple(_parse_term(name) for name in names)
    weights = tuple(float(match[1]) for match in matches if match) or None
    if weights and not any(weights):
        raise InputError(f"source {source!r}: every weight is 0; give at least one source a positive weight")
    if weights and max(weights) > MAX_WEIGHT:
        raise InputError(f"source {source!r}: weight {max(weights):g}: expected at most {MAX_WEIGHT:g}")
    return SourceExpression(source, terms, weights)


def check_options_used(
    source: str, options: SearchOptions, others: Mapping[str, tuple[object, str]] | None = None
) -> None:
    """Raises InputError if a setting of a search has no effect on a source.

    Args:
        source: The source.
        options: The settings.
        others: Further parameters that have no effect: their values, and what they go with, by name.

    Raises:
        InputError: For a setting that has no effect.
    """
    unused = {name: (getattr(options, name), NEEDS[name]) for name in parse_source(source).unused_options(options)}
    for name, (value, needed) in {**unused, **(others or {})}.items():
        raise InputError(f"{Parameter(name, value)}: {source} has no use for it, it goes with {needed}")


def fusion_text(sources: Sequence[str], weights: Sequence[float] | None) -> str:
    """Formats a fusion in the grammar: `A+B`, or `w*A+v*B` with weights."""
    if weights is None:
        return "+".join(sources)
    numbers = [np.format_float_positional(weight, trim="-") for weight in weights]
    return "+".join(f"{number}*{source}" for number, source in zip(numbers, sources, strict=True))


def source_label(source: str) -> str:
    """Converts a source to text that can be part of a name: `index:minilm` becomes dense-minilm."""
    for kind in KINDS:
        if kind.label != kind.name:
            source = source.replace(f"{kind.name}:", f"{kind.label}-")
    return re.sub(r"[^A-Za-z0-9.]+", "-", source)


def _parse_term(source: str) -> SourceTerm:
    word, _, name = source.partition(":")
    kind = find_kind(word)
    if kind is None or not kind.allows_name(name):
        raise InputError(f"source {source!r}: expected {', '.join(all_forms())}, or A+B")
    return SourceTerm(kind, name)
