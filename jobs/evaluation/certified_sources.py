"""Measures the recall of sources with an index against exact search, over the queries of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter, filter_columns
from riptide.indexing.dense.certified_recall import mean_interval, recall_of_hits, selectivity_class
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say

if TYPE_CHECKING:
    from riptide.indexing.hit_sources.dense import DenseSource
    from riptide.indexing.hit_sources.opened_sources import HitSources
    from riptide.jobs.evaluation.evaluate_options import Evaluate

DEFAULT_K = 10  # number of hits whose recall is measured, unless the options say otherwise


@dataclass(frozen=True)
class CertifiedSources:
    """The sources whose recall is measured, and the filters.

    Attributes:
        sources: Opens the exact sources.
        indexed: The sources with an index.
        filters: The filters and the rows that match, int64 ascending; None: no filter.
        k: Number of hits whose recall is measured.
    """

    sources: HitSources
    indexed: list[DenseSource]
    filters: list[tuple[Filter, np.ndarray] | None]
    k: int

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of the artifacts that the recall depends on."""
        artifacts = [artifact for source in self.indexed for artifact in source.inputs().values()]
        return [each.fingerprint for each in (*self.sources.corpus.generations, *artifacts)]

    def plan(self, num_queries: int) -> list[str]:
        """Returns a line for each source, with the number of searches for `num_queries` queries."""
        return [
            f"certify {each.source_text}: recall@{self.k} of exact:{each.embeddings.name}, "
            f"{len(self.filters)} searches per query: {num_queries * len(self.filters):,} of all "
            f"{each.embeddings.num_rows:,} vectors, in this process and without resume"
            for each in self.indexed
        ]


def open_certified(store: Store, options: Evaluate) -> CertifiedSources:
    """Opens the sources of `--certify` and parses the filters.

    Raises:
        InputError: If a source searches no index of dense embeddings, or if a filter does not parse.
    """
    from riptide.indexing.hit_sources.dense import DenseSource
    from riptide.indexing.hit_sources.opened_sources import HitSources
    from riptide.indexing.hit_sources.search_options import SearchOptions

    corpus = Corpus.open(store)
    sources = HitSources(store, corpus, SearchOptions(encoder=options.encoder, task=options.task))
    indexed = list[DenseSource]()
    for name in options.certify:
        source = sources.open(name)
        if not isinstance(source, DenseSource) or source.index is None:
            raise InputError(
                f"{Parameter('certify', name)}: it searches no index of dense embeddings, so exact search says nothing "
                "about it; give a source such as index:minilm, or dense"
            )
        if source.source_text in [each.source_text for each in indexed]:
            raise InputError(f"{Parameter('certify', name)}: a source is given twice; leave one of them out")
        indexed.append(source)
    columns = filter_columns(corpus) if options.certify_filters else {}
    parsed = [Filter.parse(text, columns) for text in options.certify_filters]
    return CertifiedSources(
        sources, indexed, [None, *((filter, filter.rows(corpus)) for filter in parsed)], options.certify_k or DEFAULT_K
    )


def certify_sources(certified: CertifiedSources, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Measures and prints the recall of the sources, with and without each filter; returns JSON values.

    Args:
        certified: The sources and filters.
        texts: The queries, at least one.
    """
    from riptide.indexing.work.local_runner import LocalRunner
    from riptide.jobs.common.session import num_gpus

    runner, texts = LocalRunner(gpus=num_gpus()), list(texts)
    corpus, k = certified.sources.corpus, certified.k
    num_passages = max(1, corpus.num_rows - len(corpus.deleted))
    figures = []
    for source in certified.indexed:
        exact_source = certified.sources.open(f"exact:{source.embeddings.name}")
        for matching in certified.filters:
            rows = None if matching is None else matching[1]
            approximate, exact = (each.search(texts, k, runner, rows) for each in (source, exact_source))
            recalls = recall_of_hits(approximate, exact)
            recalls = recalls[~np.isnan(recalls)]
            share = None if rows is None else len(rows) / num_passages
            name = selectivity_class(share) if matching is None else matching[0].text
            if not len(recalls):
                say(f"{source.source_text}, filter {name}: no passage matches")
                continue
            mean, lower, upper = mean_interval(recalls)
            say(
                f"{source.source_text}, filter {name}{'' if share is None else f' ({share:.2%} of the passages)'}: "
                f"recall@{k} {mean:.4f} ({lower:.4f} to {upper:.4f}) of exact search"
            )
            figures.append(
                {
                    "source": source.source_text,
                    "filter": None if matching is None else name,
                    "share": share,
                    "class": selectivity_class(share),
                    "k": k,
                    "queries": len(recalls),
                    "recall": mean,
                    "lower": lower,
                    "upper": upper,
                }
            )
    return figures
