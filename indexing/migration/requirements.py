"""The requirements of a gate, and whether paired values of queries meet them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.measures.metrics import Interval, bootstrap_interval

OVERLAP = "overlap"  # overlap@K: the share of the first K hits that both encoders have in common
MIN_QUERIES = 50  # queries for which the bootstrap interval is trusted
MAX_NEEDED = 1e9  # queries; a larger number says only that the mean is at the bound
TWO_SIDED = 1.96  # standard errors of a 95% interval
# The 97.5% upper bound of the expected number of events of which none was seen: exp(-UNSEEN) = 0.025. The rule of three
# (Hanley and Lippman-Hand 1983) has 3, for 95%.
UNSEEN = 3.69


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
        low: The lower end of its 95% interval; see `mean_interval`.
        high: The upper end.
        needed: The number of queries with which the requirement would be met if mean, deviation and losses stay; None:
            it is met, or the mean is not above the bound, or so near to it that more than MAX_NEEDED would be needed.
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
        if self.high < self.requirement.bound:
            return f"{interval}: not met, and more queries of this kind would not change it"
        if self.needed is None:
            return f"{interval}: not met; the interval contains the bound, so more queries are needed to tell"
        return f"{interval}: not met; about {self.needed:,} queries are needed to tell"


def decide(requirement: Requirement, values: np.ndarray) -> Decision:
    """Decides on a requirement.

    Args:
        requirement: The requirement.
        values: The difference of the metric, new minus old, or the overlap of each query: float64 [queries].
    """
    best = 1.0 if requirement.is_overlap else 0.0
    decision = Decision(requirement, len(values), *mean_interval(values, best), None)
    margin = decision.mean - requirement.bound
    if decision.is_met or margin <= 0:
        return decision
    errors = TWO_SIDED * float(values.std()) / margin
    loss = float(np.maximum(best - values, 0).mean())
    needed = max(errors * errors, min(UNSEEN / margin, UNSEEN / max(loss, 1e-12)))
    if needed > MAX_NEEDED:
        return decision
    return replace(decision, needed=max(math.ceil(needed), MIN_QUERIES, len(values) + 1))


def mean_interval(values: np.ndarray, unchanged: float = 0.0) -> Interval:
    """Returns the mean of values of queries with a 95% interval that also covers rare large changes.

    The interval is the bootstrap over the queries. It cannot show changes that no query of the sample has: if 2% of the
    queries lose 1, none of 50 queries has lost anything in 36% of the samples, and the bootstrap ends at 0. So while
    the losses of n queries sum up to less than UNSEEN, the lower end is moved by (UNSEEN - sum) / n, and the upper end
    likewise by the gains. Without any loss, this is the rule of three for a loss of 1.

    Args:
        values: The values, within 1 of `unchanged`: float64 [n].
        unchanged: The value of a query without a change: 0 of a difference, 1 of an overlap.
    """
    mean, low, high = bootstrap_interval([values])
    losses, gains = np.maximum(unchanged - values, 0).sum(), np.maximum(values - unchanged, 0).sum()
    below, above = (max(UNSEEN - float(total), 0) / len(values) for total in (losses, gains))
    return Interval(mean, low - below, min(high + above, max(1.0, high)))


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
