"""What a cross-encoder is trained with: its options, and what the batch at a step holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from retriever.errors import InputError
from retriever.options import TitlePolicy

Loss = Literal["bce", "listwise"]

WARM_UP = 0.1  # of all steps: that of BERT's fine-tuning scripts, and of sentence-transformers' examples


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """batch: queries a step, over all workers; each comes with one positive and `negatives_per_query` negatives.

    loss: "bce" makes the sigmoid of a logit the probability that the passage answers; "listwise" is the cross-entropy
    of a query's positive among its negatives, whose logits rank as well but mean no probability.
    """

    steps: int
    batch: int = 32
    negatives_per_query: int = 4
    lr: float = 2e-5
    seed: int = 0
    max_length: int = 256
    loss: Loss = "bce"
    title: TitlePolicy = "space"

    def __post_init__(self) -> None:
        """Raises InputError for a value that cannot be trained with."""
        for name in ("steps", "batch", "negatives_per_query", "max_length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if not (math.isfinite(self.lr) and self.lr > 0) or self.seed < 0:
            raise InputError(f"lr={self.lr} seed={self.seed}: expected a learning rate above 0, and a seed from 0 on")
        for name, allowed in (("loss", get_args(Loss)), ("title", get_args(TitlePolicy))):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")


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


def batch_at(data: TrainingData, options: TrainingOptions, step: int) -> tuple[np.ndarray, np.ndarray]:
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


def _group(data: TrainingData, options: TrainingOptions, epoch: int, query: int) -> np.ndarray:
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


def learning_rate(step: int, options: TrainingOptions) -> float:
    """Of a step, from 0: up to `lr` over the first tenth of the steps, then down to 0, both in a straight line."""
    rising = max(1, round(WARM_UP * options.steps))
    left = (options.steps - step) / max(1, options.steps - rising)
    return options.lr * min((step + 1) / rising, left)
