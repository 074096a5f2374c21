"""Metrics for queries with many relevant passages, as sentence-transformers defines them (Topic-DPR, Table 1).

AP@k is divided by min(k, number of relevant passages), so that the best ranking has 1; trec_eval and ir-measures divide
by the number of all relevant passages. A query without a relevant passage has 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.measures.metrics import check_cutoff

DEFAULT_METRICS = ("Acc@1", "Acc@10", "MRR@100", "MAP@10", "MAP@50")  # the metrics that Topic-DPR reports
_METRIC = re.compile(r"(Acc|MRR|MAP)@(0|[1-9]\d{0,49})", re.ASCII)


def parse_metric(name: str) -> tuple[str, int]:
    """Parses the name of a metric; returns (kind, cutoff), for example ("MAP", 50) for MAP@50.

    Raises:
        InputError: For another metric, or a cutoff that `check_cutoff` refuses.
    """
    match = _METRIC.fullmatch(name)
    if not match:
        raise InputError(
            f"{Parameter('metrics', repr(name))}: expected Acc@K, MRR@K or MAP@K, with which relevance by category "
            f"is measured"
        )
    check_cutoff(name, int(match[2]))
    return match[1], int(match[2])


def metric_values(is_relevant: np.ndarray, num_relevant: np.ndarray, metric: str) -> np.ndarray:
    """Returns the value of a metric for each query, float64 [q].

    Acc@k: whether one of the first k hits is relevant. MRR@k: 1 / rank of the first relevant one of them, else 0.
    MAP@k: sum over the relevant ranks i <= k of (relevant hits among the first i) / i, divided by min(k, R).

    Args:
        is_relevant: Whether the hit at each rank is relevant, bool [q, ranks]; False where a query has fewer hits.
        num_relevant: Number of relevant passages of each query, R: int64 [q].
        metric: Acc@k, MRR@k or MAP@k.
    """
    kind, cutoff = parse_metric(metric)
    hits = is_relevant[:, :cutoff]
    if not hits.shape[1]:
        return np.zeros(len(hits))
    ranks = np.arange(1, hits.shape[1] + 1)
    if kind == "Acc":
        return np.asarray(hits.any(axis=1), np.float64)
    if kind == "MRR":
        return np.asarray(hits.any(axis=1) / (hits.argmax(axis=1) + 1), np.float64)
    precisions = hits.cumsum(axis=1) / ranks
    totals = (precisions * hits).sum(axis=1)
    return np.asarray(totals / np.maximum(np.minimum(cutoff, num_relevant), 1), np.float64)


def expected_values(num_relevant: np.ndarray, num_passages: int, metrics: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the expected value of each metric if all passages are in random order, by metric: float64 [q] each.

    With M passages of which R are relevant, rank i is relevant with probability R/M, and then each earlier rank with
    (R-1)/(M-1); the first i ranks have no relevant one with probability prod_{j<i} (M-R-j)/(M-j).

    Args:
        num_relevant: Number of relevant passages of each query, int64 [q].
        num_passages: Number of passages, at least 1.
        metrics: Names of metrics.
    """
    relevant = num_relevant.astype(np.float64)[:, None]
    values = {}
    for metric in metrics:
        kind, cutoff = parse_metric(metric)
        before = np.arange(min(cutoff, num_passages), dtype=np.float64)  # number of ranks before each rank
        rest = np.clip((num_passages - relevant - before) / (num_passages - before), 0.0, 1.0)
        none = np.cumprod(rest, axis=1)  # the probability that no passage up to each rank is relevant
        if kind == "Acc":
            values[metric] = 1 - none[:, -1]
        elif kind == "MRR":
            first = np.concatenate([np.ones_like(relevant), none[:, :-1]], axis=1) - none
            values[metric] = (first / (before + 1)).sum(axis=1)
        else:
            others = before * (relevant - 1) / max(1, num_passages - 1)  # expected number of earlier relevant passages
            total = (relevant / num_passages * (1 + others) / (before + 1)).sum(axis=1)
            values[metric] = total / np.maximum(np.minimum(cutoff, num_relevant), 1)
    return values
