"""The hits of a run as ranked lists of passage ids."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa


def ranked_hits(run: pa.Table, queries: Iterable[str], depth: int | None = None) -> dict[str, list[str]]:
    """Returns the passage ids of each query, best first.

    Args:
        run: Columns query_id, id, score. Hits are ranked by score, as ir-measures ranks them: equal scores by id,
            descending.
        queries: Ids of the queries; hits of other queries are left out.
        depth: Maximum number of hits per query; None: all.

    Returns:
        A list per query, empty for a query without hits.
    """
    hits: dict[str, list[tuple[float, str]]] = {query: [] for query in queries}
    for query, id, score in zip(*(run[name].to_pylist() for name in ("query_id", "id", "score")), strict=True):
        if query in hits:
            hits[query].append((score, id))
    return {query: [id for _, id in sorted(found, reverse=True)[:depth]] for query, found in hits.items()}
