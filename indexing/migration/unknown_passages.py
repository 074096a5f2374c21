r"""The number of passages with unknown scores above a relevant passage, estimated from random passages.

Of N passages, some are chosen, R are drawn at random from the others, and U are unknown. p is the share of the random
passages of all queries whose standard score (by the mean and the deviation of a query's scores of random passages) is
larger than that of the relevant passage. U p alone is far too large for the passages that count: a passage that has
few chosen passages above it has few unknown ones above it too, and queries differ. So the number M of unknown passages
above one is Poisson(l) with a gamma distribution of l, of shape a and mean k U p. The number x of the R random ones
above it is known, and its distribution is the same with R in place of U. It follows that

    M | x  is negative binomial with shape a + x and  P(M = 0) = (b / (1 + b))^(a + x),   b = a / (k U p) + R / U.

k and a are fitted to x of all relevant passages that have fewer than K chosen ones above them: the others gain nothing
in any case. A random passage near many queries counts in many x, so the logarithm of the likelihood is divided by the
clumping of x (quasi-likelihood; McCullagh and Nelder 1989, chapter 9). The weak prior below decides where x says
little.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riptide.indexing.migration.rank_metrics import RankMetric

SCALES = np.geomspace(0.02, 20, 31)  # values of k that are tried
SHAPES = np.array([0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 1_000])  # of a
# The prior: log-normal with these medians and this deviation of the logarithm (a factor of 3). Chosen on the dev split
# of climate-fever-sent, where the fitted k was 0.2 to 0.8 and a was 0.5 to 8.
SCALE_MEDIAN, SHAPE_MEDIAN, PRIOR_DEVIATION = 0.4, 2.0, 1.1
LIKELY = 1.92  # below the largest logarithm: half of the 95% point of chi-squared with one degree of freedom


@dataclass(frozen=True)
class RelevantPassages:
    """Relevant passages of all queries with what is known of their ranks.

    Attributes:
        ranks: The rank of each among the known passages, from 1: int [n].
        chosen_ranks: Its rank among those that are not random: int [n].
        counts: The number of random passages above it: int [n].
        shares: p of each: float64 [n].
        num_random: R.
        num_unknown: U.
        clumping: The mean number of relevant passages that a random passage is above, among those it is above at all,
            weighted by that number; at least 1.
    """

    ranks: np.ndarray
    chosen_ranks: np.ndarray
    counts: np.ndarray
    shares: np.ndarray
    num_random: int
    num_unknown: int
    clumping: float

    def expected_gains(self, metric: RankMetric, scale: float, shape: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the mean and the standard deviation of the gain of each: float64 [n] each."""
        shapes = shape + self.counts.astype(np.float64)
        rates = shape / (scale * self.num_unknown * self.shares) + self.num_random / self.num_unknown
        numbers = np.arange(metric.cutoff)
        logs = np.empty((len(shapes), len(numbers)))  # of P(M = j), after the sum along j
        logs[:, 0] = shapes * np.log(rates / (1 + rates))
        logs[:, 1:] = np.log((shapes[:, None] + numbers[1:] - 1) / numbers[1:]) - np.log1p(rates)[:, None]
        chances = np.exp(np.cumsum(logs, axis=1))
        gains = metric.gains(self.ranks[:, None] + numbers)
        means = (chances * gains).sum(axis=1)
        return means, np.sqrt(np.maximum((chances * gains**2).sum(axis=1) - means**2, 0))

    def fit(self, cutoff: int) -> tuple[tuple[float, float], list[tuple[float, float]]]:
        """Returns the most likely k and a, and for each a that is likely the smallest and the largest k that is."""
        is_fitted = self.chosen_ranks <= cutoff
        counts, means = self.counts[is_fitted], self.num_random * self.shares[is_fitted] * SCALES[:, None]
        logs = np.empty((len(SHAPES), len(SCALES)))
        for number, shape in enumerate(SHAPES):
            steps = np.log((shape + np.arange(self.num_random)) / (1 + np.arange(self.num_random)))
            of_counts = np.concatenate([[0.0], np.cumsum(steps)])[counts]
            chances = shape * np.log(shape / (shape + means)) + counts * np.log(means / (shape + means))
            logs[number] = (of_counts + chances).sum(axis=1)
        logs /= self.clumping
        logs -= np.log(SCALES / SCALE_MEDIAN) ** 2 / (2 * PRIOR_DEVIATION**2)
        logs -= np.log(SHAPES / SHAPE_MEDIAN)[:, None] ** 2 / (2 * PRIOR_DEVIATION**2)
        best_shape, best_scale = np.unravel_index(int(logs.argmax()), logs.shape)
        ends = []
        for shape, is_likely in zip(SHAPES, logs >= logs.max() - LIKELY, strict=True):
            if is_likely.any():
                likely = SCALES[is_likely]
                ends += [(float(likely[0]), float(shape)), (float(likely[-1]), float(shape))]
        return (float(SCALES[best_scale]), float(SHAPES[best_shape])), ends


def clumping_of(numbers: np.ndarray) -> float:
    """Returns the clumping of random passages from the number of relevant passages that each is above, int [R].

    Two passages with two each are added, so that few of them do not show a clumping of 1 by chance.
    """
    return max(1.0, float((numbers.astype(np.float64) ** 2).sum() + 8) / float(numbers.sum() + 4))
