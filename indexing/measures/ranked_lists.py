"""Converts the hits of a run to ranked lists of passage ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa


def ranked_hits(run: pa.Table, queries: Iterable[str], depth: int | None = None) -> dict[str, list[str]]:
    """Returns the passage ids of each query's hits, best first.

    Args:
        run: Columns query_id, id, score. Hits are ranked by score as float32, and equal scores by id, descending, as
            trec_eval ranks them.
        queries: Ids of the queries; hits of other queries are left out.
        depth: Maximum number of hits per query; None: all.

    Returns:
        A list per query, empty for a query without hits.
    """
    hits: dict[str, list[tuple[float, str]]] = {query: [] for query in queries}
    with np.errstate(over="ignore"):  # scores beyond float32 become infinite and thus equal, as in trec_eval
        scores = run["score"].to_numpy().astype(np.float32).tolist()
    for query, id, score in zip(run["query_id"].to_pylist(), run["id"].to_pylist(), scores, strict=True):
        if query in hits:
            hits[query].append((score, id))
    return {query: [id for _, id in sorted(found, reverse=True)[:depth]] for query, found in hits.items()}
