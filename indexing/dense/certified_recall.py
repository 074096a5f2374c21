"""Recall of approximate search from a sample of queries that were searched again exactly, with a confidence interval.

The unit is the query: its k hits depend on each other, so each query contributes one value, its recall@k. The queries
of a window are fixed, and a random sample of them is measured; nothing is assumed about the distribution of their
recalls, which may drift. For every candidate m of the window's mean recall, the capital of a bettor is
    E(m) = mean over c of prod_i (1 - c + c x_i / m),    c = 1, 1/2, …, 1/32
The mean of a factor over the window is 1 if m is the window's mean, so the expected product of a sample without
replacement is at most 1 (Maclaurin's inequality), and E(m) reaches 1/a with a probability of at most a (Markov). The
lower end is the smallest m whose capital stays below 1/a; the upper end is that of 1 - x (Waudby-Smith and Ramdas 2024
bet one by one, for values of equal expectation).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from riptide.indexing.exact import Hits

CONFIDENCE = 0.95
# Fractions c of the largest possible bet. Small fractions suit values that vary little, large ones few values.
BETS = 0.5 ** np.arange(6)
STEPS = 40  # bisections of the interval [0, 1]
SELECTIVITIES = ("none", ">10%", "1-10%", "<1%")  # classes of the share of passages that match a filter


class Interval(NamedTuple):
    """A mean with the ends of its confidence interval."""

    mean: float
    lower: float
    upper: float


def mean_interval(values: np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """Returns the mean of a sample with the confidence interval of the mean of all values that it was drawn from.

    Args:
        values: float [n], a random sample of values from 0 to 1, at least one.
        confidence: Probability with which the interval covers the mean; half of the rest is below it and half above.
    """
    values = np.asarray(values, np.float64)
    half = (1 - confidence) / 2
    return Interval(float(values.mean()), _lower_end(values, half), 1 - _lower_end(1 - values, half))


def recall_of_hits(approximate: Hits, exact: Hits) -> np.ndarray:
    """Returns the recall of each query, float64 [q]: the share of the exact hits that the approximate search found.

    A hit with the score of the last exact hit counts as exact, whichever of the passages with this score it is.

    Args:
        approximate: Scores and rows [q, k] of the approximate search, with exact scores.
        exact: Scores and rows [q, k] of the exact search.

    Returns:
        The recall; NaN if a query has no exact hits.
    """
    num_exact = (exact.rows >= 0).sum(axis=1)
    last = np.take_along_axis(exact.scores, np.maximum(num_exact - 1, 0)[:, None], axis=1)
    is_exact = np.zeros(approximate.rows.shape, bool)
    for number, (rows, exact_rows) in enumerate(zip(approximate.rows, exact.rows, strict=True)):
        is_exact[number] = np.isin(rows, exact_rows)  # per query: an array [q, k, k] may not fit into memory
    is_hit = (approximate.rows >= 0) & (is_exact | (approximate.scores >= last))
    with np.errstate(invalid="ignore"):
        recall: np.ndarray = np.minimum(is_hit.sum(axis=1), num_exact) / num_exact
    return recall


def selectivity_class(share: float | None) -> str:
    """Returns the class of a filter that matches a share of the passages; None: there is no filter."""
    if share is None:
        return SELECTIVITIES[0]
    return SELECTIVITIES[1 if share > 0.1 else 2 if share >= 0.01 else 3]


def _lower_end(values: np.ndarray, error: float) -> float:
    """Returns a bound that is above the mean with a probability of at most `error`."""
    distinct, counts = np.unique(values, return_counts=True)
    log_limit = np.log(len(BETS) / error)

    def is_refuted(mean: float) -> bool:
        with np.errstate(divide="ignore"):  # a bet of everything on a value of 0 loses everything
            log_capital = np.log(1 - BETS[:, None] + BETS[:, None] * distinct / mean) @ counts
        return bool(np.logaddexp.reduce(log_capital) >= log_limit)

    low, high = 0.0, float(values.mean())
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle and is_refuted(middle) else (low, middle)
    return low
