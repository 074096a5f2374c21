"""Chooses the queries of a batch from several training sets, as a pure function of seed, step and batch size."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

Batches = Literal["mixed", "one-task"]

_ORDER = 6  # random stream of the epoch orders


@dataclass(frozen=True)
class SetMixture:
    """A mixture of training sets, whose queries are numbered one set after the other.

    A set's share of all queries of a training run is proportional to its weight times its number of queries, so a query
    of weight 2 comes twice as often as one of weight 1. Each set is gone through in epochs, each a permutation of its
    queries. Sets take turns as evenly as their shares allow: among the first n queries, a set of share w has n w of
    them, rounded up or down by at most the number of sets.

    Attributes:
        tasks: The name of each set.
        sizes: Number of queries of each set.
        weights: Weight of a query of each set, more than 0.
        batches: "mixed": each batch holds queries of all sets; "one-task": queries of one set, and sets take turns.
    """

    tasks: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    batches: Batches = "mixed"

    def queries_at(self, seed: int, step: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the queries of a batch, and for each its epoch within its set: int64 [batch] both.

        Args:
            seed: Seed of the orders.
            step: The step, from 0.
            batch: Queries per step.
        """
        shares = np.array(self.weights) * np.array(self.sizes)
        if self.batches == "mixed":
            sets, positions = schedule_sets(shares, step * batch, batch)
        else:
            [chosen], [turn] = schedule_sets(shares, step, 1)
            sets, positions = np.full(batch, chosen), turn * batch + np.arange(batch)
        epochs, places = np.divmod(positions, np.array(self.sizes)[sets])
        queries = self._find_first_queries()[sets]
        for number, epoch in np.unique(np.stack([sets, epochs], axis=1), axis=0).tolist():
            chosen = (sets == number) & (epochs == epoch)
            queries[chosen] += self._order(seed, epoch, number)[places[chosen]]
        return queries, epochs

    def sets_of(self, queries: np.ndarray) -> np.ndarray:
        """Returns the set number of each query, int64 [n]; the set's name is `tasks[number]`."""
        return np.searchsorted(self._find_first_queries(), queries, side="right") - 1

    def _find_first_queries(self) -> np.ndarray:
        """Returns the number of the first query of each set, int64 [sets]."""
        return np.cumsum([0, *self.sizes[:-1]])

    def _order(self, seed: int, epoch: int, set_number: int) -> np.ndarray:
        """Returns the permutation of a set's queries in an epoch, int64 [queries]; caches the last one of each set."""
        key, order = self._orders.get(set_number, (None, None))
        if order is None or key != (seed, epoch):
            order = _permutation(seed, epoch, set_number, self.sizes[set_number])
            self._orders[set_number] = (seed, epoch), order
        return order

    @functools.cached_property
    def _orders(self) -> dict[int, tuple[tuple[int, int], np.ndarray]]:
        """A cache of each set's last order, with its seed and epoch; its size is one order of all queries."""
        return {}


def schedule_sets(shares: np.ndarray, first_turn: int, num_turns: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sets of the next `num_turns` turns, in a sequence in which sets alternate evenly.

    Turn j of a set of share w has the time (j + 1/2) / w, and the sequence is in the order of times, then of sets. The
    number of turns before a time t differs from t by at most half the number of sets, so only turns of times near
    `first_turn` need to be sorted.

    Args:
        shares: Positive numbers, float [sets]; they need not add up to 1.
        first_turn: The first turn, from 0.
        num_turns: Number of turns.

    Returns:
        The set of each turn, and its number among the turns of that set: int64 [num_turns] both.
    """
    shares = np.asarray(shares, np.float64) / np.sum(shares)
    starts = np.floor(max(0, first_turn - len(shares)) * shares + 0.5).astype(np.int64)
    ends = np.floor((first_turn + num_turns + len(shares)) * shares + 0.5).astype(np.int64) + 1
    sets = np.repeat(np.arange(len(shares)), ends - starts)
    numbers = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    order = np.lexsort((sets, (numbers + 0.5) / shares[sets]))
    chosen = order[first_turn - starts.sum() :][:num_turns]
    return sets[chosen], numbers[chosen]


def _permutation(seed: int, epoch: int, set_number: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, _ORDER, epoch, set_number]).permutation(size)
