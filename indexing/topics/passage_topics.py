"""Provides the topics of passages for topic prompts: stored topics if they exist, otherwise inferred ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riptide.indexing.corpus.corpus import passage_contents
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowPart, RowParts, parts_of_range
from riptide.indexing.store.keys import Key
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topics_work import KIND
from riptide.retriever.topics.model import NO_TOPIC, TopicModel, with_default_topic


@dataclass(frozen=True)
class PassageTopics:
    """The source of the topics of a corpus' passages. It is sent to workers, which read the topics on their node.

    Attributes:
        fitted: The generation of topics/NAME that was fitted to the corpus; None: all topics are inferred.
    """

    fitted: Artifact | None

    def covers(self, corpus: Artifact) -> bool:
        """Returns whether the generation `fitted` has topics, fitted or inferred, for a generation of the corpus."""
        if self.fitted is None:
            return False
        made_from = [entry["fingerprint"] for role, entry in self.fitted.inputs.items() if role != "previous"]
        return corpus.fingerprint in made_from

    @property
    def num_stored(self) -> int:
        """The number of passages with stored topics, which are the first ones of the corpus."""
        return 0 if self.fitted is None else RowParts([self.fitted]).num_rows

    def topics_of_part(self, model: TopicModel, part: RowPart, rows: int) -> np.ndarray:
        """Returns the topics of the first `rows` passages of a part of the corpus: int64 [rows].

        A passage without a known word has the most probable topic.

        Args:
            model: The topics.
            part: The part of the corpus.
            rows: The number of passages.
        """
        topics = np.full(rows, NO_TOPIC, np.int64)
        first, end = part.first_row, part.first_row + rows
        is_known = np.zeros(rows, bool)
        fitted = RowParts([self.fitted] if self.fitted is not None and self.covers(part.artifact) else [])
        for piece, own in parts_of_range(fitted, first, end):
            start = piece.first_row + own.start - first
            here = slice(start, start + own.stop - own.start)
            topics[here] = np.load(piece.artifact.local_path(piece.part), mmap_mode="r")[own]
            is_known[here] = True
        if not is_known.all():
            texts = [
                text for text, known in zip(passage_contents([part], first, end), is_known, strict=True) if not known
            ]
            topics[~is_known] = model.infer(texts)
        return with_default_topic(topics, model)


def open_passage_topics(store: Store, task: str) -> PassageTopics:
    """Opens the topics with which the passages of the store are encoded for a task.

    The fitted topics are those that the task was trained with, if the store has them and they are of its corpus;
    otherwise, for example after a task came from another store, topics are inferred.

    Args:
        store: The store.
        task: The name of a task with prompts of topics.
    """
    entry = store.open("prompts", task).inputs.get("topics")
    if entry is None:
        return PassageTopics(None)
    kind, name = Key.parse(entry["artifact"])
    generations = store.generations(kind, name.rpartition("/")[0]) if kind == KIND else []
    fitted = next((made for made in generations if made.fingerprint == entry["fingerprint"]), None)
    return PassageTopics(fitted)
