"""Options of prompts of topics, on the command line."""

from __future__ import annotations

from jobs.common.cli import Common

from dataclasses import dataclass
from typing import Any, Literal

from retriever.errors import InputError
from retriever.topics.options import TopicOptions

_OPTIONS = {
    "topics": None,
    "query_topics": None,
    "wordless_queries": None,
    "topic_loss": True,
    "topic_sample": None,
    "topic_margin": None,
}
_OF_LOSS = ("topic_sample", "topic_margin")


@dataclass(frozen=True, kw_only=True)
class TopicTraining(Common):
    """Options of jobs that can train prompts of topics."""

    topics: str | None = None
    """With --prompt topics: topics/NAME of the corpus (fit_topics); may be left out if the store has only one."""
    query_topics: Literal["own", "judged"] | None = None
    """With --prompt topics: own: the topic of a training query is inferred from its text, as in a search; judged: it is
    that of its passage (Topic-DPR's protocol), which tells the query in which part of the corpus its passage is. The
    topics of the queries of searches and of the dev split are always inferred. Default: own."""
    wordless_queries: Literal["refuse", "prior"] | None = None
    """With --prompt topics: refuse: a query without a word that the topics know is an error, in training and when the
    task is used; prior: it has the most probable topic, as a passage without one. It is stored with the prompts.
    Default: refuse."""
    topic_loss: bool = True
    """With --prompt topics --positives categories: --no-topic-loss: leave out the loss that keeps passages closer under
    one topic's prompt than under two (Topic-DPR, Eq. 5). Its weight is --category-weight. It encodes the passages of
    each batch once more under every topic."""
    topic_sample: int | None = None
    """With --prompt topics --positives categories: in each step, encode the passages for that loss under N topics drawn
    at random, at least 2, instead of all, which is faster; the expected loss is the same. Default: all."""
    topic_margin: float | None = None
    """With --prompt topics --positives categories: the margin of that loss, a difference of cosines. Default: 0.1 (our
    choice: the paper does not print its own)."""

    def topic_options(self, prompt: str, hidden: int | None, weight: float | None) -> TopicOptions | None:
        """Returns the options of prompts of topics; None for other prompts.

        Args:
            prompt: The value of --prompt.
            hidden: The size of the hidden layer; None: the default.
            weight: The weight of the loss of topics; None: positives are judged, so that there is none.

        Raises:
            InputError: If an option has a bad value, or does not fit the others.
        """
        by_categories = weight is not None
        given = {name: value for name, default in _OPTIONS.items() if (value := getattr(self, name)) != default}
        unused = [name for name in given if prompt != "topics" or (name in _OF_LOSS and not by_categories)]
        if unused:
            [name, *_] = unused
            option = f"--no-{name.replace('_', '-')}" if given[name] is False else f"parameter {name} {given[name]}"
            what = (
                "is for prompts of topics: give --prompt topics"
                if prompt != "topics"
                else (
                    "is for the loss of topics, which needs positives of a common category: give --positives categories"
                )
            )
            raise InputError(f"{option} --prompt {prompt}: {what}, or leave it out")
        if prompt != "topics":
            return None
        if (of_loss := [name for name in _OF_LOSS if name in given]) and not (self.topic_loss and weight):
            reason = "parameter category_weight 0" if self.topic_loss else "--no-topic-loss"
            raise InputError(
                f"{reason}, parameter {of_loss[0]} {given[of_loss[0]]}: there is no loss of topics: leave one of them "
                "out"
            )
        values: dict[str, Any] = {
            "hidden": hidden,
            "queries": self.query_topics,
            "wordless": self.wordless_queries,
            "margin": self.topic_margin,
            "sample": self.topic_sample,
        }
        known = {name: value for name, value in values.items() if value is not None}
        return TopicOptions(loss=self.topic_loss and by_categories, **known)
