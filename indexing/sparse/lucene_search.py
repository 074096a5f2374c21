"""Stores impacts in Lucene as term frequencies; a score is the inner product of query and passage impacts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from riptide.indexing.lucene.lucene import FIELD, PACKAGE, LuceneSegmentFiles, SegmentSearch, lucene_jvm, write_segment


@functools.cache
def _frequency_analyzer() -> Any:
    """Returns the analyzer of passages, which splits at spaces and reads a word's frequency after `|`."""
    arguments = lucene_jvm().type("java.util.HashMap")
    builder = lucene_jvm().type(f"{PACKAGE}analysis.custom.CustomAnalyzer").builder()
    builder = builder.withTokenizer("whitespace", arguments())
    return builder.addTokenFilter("delimitedTermFrequency", arguments()).build()


def write_impacts(passages: Iterable[str], folder: Path) -> LuceneSegmentFiles:
    """Writes passages of the form `word|frequency ...` as a segment; arguments and errors as for `write_segment`."""
    return write_segment(passages, folder, _frequency_analyzer(), omit_norms=True)


class ImpactSearch(SegmentSearch):
    """Searches shards as one index, for queries of the form `word^weight ...`.

    A score is the float32 that is nearest to the sum of the products weight * frequency, if each product is below 2^24:
    Lucene multiplies in float32 and adds up in float64. Queries may have any number of words
    (`riptide.indexing.lucene.lucene` raises Lucene's limit of clauses).
    """

    def __init__(self, shards: Sequence[tuple[LuceneSegmentFiles, Path]], first_row: int = 0):
        """Opens the shards; `shards` and `first_row` as for SegmentSearch."""
        similarity = lucene_jvm().type("io.anserini.search.similarity.ImpactSimilarity")()
        super().__init__(shards, similarity, first_row=first_row)
        analysis = lucene_jvm().type(f"{PACKAGE}analysis.core.KeywordAnalyzer")()
        keywords = lucene_jvm().cast(f"{PACKAGE}analysis.Analyzer", analysis)
        self._parser = lucene_jvm().type(f"{PACKAGE}queryparser.classic.QueryParser")(FIELD, keywords)
        self._parsing = threading.Lock()

    def _build_query(self, query: str) -> Any:
        if not query:
            return None
        # The lock is needed as a parser is not thread-safe. A parser per thread would not work: pyjnius keeps one Java
        # object per method of a class, and would release a thread's parser while it runs.
        with self._parsing:
            return self._parser.parse(query)
