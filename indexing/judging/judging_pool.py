"""Pools two runs: the pairs of a query and a passage whose verdict changes the difference of the runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter

MEASURES = ("DCG@10", "P@10")
_MEASURE = re.compile(r"(DCG|P)@([1-9][0-9]{0,2})")
_NOT_RANKED = 0  # the rank of a passage that a run lacks among its first hits


@dataclass(frozen=True)
class JudgingPool:
    """The pairs that two runs rank differently among their first hits, ordered by query and best rank.

    Attributes:
        query_ids: The query of each pair.
        ids: The passage of each pair.
        gains: What a relevant passage adds to the mean difference, second run minus first run: float64 [pairs].
        best_ranks: The better of its two ranks, from 1: float64 [pairs].
        num_pooled: Number of different pairs of both runs, those with equal ranks too.
        num_queries: Number of queries.
    """

    query_ids: tuple[str, ...]
    ids: tuple[str, ...]
    gains: np.ndarray
    best_ranks: np.ndarray
    num_pooled: int
    num_queries: int

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self) -> dict[tuple[str, str], int]:
        """Returns the number of each pair by query id and passage id."""
        return {pair: at for at, pair in enumerate(zip(self.query_ids, self.ids, strict=True))}


def parse_measure(name: str) -> np.ndarray:
    """Returns the value of a relevant hit at each rank: float64 [depth].

    DCG@k is `sum(1 / log2(rank + 1))` over the relevant hits, divided by its value for k relevant hits. Both measures
    are sums over pairs, so a sample of pairs estimates them without bias. The ideal of nDCG@k and the first relevant
    hit of RR@k depend on verdicts outside the sample.

    Raises:
        InputError: If it is another measure.
    """
    if not (match := _MEASURE.fullmatch(name)):
        raise InputError(
            f"{Parameter('measure', name)}: expected DCG@k or P@k with k from 1 to 999, for example {MEASURES[0]}: "
            "other measures cannot be estimated from a sample of passages without bias; name one of these"
        )
    depth = int(match[2])
    values = np.ones(depth) if match[1] == "P" else 1 / np.log2(np.arange(2, depth + 2))
    return values / values.sum()


def pool_runs(
    first: Mapping[str, Sequence[str]], second: Mapping[str, Sequence[str]], rank_values: np.ndarray
) -> JudgingPool:
    """Pools the first hits of two runs.

    Args:
        first: The ranked passages of each query; both runs have the same queries.
        second: Those of the second run.
        rank_values: The value of a relevant hit at each rank, as `parse_measure` returns it.
    """
    depth, num_pooled = len(rank_values), 0
    values = np.append(0.0, rank_values)  # by rank; 0 is _NOT_RANKED
    pairs: list[tuple[str, str, float, int]] = []
    for query, hits in first.items():
        ranks = [{id: rank for rank, id in enumerate(run[:depth], 1)} for run in (hits, second[query])]
        pooled = dict.fromkeys([*ranks[0], *ranks[1]])
        num_pooled += len(pooled)
        for id in pooled:
            of_first, of_second = (each.get(id, _NOT_RANKED) for each in ranks)
            if gain := values[of_second] - values[of_first]:
                pairs.append((query, id, gain / len(first), min(filter(None, (of_first, of_second)))))
    pairs.sort(key=lambda pair: (pair[0], pair[3], pair[1]))
    query_ids, ids, gains, best = zip(*pairs, strict=True) if pairs else ((), (), (), ())
    return JudgingPool(
        query_ids=query_ids,
        ids=ids,
        gains=np.array(gains, np.float64),
        best_ranks=np.array(best, np.float64),
        num_pooled=num_pooled,
        num_queries=len(first),
    )
