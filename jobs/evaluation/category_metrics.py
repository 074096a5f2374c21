"""Metrics of runs by category (Topic-DPR): a hit is relevant if it has a category in common with its query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.measures.many_relevant import expected_values, metric_values, parse_metric
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say

if TYPE_CHECKING:
    from riptide.indexing.queries.category_relevance import CategoryRelevance


@dataclass(frozen=True)
class CategoryMeasure:
    """Computes the metrics of runs by category; an instance is called with a run.

    Attributes:
        relevance: The relevant passages of categories.
        ids: The queries, in the order of the values.
        metrics: Names of metrics.
        groups: The places of the queries with the same categories, by their categories.
        num_relevant: Number of relevant passages of each query, int64 [q].
    """

    relevance: CategoryRelevance
    ids: list[str]
    metrics: list[str]
    groups: dict[frozenset[str], list[int]]
    num_relevant: np.ndarray

    def __call__(self, run: pa.Table) -> dict[str, np.ndarray]:
        """Returns the values of each metric for a run, float64 [q]."""
        depth = max(parse_metric(metric)[1] for metric in self.metrics)
        ranked = ranked_hits(run, self.ids, depth)
        distinct = sorted({id for ids in ranked.values() for id in ids})
        row_of = dict(zip(distinct, self.relevance.corpus.rows_of(distinct).tolist(), strict=True))
        is_relevant = np.zeros((len(self.ids), max(map(len, ranked.values()), default=0)), bool)
        for categories, places in self.groups.items():
            relevant = self.relevance.relevant(categories)
            for place in places:
                rows = np.array([row_of[id] for id in ranked[self.ids[place]]], np.int64)
                is_relevant[place, : len(rows)] = (rows >= 0) & relevant[rows]  # row -1: the corpus lacks the hit
        return {metric: metric_values(is_relevant, self.num_relevant, metric) for metric in self.metrics}

    def of_random_ranking(self) -> dict[str, np.ndarray]:
        """Returns the expected values of each metric for a random order of the passages, float64 [q]."""
        return expected_values(self.num_relevant, self.relevance.num_passages, self.metrics)


def make_category_measure(
    store: Store, queries: Queries, qrels: pa.Table | None, ids: Sequence[str], metrics: list[str], field: str
) -> CategoryMeasure:
    """Makes the category measure of a query set. Prints how many queries have the categories of their judged passages.

    Args:
        store: The store.
        queries: The query set.
        qrels: The judgements; None: there are none.
        ids: The queries that are measured.
        metrics: Names of metrics.
        field: The metadata field with the categories.

    Raises:
        InputError: If a passage or a query has no categories.
    """
    from riptide.indexing.queries.category_relevance import CategoryRelevance

    relevance = CategoryRelevance(Corpus.open(store), field)
    query_ids = sorted(set(ids))
    of_queries = relevance.categories_of(queries, query_ids, qrels)
    if number := of_queries.num_from_judgements:
        say(f"{number:,} of the {len(query_ids):,} queries have the categories of their judged passages")
    groups: dict[frozenset[str], list[int]] = {}
    for place, id in enumerate(query_ids):
        groups.setdefault(of_queries.by_query[id], []).append(place)
    num_relevant = np.zeros(len(query_ids), np.int64)
    for categories, places in groups.items():
        num_relevant[places] = relevance.relevant(categories).sum()
    if without := int((num_relevant == 0).sum()):
        say(
            f"warning: {without:,} of the {len(query_ids):,} queries of {queries.artifact.key} have no category of a "
            "passage, and count as 0"
        )
    return CategoryMeasure(relevance, query_ids, metrics, groups, num_relevant)
