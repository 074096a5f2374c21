"""The topics of training queries and passages, from topics/NAME."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.indexing.topics.reader import Topics
from riptide.retriever.options.topics import TopicOptions
from riptide.retriever.topics.model import with_default_topic
from riptide.retriever.topics.training import TrainingTopics, topics_of_queries
from riptide.retriever.training.training_data import TrainingData


def open_training_topics(
    store: Store, name: str | None, queries: Sequence[str], num_passages: int, options: TopicOptions
) -> tuple[Topics, TrainingTopics]:
    """Opens topics/NAME for training.

    Args:
        store: The store.
        name: The name of the topics; None: the only ones of the store.
        queries: The training queries.
        num_passages: Number of passages of the corpus that training uses: its first rows.
        options: Whether the topic of a query is inferred from its text or that of its passage, and what happens to
            queries without a known word.

    Returns:
        The opened topics, and those of the training data. A passage without a known word has the most probable topic.

    Raises:
        InputError: If the topics are of another corpus or of a part of it, or if a query has no word that they know.
    """
    topics = Topics.open(store, name, num_passages)
    passages = topics.topic_per_row()
    if len(passages) < num_passages:
        raise InputError(
            f"{topics.generations[0].url} covers {len(passages):,} of the {num_passages:,} passages: fit topics "
            "without a limit under another name"
        )
    model, of_queries = topics.model, None
    if options.queries == "own":
        of_queries = topics_of_queries(model, queries, options.wordless)
    known = with_default_topic(passages[:num_passages].astype(np.int64), model)
    return topics, TrainingTopics(model, known, of_queries, options.wordless)


def topic_agreement(topics: TrainingTopics, data: TrainingData) -> float:
    """Returns the share of training queries whose text has the topic of their first positive, 0 to 1.

    A query without a known word does not agree.
    """
    inferred = topics.model.infer(data.queries)
    judged = topics.of_passages[[rows[0] for rows in data.positives]]
    return float((inferred == judged).mean())
