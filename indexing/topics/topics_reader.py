"""Reads topics/NAME: the topic of each passage, and the topic model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowChain, RowPart, open_chain
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topic_model_file import read_topics
from riptide.indexing.topics.topics_work import KIND, model_part
from riptide.indexing.topics.tree import TopicTree
from riptide.retriever.topics.model import TopicModel


class Topics(RowChain):
    """Topics opened for reading: all complete generations of topics/NAME.

    Attributes:
        name: The name.
        generations: The first one was fitted and has the model; topics of later ones are inferred.
        num_rows: The number of passages with topics: those of the corpus, or the limit of the fit.
    """

    def __init__(self, name: str, generations: Sequence[Artifact]):
        super().__init__(generations)
        self.name = name

    @classmethod
    def open(cls, store: Store, name: str | None = None, rows: int | None = None) -> Topics:
        """Opens topics/NAME of a store, or its only topics.

        Args:
            store: The store.
            name: The name; None: the only one of the store.
            rows: The number of passages that need topics, the first ones of the corpus; None: all.

        Raises:
            InputError: If it is missing, was fitted to another corpus, or lacks passages of this one.
        """
        corpus = Corpus.open(store)
        name = store.only_name(KIND, name)
        return cls(name, open_chain(store, KIND, name, corpus.generations, rows))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the fitted generation, which does not change when the corpus grows."""
        return self.generations[0].fingerprint

    @functools.cached_property
    def tree(self) -> TopicTree:
        """The topic model with its tree, read from the fitted generation."""
        fitted = self.generations[0]
        return read_topics(fitted.local_path(model_part(fitted)))

    @property
    def model(self) -> TopicModel:
        """The topic model without its tree."""
        return self.tree.model

    def topic_per_row(self) -> np.ndarray:
        """Reads the topic of each passage, in the order of rows.

        Returns:
            int64 [num_rows]; NO_TOPIC (-1) for a passage without a word of the vocabulary.

        Raises:
            InputError: If a file holds other numbers than topics.
        """
        pieces = [self._read_topics(part) for part in self.parts]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def passages_per_topic(self) -> np.ndarray:
        """Returns the number of passages of each topic: int64 [K]."""
        topics = self.topic_per_row()
        return np.bincount(topics[topics >= 0], minlength=self.model.num_topics)

    def _read_topics(self, part: RowPart) -> np.ndarray:
        """Reads the topics of the passages of a part: int64 [rows]."""
        topics = np.load(part.artifact.local_path(part.part))
        if topics.shape != (part.part.rows,) or topics.dtype != np.int64:
            raise InputError(
                f"{part.artifact.url}/{part.part.file}: {topics.dtype} {list(topics.shape)}, expected int64 "
                f"[{part.part.rows}]"
            )
        if len(topics) and (topics.min() < -1 or topics.max() >= self.model.num_topics):
            raise InputError(
                f"{part.artifact.url}/{part.part.file}: topics from {topics.min()} to {topics.max()}, expected -1 to "
                f"{self.model.num_topics - 1}"
            )
        return topics
