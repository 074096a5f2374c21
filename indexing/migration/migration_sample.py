"""The passages and queries that both encoders encode for a forecast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.stored_encoder import StoredEncoder
from riptide.indexing.exact import exact_search
from riptide.indexing.migration.forecast import JudgedQuery, KnownPassages
from riptide.indexing.migration.space_maps import SpaceMap, fit_maps

BATCH = 1_024  # passages whose texts are in memory at once


@dataclass(frozen=True)
class EncodedSample:
    """Passages with the vectors of both encoders.

    Attributes:
        rows: Their rows, int64 [n].
        old: float32 [n, dimensions of the old encoder].
        new: float32 [n, dimensions of the new encoder].
        seconds: The time in which the new encoder has encoded them.
    """

    rows: np.ndarray
    old: np.ndarray
    new: np.ndarray
    seconds: float


class Migration:
    """Two encoders of a corpus: the existing embeddings of one, and the other one.

    Args:
        corpus: The corpus.
        embeddings: The embeddings of the old encoder.
        encoder: The new encoder.
    """

    def __init__(self, corpus: Corpus, embeddings: Embeddings, encoder: StoredEncoder):
        self.corpus, self.embeddings, self.encoder = corpus, embeddings, encoder

    def encode(self, rows: np.ndarray) -> EncodedSample:
        """Encodes passages, int64 [n], with the new encoder, and reads their existing vectors."""
        self.encoder.encoder_of("passage")  # opened before the time is taken
        pieces, started = [], time.perf_counter()
        for first in range(0, len(rows), BATCH):
            passages = self.corpus.passages(rows[first : first + BATCH])
            texts = self.encoder.compose([each.title for each in passages], [each.text for each in passages])
            pieces.append(self.encoder.encode(texts, side="passage"))
        seconds = time.perf_counter() - started
        new = np.concatenate(pieces) if pieces else np.empty((0, self.encoder.dim), np.float32)
        return EncodedSample(rows, self.embeddings.take(rows).astype(np.float32), new, seconds)

    def draw(self, count: int, seed: int) -> np.ndarray:
        """Draws passages at random that are not deleted: int64 [at most count], ascending."""
        deleted, number = np.sort(self.corpus.deleted), len(self.corpus)
        positions = np.random.default_rng(seed).choice(number, min(count, number), replace=False, shuffle=False)
        positions = np.sort(positions.astype(np.int64))
        return positions + np.searchsorted(deleted - np.arange(len(deleted)), positions, side="right")

    def search(self, queries: Sequence[np.ndarray], k: int) -> list[np.ndarray]:
        """Returns the rows of the first k existing vectors of each group of queries, in one exact search.

        Args:
            queries: Vectors in the old space: float32 [q, e] each, with the same q.
            k: The number of hits per query.

        Returns:
            int64 [q, k] of each group.
        """
        parts = self.embeddings.read_range(0, self.embeddings.num_rows)
        rows = exact_search(np.concatenate(queries), parts, k, deleted=self.corpus.deleted).rows
        return np.split(rows, len(queries))

    def known_passages(
        self, sample: EncodedSample, judged: Sequence[JudgedQuery], hits: Sequence[np.ndarray]
    ) -> tuple[KnownPassages, EncodedSample]:
        """Encodes the judged passages and the first hits too, and returns all passages that are known then.

        Args:
            sample: Random passages.
            judged: The relevant passages of the queries.
            hits: Rows of the first hits of searches, -1 for none: int64 [q, k] each.
        """
        chosen = np.unique(np.concatenate([*(query.rows for query in judged), *(each.ravel() for each in hits)]))
        others = self.encode(np.setdiff1d(chosen[chosen >= 0], sample.rows))
        order = np.argsort(rows := np.concatenate([sample.rows, others.rows]))
        whole = EncodedSample(
            rows[order],
            np.concatenate([sample.old, others.old])[order],
            np.concatenate([sample.new, others.new])[order],
            sample.seconds + others.seconds,
        )
        # A sampled passage that is also chosen is no random one of the passages that are not chosen.
        is_random = np.isin(whole.rows, sample.rows) & ~np.isin(whole.rows, chosen)
        return KnownPassages(whole.rows, is_random, len(self.corpus)), whole


def fit_query_maps(
    sample: EncodedSample, new_queries: np.ndarray, old_queries: np.ndarray, seed: int
) -> list[SpaceMap]:
    """Fits the maps of queries on the passages of a sample and on queries that both encoders have encoded.

    Args:
        sample: The passages.
        new_queries: float32 [q, d]; q may be 0.
        old_queries: float32 [q, e].
        seed: Seed of the held-out part.
    """
    return fit_maps(np.concatenate([sample.new, new_queries]), np.concatenate([sample.old, old_queries]), seed=seed)


def check_corpus(corpus: Corpus) -> None:
    """Raises InputError for a corpus whose documents were split: judgements of documents name no passage."""
    if corpus.is_split:
        raise InputError(
            "the corpus consists of split documents, and a forecast measures passages: encode the corpus under another "
            "name, and compare both by document"
        )
