"""Measures the recall of sources with an index against exact search, over the queries of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter, FilteredQueries, filter_columns, group_queries
from riptide.indexing.dense.certified_recall import SELECTIVITIES, mean_interval, recall_of_hits, selectivity_class
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say

if TYPE_CHECKING:
    from riptide.indexing.hit_sources.dense import DenseSource
    from riptide.jobs.evaluation.evaluate_options import Evaluate

DEFAULT_K = 10  # number of hits whose recall is measured, unless the options say otherwise


@dataclass(frozen=True)
class CertifiedSources:
    """The sources whose recall is measured, and the queries with their filters.

    Attributes:
        corpus: The corpus that is searched.
        indexed: The sources with an index.
        texts: The queries.
        searches: The queries by filter; with `has_query_filters`, each query occurs once.
        has_query_filters: Whether the filters are fields of the queries, and not those of `--certify-filters`.
        k: Number of hits whose recall is measured.
    """

    corpus: Corpus
    indexed: list[DenseSource]
    texts: list[str]
    searches: list[FilteredQueries]
    has_query_filters: bool
    k: int

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of the artifacts that the recall depends on."""
        artifacts = [artifact for source in self.indexed for artifact in source.inputs().values()]
        return [each.fingerprint for each in (*self.corpus.generations, *artifacts)]

    def plan(self) -> list[str]:
        """Returns a line for each source, with the number of searches."""
        num_searches = sum(len(each.numbers) for each in self.searches)
        num_filters = sum(each.filter is not None for each in self.searches)
        return [
            f"certify {each.source_text}: recall@{self.k} of exact:{each.embeddings.name}, {num_searches:,} searches "
            f"with {num_filters:,} filters of all {each.embeddings.num_rows:,} vectors, in this process and without "
            "resume"
            for each in self.indexed
        ]


def open_certified(store: Store, queries: Queries, options: Evaluate) -> CertifiedSources:
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
    ids, texts = queries.split(options.split, options.limit)
    columns, field = filter_columns(corpus), options.certify_filter_field
    if field is None:
        filters = [None, *(Filter.parse(text, columns) for text in options.certify_filters)]
        searches = [FilteredQueries(filter, np.arange(len(ids))) for filter in filters]
    else:
        searches = group_queries(queries.filters(ids, field, columns))
    k = min(options.certify_k or DEFAULT_K, max(1, corpus.num_rows))
    return CertifiedSources(corpus, indexed, texts, searches, field is not None, k)


def certify_sources(certified: CertifiedSources) -> list[dict[str, Any]]:
    """Measures and prints the recall of the sources by filter; returns JSON values.

    Queries with different filters are measured together by the class of the share of matching passages, as in a server.
    """
    from riptide.indexing.work.local_runner import LocalRunner
    from riptide.jobs.common.session import num_gpus

    runner, corpus = LocalRunner(gpus=num_gpus()), certified.corpus
    num_passages = max(1, corpus.num_rows - len(corpus.deleted))
    figures = []
    for source in certified.indexed:
        exact_source = replace(source, index=None)
        vectors = source.encoder.encode(certified.texts, runner)
        recalls: dict[tuple[str, str | None, float | None], list[np.ndarray]] = {}
        for filter, numbers in certified.searches:
            rows = None if filter is None else filter.rows(corpus)
            share = None if rows is None else len(rows) / num_passages
            approximate, exact = (
                each.search_vectors(vectors[numbers], certified.k, runner, rows) for each in (source, exact_source)
            )
            text = None if filter is None or certified.has_query_filters else filter.text
            group = selectivity_class(share), text, None if text is None else share
            recalls.setdefault(group, []).append(recall_of_hits(approximate, exact))
        groups = (
            sorted(recalls, key=lambda group: SELECTIVITIES.index(group[0])) if certified.has_query_filters else recalls
        )
        for group in groups:
            figure = _measure_group(source.source_text, certified.k, *group, np.concatenate(recalls[group]))
            figures.extend([figure] if figure else [])
    return figures


def _measure_group(
    source: str, k: int, class_name: str, filter: str | None, share: float | None, recalls: np.ndarray
) -> dict[str, Any] | None:
    """Prints the recall of queries, and returns it as JSON values; None if no passage matches any of them.

    Args:
        source: The source.
        k: Number of hits.
        class_name: The class of the share of matching passages.
        filter: The filter of all queries; None: they have none, or different ones.
        share: The share of passages that match it; None without one.
        recalls: float64 [queries]; NaN for queries whose filter no passage matches.
    """
    title = f"{source}, filter {filter or class_name}{'' if share is None else f' ({share:.2%} of the passages)'}"
    measured = recalls[~np.isnan(recalls)]
    if not len(measured):
        say(f"{title}: no passage matches")
        return None
    mean, lower, upper = mean_interval(measured)
    unmatched = len(recalls) - len(measured)
    say(
        f"{title}: recall@{k} {mean:.4f} ({lower:.4f} to {upper:.4f}) of exact search, {len(measured):,} queries"
        + (f", and {unmatched:,} whose filter no passage matches" if unmatched else "")
    )
    return {
        "source": source,
        "filter": filter,
        "share": share,
        "class": class_name,
        "k": k,
        "queries": len(measured),
        "recall": mean,
        "lower": lower,
        "upper": upper,
    }
