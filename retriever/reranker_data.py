"""What re-rankers and dual encoders are trained with: questions, passages, and what the batch at a step holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


class BatchOptions(Protocol):
    """What decides what a batch holds. batch: queries a step; each brings one positive and so many negatives."""

    @property
    def batch(self) -> int: ...
    @property
    def negatives_per_query(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class TrainingData:
    """queries: their texts. positives, negatives: of each query, rows of the corpus, int64 [any].

    passages(rows int64 [n]) gives their n titles and n texts; the corpus has rows 0 to num_passages - 1, of which
    `deleted` (int64, ascending) are drawn for nothing.
    """

    queries: Sequence[str]
    positives: Sequence[np.ndarray]
    negatives: Sequence[np.ndarray]
    num_passages: int
    passages: Callable[[np.ndarray], tuple[list[str], list[str]]]
    deleted: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


def batch_at(data: TrainingData, options: BatchOptions, step: int) -> tuple[np.ndarray, np.ndarray]:
    """What the batch at a step holds: query numbers int64 [batch], rows int64 [batch, 1 + negatives], positive first.

    A function of (seed, step, batch): epochs are permutations of the queries laid end to end; which positive and which
    negatives a query brings is drawn from (seed, epoch, query), negatives without repetition. Where there are fewer
    than asked for, passages of the whole corpus that are no positives and not deleted fill up.
    """
    positions = step * options.batch + np.arange(options.batch)
    epochs, places = np.divmod(positions, len(data.queries))
    orders = {epoch: _permutation(options.seed, epoch, len(data.queries)) for epoch in np.unique(epochs)}
    queries = np.array([orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)], np.int64)
    rows = [_group(data, options, int(epoch), int(query)) for epoch, query in zip(epochs, queries, strict=True)]
    return queries, np.stack(rows)


def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, 0, int(epoch)]).permutation(size)


def _group(data: TrainingData, options: BatchOptions, epoch: int, query: int) -> np.ndarray:
    draw = np.random.default_rng([options.seed, 1, epoch, query])
    positives, negatives = data.positives[query], data.negatives[query]
    wanted = options.negatives_per_query
    chosen = [draw.choice(positives), *draw.choice(negatives, min(wanted, len(negatives)), replace=False)]
    while len(chosen) <= wanted:
        row = draw.integers(data.num_passages)
        place = np.searchsorted(data.deleted, row)
        deleted = place < len(data.deleted) and data.deleted[place] == row
        if row not in positives and not deleted:
            chosen.append(row)
    return np.array(chosen, np.int64)
