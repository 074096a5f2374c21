"""The expected quality of a partly encoded corpus, against ir-measures and against whole corpora."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from riptide.base.errors import InputError
from riptide.indexing.measures.metrics import metrics_per_query
from riptide.indexing.migration.forecast import (
    ExpectedValues,
    JudgedQuery,
    KnownPassages,
    difference_interval,
    expected_values,
    judged_queries,
    values_of_hits,
)
from riptide.indexing.migration.migration_sample import Migration
from riptide.indexing.migration.rank_metrics import RankMetric
from riptide.indexing.migration.space_maps import unit_rows
from riptide.indexing.migration.unknown_passages import CountModel, RelevantPassages

METRICS = ("nDCG@10", "R@5", "RR@10", "nDCG@3")


def random_queries(queries: int, passages: int) -> tuple[np.ndarray, list[JudgedQuery]]:
    """Returns the scores of passages, and one to three relevant passages of each query, whose scores are higher."""
    random = np.random.default_rng(0)
    scores = random.standard_normal((queries, passages)).astype(np.float32)
    judged = []
    for number in range(queries):
        rows = random.choice(passages, random.integers(1, 4), replace=False)
        scores[number, rows] += random.uniform(1, 4)
        judged.append(JudgedQuery(rows, random.integers(1, 3, len(rows))))
    return scores, judged


def expected_of_scores(
    metric: RankMetric, scores: np.ndarray, known: KnownPassages, judged: list[JudgedQuery]
) -> ExpectedValues:
    """Calls `expected_values` with vectors whose inner products are the given scores."""
    return expected_values(metric, scores, np.eye(scores.shape[1], dtype=np.float32), known, judged)


@pytest.mark.parametrize("name", METRICS)
def test_values_of_a_whole_corpus_are_those_of_ir_measures(name: str) -> None:
    scores, judged = random_queries(30, 60)
    metric, rows = RankMetric.parse(name), np.argsort(-scores, axis=1)
    run = pa.table(
        {
            "query_id": np.repeat([f"q{n:02d}" for n in range(30)], 60),
            "id": [f"d{row}" for row in rows.ravel()],
            "score": np.tile(np.arange(60, 0, -1.0), 30),
        }
    )
    judgements = [
        (f"q{n:02d}", f"d{row}", int(grade))
        for n, query in enumerate(judged)
        for row, grade in zip(query.rows, query.grades, strict=True)
    ]
    qrels = pa.table(dict(zip(("query_id", "corpus_id", "score"), zip(*judgements, strict=True), strict=True)))
    expected = metrics_per_query(qrels, run, [name])[name]
    assert values_of_hits(metric, rows[:, :10], judged) == pytest.approx(expected)
    known = KnownPassages(np.arange(60), np.zeros(60, bool), 60)
    forecast = expected_of_scores(metric, scores, known, judged)
    assert forecast.values == pytest.approx(expected)
    assert forecast.low == forecast.high == pytest.approx(expected.mean())


def test_the_forecast_of_a_sampled_corpus_is_near_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the passages is known; without the estimate of the others, the value would be far too high."""
    scores, judged = random_queries(200, 4_000)
    metric = RankMetric.parse("nDCG@10")
    truth = values_of_hits(metric, np.argsort(-scores, axis=1)[:, :10], judged).mean()
    certain = np.unique(np.concatenate([query.rows for query in judged]))
    rest = np.setdiff1d(np.arange(4_000), certain)
    errors, naive = [], []
    for seed in range(5):
        sampled_rows = np.random.default_rng(seed).choice(rest, 400, replace=False)
        rows = np.sort(np.concatenate([certain, sampled_rows]))
        known = KnownPassages(rows, np.isin(rows, sampled_rows), 4_000)
        forecast = expected_of_scores(metric, scores[:, rows], known, judged)
        assert forecast.low <= forecast.values.mean() <= forecast.high
        errors.append(forecast.values.mean() - truth)
        sampled = KnownPassages(rows, np.isin(rows, sampled_rows), len(rows))
        naive.append(expected_of_scores(metric, scores[:, rows], sampled, judged).values.mean() - truth)
    assert np.abs(errors).max() < 0.02
    assert min(naive) > 0.1
    monkeypatch.setattr("riptide.indexing.migration.forecast.QUERIES_AT_ONCE", 7)
    again = expected_of_scores(metric, scores[:, rows], known, judged)
    assert again.values == pytest.approx(forecast.values)


