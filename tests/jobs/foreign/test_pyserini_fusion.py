"""Pyserini's fusion: the expected scores of its tests, and random runs that its code fuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from pyserini import fusion
from pyserini.trectools import TrecRun

from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.fusion import reciprocal_rank, weighted

# The runs of its tests: (query, passage, rank, score). Rank 2 of the second run is missing.
RUNS = (
    [(0, 0, 1, 24.0), (0, 1, 2, 13.0), (1, 2, 1, 99.0)],
    [(0, 0, 1, 2.4), (0, 1, 3, 1.3), (2, 2, 1, 3.3)],
)
FUSIONS: dict[str, Any] = {
    "rrf": (lambda hits: reciprocal_rank(hits, 10), fusion.reciprocal_rank_fusion, {}),
    "interpolation": (
        lambda hits: weighted(hits, 10, [0.4, 0.6], normalize="none"),
        fusion.interpolation,
        {"alpha": 0.4},
    ),
    "average": (lambda hits: weighted(hits, 10, [0.5, 0.5], normalize="none"), fusion.average, {}),
    "normalize": (lambda hits: weighted(hits, 10, [1.0, 1.0]), fusion.normalize, {}),
}
EXPECTED = {
    "rrf": [0.03278688524590164, 0.03200204813108039, 0.01639344262295082, 0.01639344262295082],
    "interpolation": [11.040000000000001, 5.98, 39.6, 1.9799999999999998],
    "average": [13.2, 7.15, 49.5, 1.65],
    "normalize": [2.0, 0.0, 1.0, 1.0],
}


def as_hits(run: list[tuple[int, int, int, float]], num_queries: int) -> Hits:
    """Returns the hits of a run by their ranks; a rank without a hit is empty."""
    width = max(rank for _, _, rank, _ in run)
    hits = Hits(np.full((num_queries, width), -np.inf, np.float32), np.full((num_queries, width), -1))
    for query, passage, rank, score in run:
        hits.rows[query, rank - 1], hits.scores[query, rank - 1] = passage, score
    return hits


def listed(hits: Hits) -> list[tuple[int, int, float]]:
    """Returns (query, passage, score) of each hit."""
    places = np.argwhere(hits.rows >= 0).tolist()
    return [(query, int(hits.rows[query, place]), float(hits.scores[query, place])) for query, place in places]


def in_order(hits: Iterable[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Returns hits by query and score, those of equal scores by passage, as each program has its own order of these."""
    return sorted(hits, key=lambda hit: (hit[0], -np.float32(hit[2]), hit[1]))


def random_run(draw: np.random.Generator, passages: int) -> list[tuple[int, int, int, float]]:
    """Returns the hits of 20 queries among 40 passages, in float32, without equal scores."""
    run = []
    for query in range(20):
        scores = np.sort(draw.normal(size=passages).astype(np.float32) * 9)[::-1].tolist()
        ids = draw.permutation(40)[:passages].tolist()
        run += [(query, id, rank, score) for rank, (id, score) in enumerate(zip(ids, scores, strict=True), 1)]
    return run


@pytest.mark.parametrize("method", FUSIONS)
def test_a_fusion_is_that_of_pyserini(method: str) -> None:
    ours, theirs, options = FUSIONS[method]
    places = [(0, 0), (0, 1), (1, 2), (2, 2)]
    expected = [(*place, pytest.approx(score)) for place, score in zip(places, EXPECTED[method], strict=True)]
    assert listed(ours([as_hits(run, 3) for run in RUNS])) == expected

    # A passage that is missing in a run counts 0 there, and here its lowest score: so no passage is missing.
    passages = 40 if method in ("interpolation", "average") else 25
    runs = [random_run(np.random.default_rng(seed), passages) for seed in range(2)]
    tables = [TrecRun.from_list([(q, "Q0", id, rank, score, "") for q, id, rank, score in run]) for run in runs]
    fused = theirs(tables, k=10, **options).run_data[["topic", "docid", "score"]].itertuples(index=False)
    actual = listed(ours([as_hits(run, 20) for run in runs]))
    assert in_order(actual) == [(query, id, pytest.approx(score, rel=1e-6)) for query, id, score in in_order(fused)]
    assert len(actual) == 200
