"""Options of topic prompts, one per topic of the corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.option_fields import OptionGroup, option

QueryTopics = Literal["own", "judged"]
Wordless = Literal["refuse", "prior"]


@dataclass(frozen=True, kw_only=True)
class TopicLossOptions(OptionGroup):
    """Options of training prompts of topics. The paper's text gives no sizes: these defaults are ours."""

    GROUP: ClassVar = "prompts of topics"

    queries: QueryTopics = option("own", flag="query-topics")
    """With --prompt topics: own: the topic of a training query is inferred from its text, as in a search; judged: it is
    that of its passage (Topic-DPR's protocol), which tells the query in which part of the corpus its passage is. The
    topics of the queries of searches and of the dev split are always inferred."""
    wordless: Wordless = option("refuse", flag="wordless-queries")
    """With --prompt topics: refuse: a query without a word that the topics know is an error, in training and when the
    task is used; prior: it has the most probable topic, as a passage without one. It is stored with the prompts."""
    loss: bool = option(True, flag="topic-loss")
    """With --prompt topics --positives categories: --no-topic-loss: leave out the loss that keeps passages closer under
    one topic's prompt than under two (Topic-DPR, Eq. 5). Its weight is --category-weight. It encodes the passages of
    each batch once more under every topic."""
    sample: int | None = option(None, flag="topic-sample", minimum=2)
    """With --prompt topics --positives categories: in each step, encode the passages for that loss under N topics drawn
    at random, at least 2, instead of all, which is faster; the expected loss is the same. Default: all."""
    margin: float = option(0.1, flag="topic-margin", minimum=0)
    """With --prompt topics --positives categories: the margin of that loss, a difference of cosines (our choice: the
    paper does not print its own)."""


@dataclass(frozen=True, kw_only=True)
class TopicOptions(TopicLossOptions):
    """Resolved options of prompts of topics; `hidden`: size of the hidden layer of the network over a topic's words."""

    hidden: int = option(512, flag="prompt-hidden", minimum=1)
