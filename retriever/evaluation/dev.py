"""Dev splits for evaluation during training: MRR@10 of search in a pool of passages, and of re-ranking."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from retriever.options import Side

DEPTH = 10  # of MRR@10


class TextSystem(Protocol):
    """A System that encodes texts."""

    def encode(self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1) -> np.ndarray:
        """Returns vectors of the current model, float32 [n, dim]; workers share the texts, and all get the result."""


class PairSystem(Protocol):
    """A System that scores pairs of a query and a passage."""

    def score(self, queries: Sequence[str], passages: Sequence[str], rank: int = 0, world: int = 1) -> np.ndarray:
        """Returns logits of the current model, float32 [n]; the workers share the pairs, and all get the result."""


@dataclass(frozen=True)
class DevSet:
    """A dev split for evaluation during training: queries, and the passages to search.

    Attributes:
        queries: Texts of the queries.
        positives: For each query, positions among the passages, int64 [any].
        texts: Texts of the passages; not used if there are vectors.
        vectors: Their stored vectors, float32 [n, dim]; None: the system encodes the texts.
    """

    queries: Sequence[str]
    positives: Sequence[np.ndarray]
    texts: Sequence[str]
    vectors: np.ndarray | None = None

    def mrr(self, system: TextSystem, rank: int = 0, world: int = 1, depth: int = DEPTH) -> float:
        """Returns MRR@depth. A positive ranks last among passages with equal scores. NaN if vectors are not finite."""
        queries = system.encode(self.queries, "query", rank, world)
        passages = self.vectors if self.vectors is not None else system.encode(self.texts, "passage", rank, world)
        return mean_reciprocal_rank(queries @ passages.T, self.positives, depth)


@dataclass(frozen=True)
class DevLists:
    """A dev split for evaluation of a re-ranker during training: queries, each with a list of passages to order.

    Attributes:
        queries: Texts of the queries.
        positives: For each query, positions in its list, int64 [any].
        lists: For each query, the texts of its passages.
    """

    queries: Sequence[str]
    positives: Sequence[np.ndarray]
    lists: Sequence[Sequence[str]]

    def mrr(self, system: PairSystem, rank: int = 0, world: int = 1, depth: int = DEPTH) -> float:
        """Returns MRR@depth. A positive ranks last among passages with equal scores. NaN if scores are not finite."""
        sizes = [len(passages) for passages in self.lists]
        queries = [query for query, size in zip(self.queries, sizes, strict=True) for _ in range(size)]
        scores = system.score(queries, list(itertools.chain.from_iterable(self.lists)), rank, world)
        return mean_reciprocal_rank(np.split(scores, np.cumsum(sizes)[:-1]), self.positives, depth)


def mean_reciprocal_rank(scores: Iterable[np.ndarray], positives: Sequence[np.ndarray], depth: int) -> float:
    """Returns the mean over queries of 1 / rank of the first positive, 0 if that rank is greater than `depth`.

    A positive ranks last among passages with equal scores, because otherwise a model that gives every text the same
    score would be the best.

    Args:
        scores: For each query, the scores of its passages, float [n].
        positives: For each query, positions of its positives among the passages, int64 [any], at least one.
        depth: The last rank that counts.

    Returns:
        The mean; NaN if a score is not finite, 0 without queries.
    """
    total = 0.0
    for line, own in zip(scores, positives, strict=True):
        if not np.isfinite(line).all():
            return math.nan
        place = int((np.delete(line, own) >= line[own].max()).sum())
        total += 1 / (place + 1) if place < depth else 0.0
    return total / max(1, len(positives))
