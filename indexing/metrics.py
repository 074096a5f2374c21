"""Metrics of ranked lists (by ir-measures) and a paired test between runs (by scipy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from retriever.errors import InputError

RESAMPLES = 9_999  # random sign patterns of the paired test
BATCH_NUMBERS = 1_000_000  # signs that are drawn at once: bounds the memory of the paired test


def per_query(qrels: pa.Table, run: pa.Table, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the value of each metric for every judged query.

    Args:
        qrels: Columns query_id, corpus_id, score.
        run: Columns query_id, id, score; higher is better. Queries without judgements are ignored.
        metrics: Names as ir-measures has them, for example nDCG@10.

    Returns:
        float64 [queries] by metric, in the order of the judged queries' ids; a query without hits has 0.

    Raises:
        InputError: For a metric that ir-measures does not know.
    """
    import ir_measures

    measures = parse_metrics(metrics)
    judged: dict[str, dict[str, int]] = {}
    for query, passage, score in zip(*(qrels[c].to_pylist() for c in ("query_id", "corpus_id", "score")), strict=True):
        judged.setdefault(query, {})[passage] = score
    found: dict[str, dict[str, float]] = {}
    for query, passage, score in zip(*(run[c].to_pylist() for c in ("query_id", "id", "score")), strict=True):
        if query in judged:
            found.setdefault(query, {})[passage] = score
    queries = {query: number for number, query in enumerate(sorted(judged))}
    values = {name: np.zeros(len(queries)) for name in metrics}
    for metric in ir_measures.iter_calc(list(measures), judged, found):
        for name in measures[metric.measure]:
            values[name][queries[metric.query_id]] = metric.value
    return values


def parse_metrics(metrics: Sequence[str]) -> dict[Any, list[str]]:
    """Returns the measures of ir-measures, each with its names: RR@10 and MRR@10 are one measure.

    Args:
        metrics: Names as ir-measures has them, for example nDCG@10.

    Raises:
        InputError: For a metric that ir-measures does not know.
    """
    import ir_measures

    measures: dict[Any, list[str]] = {}
    for name in metrics:
        try:
            measures.setdefault(ir_measures.parse_measure(name), []).append(name)
        except (ValueError, NameError, SyntaxError, KeyError) as error:
            raise InputError(
                f"--metrics {name!r}: not one of ir-measures' (such as nDCG@10, R@100, RR@10, AP)"
            ) from error
    return measures


def paired_test(one: np.ndarray, other: np.ndarray, seed: int = 0) -> float:
    """Returns the two-sided p-value of a paired randomisation test of equal means (Smucker et al. 2007).

    Under the null hypothesis the sign of each difference is random. scipy compares the mean difference with those of
    RESAMPLES random sign patterns.

    Args:
        one: A metric of the first run, float64 [queries].
        other: The same metric of the other run, for the same queries.
        seed: Seed of the random signs.
    """
    differences = other - one
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    from scipy.stats import monte_carlo_test

    random = np.random.default_rng(seed)

    def draw(size: tuple[int, int]) -> np.ndarray:
        """Returns random patterns, uint8 [patterns, queries]: 1 flips the sign of a difference."""
        packed = np.frombuffer(random.bytes(size[0] * (-(-size[1] // 8))), np.uint8).reshape(size[0], -1)
        return np.unpackbits(packed, axis=1, count=size[1])

    def mean(patterns: np.ndarray, axis: int) -> np.ndarray:
        return (differences.sum() - 2 * (patterns.astype(np.float64) @ differences)) / len(differences)

    result = monte_carlo_test(
        np.zeros(len(differences), np.uint8),
        draw,
        mean,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, BATCH_NUMBERS // len(differences)),
    )
    return float(result.pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Returns p-values adjusted for their number (Holm 1979), by name."""
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda entry: entry[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
