"""The passages that a picture shows, grouped by topic and by category."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.corpus.categories import categories_of_rows
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.measures.embedding_measures import draw_sample
from riptide.indexing.store.store import Store
from riptide.jobs.pictures.points import Panel

WORDS_SHOWN = 3  # number of words that name a topic in the legend


@dataclass(frozen=True)
class PointSet:
    """A sample of passages with vectors, and the panels that group them.

    Attributes:
        embeddings: The embeddings.
        rows: Their rows, int64 [n], ascending.
        ids: Their ids.
        panels: A panel by topic if topics are named, and one by category if a field is named.
    """

    embeddings: Embeddings
    rows: np.ndarray
    ids: list[str]
    panels: list[Panel]


def open_points(
    store: Store, name: str | None, *, topics: str | None, field: str | None, sample: int, seed: int
) -> PointSet:
    """Draws a random sample of the passages of embeddings, and groups them.

    Args:
        store: The store.
        name: Name of the embeddings; None if the store has only one.
        topics: Name of topics of the corpus; None: no panel by topic.
        field: The metadata field with the categories of a passage; None: no panel by category. A passage with several
            is in the group of the one that most passages of the sample have.
        sample: Maximum number of passages.
        seed: Seed of the sample.

    Raises:
        InputError: If an artifact is missing or does not fit the corpus, or if a passage of the sample has no category.
    """
    corpus = Corpus.open(store)
    embeddings = Embeddings.open(store, name, corpus)
    alive = np.setdiff1d(np.arange(embeddings.num_rows), corpus.deleted)
    rows = draw_sample(np.random.default_rng(seed), alive, sample)
    panels = []
    if topics is not None:
        panels.append(group_by_topic(store, topics, rows))
    if field is not None:
        panels.append(group_by_category(corpus, field, rows))
    if not panels:
        raise InputError("found neither topics nor categories to colour passages by, expected one of them; name it")
    return PointSet(embeddings, rows, [passage.id for passage in corpus.passages(rows)], panels)


def group_by_topic(store: Store, name: str, rows: np.ndarray) -> Panel:
    """Groups passages by topic; a passage without a known topic has the group ""."""
    from riptide.indexing.topics.topics_reader import Topics

    opened = Topics.open(store, name)
    labels = [f"{n}: {' '.join(words[:WORDS_SHOWN])}" for n, words in enumerate(opened.model.words)]
    topics = np.full(max(int(rows.max(initial=-1)) + 1, opened.num_rows), -1, np.int64)
    topics[: opened.num_rows] = opened.topic_per_row()
    return Panel("by topic", ["" if topic < 0 else labels[topic] for topic in topics[rows].tolist()])


def group_by_category(corpus: Corpus, field: str, rows: np.ndarray) -> Panel:
    """Groups passages by category; of several categories, the most frequent in the sample counts."""
    table = categories_of_rows(corpus, field, rows)
    counts = np.bincount(table.values, minlength=len(table.names))
    chosen = [min(table.of_row(row).tolist(), key=lambda number: (-counts[number], number)) for row in rows.tolist()]
    return Panel("by category", [table.names[number] for number in chosen])