def topic_scores(
    random: np.random.Generator, noise: float, passages: int, queries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scores by an old and a new encoder in topics of different sizes, and the relevant row of each query."""
    topics = random.standard_normal((40, 24))
    vectors = topics[random.choice(40, passages, p=random.dirichlet(np.full(40, 0.5)))]
    vectors = vectors + random.uniform(0.2, 0.8, (passages, 1)) * random.standard_normal(vectors.shape)
    rows = random.integers(0, passages, queries)
    query_vectors = vectors[rows] + random.uniform(0.2, 1.2, (queries, 1)) * random.standard_normal((queries, 24))
    old = unit_rows(query_vectors + 0.3 * random.standard_normal(query_vectors.shape)) @ unit_rows(vectors).T
    new = unit_rows(query_vectors) @ unit_rows(vectors + noise * random.standard_normal(vectors.shape)).T
    return old, new, rows


@pytest.mark.parametrize("noise", [0.3, 1.5])  # a new encoder that is near the old one, and one that is not
def test_the_interval_covers_the_truth_of_all_queries(noise: float) -> None:
    """A relevant passage that few chosen ones are above has few unknown ones above it: U p was far too large for it.

    Of 600 queries, 100 are drawn again and again, with 300 random passages of 1,500; the truth is that of all queries.
    """
    random, metric = np.random.default_rng(1), RankMetric.parse("nDCG@10")
    old_scores, new_scores, rows = topic_scores(random, noise, 1_500, 600)
    old, new = (
        metric.gains(1 + (scores > scores[np.arange(600), rows][:, None]).sum(axis=1))
        for scores in (old_scores, new_scores)
    )
    hits = np.argpartition(-old_scores, 3, axis=1)[:, :3]
    is_covered, errors = [], []
    for _ in range(12):
        drawn, sample = random.choice(600, 100, replace=False), random.choice(1_500, 300, replace=False)
        chosen = np.union1d(rows[drawn], hits[drawn])
        known_rows = np.union1d(chosen, sample)
        known = KnownPassages(known_rows, ~np.isin(known_rows, chosen), 1_500)
        judged = [JudgedQuery(np.array([row]), np.ones(1, np.int64)) for row in rows[drawn]]
        forecast = expected_of_scores(metric, new_scores[np.ix_(drawn, known_rows)], known, judged)
        interval = difference_interval(forecast.values, old[drawn], forecast)
        is_covered.append(interval.low <= new.mean() - old.mean() <= interval.high)
        errors.append(forecast.values.mean() - new[drawn].mean())
    assert np.mean(is_covered) >= 0.9
    assert abs(np.mean(errors)) < 0.025


def test_expected_gains_are_those_of_drawn_numbers() -> None:
    metric, random = RankMetric.parse("nDCG@10"), np.random.default_rng(0)
    relevant = RelevantPassages(np.array([2]), np.array([2]), np.array([1]), np.array([0.01]), 100, 400, 1.0)
    [mean], [deviation] = relevant.expected_gains(metric, CountModel(0.5, 3.0, 1.0, 0.0))
    # Numbers above it: gamma with mean 0.5 * 400 * 0.01 = 2 and shape 3, given that 1 of 100 is seen.
    means = random.gamma(3.0, 2 / 3, 400_000)
    means = means[random.poisson(means / 4) == 1]
    gains = metric.gains(2 + random.poisson(means))
    assert mean == pytest.approx(gains.mean(), abs=0.005)
    assert deviation == pytest.approx(gains.std(), abs=0.005)
    many = RelevantPassages(np.array([1]), np.array([1]), np.array([0]), np.array([0.76]), 2, 1_000, 1.0)
    assert many.expected_gains(RankMetric.parse("R@1000"), CountModel(1.0, 1_000.0, 1.0, 0.0))[0] == pytest.approx(1)
    with pytest.raises(InputError, match="AP: expected nDCG@K, R@K or RR@K with K from 1 to 1,000"):
        RankMetric.parse("AP")


def test_missing_passages_and_the_bound_lower_the_values() -> None:
    [query] = judged_queries(["q"], {"q": {"d1": 2, "d2": 0, "gone": 1}}, {"d1": 4, "d2": 5})
    assert (query.rows.tolist(), query.grades.tolist()) == ([4, -1], [2, 1])
    assert values_of_hits(RankMetric.parse("R@5"), np.array([[4, 5, -1]]), [query]) == pytest.approx([0.5])
    known = KnownPassages(np.arange(6), np.zeros(6, bool), 7)
    with pytest.raises(InputError, match="fewer than two random passages"):
        expected_of_scores(RankMetric.parse("R@5"), np.zeros((1, 6)), known, [query])
    new, old = np.array([0.5, 1.0, 0.2, 0.7]), np.array([0.5, 0.5, 0.1, 0.7])
    expected = ExpectedValues(new, np.zeros(4), float(new.mean()) - 0.1, float(new.mean()) + 0.2)
    plain, bounded = difference_interval(new, old), difference_interval(new, old, expected)
    assert plain.mean == pytest.approx(0.15)
    assert bounded.mean == plain.mean
    assert (bounded.low, bounded.high) == (pytest.approx(plain.low - 0.1), pytest.approx(plain.high + 0.2))


def test_the_random_passages_are_rows_that_are_not_deleted() -> None:
    deleted = np.array([7, 0, 3, 4])
    remaining = np.setdiff1d(np.arange(10), deleted)
    migration = Migration(cast(Any, FewPassages(deleted)), cast(Any, None), cast(Any, None))
    assert migration.draw(100, 0).tolist() == remaining.tolist()
    rows = [migration.draw(3, seed) for seed in range(50)]
    assert all(len(set(each)) == 3 for each in rows)
    assert set(np.concatenate(rows)) == set(remaining)


class FewPassages:
    """A corpus of ten rows, of which some are deleted."""

    def __init__(self, deleted: np.ndarray):
        self.deleted = deleted

    def __len__(self) -> int:
        return 10 - len(self.deleted)
