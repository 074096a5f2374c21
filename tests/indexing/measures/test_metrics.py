"""Measures against hand-written ones, p-values against all sign patterns."""

import itertools
import math
import random
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import pytrec_eval
from scipy.stats import monte_carlo_test

from riptide.base.errors import InputError
from riptide.indexing.measures import metrics
from riptide.indexing.measures.metrics import (
    adjust_p_values,
    bootstrap_interval,
    metrics_per_query,
    paired_p_value,
    parse_metrics,
)


def tables(judged: dict[str, dict[str, int]], found: dict[str, dict[str, float]]) -> tuple[pa.Table, pa.Table]:
    qrels = [(q, p, g) for q, grades in judged.items() for p, g in grades.items()]
    run = [(q, p, s) for q, scores in found.items() for p, s in scores.items()]
    random.Random(0).shuffle(run)  # the order of lines means nothing, the scores do
    names = (["query_id", "corpus_id", "score"], ["query_id", "id", "score"])
    return tuple(  # type: ignore[return-value]
        pa.table(dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True)))
        for columns, rows in zip(names, (qrels, run), strict=True)
    )


def by_hand(grades: dict[str, int], scores: dict[str, float]) -> dict[str, float]:
    """nDCG@10 (gain = grade), RR@10, R@5, AP of one query, from their definitions."""
    ranked = sorted(scores, key=lambda id: -scores[id])
    gains = [grades.get(id, 0) for id in ranked]
    best = sorted(grades.values(), reverse=True)

    def dcg(values: list[int]) -> float:
        return sum(value / math.log2(rank + 1) for rank, value in enumerate(values[:10], 1))

    relevant = sum(grade > 0 for grade in grades.values())
    hits = [rank for rank, gain in enumerate(gains, 1) if gain > 0]
    return {
        "nDCG@10": dcg(gains) / dcg(best) if relevant else 0.0,
        "RR@10": next((1 / rank for rank in hits if rank <= 10), 0.0),
        "R@5": sum(rank <= 5 for rank in hits) / relevant if relevant else 0.0,
        "AP": sum((at + 1) / rank for at, rank in enumerate(hits)) / relevant if relevant else 0.0,
    }


def test_values_equal_hand_written_ones() -> None:
    draw = random.Random(1)
    passages = [f"p{n}" for n in range(30)]
    judged = {f"q{n}": {p: draw.randrange(3) for p in draw.sample(passages, 6)} | {"p0": 1} for n in range(40)}
    found = {q: {p: draw.random() for p in draw.sample(passages, draw.randrange(1, 25))} for q in judged}
    del found["q3"], found["q30"]  # without hits
    found["stranger"] = {"p1": 1.0}  # not judged
    values = metrics_per_query(*tables(judged, found), ["nDCG@10", "RR@10", "R@5", "AP"])
    for number, query in enumerate(sorted(judged)):
        expected = by_hand(judged[query], found.get(query, {}))
        assert {metric: value[number] for metric, value in values.items()} == pytest.approx(expected), query
    assert len(values["AP"]) == 40
    at = sorted(judged).index("q3")
    assert [value[at] for value in values.values()] == [0, 0, 0, 0]


def test_names_are_those_that_were_asked_for() -> None:
    qrels, run = tables({"q": {"p": 1}}, {"q": {"p": 1.0}})
    assert {
        name: value.tolist() for name, value in metrics_per_query(qrels, run, ["MAP", "P@1", "Success@1"]).items()
    } == {
        "MAP": [1],
        "P@1": [1],
        "Success@1": [1],
    }


def test_numbers_of_hits_do_not_depend_on_other_metrics() -> None:
    """ir-measures gave NumRet without the hits that are not judged beside such a metric, for half of the hash seeds."""
    qrels, run = tables({"q": {"p": 1}}, {"q": {"p": 1.0, "x": 2.0}})
    for cutoff in range(1, 20):
        assert metrics_per_query(qrels, run, ["NumRet", f"P(judged_only=True)@{cutoff}"])["NumRet"].tolist() == [2]


