"""Measured quality: ir-measures over runs and qrels, and a paired test between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from retriever.errors import InputError

RESAMPLES = 9_999


def per_query(qrels: pa.Table, run: pa.Table, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """Each metric's value for every judged query, in the order of their ids: {metric: float64 [queries]}.

    qrels: query_id, corpus_id, score; run: query_id, id, score, higher is better. A judged query without hits counts
    as 0, a query without judgements is left out. Raises InputError for a metric that ir-measures does not know.
    """
    import ir_measures

    measures: dict[Any, list[str]] = {}  # a measure may have several names: RR@10, MRR@10
    for name in metrics:
        try:
            measures.setdefault(ir_measures.parse_measure(name), []).append(name)
        except (ValueError, NameError, SyntaxError, KeyError) as error:
            raise InputError(
                f"--metrics {name!r}: not one of ir-measures' (such as nDCG@10, R@100, RR@10, AP)"
            ) from error
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


def paired_test(one: np.ndarray, other: np.ndarray, seed: int = 0) -> float:
    """Two-sided p-value of a paired randomisation test of equal means over the same queries (Smucker et al. 2007).

    Signs of the differences are flipped at random, RESAMPLES times with `seed`; two float64 [queries].
    """
    differences = other - one
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    random = np.random.default_rng(seed)
    observed = abs(differences.sum()) * (1 - 1e-12)
    extreme, drawn = 0, 0
    while drawn < RESAMPLES:
        rows = min(RESAMPLES - drawn, max(1, 10_000_000 // len(differences)))
        signs = random.integers(0, 2, (rows, len(differences)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ differences) >= observed).sum())
        drawn += rows
    return (extreme + 1) / (RESAMPLES + 1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for their number (Holm 1979)."""
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda entry: entry[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def alignment(one: np.ndarray, other: np.ndarray) -> float:
    """How far partners are from each other: mean |x - x+|^2 over rows (Wang & Isola 2020; lower is better).

    one, other: float [n, dim], row by row a pair, as they are: DPTDR's figures are of raw vectors.
    """
    return float(((one.astype(np.float64) - other.astype(np.float64)) ** 2).sum(axis=1).mean())


def uniformity(vectors: np.ndarray) -> float:
    """log mean e^(-2 |x - y|^2) over pairs of different rows (Wang & Isola 2020; lower is better): float [n, dim]."""
    from scipy.spatial.distance import pdist
    from scipy.special import logsumexp

    exponents = -2 * pdist(vectors.astype(np.float64), "sqeuclidean")
    return float(logsumexp(exponents) - np.log(len(exponents)))
