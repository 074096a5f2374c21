"""Orders the pairs of a pool at random, those with a large influence first, and cuts the order into rounds.

The order is that of priority sampling (Duffield, Lund and Thorup, "Priority sampling for estimation of arbitrary subset
sums", JACM 2007): a pair with the size s gets a random number u in (0, 1] and the priority s / u. The first n pairs are
a sample without replacement in which a pair has the inclusion probability min(1, s / t), where t is the priority of
pair n + 1, and the weighted values of two pairs are uncorrelated. So each beginning of the order is a sample, and a
larger sample contains the smaller one.
"""

from __future__ import annotations

import hashlib

import numpy as np

from riptide.indexing.judging.judging_pool import JudgingPool

GROWTH = 1.5  # each round ends at as many times the verdicts of the previous one
_MODEL_WEIGHT = 2.0  # how much larger a pair is that a model calls relevant, if it calls few pairs relevant


class JudgingOrder:
    """The order in which the pairs of a pool are judged.

    The size of a pair is the influence of its verdict, divided by the square root of its best rank, as later hits are
    less often relevant. If a model calls few pairs relevant, most verdicts that it gets wrong are among these, and such
    a pair is up to three times as large; if it calls half of them relevant, it does not change the sizes. Any sizes
    give an unbiased estimate; these gave short intervals (docs/measurements/judging.md).

    Args:
        pool: The pairs.
        seed: Seed of the random numbers. That of a pair depends on its ids, not on other pairs.
        first: Number of pairs of the first round.
        model: The verdicts of a model, from 0 to 1, float64 [pairs]; None: there is no model.

    Attributes:
        numbers: The numbers of the pairs in the order in which they are judged, int64 [pairs].
        ends: The number of verdicts at the end of each round; the last one has all pairs.
        model: As the argument.
    """

    def __init__(self, pool: JudgingPool, seed: int, first: int, model: np.ndarray | None = None):
        self.model = model
        self._sizes = np.abs(pool.gains) / np.sqrt(pool.best_ranks)
        if model is not None:
            self._sizes = self._sizes * (1 + _MODEL_WEIGHT * max(0.0, 1 - 2 * float(model.mean())) * model)
        pairs = zip(pool.query_ids, pool.ids, strict=True)
        uniform = [_uniform(f"{seed}\0{query}\0{id}") for query, id in pairs]
        self._priorities = self._sizes / np.array(uniform, np.float64)
        self.numbers = np.argsort(-self._priorities, kind="stable")
        self.ends = [min(first, len(pool))]
        while self.ends[-1] < len(pool):
            self.ends.append(min(len(pool), int(np.ceil(self.ends[-1] * GROWTH))))

    def probabilities(self, count: int) -> np.ndarray:
        """Returns the probability that each pair is among the first `count` of the order: float64 [pairs]."""
        if count >= len(self.numbers):
            return np.ones(len(self.numbers))
        return np.minimum(1.0, self._sizes / self._priorities[self.numbers[count]])


def _uniform(text: str) -> float:
    """Returns a number in (0, 1] that a hash of the text determines."""
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") + 1) / 2**56