def test_every_measure_ranks_equal_scores_as_trec_eval_does() -> None:
    """By id, descending. The first hit of 30 queries is one of several with the same score in float32."""
    draw = random.Random(3)
    passages = [f"p{n}" for n in range(9)]
    judged = {f"q{n}": {p: draw.randrange(2) for p in draw.sample(passages, 4)} | {"p8": 1} for n in range(30)}
    found = {q: {p: draw.choice([1.0, 1.0 + 1e-9, 0.5]) for p in passages[:7]} for q in judged}
    names = ["RR", "RR@1", "P@1", "Success@1", "nDCG@1", "Judged@1", "RR@5"]
    values = metrics_per_query(*tables(judged, found), names)
    reference = pytrec_eval.RelevanceEvaluator(judged, {"recip_rank", "P_1"}).evaluate(found)
    for number, query in enumerate(sorted(judged)):
        first = max(found[query], key=lambda id: (np.float32(found[query][id]), id))
        rank = reference[query]["recip_rank"]
        assert reference[query]["P_1"] == (judged[query].get(first, 0) > 0)
        assert [values[name][number] for name in ("RR", "RR@5")] == [rank, rank if rank >= 1 / 5 else 0]
        for name in ("RR@1", "P@1", "Success@1", "nDCG@1"):
            assert values[name][number] == reference[query]["P_1"]
        assert values["Judged@1"][number] == (first in judged[query])


@pytest.mark.filterwarnings("error")
def test_scores_beyond_float32_are_equal_without_a_warning() -> None:
    values = metrics_per_query(*tables({"q": {"p1": 1}}, {"q": {"p1": 2e39, "p2": 1e39}}), ["RR"])
    assert values["RR"].tolist() == [0.5]


OFFERED = ["nDCG", "nDCG@10", "P@3", "R@3", "AP", "AP@3", "RR", "RR@3", "Rprec", "Bpref", "infAP", "Compat", "Judged@3"]
OFFERED += ["NumQ", "NumRel", "NumRet", "SetAP", "SetF", "SetP", "SetR", "Success@3", "IPrec@0.25", "RR(rel=2)@3"]
NEGATIVE = """
import itertools, random, sys
import pyarrow as pa
from riptide.indexing.measures.metrics import metrics_per_query
run = pa.table({"query_id": ["a", "a", "b", "c"], "id": ["p", "q", "p", "p"], "score": [2.0, 1.0, 1.0, 1.0]})
names, draw = sys.argv[1:], random.Random(0)
for grades in ([-1, -1, -1, 1], [-2, -1, -9, -1], [-1, 0, -1, 2]):
    qrels = pa.table({"query_id": ["a", "a", "b", "c"], "corpus_id": ["p", "x", "y", "p"], "score": grades})
    for metrics in [names, ["nDCG@10", "AP", "Bpref", "infAP"], ["SetF", "Bpref", "infAP", "NumRet"],
                    *(draw.sample(names, 5) for _ in range(60))]:
        values = metrics_per_query(qrels, run, metrics)
        for name in metrics:
            assert values[name].shape == (3,)
            if name not in ("NumQ", "NumRet", "Judged@3") and max(grades[:2]) < 0:
                assert values[name][0] == 0, (name, values[name])
"""


