"""The expected quality of a partly encoded corpus, against ir-measures and against whole corpora."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from riptide.base.errors import InputError
from riptide.indexing.measures.metrics import metrics_per_query
from riptide.indexing.migration.forecast import (
    JudgedQuery,
    KnownPassages,
    difference_interval,
    expected_values,
    judged_queries,
    ratio_corrected,
    values_of_hits,
)
from riptide.indexing.migration.migration_sample import Migration
from riptide.indexing.migration.rank_metrics import RankMetric

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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    for values in expected_of_scores(metric, scores, known, judged):
        assert values == pytest.approx(expected)


def test_the_forecast_of_a_sampled_corpus_is_near_the_truth() -> None:
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
        values, low, high = expected_of_scores(metric, scores[:, rows], known, judged)
        assert (low <= values + 1e-12).all()
        assert (values <= high + 1e-12).all()
        assert truth < high.mean()
        errors.append(values.mean() - truth)
        sampled = KnownPassages(rows, np.isin(rows, sampled_rows), len(rows))
        naive.append(expected_of_scores(metric, scores[:, rows], sampled, judged)[0].mean() - truth)
    assert np.abs(errors).max() < 0.02
    assert min(naive) > 0.1


def test_the_error_of_the_old_encoder_corrects_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the queries have many more near passages than the others, which a common distribution does not show."""
    scores, judged = random_queries(200, 2_000)
    scores[::2] = np.sign(scores[::2]) * np.abs(scores[::2]) ** 1.5
    metric, rows = RankMetric.parse("nDCG@10"), np.arange(0, 2_000, 2)
    judged = [JudgedQuery(query.rows - query.rows % 2, query.grades) for query in judged]
    judged = [
        JudgedQuery(*(array[np.unique(q.rows, return_index=True)[1]] for array in (q.rows, q.grades))) for q in judged
    ]
    known = KnownPassages(rows, np.ones(1_000, bool), 2_000)
    new = scores + np.random.default_rng(1).normal(0, 0.05, scores.shape).astype(np.float32)
    old_truth, truth = (values_of_hits(metric, np.argsort(-each, axis=1)[:, :10], judged) for each in (scores, new))
    old, *_ = expected_of_scores(metric, scores[:, rows], known, judged)
    values, low, high = expected_of_scores(metric, new[:, rows], known, judged)
    corrected, lower = ratio_corrected(values, old, old_truth, (low, high))
    assert corrected.mean() == pytest.approx(truth.mean(), abs=0.01)
    assert (corrected <= high).all()
    assert (lower == low).all()
    unchanged, _ = ratio_corrected(values, np.zeros(200), old_truth, (low, high))
    assert unchanged == pytest.approx(np.minimum(values, high))
    smaller, lower = ratio_corrected(values, old, old_truth / 3, (low, high))
    assert (lower <= smaller + 1e-12).all()  # the lower end of the interval moves outwards
    monkeypatch.setattr("riptide.indexing.migration.forecast.QUERIES_AT_ONCE", 7)
    assert expected_of_scores(metric, new[:, rows], known, judged)[0] == pytest.approx(values)


def test_expected_gains_are_those_of_drawn_numbers() -> None:
    metric, random = RankMetric.parse("nDCG@10"), np.random.default_rng(0)
    expected = metric.value(np.array([1]), np.array([2]), np.array([3.0]))
    values = [metric.value(np.array([1]), np.array([2 + number])) for number in random.poisson(3.0, 20_000)]
    assert expected == pytest.approx(np.mean(values), abs=0.005)
    deep = RankMetric.parse("R@1000").value(np.array([1]), np.array([1]), np.array([760.0]))
    assert deep == pytest.approx(1)
    assert metric.value(np.array([1]), np.array([2]), np.array([0.0])) == metric.value(np.array([1]), np.array([2]))
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
    plain, bounded = difference_interval(new, old), difference_interval(new, old, (new - 0.1, new + 0.2))
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
