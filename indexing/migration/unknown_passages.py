r"""The number of passages with unknown scores above a relevant passage, estimated from random passages.

Of the passages of a corpus, some are chosen, R are drawn at random from the others, and U are unknown. p is the share
of the random passages of all queries whose standard score (by the mean and the deviation of a query's scores of random
passages) is larger than that of a relevant passage. U p is far too large for the passages that count: a passage that
has few chosen passages above it has few unknown ones above it too, and queries differ. So the number M of unknown
passages above one is taken as Poisson(l), where l has a gamma distribution of shape a with the mean

    m = k c (U p)^g r^h,   r = its rank among the chosen passages, c so that c (U p)^g r^h and U p have the same mean.

The number x of the R random passages above it is known, and has the same distribution with m R / U in place of m. So

    M | x  is negative binomial of shape a + x with  P(M = 0) = (b / (1 + b))^(a + x),   b = a / m + R / U.

k, a, g and h are fitted to x of the relevant passages with r <= K: the others gain nothing in any case. A random
passage near many queries counts in many x, so the logarithm of the likelihood is divided by the clumping of x
(quasi-likelihood; McCullagh and Nelder 1989, chapter 9). A weak prior decides where x says little.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from riptide.indexing.migration.rank_metrics import RankMetric

SCALES = np.geomspace(0.02, 20, 31)  # values of k that are tried
SHAPES = np.array([0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 1_000])  # of a
SHARE_POWERS, RANK_POWERS = (0.25, 0.5, 1.0), (0.0, 1.0, 2.0)  # of g and h
# The prior: log-normal with these medians and this deviation of the logarithm (a factor of 3). Chosen on the dev split
# of climate-fever-sent, where the fitted k was 0.2 to 0.8, and a 2 to 4.
SCALE_MEDIAN, SHAPE_MEDIAN, PRIOR_DEVIATION = 0.4, 2.0, 1.1
LIKELY = 1.92  # below the largest logarithm: half of the 95% point of chi-squared with one degree of freedom


@dataclass(frozen=True)
class CountModel:
    """The distribution of the number of unknown passages above a relevant one.

    Attributes:
        scale: k.
        shape: a.
        share_power: g.
        rank_power: h.
    """

    scale: float
    shape: float
    share_power: float
    rank_power: float


@dataclass(frozen=True)
class RelevantPassages:
    """Relevant passages of all queries with what is known of their ranks.

    Attributes:
        ranks: The rank of each relevant passage among the known passages, from 1: int [n].
        chosen_ranks: Its rank among those that are not random: int [n].
        counts: The number of random passages above it: int [n].
        shares: p of each passage: float64 [n].
        num_random: R.
        num_unknown: U.
        clumping: See `clumping_of`.
    """

    ranks: np.ndarray
    chosen_ranks: np.ndarray
    counts: np.ndarray
    shares: np.ndarray
    num_random: int
    num_unknown: int
    clumping: float

    def expected_gains(self, metric: RankMetric, model: CountModel) -> tuple[np.ndarray, np.ndarray]:
        """Returns the mean and the standard deviation of the gain of each passage: two arrays, float64 [n]."""
        shapes = model.shape + self.counts.astype(np.float64)
        means = model.scale * self._base(metric.cutoff, model.share_power, model.rank_power)
        rates = model.shape / means + self.num_random / self.num_unknown
        numbers = np.arange(metric.cutoff)
        logs = np.empty((len(shapes), len(numbers)))  # of P(M = j), after the sum along j
        logs[:, 0] = shapes * np.log(rates / (1 + rates))
        logs[:, 1:] = np.log((shapes[:, None] + numbers[1:] - 1) / numbers[1:]) - np.log1p(rates)[:, None]
        chances = np.exp(np.cumsum(logs, axis=1))
        gains = metric.gains(self.ranks[:, None] + numbers)
        means = (chances * gains).sum(axis=1)
        return means, np.sqrt(np.maximum((chances * gains**2).sum(axis=1) - means**2, 0))

    def fit(self, cutoff: int) -> tuple[CountModel, list[CountModel]]:
        """Returns the most likely model, and the likely ones with the smallest and the largest scales."""
        is_fitted = self.chosen_ranks <= cutoff
        counts, fits = self.counts[is_fitted], list[tuple[float, CountModel]]()
        for shape in SHAPES.tolist():
            steps = np.log((shape + np.arange(self.num_random)) / (1 + np.arange(self.num_random)))
            of_counts = np.concatenate([[0.0], np.cumsum(steps)])[counts].sum()
            for share_power, rank_power in product(SHARE_POWERS, RANK_POWERS):
                base = self._base(cutoff, share_power, rank_power)[is_fitted] * self.num_random / self.num_unknown
                means = base * SCALES[:, None]
                chances = shape * np.log(shape / (shape + means)) + counts * np.log(means / (shape + means))
                logs = (of_counts + chances.sum(axis=1)) / self.clumping
                distances = np.log(SCALES / SCALE_MEDIAN) ** 2 + np.log(shape / SHAPE_MEDIAN) ** 2
                logs -= distances / (2 * PRIOR_DEVIATION**2)
                models = [CountModel(scale, shape, share_power, rank_power) for scale in SCALES.tolist()]
                fits += zip(logs.tolist(), models, strict=True)
        largest, best = max(fits, key=lambda fit: fit[0])
        ends = dict[tuple[float, float, float], list[CountModel]]()
        for log, model in fits:
            if log >= largest - LIKELY:
                ends.setdefault((model.shape, model.share_power, model.rank_power), []).append(model)
        return best, [model for models in ends.values() for model in (models[0], models[-1])]

    def _base(self, cutoff: int, share_power: float, rank_power: float) -> np.ndarray:
        """Returns (U p)^g r^h of each, scaled to the mean of U p of the fitted passages: float64 [n]."""
        is_fitted = self.chosen_ranks <= cutoff
        expected = self.num_unknown * self.shares
        base = expected**share_power * self.chosen_ranks**rank_power
        return base * (expected[is_fitted].mean() / base[is_fitted].mean()) if is_fitted.any() else expected


def clumping_of(numbers: np.ndarray) -> float:
    """Returns the number of relevant passages that a random passage is above, as a mean weighted by this number.

    Two passages above two relevant ones each are added, so that a few of them do not have a clumping of 1 by chance.

    Args:
        numbers: The number of relevant passages that each random passage is above: int [R].
    """
    return max(1.0, float((numbers.astype(np.float64) ** 2).sum() + 8) / float(numbers.sum() + 4))