def test_queries_with_negative_judgements_alone_have_values() -> None:
    """In a process of its own, which pytrec_eval would end with a segmentation fault."""
    ended = subprocess.run([sys.executable, "-c", NEGATIVE, *OFFERED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_grade_that_would_take_memory_by_its_value_is_refused() -> None:
    """As it may be in judgements of a store of an earlier version."""
    qrels, run = tables({"q": {"p": 1, "r": 100_000_000}}, {"q": {"p": 1.0}})
    message = "query 'q', passage 'r': found score 100000000, expected an integer from -100,000 to 100,000; import"
    with pytest.raises(InputError, match=message):
        metrics_per_query(qrels, run, ["nDCG@10"])


def test_measures_that_are_offered_have_values_for_every_query() -> None:
    qrels, run = tables({"q": {"p": 1, "r": 0}, "r": {"p": 2}, "s": {"p": 1}}, {"q": {"p": 1.0}, "r": {"x": 1.0}})
    names = ["nDCG", "P@3", "R@3", "AP", "AP@3", "RR", "RR@3", "Rprec", "Bpref", "infAP", "Compat", "Judged@3", "NumQ"]
    names += ["NumRel", "NumRet", "SetAP", "SetF", "SetP", "SetR", "Success@3", "IPrec@0.25", f"nDCG@{10**9}"]
    names += ["RR(rel=2)@3", "R(rel=2)@3", "AP(rel=2)", "nDCG(judged_only=True)@3"]
    values = metrics_per_query(qrels, run, names)
    assert {name: len(value) for name, value in values.items()} == dict.fromkeys(names, 3)
    assert values[f"nDCG@{10**9}"].tolist() == values["nDCG"].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ("nDCG@0", "cutoff 0: expected 1 to 1,000,000,000"),
        ("P@0", "cutoff 0: expected"),
        ("AP(cutoff=0)", "cutoff 0: expected"),
        ("Judged@0", "cutoff 0: expected"),
        ("nDCG@100000000000000000000", "cutoff 100000000000000000000: expected"),
        ("R@1.5", "cutoff 1.5: expected"),
        ("P(rel=0)@5", "rel 0: expected 1 to"),
        ("P(rel=3000000000)@5", "rel 3000000000: expected 1 to"),
        ("P(rel=True)@5", "rel True: expected 1 to"),
        ("nDCG(dcg='exp-log2')@10", "dcg is not offered; expected a cutoff, rel and judged_only alone"),
        ("nDCG(gains={1:5})@10", "gains is not offered"),
        ("SetF(beta=2.0)", "beta is not offered"),
        ("P(foo=1)@5", "foo is not offered"),
        ("IPrec@1.5", "recall 1.5: expected 0.0 to 1.0"),
        ("IPrec@0.104", "recall 0.104: expected 0.0 to 1.0, of two digits"),
        ("P", "cannot be computed with these parameters; P has cutoff (required), rel, judged_only"),
        ("Rprec@10", "cannot be computed with these parameters; Rprec has rel, judged_only"),
        ("NumRel(rel=2)", "cannot be computed with these parameters; NumRel has rel"),
        ("RR(judged_only=True)@10", "cannot be computed with these parameters; RR has cutoff, rel, judged_only"),
        ("NumQ(rel=1)", "cannot be computed with these parameters; NumQ has none"),
        ("ERR@10", "ERR is not offered; expected AP, Bpref, Compat, "),
        ("Accuracy@1", "Accuracy is not offered"),
    ],
)
def test_parameters_that_ir_measures_cannot_compute_are_refused(metric: str, told: str) -> None:
    """With these, it aborts the process, fails, or gives values by chance."""
    with pytest.raises(InputError) as error:
        parse_metrics(["RR@10", metric])
    assert str(error.value).startswith(f"parameter metrics {metric!r}: {told}")


NO_NAMES = [
    "nDGC@10",
    "nDCG@",
    "",
    "nDCG@10 R@5",
    "__import__('os')",
    "os.system",
    "nDCG@-1",
    "nDCG@10**20",
    "nDCG@10@5",
]


@pytest.mark.parametrize("metric", [*NO_NAMES, "nDCG@10#@5", "(nDCG@10)", "nDCG@None", "nDCG\0@10"])
def test_what_is_no_metric_is_refused_by_name(metric: str) -> None:
    qrels, run = tables({"q": {"p": 1}}, {"q": {"p": 1.0}})
    with pytest.raises(InputError, match="not one of ir-measures'") as error:
        metrics_per_query(qrels, run, [metric])
    assert repr(metric) in str(error.value)


@pytest.mark.parametrize(
    ("metric", "meant"),
    [("nDGC@10", "nDCG@10"), ("ndcg@10", "nDCG@10"), ("recall(rel=2)@5", "Recall(rel=2)@5"), ("mrr", "MRR")],
)
def test_a_misspelt_metric_is_answered_with_the_one_that_is_meant(metric: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"did you mean {re.escape(meant)}\\?$"):
        parse_metrics([metric])
    parse_metrics([meant])


@pytest.mark.parametrize("metric", ["(" * 5_000 + "nDCG" + ")" * 5_000, "nDCG@" + "9" * 5_000])
def test_a_long_name_is_refused_and_cut(metric: str) -> None:
    with pytest.raises(InputError, match=r"'\S{100}\.\.\.': not one of ir-measures'"):
        parse_metrics([metric])


def exact_p_value(one: np.ndarray, other: np.ndarray) -> float:
    """The share of all sign patterns of the differences whose sum is at least as extreme."""
    differences = other - one
    observed = abs(differences.sum())
    patterns = itertools.product((-1, 1), repeat=len(differences))
    return float(np.mean([abs(np.dot(signs, differences)) >= observed * (1 - 1e-12) for signs in patterns]))


