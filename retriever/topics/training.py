"""The topics of the texts of a training run, and random samples of topics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.options import Side
from riptide.retriever.options.topics import TopicOptions, Wordless
from riptide.retriever.topics.model import NO_TOPIC, TopicModel, with_default_topic
from riptide.retriever.topics.saved import NO_TOPIC_WORDS

_DRAW = 3  # random stream of sampled topics; other draws of a step use other streams


@dataclass(frozen=True, eq=False)
class TrainingTopics:
    """The topics that select the prompts of a training run's texts.

    Any numbers may be given, for example random topics, for comparisons.

    Attributes:
        model: The topics, also for texts outside of the training data.
        of_passages: The topic of each passage of the corpus, int64 [rows].
        query_topics: The topic of each training query, int64 [queries]; None: a query has the topic of the passage that
            is its positive in a batch.
        wordless: As of TopicOptions, for queries outside of the training data.
    """

    model: TopicModel
    of_passages: np.ndarray
    query_topics: np.ndarray | None
    wordless: Wordless = "refuse"

    def __post_init__(self) -> None:
        """Raises InputError for topic numbers outside of the model."""
        for name, topics in (("passages", self.of_passages), ("queries", self.query_topics)):
            if topics is not None and len(topics) and not 0 <= topics.min() <= topics.max() < self.model.num_topics:
                raise InputError(
                    f"topics of {name}: {topics.min()} to {topics.max()}, expected 0 to {self.model.num_topics - 1}"
                )

    def of_queries(self, queries: np.ndarray, positives: np.ndarray) -> np.ndarray:
        """Returns the topics of a batch's queries, int64 [m]. positives: the row of each query's positive."""
        return self.of_passages[positives] if self.query_topics is None else self.query_topics[queries]

    def infer(self, texts: Sequence[str], side: Side) -> np.ndarray:
        """Infers the topics of texts outside of the training data, int64 [n].

        Raises:
            InputError: For a query without a known word, if such queries are refused; names it.
        """
        if side == "query":
            return topics_of_queries(self.model, texts, self.wordless)
        return with_default_topic(self.model.infer(texts), self.model)

    def sample(self, options: TopicOptions, seed: int, step: int) -> np.ndarray:
        """Returns the topics under which the topic loss encodes the passages of a step, int64, ascending.

        All of them, or `options.sample` different ones, drawn at random. The loss is a mean over ordered pairs of
        topics, so that its expectation is the same.
        """
        number = self.model.num_topics
        if options.sample is None or options.sample >= number:
            return np.arange(number)
        rng = np.random.default_rng([seed, _DRAW, step])
        return np.sort(rng.choice(number, options.sample, replace=False))


def topics_of_queries(model: TopicModel, texts: Sequence[str], wordless: Wordless) -> np.ndarray:
    """Infers the topics of queries, int64 [n].

    Raises:
        InputError: If a query has no known word, and such queries are refused; names the first one, and counts them.
    """
    topics = model.infer(texts)
    if wordless == "prior":
        return with_default_topic(topics, model)
    if len(lacking := np.flatnonzero(topics == NO_TOPIC)):
        of = "" if len(lacking) == 1 else f" (and {len(lacking) - 1:,} more of {len(topics):,})"
        raise InputError(
            f"the query {texts[lacking[0]][:80]!r}{of} {NO_TOPIC_WORDS}, or set "
            f"{Parameter('wordless_queries', 'prior')}"
        )
    return topics
