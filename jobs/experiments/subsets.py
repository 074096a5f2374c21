"""Finds the test queries whose relevant passages occurred in training."""

from __future__ import annotations

import numpy as np

from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.jobs.experiments.arms import DataSet


def seen_queries(data_set: DataSet, split: str, trained_split: str) -> np.ndarray:
    """Returns whether each judged query of a split shares a relevant passage with a training query: bool [queries].

    Args:
        data_set: The set.
        split: The split that is measured; its queries are in the order of their ids, as metrics are.
        trained_split: The split that arms are trained on.
    """
    queries = Queries.open(Store(data_set.store), data_set.queries)

    def relevant(name: str) -> dict[str, set[str]]:
        table = queries.qrels(name)
        passages: dict[str, set[str]] = {query: set() for query in table["query_id"].to_pylist()}
        for query, passage, score in zip(*(table[c].to_pylist() for c in table.column_names), strict=True):
            if score > 0:
                passages[query].add(passage)
        return passages

    trained = set().union(*relevant(trained_split).values())
    return np.array([bool(passages & trained) for _, passages in sorted(relevant(split).items())])
