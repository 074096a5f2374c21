"""The requirements of a gate, and whether paired values of queries meet them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.measures.metrics import bootstrap_interval

OVERLAP = "overlap"  # overlap@K: the share of the first K hits that both encoders have in common
MIN_QUERIES = 50  # queries for which the bootstrap interval is trusted
_TWO_SIDED = 1.96  # standard errors of a 95% interval


@dataclass(frozen=True)
class Requirement:
    """A requirement: the lower end of the interval of a metric is at least a bound.

    Attributes:
        metric: A metric of judged queries, whose difference new minus old counts, or overlap@K.
        bound: The bound.
    """

    metric: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Parses a requirement such as `nDCG@10 >= -0.005`. Raises InputError for another text."""
        metric, _, number = map(str.strip, text.partition(">="))
        try:
            bound = float(number)
        except ValueError:
            bound = math.nan
        if not metric or not math.isfinite(bound):
            raise InputError(
                f"{Parameter('require', repr(text))}: expected a metric, >= and a number, such as 'nDCG@10 >= -0.005' "
                f"or '{OVERLAP}@10 >= 0.8'"
            )
        if metric.startswith(OVERLAP) and not re.fullmatch(OVERLAP + r"@[1-9]\d{0,2}", metric):
            raise InputError(f"{Parameter('require', repr(text))}: expected {OVERLAP}@K with K from 1 to 999")
        return cls(metric, bound)

    @property
    def is_overlap(self) -> bool:
        return self.metric.startswith(OVERLAP)

    def __str__(self) -> str:
        return f"{self.metric} >= {self.bound:+g}"


@dataclass(frozen=True)
class Decision:
    """The decision on a requirement.

    Attributes:
        requirement: The requirement.
        queries: The number of queries.
        mean: The mean difference of the metric, or the mean overlap.
        low: The lower end of its 95% interval, a paired bootstrap over the queries.
        high: The upper end.
        needed: The number of queries with which the requirement would be met if mean and deviation stay; None: it is
            met, or no number is enough, as the mean is not above the bound.
    """

    requirement: Requirement
    queries: int
    mean: float
    low: float
    high: float
    needed: int | None

    @property
    def is_met(self) -> bool:
        return self.queries >= MIN_QUERIES and self.low >= self.requirement.bound

    def describe(self) -> str:
        """Returns the interval and, if the requirement is not met, what it would take."""
        interval = (
            f"{self.requirement.metric} {self.mean:+.4f}, 95% interval {self.low:+.4f} to {self.high:+.4f}, "
            f"{self.queries:,} queries; required >= {self.requirement.bound:+g}"
        )
        if self.is_met:
            return f"{interval}: met"
        if self.needed is None:
            return f"{interval}: not met, and more queries of this kind would not change it"
        return f"{interval}: not met; about {self.needed:,} queries are needed to tell"


def decide(requirement: Requirement, values: np.ndarray) -> Decision:
    """Decides on a requirement.

    Args:
        requirement: The requirement.
        values: The difference of the metric, new minus old, or the overlap of each query: float64 [queries].
    """
    mean, low, high = bootstrap_interval([values])
    decision = Decision(requirement, len(values), mean, low, high, None)
    margin = mean - requirement.bound
    if decision.is_met or margin <= 0:
        return decision
    needed = math.ceil((_TWO_SIDED * float(values.std()) / margin) ** 2)
    return Decision(requirement, len(values), mean, low, high, max(needed, MIN_QUERIES, len(values) + 1))


def overlaps(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]], k: int) -> np.ndarray:
    """Returns the share of the first k hits of each query that two runs have in common: float64 [queries].

    A query with fewer hits in both runs is divided by the larger number of hits; one without hits has 1.
    """
    return np.array(
        [
            len({*one[:k]} & {*two[:k]}) / max(len(one[:k]), len(two[:k]), 1) if one or two else 1.0
            for one, two in zip(first, second, strict=True)
        ]
    )
