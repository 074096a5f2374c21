"""Records of a comparison of two runs: means and tests of each metric, and the results per query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from riptide.jobs.comparison.shown_passages import ShownPassage


@dataclass(frozen=True)
class MetricComparison:
    """The comparison of two runs on one metric, over all queries.

    Attributes:
        metric: Name of the metric.
        first: Mean of the first run.
        second: Mean of the second run.
        difference: Mean of the second run minus that of the first one.
        low: Lower end of the 95% bootstrap interval of the difference.
        high: Upper end of that interval.
        p_value: Two-sided p-value of a paired randomisation test.
        adjusted_p_value: The p-value adjusted for the number of compared metrics (Holm).
        won: Number of queries for which the second run has the higher value.
        equal: Number of queries with equal values.
        lost: Number of queries for which the first run has the higher value.
    """

    metric: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    adjusted_p_value: float
    won: int
    equal: int
    lost: int


@dataclass(frozen=True)
class RunResult:
    """The result of one run for one query.

    Attributes:
        values: The value of each metric.
        relevant_rank: Rank of the first relevant hit, from 1; None: no hit is relevant.
        top: The first hit; None: the run has no hit for the query.
    """

    values: Mapping[str, float]
    relevant_rank: int | None
    top: ShownPassage | None


@dataclass(frozen=True)
class ComparedQuery:
    """A query of a comparison, with the results of both runs.

    Attributes:
        id: Its id.
        text: Its text.
        difference: Value of the second run minus that of the first one, in the metric that orders the queries.
        first: The result of the first run.
        second: The result of the second run.
        relevant: The passages that are judged relevant, best grade first.
    """

    id: str
    text: str
    difference: float
    first: RunResult
    second: RunResult
    relevant: tuple[ShownPassage, ...]


@dataclass(frozen=True)
class ComparedRuns:
    """The values of two runs that are compared on the queries of a split.

    Attributes:
        queries: Key of the query set.
        split: Its split.
        first: Name of the first run, the baseline.
        second: Name of the second run.
        metrics: The metrics; the first one orders the rows.
        rows: A row per query, by falling difference, then by id.
        recall_first: Recall of the first run at depths 1, 2, … up to its largest number of hits per query.
        recall_second: The same of the second run.
    """

    queries: str
    split: str
    first: str
    second: str
    metrics: tuple[MetricComparison, ...]
    rows: tuple[ComparedQuery, ...]
    recall_first: tuple[float, ...]
    recall_second: tuple[float, ...]

    @property
    def metric(self) -> str:
        """Name of the metric that orders the rows."""
        return self.metrics[0].metric

    def won(self, count: int) -> tuple[ComparedQuery, ...]:
        """Returns the queries with the largest positive differences, in descending order."""
        return tuple(row for row in self.rows[:count] if row.difference > 0)

    def lost(self, count: int) -> tuple[ComparedQuery, ...]:
        """Returns the queries with the most negative differences, the most negative first."""
        return tuple(row for row in self.rows[::-1][:count] if row.difference < 0)
