"""Evaluation on dev splits during training: MRR@10 of search in a pool of passages, or of re-ranking."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from riptide.retriever.encoding.sparse_vectors import SparseVectors, from_dense
from riptide.retriever.options import Side

DEPTH = 10  # cut-off rank k of MRR@k
# Maximum values in a block of encoded vectors, 32 MiB; a SPLADE vector has one value per vocabulary word.
_BLOCK = 1 << 23


class TextSystem(Protocol):
    """The interface of a System that encodes texts."""

    @property
    def dim(self) -> int:
        """The dimension of a vector."""

    def encode(self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1) -> np.ndarray:
        """Encodes texts with the current model, float32 [n, dim]; workers share the texts, and all get all vectors."""


class NumberedSystem(TextSystem, Protocol):
    """The interface of a TextSystem that has several prompts, one of which applies to each text."""

    def encode(
        self, texts: Sequence[str], side: Side, rank: int = 0, world: int = 1, prompt_numbers: np.ndarray | None = None
    ) -> np.ndarray:
        """Encodes texts as TextSystem does. prompt_numbers: the prompt of each text, int64 [n]; None: inferred."""


class PairSystem(Protocol):
    """The interface of a System that scores pairs of a query and a passage."""

    def score(self, queries: Sequence[str], passages: Sequence[str], rank: int = 0, world: int = 1) -> np.ndarray:
        """Scores pairs with the current model, logits float32 [n]; workers share the pairs, and all get all logits."""


@dataclass(frozen=True)
class DevSet:
    """A dev split for search evaluation during training: queries and the passages to search.

    Attributes:
        queries: Texts of the queries.
        positives: For each query, positions among the passages, or among the documents, int64 [any].
        texts: Texts of the passages; not used if there are vectors.
        vectors: Their stored vectors, float32 [n, dim], or blocks of them; None: the system encodes the texts.
        prompt_numbers: The numbers of the prompts of the passages, int64 [n], for a NumberedSystem; None: it infers
            them, if it has several prompts.
        documents: Positions of the first passage of each document, int64, ascending: a document ranks by its best
            passage. None: the passages are ranked.
    """

    queries: Sequence[str]
    positives: Sequence[np.ndarray]
    texts: Sequence[str]
    vectors: np.ndarray | Sequence[np.ndarray | SparseVectors] | None = None
    prompt_numbers: np.ndarray | None = None
    documents: np.ndarray | None = None

    def mrr(self, system: TextSystem, rank: int = 0, world: int = 1, depth: int = DEPTH) -> float:
        """Returns MRR@depth. A positive ranks last among equal scores. NaN if vectors are not finite."""
        passages: Sequence[np.ndarray | SparseVectors]
        if self.vectors is None:
            blocks = _encode_blocks(system, self.texts, "passage", rank, world, self.prompt_numbers)
            passages = [_compact(vectors) for vectors in blocks]
        else:
            passages = [self.vectors] if isinstance(self.vectors, np.ndarray) else self.vectors
        scores = [
            _inner_products(block, passages) for block in _encode_blocks(system, self.queries, "query", rank, world)
        ]
        if self.documents is not None:
            scores = [np.maximum.reduceat(block, self.documents, axis=1) for block in scores]
        return mean_reciprocal_rank(itertools.chain.from_iterable(scores), self.positives, depth)


@dataclass(frozen=True)
class DevSets:
    """The dev splits of several training sets, each with its own passages to search.

    Attributes:
        sets: The dev splits, at least one.
    """

    sets: Sequence[DevSet]

    def mrr(self, system: TextSystem, rank: int = 0, world: int = 1, depth: int = DEPTH) -> float:
        """Returns the mean of MRR@depth over the sets, so that every set has equal weight, regardless of its size."""
        return sum(each.mrr(system, rank, world, depth) for each in self.sets) / len(self.sets)


def _encode_blocks(
    system: TextSystem,
    texts: Sequence[str],
    side: Side,
    rank: int,
    world: int,
    prompt_numbers: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Yields the vectors of texts, in order, in blocks of at most _BLOCK values; `prompt_numbers` as in DevSet."""
    step = max(1, _BLOCK // system.dim)
    for first in range(0, len(texts), step):
        block = texts[first : first + step]
        if prompt_numbers is None:
            yield system.encode(block, side, rank, world)
        else:
            yield cast(NumberedSystem, system).encode(block, side, rank, world, prompt_numbers[first : first + step])


def read_blocks(
    read_rows: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, dim: int
) -> list[np.ndarray | SparseVectors]:
    """Reads the stored vectors of rows in blocks, in CSR format where that is smaller.

    Args:
        read_rows: Returns vectors by row: int64 [n] -> float [n, dim].
        rows: The rows, int64.
        dim: Length of a vector.
    """
    step = max(1, _BLOCK // dim)
    return [_compact(read_rows(rows[first : first + step]).astype(np.float32)) for first in range(0, len(rows), step)]


def _compact(vectors: np.ndarray) -> np.ndarray | SparseVectors:
    """Converts vectors to CSR format if that is smaller."""
    return from_dense(vectors) if 2 * np.count_nonzero(vectors) < vectors.size else vectors


def _inner_products(queries: np.ndarray, passages: Sequence[np.ndarray | SparseVectors]) -> np.ndarray:
    """Returns the inner products of queries with the passages of all blocks, float32 [queries, passages]."""
    blocks = (block.dense() if isinstance(block, SparseVectors) else block for block in passages)
    return np.concatenate([queries @ block.T for block in blocks], axis=1)


@dataclass(frozen=True)
class DevLists:
    """A dev split for re-ranking evaluation during training: queries, each with a list of passages to rank.

    Attributes:
        queries: Texts of the queries.
        positives: For each query, positions in its list, int64 [any].
        lists: For each query, the texts of its passages.
    """

    queries: Sequence[str]
    positives: Sequence[np.ndarray]
    lists: Sequence[Sequence[str]]

    def mrr(self, system: PairSystem, rank: int = 0, world: int = 1, depth: int = DEPTH) -> float:
        """Returns MRR@depth. A positive ranks last among equal scores. NaN if scores are not finite."""
        sizes = [len(passages) for passages in self.lists]
        queries = [query for query, size in zip(self.queries, sizes, strict=True) for _ in range(size)]
        scores = system.score(queries, list(itertools.chain.from_iterable(self.lists)), rank, world)
        return mean_reciprocal_rank(np.split(scores, np.cumsum(sizes)[:-1]), self.positives, depth)


def mean_reciprocal_rank(scores: Iterable[np.ndarray], positives: Sequence[np.ndarray], depth: int) -> float:
    """Returns the mean over queries of the reciprocal rank of the first positive; 0 for ranks beyond `depth`.

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
