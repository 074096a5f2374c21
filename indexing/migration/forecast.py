r"""The quality of an encoder of which only a sample of the passages is encoded.

The known passages of a corpus of N passages are the judged ones, the first hits of the existing search ("hard"), and R
random ones. Among them, the rank r of a relevant passage is exact. The number of unknown passages above it is
estimated: with the mean and the standard deviation of a query's scores for the random passages, a score s has the
standard score z, and

    p(z) = the share of the random passages of all queries with a larger standard score,   m = (N - known) p(z)

is the expected number of unknown passages above s. The random passages of all Q queries together resolve p down to
1 / (Q R), which assumes that the standard scores of different queries have the same distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.measures.metrics import Interval, bootstrap_interval
from riptide.indexing.migration.rank_metrics import RankMetric

ZERO_BOUND = 3  # 95% upper bound of the mean of a Poisson variable that was 0 (the rule of three)

MAX_RATIO = 2.0  # of the correction; an old encoder that finds little says little about the error


@dataclass(frozen=True)
class JudgedQuery:
    """The relevant passages of a query.

    Attributes:
        rows: Their rows, int64 [n]; -1 for a passage that the corpus lacks.
        grades: Their grades, at least 1: int64 [n].
    """

    rows: np.ndarray
    grades: np.ndarray


@dataclass(frozen=True)
class KnownPassages:
    """The passages that the new encoder has encoded.

    Attributes:
        rows: Their rows, int64 [n], ascending.
        is_random: Whether each was drawn at random from those that are not chosen otherwise: bool [n].
        num_passages: The number of passages of the corpus, without deleted ones.
    """

    rows: np.ndarray
    is_random: np.ndarray
    num_passages: int

    @property
    def num_unknown(self) -> int:
        return self.num_passages - len(self.rows)


def values_of_hits(metric: RankMetric, rows: np.ndarray, judged: Sequence[JudgedQuery]) -> np.ndarray:
    """Returns the metric of each query from its hits.

    Args:
        metric: The metric.
        rows: Rows of the hits, best first: int64 [queries, k], k at least the cutoff or the number of passages; -1
            where there is no hit.
        judged: The relevant passages of each query.

    Returns:
        float64 [queries].
    """

    def ranks_of(hits: np.ndarray, query: JudgedQuery) -> np.ndarray:
        places = {row: place for place, row in enumerate(hits.tolist(), 1) if row >= 0}
        return np.array([places.get(row, metric.cutoff + 1) for row in query.rows.tolist()])

    return np.array(
        [metric.value(query.grades, ranks_of(hits, query)) for hits, query in zip(rows, judged, strict=True)]
    )


def expected_values(
    metric: RankMetric, scores: np.ndarray, known: KnownPassages, judged: Sequence[JudgedQuery]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the expected metric of each query in the whole corpus, and a lower and an upper bound of it.

    The lower bound adds ZERO_BOUND to the number of random passages above each score, for the case that a random
    passage above it was missed by chance. The upper bound is the value among the known passages alone: further passages
    can only lower it.

    Args:
        metric: The metric.
        scores: Scores of the known passages, float32 [queries, n].
        known: The known passages.
        judged: The relevant passages of each query, which are known unless the corpus lacks them.

    Returns:
        Three arrays, float64 [queries]: expectations, lower bounds, upper bounds.

    Raises:
        InputError: If passages are unknown, and fewer than two known ones are random.
    """
    of_random = scores[:, known.is_random].astype(np.float64)
    if known.num_unknown and of_random.shape[1] < 2:
        raise InputError(
            f"{Parameter('sample')}: fewer than two random passages are neither judged nor first hits, and "
            f"{known.num_unknown:,} passages are unknown; give a larger sample"
        )
    has_unknown = known.num_unknown > 0
    means = of_random.mean(axis=1, keepdims=True) if has_unknown else np.zeros((len(scores), 1))
    deviations = np.maximum(of_random.std(axis=1, keepdims=True), 1e-12) if has_unknown else np.ones((len(scores), 1))
    standard = np.sort(((of_random - means) / deviations).ravel())
    values = np.zeros((3, len(judged)))
    for number, query in enumerate(judged):
        is_there = query.rows >= 0
        positives = scores[number, np.searchsorted(known.rows, query.rows[is_there])]
        ranks = np.full(len(query.rows), metric.cutoff + 1)
        ranks[is_there] = 1 + (scores[number][None] > positives[:, None]).sum(axis=1)
        above = np.zeros(len(query.rows))
        z = (positives - means[number, 0]) / deviations[number, 0]
        above[is_there] = len(standard) - np.searchsorted(standard, z, side="right")
        for bound in (0, 1):
            expected = known.num_unknown * np.minimum((above + bound * ZERO_BOUND) / max(1, len(standard)), 1)
            values[bound, number] = metric.value(query.grades, ranks, expected if has_unknown else None)
        values[2, number] = metric.value(query.grades, ranks)
    return values[0], values[1], values[2]


def ratio_corrected(new: np.ndarray, old: np.ndarray, old_truth: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Corrects the expected values of a new encoder by the error of those of the old one.

    Queries differ in how many unknown passages are near their relevant ones, which the common p(z) does not show, so
    expected values are too low. The error of the old encoder is known: new values are multiplied by the ratio of the
    true mean to the expected one (the ratio estimator of survey sampling; Cochran 1977, chapter 6).

    Args:
        new: Expected values of the new encoder, float64 [queries].
        old: Expected values of the old encoder, from the same known passages.
        old_truth: Its true values.
        upper: Upper bounds of the new encoder's values.

    Returns:
        float64 [queries], at most `upper`.
    """
    ratio = float(old_truth.mean() / old.mean()) if old.mean() > 0 else 1.0
    return np.minimum(new * min(max(ratio, 1 / MAX_RATIO), MAX_RATIO), upper)


def difference_interval(
    new: np.ndarray, old: np.ndarray, bounds: tuple[np.ndarray, np.ndarray] | None = None
) -> Interval:
    """Returns the mean difference of two encoders with its 95% interval.

    The interval is the paired bootstrap over the queries. If `new` is estimated, each end is moved outwards by the mean
    distance of `new` from its bound, so that the interval covers the unknown passages too.

    Args:
        new: Values of the new encoder, float64 [queries].
        old: Values of the old encoder, for the same queries.
        bounds: Lower and upper bounds of `new`; None: `new` is exact.
    """
    mean, low, high = bootstrap_interval([new - old])
    below, above = (0.0, 0.0) if bounds is None else (float((new - bound).mean()) for bound in bounds)
    return Interval(mean, low - below, high - above)


def judged_queries(
    ids: Sequence[str], qrels: Mapping[str, Mapping[str, int]], rows_by_id: Mapping[str, int]
) -> list[JudgedQuery]:
    """Returns the relevant passages of queries.

    Args:
        ids: Ids of the queries.
        qrels: Grades of the passages of each query, at least one of them 1 or more.
        rows_by_id: The row of each passage; -1 or missing for one that the corpus lacks.
    """
    relevant = [[(id, grade) for id, grade in qrels[query].items() if grade > 0] for query in ids]
    return [
        JudgedQuery(
            np.array([rows_by_id.get(id, -1) for id, _ in passages], np.int64),
            np.array([grade for _, grade in passages], np.int64),
        )
        for passages in relevant
    ]
