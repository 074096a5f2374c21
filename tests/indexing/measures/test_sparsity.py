"""Figures of sparse vectors against those of the same vectors with all zeros."""

from __future__ import annotations

import numpy as np
import pytest

from riptide.indexing.measures.sparsity import sparsity_figures
from riptide.retriever.encoding.sparse_vectors import from_dense


def test_figures_are_those_of_the_dense_matrices() -> None:
    random = np.random.default_rng(0)
    queries = random.random((7, 20), np.float32) * (random.random((7, 20)) < 0.3)
    passages = random.random((12, 20), np.float32) * (random.random((12, 20)) < 0.6)
    figures = sparsity_figures([from_dense(queries)], [from_dense(passages[:5]), from_dense(passages[5:])])
    products = [np.count_nonzero(query * passage) for query in queries for passage in passages]
    assert figures == pytest.approx(
        {
            "words of queries": np.count_nonzero(queries) / 7,
            "words of passages": np.count_nonzero(passages) / 12,
            "FLOPS": np.mean(products),
            "regularised, queries": float(np.square(queries.mean(0)).sum()),
            "regularised, passages": float(np.square(passages.mean(0)).sum()),
        },
        rel=1e-5,
    )
