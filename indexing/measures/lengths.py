"""Computes the median length of the first passages of a run, by which GTR's analysis compares retrievers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus

_BLOCK = 8_192  # number of passages that are in memory at once


@dataclass(frozen=True)
class PassageLength:
    """The median length of the first passages of a run, with the numbers of counted and missing passages.

    Attributes:
        depth: Maximum number of passages per query.
        words: The median number of words.
        passages: Number of passages whose median it is; a passage counts once for each query that has it.
        missing: Number of passages that the corpus lacks. They are left out.
    """

    depth: int
    words: float
    passages: int
    missing: int


def median_length(ranked_ids: Mapping[str, Sequence[str]], corpus: Corpus, depth: int) -> PassageLength:
    """Returns the median number of words (title and text) over the first `depth` passages of all queries.

    A word is a run of characters without white space.

    Args:
        ranked_ids: Passage ids of each query, best first.
        corpus: The corpus.
        depth: Number of passages per query, at least 1.

    Raises:
        InputError: If there are no passages, or if the corpus has none of them.
    """
    first = [id for ids in ranked_ids.values() for id in ids[:depth]]
    words = _words_of_passages(sorted(set(first)), corpus)
    counts = [words[id] for id in first if id in words]
    if not counts:
        example = f" (such as {first[0]!r})" if first else ""
        raise InputError(
            f"the corpus has none of its first {len(first):,} passages{example}, expected passages whose length is "
            "known; give a run over this corpus that has hits for these queries"
        )
    return PassageLength(depth, float(np.median(counts)), len(counts), len(first) - len(counts))


def _words_of_passages(ids: Sequence[str], corpus: Corpus) -> dict[str, int]:
    """Returns the number of words by passage id; passages that the corpus lacks are left out."""
    rows = corpus.rows_of(ids)
    rows = np.sort(rows[rows >= 0])
    words = {}
    for start in range(0, len(rows), _BLOCK):
        for passage in corpus.passages(rows[start : start + _BLOCK]):
            words[passage.id] = len(passage.title.split()) + len(passage.text.split())
    return words
