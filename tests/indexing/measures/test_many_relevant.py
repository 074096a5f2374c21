"""Metrics of queries with many relevant passages: against sentence-transformers, and against all orders of passages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from riptide.base.errors import InputError
from riptide.indexing.measures.many_relevant import DEFAULT_METRICS, expected_values, metric_values, parse_metric


def test_values_equal_those_of_sentence_transformers() -> None:
    """60 queries with 1 to 80 of 120 passages relevant, and rankings of 0 to 100 hits; the means are the same."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    draw = np.random.default_rng(0)
    passages = [f"p{number:03d}" for number in range(120)]
    relevant = {f"q{n:02d}": set(draw.choice(passages, draw.integers(1, 81), replace=False)) for n in range(60)}
    ranked = [list(draw.permutation(passages)[: draw.integers(0, 101)]) for _ in relevant]
    evaluator = InformationRetrievalEvaluator(
        dict.fromkeys(relevant, "x"),
        dict.fromkeys(passages, "x"),
        relevant,
        accuracy_at_k=[1, 10],
        mrr_at_k=[100],
        map_at_k=[10, 50],
    )
    hits = [[{"corpus_id": id, "score": -rank} for rank, id in enumerate(ids)] for ids in ranked]
    peer = evaluator.compute_metrics(hits)
    expected = [
        *(peer["accuracy@k"][k] for k in (1, 10)),
        peer["mrr@k"][100],
        *(peer["map@k"][k] for k in (10, 50)),
    ]
    is_relevant = np.zeros((60, 100), bool)
    for row, (ids, own) in enumerate(zip(ranked, relevant.values(), strict=True)):
        is_relevant[row, : len(ids)] = [id in own for id in ids]
    counts = np.array([len(own) for own in relevant.values()])
    values = [metric_values(is_relevant, counts, metric).mean() for metric in DEFAULT_METRICS]
    np.testing.assert_allclose(values, expected, atol=1e-12)
    assert 0.1 < values[4] < 0.6


def test_values_of_one_ranking_by_hand() -> None:
    """Ranks 2 and 3 of 3 hits are relevant, of 5 relevant passages; another query has none, and no hits."""
    is_relevant = np.array([[False, True, True], [False, False, False]])
    counts = np.array([5, 0])
    expected = {"Acc@1": 0, "Acc@2": 1, "MRR@1": 0, "MRR@3": 1 / 2, "MAP@2": 1 / 2 / 2, "MAP@10": (1 / 2 + 2 / 3) / 5}
    for metric, value in expected.items():
        assert metric_values(is_relevant, counts, metric).tolist() == [pytest.approx(value), 0], metric
    assert metric_values(np.zeros((2, 0), bool), counts, "MAP@10").tolist() == [0, 0]


def test_expected_values_are_the_means_over_all_orders() -> None:
    """All orders of 5 passages with 0 to 5 relevant ones; cutoffs below and above the number of passages."""
    metrics = ["Acc@1", "Acc@3", "MRR@2", "MRR@9", "MAP@1", "MAP@3", "MAP@9"]
    counts = np.arange(6)
    expected = expected_values(counts, 5, metrics)
    for num_relevant in counts:
        orders = np.array(list(itertools.permutations([True] * num_relevant + [False] * (5 - num_relevant))))
        for metric in metrics:
            mean = metric_values(orders, np.full(len(orders), num_relevant), metric).mean()
            assert expected[metric][num_relevant] == pytest.approx(mean, abs=1e-12), (metric, num_relevant)


@pytest.mark.parametrize("name", ["nDCG@10", "MAP", "MAP@10x"])
def test_other_metrics_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="expected Acc@K, MRR@K or MAP@K"):
        parse_metric(name)
