"""The quality of an encoder of which only a sample of the passages is encoded.

The known passages of a corpus are the judged ones, the first hits of the existing search ("hard"), and random ones.
Among them, the rank of a relevant passage is exact. `unknown_passages` estimates how many unknown ones are above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.measures.metrics import Interval, bootstrap_interval
from riptide.indexing.migration.rank_metrics import RankMetric
from riptide.indexing.migration.requirements import TWO_SIDED
from riptide.indexing.migration.unknown_passages import RelevantPassages, clumping_of

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


@dataclass(frozen=True)
class ExpectedValues:
    """The expected metric of queries in a corpus with unknown passages.

    Attributes:
        values: The expectation of each query: float64 [queries].
        deviations: Its standard deviation by the unknown passages: float64 [queries].
        low: The smallest mean over the queries by a likely number of unknown passages.
        high: The largest one.
    """

    values: np.ndarray
    deviations: np.ndarray
    low: float
    high: float


def expected_values(
    metric: RankMetric,
    queries: np.ndarray,
    vectors: np.ndarray,
    passages: KnownPassages,
    judged: Sequence[JudgedQuery],
) -> ExpectedValues:
    """Returns the expected metric of each query in the whole corpus.

    Args:
        metric: The metric.
        queries: Vectors of the queries, float32 [queries, d].
        vectors: Vectors of the known passages, float32 [n, d].
        passages: The known passages.
        judged: The relevant passages of each query, which are known unless the corpus lacks them.

    Raises:
        InputError: If passages are unknown, and fewer than two known ones are random.
    """
    if passages.num_unknown and passages.is_random.sum() < 2:
        raise InputError(
            f"{Parameter('sample')}: fewer than two random passages are neither judged nor first hits, and "
            f"{passages.num_unknown:,} passages are unknown; give a larger sample"
        )
    is_there = np.concatenate([query.rows >= 0 for query in judged])
    relevant = rank_relevant(metric, queries, vectors, passages, judged)
    starts = np.cumsum([len(query.rows) for query in judged])[:-1]

    def values_of(gains: np.ndarray) -> np.ndarray:
        of_all = np.zeros(len(is_there))
        of_all[is_there] = gains
        pieces = zip(judged, np.split(of_all, starts), strict=True)
        return np.array([metric.value_of_gains(query.grades, piece) for query, piece in pieces])

    if not passages.num_unknown:
        values = values_of(metric.gains(relevant.ranks))
        return ExpectedValues(values, np.zeros(len(judged)), float(values.mean()), float(values.mean()))
    best, ends = relevant.fit(metric.cutoff)
    values, deviations = map(values_of, relevant.expected_gains(metric, best))
    means = [float(values_of(relevant.expected_gains(metric, end)[0]).mean()) for end in ends]
    return ExpectedValues(values, deviations, min(means), max(means))


def rank_relevant(
    metric: RankMetric,
    queries: np.ndarray,
    vectors: np.ndarray,
    passages: KnownPassages,
    judged: Sequence[JudgedQuery],
) -> RelevantPassages:
    """Returns the relevant passages that the corpus has, in the order of the queries; see `expected_values`."""
    is_random = passages.is_random
    random_count = int(is_random.sum())
    standard = np.empty((len(judged), random_count), np.float32)
    above_count = np.zeros(random_count, np.int64)
    columns = list[tuple[np.ndarray, ...]]()
    for first in range(0, len(judged), QUERIES_AT_ONCE):
        block = slice(first, first + QUERIES_AT_ONCE)
        block_scores = queries[block] @ vectors.T
        of_random = block_scores[:, is_random].astype(np.float64)
        means = of_random.mean(axis=1) if random_count else np.zeros(len(of_random))
        deviations = np.maximum(of_random.std(axis=1), 1e-12) if random_count else np.ones(len(of_random))
        standard[block] = (of_random - means[:, None]) / deviations[:, None]
        for scores, query, mean, deviation in zip(block_scores, judged[block], means, deviations, strict=True):
            positives = scores[np.searchsorted(passages.rows, query.rows[query.rows >= 0])]
            is_above = scores[None] > positives[:, None]
            counts = is_above[:, is_random].sum(axis=1)
            ranks = 1 + is_above.sum(axis=1)
            above_count += is_above[:, is_random][ranks - counts <= metric.cutoff].sum(axis=0)
            columns.append((ranks, ranks - counts, counts, (positives - mean) / deviation))
    ranks, chosen_ranks, counts, z = (np.concatenate(column) for column in zip(*columns, strict=True))
    flat = np.sort(standard.ravel())
    above = len(flat) - np.searchsorted(flat, z.astype(np.float32), side="right")
    shares = (above + 0.5) / (len(flat) + 1)
    return RelevantPassages(
        ranks, chosen_ranks, counts, shares, random_count, passages.num_unknown, clumping_of(above_count)
    )


def difference_interval(new: np.ndarray, old: np.ndarray, expected: ExpectedValues | None = None) -> Interval:
    """Returns the mean difference of two encoders with its 95% interval.

    The interval is the paired bootstrap over the queries. If `new` is estimated, the variance of its mean by the
    unknown passages is added, and each end is moved outwards by the distance of the mean from the smallest or largest
    one, so that the interval covers the draw of the random passages too.

    Args:
        new: Values of the new encoder, float64 [queries].
        old: Values of the old encoder, for the same queries.
        expected: What `new` was taken from; None: `new` is exact.
    """
    mean, low, high = bootstrap_interval([new - old])
    if expected is None:
        return Interval(mean, low, high)
    error = TWO_SIDED * float(np.sqrt((expected.deviations**2).mean() / len(new)))
    below = math.hypot(mean - low, error) + float(new.mean()) - expected.low
    above = math.hypot(high - mean, error) + expected.high - float(new.mean())
    return Interval(mean, mean - below, mean + above)


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
