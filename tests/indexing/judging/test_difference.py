"""The difference of two runs from a sample of verdicts: bias, coverage in every round, and what a model changes."""

from __future__ import annotations

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.indexing.judging.difference import SKIPPED, decide, estimate_difference, factor_of_rounds, needed_verdicts
from riptide.indexing.judging.judging_order import JudgingOrder
from riptide.indexing.judging.judging_pool import JudgingPool, parse_measure, pool_runs


def test_gains_add_up_to_the_difference_of_the_measure() -> None:
    """Against values by hand: DCG of the first run (1 + 1/log2 3), of the second one (1/log2 3), over both ranks."""
    pool = pool_runs({"q": ["a", "b", "z"], "r": ["a"]}, {"q": ["c", "b"], "r": ["a"]}, parse_measure("DCG@2"))
    assert (pool.query_ids, pool.ids, pool.num_pooled, pool.num_queries) == (("q", "q"), ("a", "c"), 4, 2)
    first = 1 / (1 + 1 / np.log2(3)) / 2
    assert pool.gains == pytest.approx([-first, first])
    assert parse_measure("P@4") == pytest.approx([0.25] * 4)
    for name in ("nDCG@10", "RR@10", "P@0", "P"):
        with pytest.raises(InputError, match=r"expected DCG@k or P@k"):
            parse_measure(name)


@pytest.fixture(scope="module")
def pool() -> JudgingPool:
    """400 pairs of 40 queries."""
    random = np.random.default_rng(0)
    first, second = ({f"q{n}": [f"p{at}" for at in random.permutation(14)[:10]] for n in range(40)} for _ in range(2))
    return pool_runs(first, second, parse_measure("DCG@10"))


def test_each_beginning_of_the_order_is_an_unbiased_sample(pool: JudgingPool) -> None:
    values, totals = np.abs(pool.gains), np.zeros(2)
    for seed in range(200):
        order = JudgingOrder(pool, seed, 30)
        for at, count in enumerate((30, 60)):
            chosen = order.numbers[:count]
            totals[at] += (values[chosen] / order.probabilities(count)[chosen]).sum() / 200
    assert totals == pytest.approx([values.sum()] * 2, rel=0.02)
    assert order.ends[:3] == [30, 45, 68]
    assert (order.probabilities(order.ends[-1]) == 1).all()
    assert JudgingOrder(pool, 0, 1_000).ends == [len(pool)]


@pytest.mark.parametrize(
    ("relevance", "model"),
    [*(("random", model) for model in ("none", "good", "poor")), ("late", "none"), ("late, top", "none")],
)
def test_intervals_of_all_rounds_cover_the_difference(pool: JudgingPool, relevance: str, model: str) -> None:
    """At most 5% of the seeds may have a round whose interval misses the truth; a poor model costs no coverage.

    With "late", only passages that the second run finds late, and few others, are relevant; the sample has few of them.
    """
    random = np.random.default_rng(1)
    is_second, ranks = pool.gains > 0, pool.best_ranks
    relevant = {
        "random": random.random(len(pool)) < np.where(is_second, 0.35, 0.2),
        "late": is_second & (ranks >= 8),
        "late, top": np.where(is_second, ranks >= 8, (ranks <= 2) & (random.random(len(pool)) < 0.15)),
    }[relevance].astype(np.float64)
    wrong = random.random(len(pool)) < {"none": 0.0, "good": 0.05, "poor": 0.4}[model]
    verdicts = None if model == "none" else np.where(wrong | (relevant == 1), 1.0, 0.0)
    truth, missed, lengths, alone = float(pool.gains @ relevant), 0, [], []
    for seed in range(100):
        order = JudgingOrder(pool, seed, 40, verdicts)
        estimates = [estimate_difference(pool, order, relevant, each) for each in range(1, len(order.ends) + 1)]
        missed += any(not each.low <= truth <= each.high for each in estimates)
        lengths.append(estimates[1].high - estimates[1].low)
        assert estimates[-1].difference == pytest.approx(truth)
        assert estimates[-1].high - estimates[-1].low < 1e-8, "all pairs are judged"
        of_people = estimate_difference(pool, JudgingOrder(pool, seed, 40), relevant, 2)
        alone.append(of_people.high - of_people.low)
    assert missed <= 5
    assert np.mean(lengths) < {"none": 1.01, "good": 0.8, "poor": 1.15}[model] * np.mean(alone)


def test_a_skipped_pair_widens_the_interval_by_both_of_its_verdicts(pool: JudgingPool) -> None:
    order, verdicts = JudgingOrder(pool, 0, 40), np.zeros(len(pool))
    at = int(order.numbers[0])
    verdicts[at] = SKIPPED
    estimate = estimate_difference(pool, order, verdicts, len(order.ends))
    assert estimate.high - estimate.low == pytest.approx(abs(pool.gains[at]))


def test_runs_with_equally_many_relevant_hits_are_tied() -> None:
    """P@10 gives all pairs one gain, and a sum of 2 x 30 such gains, in another order for each seed, may not be 0."""
    random = np.random.default_rng(0)
    first, second = ({f"q{n}": [f"p{at}" for at in random.permutation(14)[:10]] for n in range(30)} for _ in range(2))
    equal = pool_runs(first, second, parse_measure("P@10"))
    for seed in range(50):
        random, verdicts = np.random.default_rng(seed), np.zeros(len(equal))
        for sign in (-1, 1):
            verdicts[random.permutation(np.flatnonzero(np.sign(equal.gains) == sign))[:30]] = 1
        order = JudgingOrder(equal, seed, 40)
        assert estimate_difference(equal, order, verdicts, len(order.ends)).decision is None


def test_decisions_and_the_verdicts_until_one(pool: JudgingPool) -> None:
    assert [decide(*each, 0.1) for each in ((0.01, 1), (-1, -0.01), (-0.1, 0.1), (-0.2, 0.1))] == [
        *("second", "first", "equal", None)
    ]
    assert decide(-0.1, 0.1, 0.0) is None
    assert decide(0.01, 0.05, 0.1) == "equal", "within the margin, although one run is better"
    assert [factor_of_rounds(each) for each in (1, 2, 3, 12)] == pytest.approx([1.960, 1.960, 2.236, 2.830], abs=1e-3)
    order = JudgingOrder(pool, 0, 40)
    relevant = (np.random.default_rng(2).random(len(pool)) < 0.2).astype(np.float64)
    estimate = estimate_difference(pool, order, relevant, 1)
    assert estimate.decision is None
    needed = [needed_verdicts(pool, order, estimate, margin) for margin in (0.0, 0.2, 5.0)]
    assert len(pool) - order.ends[0] >= needed[0] >= needed[1] >= needed[2] == order.ends[1] - order.ends[0]
