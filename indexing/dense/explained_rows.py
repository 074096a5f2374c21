"""Explains dense hits by the inverted lists that hold them. Their scores are inner products, which have no parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts


def explain_rows(
    embeddings: Embeddings, queries: np.ndarray, rows: RowsOfQueries, index: Any = None, nprobe: int = 0
) -> list[dict[int, ScoreParts]]:
    """Returns the lists that hold passages, by row, for each query.

    Args:
        embeddings: The vectors of the passages.
        queries: float32 [q, dim].
        rows: The rows of the passages, for each query.
        index: A trained FAISS index, with or without vectors; None: the search has no lists.
        nprobe: Number of lists that a query probes.
    """
    if index is None:
        return [dict.fromkeys(of_query, ScoreParts()) for of_query in rows]
    from riptide.indexing.dense.faiss_search import find_probed_lists

    explained = []
    for query, of_query in zip(queries, rows, strict=True):
        vectors = embeddings.take(np.array(of_query, np.int64)).astype(np.float32)
        lists = find_probed_lists(index, query, vectors, nprobe)
        explained.append({row: ScoreParts(probed_list=each) for row, each in zip(of_query, lists, strict=True)})
    return explained