@pytest.mark.parametrize("queries", [1, 2, 3, 7, 11, 14])
@pytest.mark.parametrize("shift", [0.0, 0.3, 1.0])
def test_p_values_approach_those_of_all_sign_patterns(queries: int, shift: float, monkeypatch) -> None:
    """With more samples than usual: the standard error is at most 0.0032."""
    monkeypatch.setattr(metrics, "RESAMPLES", 99_999)
    draw = np.random.default_rng(queries)
    one = draw.normal(size=queries)
    other = one + draw.normal(shift, 0.5, size=queries)
    assert paired_p_value(one, other) == pytest.approx(exact_p_value(one, other), abs=0.007)
    assert paired_p_value(other, one) == pytest.approx(exact_p_value(one, other), abs=0.007)


@pytest.mark.parametrize("queries", [3, 90, 700])
def test_p_values_are_those_of_scipy(queries: int) -> None:
    """With the same random signs; many differences are equal, so that many sums are equal."""
    draw = np.random.default_rng(queries)
    one = draw.integers(0, 3, queries) / 3
    other = one + draw.choice([-0.1, 0.1, 0.2], queries)
    differences = other - one
    random_signs = np.random.default_rng(0)

    def patterns(size: tuple[int, int]) -> np.ndarray:
        packed = np.frombuffer(random_signs.bytes(size[0] * -(-size[1] // 8)), np.uint8).reshape(size[0], -1)
        return np.unpackbits(packed, axis=1, count=size[1])

    def total(signs: np.ndarray, axis: int) -> np.ndarray:
        return differences.sum() - 2 * (signs.astype(np.float64) @ differences)

    observed = np.zeros(queries, np.uint8)
    options = {"vectorized": True, "n_resamples": metrics.RESAMPLES, "batch": metrics.BATCH_NUMBERS // queries}
    assert paired_p_value(one, other) == pytest.approx(monte_carlo_test(observed, patterns, total, **options).pvalue)


def test_p_values_have_a_seed_and_leave_out_queries_that_do_not_differ() -> None:
    draw = np.random.default_rng(2)
    one = draw.normal(size=15)
    other = one + draw.normal(0.2, 0.5, size=15)
    same = draw.normal(size=400)
    p_value = paired_p_value(one, other)
    assert p_value == paired_p_value(one, other)
    assert p_value == paired_p_value(np.concatenate([same, one]), np.concatenate([same, other]))
    assert p_value != paired_p_value(one, other, seed=1)


def test_the_smallest_p_value_is_that_of_no_sample_as_extreme() -> None:
    """Two-sided, of 9,999 samples and the observed one."""
    assert paired_p_value(np.zeros(60), np.ones(60)) == pytest.approx(2 / 10_000)


def test_runs_that_do_not_differ_have_a_p_of_one() -> None:
    values = np.random.default_rng(3).random(20)
    assert paired_p_value(values, values.copy()) == 1.0
    assert paired_p_value(np.empty(0), np.empty(0)) == 1.0


def test_holm_adjusts_as_published() -> None:
    """The step-down procedure by hand: p (m - rank), made monotone, at most 1."""
    assert adjust_p_values({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert adjust_p_values({"a": 0.5, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert adjust_p_values({"only": 0.2}) == {"only": 0.2}
    assert adjust_p_values({}) == {}


def test_an_interval_is_that_of_a_normal_distribution_for_many_queries() -> None:
    """The mean over two sets has half the sum of their means, and a quarter of the sum of the variances of these."""
    random_numbers = np.random.default_rng(1)
    sets = [random_numbers.normal(1.0, 2.0, 400), random_numbers.normal(3.0, 1.0, 900)]
    for values in (sets[:1], sets):
        interval = bootstrap_interval(values)
        deviation = math.sqrt(sum(each.var() / len(each) for each in values)) / len(values)
        assert interval.mean == pytest.approx(np.mean([each.mean() for each in values]))
        assert interval.low == pytest.approx(interval.mean - 1.96 * deviation, abs=0.2 * deviation)
        assert interval.high == pytest.approx(interval.mean + 1.96 * deviation, abs=0.2 * deviation)
    assert bootstrap_interval(sets) == bootstrap_interval(sets)
