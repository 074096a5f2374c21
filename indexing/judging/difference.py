"""Estimates the difference of two runs from a sample of verdicts, with an interval for verdicts on all pairs.

With the gain g of each pair, its inclusion probability p, verdicts y of people and predictions f, the difference is

    D = sum over all pairs of g f + sum over the sample of g (y - f) / p

The predictions are a linear regression of y on a constant, on 1 / rank and on the verdict of a model, if there is one:
a generalised regression estimator (Cassel, Särndal and Wretman 1976), which with a model is prediction-powered
inference with tuned weights (Angelopoulos, Duchi and Zrnic, "PPI++", 2023). The sample corrects the predictions, so
their errors make the interval longer. The intervals are approximate, as the predictions are fitted on the sample:
docs/measurements/judging.md has their coverage.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from riptide.indexing.judging.judging_order import JudgingOrder
from riptide.indexing.judging.judging_pool import JudgingPool

_RIDGE = 2.0  # pseudo-verdicts that draw the coefficients of the regression to 0
_ROUNDING = 1e-9  # added to half of an interval, so that sums that are equal but for rounding are no decision
SKIPPED = 0.5  # a verdict of a pair that people cannot decide


@dataclass(frozen=True)
class DifferenceEstimate:
    """The estimated difference of two runs, second minus first, on the judged queries.

    Attributes:
        num_verdicts: Number of verdicts of people that it uses.
        round: The number of the round that these complete, from 1.
        difference: The estimate.
        low: Lower end of the interval.
        high: Upper end.
        spread: The mean squared error of a prediction, by which `needed_verdicts` plans.
        decision: "second", "first" (the better run), "equal" (within the margin) or None: not enough verdicts.
    """

    num_verdicts: int
    round: int
    difference: float
    low: float
    high: float
    spread: float
    decision: str | None


def factor_of_rounds(num_rounds: int) -> float:
    """Returns the factor of the standard error for intervals of which all cover the difference with 95%.

    So looking after each round is allowed. The factor is right for independent errors, and covers more if the errors of
    the rounds are correlated (Šidák 1967). The last round, in which all pairs are judged, has no error.

    Args:
        num_rounds: Number of rounds until all pairs are judged.
    """
    of_each = 0.95 ** (1 / max(1, num_rounds - 1))
    return NormalDist().inv_cdf((1 + of_each) / 2)


def estimate_difference(
    pool: JudgingPool, order: JudgingOrder, verdicts: np.ndarray, round: int, margin: float = 0.0
) -> DifferenceEstimate:
    """Estimates the difference after a complete round.

    Args:
        pool: The pairs.
        order: Their order, with the verdicts of a model.
        verdicts: 1 for relevant, 0 for not, SKIPPED for a skipped pair, float64 [pairs]; only those of the rounds are
            read.
        round: The number of the round, from 1.
        margin: Differences from -margin to margin count as equal.
    """
    count = order.ends[round - 1]
    chosen = order.numbers[:count]
    gains, p, y = pool.gains[chosen], order.probabilities(count)[chosen], verdicts[chosen]
    features = [np.ones(len(pool)), 1 / pool.best_ranks, *([] if order.model is None else [order.model])]
    predictors = np.stack(features, axis=1)
    squares = gains**2 * (1 - p) / p**2
    predicted = predictors @ _fit(predictors[chosen], y, squares)
    residuals = y - predicted[chosen]
    difference = float(pool.gains @ predicted + (gains * residuals / p).sum())

    # Few verdicts may have most of the weight. The variance has as many degrees of freedom as equal weights would give.
    size = float(squares.sum() ** 2 / (squares**2).sum()) if squares.any() else float(count)
    degrees = max(1.0, size - len(features))
    variance = (degrees + len(features)) / degrees * float((squares * residuals**2).sum())
    z = factor_of_rounds(len(order.ends))
    variance += z**2 / 2 * _weight_of_an_error(pool, order, count)
    undecided = float(np.abs(gains[y == SKIPPED] / p[y == SKIPPED]).sum()) / 2
    half = _student_factor(z, degrees) * variance**0.5 + undecided + _ROUNDING
    low, high = difference - half, difference + half
    weights = gains**2 / p
    spread = float((weights * residuals**2).sum() / weights.sum())
    return DifferenceEstimate(count, round, difference, low, high, spread, decide(low, high, margin))


def decide(low: float, high: float, margin: float) -> str | None:
    """Returns the decision of an interval: "second", "first", "equal", or None if it is too long for one."""
    if margin and -margin <= low and high <= margin:
        return "equal"
    if low > 0:
        return "second"
    return "first" if high < 0 else None


def needed_verdicts(pool: JudgingPool, order: JudgingOrder, estimate: DifferenceEstimate, margin: float = 0.0) -> int:
    """Returns about how many further verdicts decide, if the estimated difference is the true one; at most all pairs.

    Args:
        pool: The pairs.
        order: Their order.
        estimate: The estimate after the last complete round.
        margin: As in `estimate_difference`.
    """
    goal = max(abs(estimate.difference), margin - abs(estimate.difference))
    z = factor_of_rounds(len(order.ends))
    for end in order.ends[estimate.round :]:
        p = order.probabilities(end)
        variance = float((pool.gains**2 * (1 - p) / p).sum()) * estimate.spread
        variance += z**2 / 2 * _weight_of_an_error(pool, order, end)
        if z * variance**0.5 < goal:
            return end - estimate.num_verdicts
    return len(pool) - estimate.num_verdicts


def _weight_of_an_error(pool: JudgingPool, order: JudgingOrder, count: int) -> float:
    """Returns what a wrong prediction adds to the variance after `count` verdicts: the mean of the uncertain pairs.

    The variance has z^2 / 2 of them: without these, a sample without relevant passages, or without errors of the model,
    would have no variance. Pairs that are surely in the sample add none. The mean is over all others, judged or not,
    as the judged ones are those with the smaller weights.
    """
    p = order.probabilities(count)
    uncertain = p < 1
    if not uncertain.any():
        return 0.0
    return float((pool.gains**2 * (1 - p) / p**2)[uncertain].mean())


def _student_factor(z: float, degrees: float) -> float:
    """Returns the quantile of Student's t distribution at the level of a normal quantile z (Cornish-Fisher)."""
    degrees = max(degrees, 3.0)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _fit(predictors: np.ndarray, verdicts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the coefficients of a weighted ridge regression, float64 [features]."""
    if not weights.sum() > 0:
        return np.zeros(predictors.shape[1])
    weights = weights / weights.mean()
    weighted = predictors * weights[:, None]
    return np.linalg.solve(weighted.T @ predictors + _RIDGE * np.eye(predictors.shape[1]), weighted.T @ verdicts)
