"""Options of prompts of topics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from retriever.errors import InputError

QueryTopics = Literal["own", "judged"]
Wordless = Literal["refuse", "prior"]


@dataclass(frozen=True, kw_only=True)
class TopicOptions:
    """Options of prompts of topics. The paper's text gives no sizes: these defaults are ours.

    Attributes:
        hidden: Size of the hidden layer of the network over a topic's words.
        queries: The topic of a training query: "own": inferred from its text, as in a search. "judged": that of its
            passage (the paper's protocol), which tells the query which part of the corpus to look in.
        wordless: A query without a word that the topics know: "refuse": an error; "prior": it has the topic of the
            most probable path, as a passage without one. It is saved with the prompts.
        loss: Add the loss that keeps passages closer under one topic's prompt than under two (Eq. 5).
        margin: The margin of that loss, a difference of cosines.
        sample: That loss encodes the passages of a batch under N topics, drawn at random in each step; None: under all.
    """

    hidden: int = 512
    queries: QueryTopics = "own"
    wordless: Wordless = "refuse"
    loss: bool = True
    margin: float = 0.1
    sample: int | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        if self.hidden < 1:
            raise InputError(f"hidden={self.hidden} of the prompts of topics: expected at least 1")
        for name, allowed in (("queries", get_args(QueryTopics)), ("wordless", get_args(Wordless))):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"{name}={getattr(self, name)!r} of the prompts of topics: expected {' or '.join(allowed)}"
                )
        if not (self.margin >= 0 and math.isfinite(self.margin)):
            raise InputError(f"margin={self.margin} of the loss of topics: expected 0 or more")
        if self.sample is not None and self.sample < 2:
            raise InputError(
                f"sample={self.sample} of the loss of topics: expected at least 2, since it compares two topics"
            )
