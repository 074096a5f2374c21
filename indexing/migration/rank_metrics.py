r"""nDCG@K, R@K and RR@K of a query from the ranks of its relevant passages.

With the gain g(t) = 1 / log2(1 + t), 1 or 1 / t of a rank t up to K, and 0 beyond:

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

    def value(self, grades: np.ndarray, ranks: np.ndarray) -> float:
        """Returns the value of a query.

        Args:
            grades: The grade of each relevant passage, at least 1: int [n], n at least 1.
            ranks: Its rank from 1; a rank beyond K counts as no hit: int [n].
        """
        return self.value_of_gains(grades, self.gains(ranks))

    def value_of_gains(self, grades: np.ndarray, gains: np.ndarray) -> float:
        """Returns the value of a query from the gains of its relevant passages, float64 [n]."""
        if self.name == "nDCG":
            ideal = np.sort(grades)[::-1][: self.cutoff]
            return float(grades @ gains / (ideal @ self.gains(np.arange(1, len(ideal) + 1))))
        return float(gains.mean() if self.name == "R" else gains.max())

    def gains(self, ranks: np.ndarray) -> np.ndarray:
        """Returns g(t) of ranks, float64."""
        ranks = ranks.astype(np.float64)
        return np.where(ranks <= self.cutoff, _GAINS[self.name](ranks), 0.0)
