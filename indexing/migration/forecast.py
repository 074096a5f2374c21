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
QUERIES_AT_ONCE = 256  # queries whose scores of all known passages are in memory


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
            if a query has fewer hits.
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
    metric: RankMetric,
    queries: np.ndarray,
    vectors: np.ndarray,
    passages: KnownPassages,
    judged: Sequence[JudgedQuery],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the expected metric of each query in the whole corpus, and a lower and an upper bound of it.

    The lower bound adds ZERO_BOUND to the number of random passages above each score, for the case that a random
    passage above it was missed by chance. The upper bound is the value among the known passages alone: further passages
    can only lower it.

    Args:
        metric: The metric.
        queries: Vectors of the queries, float32 [queries, d].
        vectors: Vectors of the known passages, float32 [n, d].
        passages: The known passages.
        judged: The relevant passages of each query, which are known unless the corpus lacks them.

    Returns:
        Three arrays, float64 [queries]: expectations, lower bounds, upper bounds.

    Raises:
        InputError: If passages are unknown, and fewer than two known ones are random.
    """
    if passages.num_unknown and passages.is_random.sum() < 2:
        raise InputError(
            f"{Parameter('sample')}: fewer than two random passages are neither judged nor first hits, and "
            f"{passages.num_unknown:,} passages are unknown; give a larger sample"
        )
    has_unknown = passages.num_unknown > 0
    blocks = [slice(first, first + QUERIES_AT_ONCE) for first in range(0, len(judged), QUERIES_AT_ONCE)]
    means, deviations, standard = np.zeros(len(judged)), np.ones(len(judged)), np.empty(0, np.float32)
    if has_unknown:
        random_vectors = vectors[passages.is_random]
        standard = np.empty((len(judged), len(random_vectors)), np.float32)
        for block in blocks:
            of_random = (queries[block] @ random_vectors.T).astype(np.float64)
            means[block] = of_random.mean(axis=1)
            deviations[block] = np.maximum(of_random.std(axis=1), 1e-12)
            standard[block] = (of_random - means[block, None]) / deviations[block, None]
        standard = standard.ravel()
        standard.sort()
    values = np.zeros((3, len(judged)))
    for block in blocks:
        block_scores = queries[block] @ vectors.T
        for number, scores, query in zip(range(len(judged))[block], block_scores, judged[block], strict=True):
            is_there = query.rows >= 0
            positives = scores[np.searchsorted(passages.rows, query.rows[is_there])]
            ranks = np.full(len(query.rows), metric.cutoff + 1)
            ranks[is_there] = 1 + (scores[None] > positives[:, None]).sum(axis=1)
            above = np.zeros(len(query.rows))
            z = (positives - means[number]) / deviations[number]
            above[is_there] = len(standard) - np.searchsorted(standard, z.astype(np.float32), side="right")
            for bound in (0, 1):
                expected = passages.num_unknown * np.minimum((above + bound * ZERO_BOUND) / max(1, len(standard)), 1)
                values[bound, number] = metric.value(query.grades, ranks, expected if has_unknown else None)
            values[2, number] = metric.value(query.grades, ranks)
    return values[0], values[1], values[2]


def ratio_corrected(
    new: np.ndarray, old: np.ndarray, old_truth: np.ndarray, bounds: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Corrects the expected values of a new encoder by the error of those of the old one.

    Queries differ in how many unknown passages are near their relevant ones, which the common p(z) does not show, so
    expected values are too low. The error of the old encoder is known: new values are multiplied by the ratio of the
    true mean to the expected one (the ratio estimator of survey sampling; Cochran 1977, chapter 6).

    Args:
        new: Expected values of the new encoder, float64 [queries].
        old: Expected values of the old encoder, from the same known passages.
        old_truth: Its true values.
        bounds: Lower and upper bounds of the new encoder's values.

    Returns:
        The values, at most the upper bounds, and their lower bounds: float64 [queries] each. A ratio below 1 lowers the
        lower bounds too; a larger one does not raise them.
    """
    ratio = float(old_truth.mean() / old.mean()) if old.mean() > 0 else 1.0
    ratio = min(max(ratio, 1 / MAX_RATIO), MAX_RATIO)
    lower, upper = bounds
    return np.minimum(new * ratio, upper), lower * min(ratio, 1)


def difference_interval(
    new: np.ndarray, old: np.ndarray, bounds: tuple[np.ndarray, np.ndarray] | None = None
) -> Interval:
    """Returns the mean difference of two encoders with its 95% interval.

    The interval is the paired bootstrap over the queries. If `new` is estimated, each end is moved outwards by the mean
    distance of `new` from its bound, so that the interval covers the draw of the random passages too. It covers no bias
    of the estimate, such as queries with more unknown passages near their relevant ones than p(z), which is of all
    queries together, shows.

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
