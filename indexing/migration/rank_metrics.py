r"""nDCG@K, R@K and RR@K of a query from the ranks of its relevant passages, known or estimated.

If a number M of passages with unknown scores are above a relevant passage of rank r among the known ones, its rank is
r + M. With M ~ Poisson(m) for an expected number m, the expected value of a metric follows from

    E[g(r + M)] = sum_j P(M = j) g(r + j),   g(t) = 1 / log2(1 + t), 1 or 1 / t up to K, and 0 beyond.

nDCG@K = sum_i grade_i g(t_i) / (the same sum in the ideal order), R@K = mean_i g(t_i), RR@K = max_i g(t_i), as in
trec_eval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter

_GAINS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "nDCG": lambda ranks: 1 / np.log2(1 + ranks),
    "R": np.ones_like,
    "RR": lambda ranks: 1 / ranks,
}
MAX_RANK = 1_000  # the largest K


@dataclass(frozen=True)
class RankMetric:
    """A metric that depends on the ranks of the relevant passages alone.

    Attributes:
        name: nDCG, R or RR.
        cutoff: K.
    """

    name: str
    cutoff: int

    @classmethod
    def parse(cls, text: str) -> RankMetric:
        """Parses a metric such as nDCG@10. Raises InputError for another one."""
        match = re.fullmatch(r"(nDCG|R|RR)@([1-9]\d{0,3})", text)
        if match is None or int(match[2]) > MAX_RANK:
            raise InputError(
                f"{Parameter('metric', text)}: expected nDCG@K, R@K or RR@K with K from 1 to {MAX_RANK:,}, such as "
                "nDCG@10"
            )
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.name}@{self.cutoff}"

    def value(self, grades: np.ndarray, ranks: np.ndarray, above: np.ndarray | None = None) -> float:
        """Returns the value, or its expectation, for a query.

        Args:
            grades: The grade of each judged passage, at least 1: int [n], n at least 1.
            ranks: Its rank from 1, among the passages with known scores; a rank beyond K counts as no hit: int [n].
            above: The expected number of passages with unknown scores above it; None: all scores are known.
        """
        gains = self._gains(np.minimum(ranks, self.cutoff + 1))
        if above is not None:
            gains = self._expected_gains(np.minimum(ranks, self.cutoff + 1), above)
        if self.name == "nDCG":
            ideal = np.sort(grades)[::-1][: self.cutoff]
            return float(grades @ gains / (ideal @ self._gains(np.arange(1, len(ideal) + 1))))
        return float(gains.mean() if self.name == "R" else gains.max())

    def _gains(self, ranks: np.ndarray) -> np.ndarray:
        """Returns g(t) of ranks, float64."""
        ranks = ranks.astype(np.float64)
        return np.where(ranks <= self.cutoff, _GAINS[self.name](ranks), 0.0)

    def _expected_gains(self, ranks: np.ndarray, above: np.ndarray) -> np.ndarray:
        """Returns E[g(r + M)] of ranks, float64 [n]."""
        numbers = np.arange(self.cutoff)
        # The logarithms of P(M = j): exp(-m) itself is 0 for m of 746 and more.
        logs = np.log(np.maximum(above[:, None], 1e-300)) - np.log(np.maximum(numbers, 1))
        logs[:, 0] = -above
        return (np.exp(np.cumsum(logs, axis=1)) * self._gains(ranks[:, None] + numbers)).sum(axis=1)
