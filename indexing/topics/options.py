"""The options of a fit of topics."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from retriever.errors import InputError

Method = Literal["hlda", "lda"]


@dataclass(frozen=True, kw_only=True)
class TopicOptions:
    """The options of a fit. The defaults gave ten topics on 9,217 abstracts of arXiv and on 4,020 news of Reuters.

    Attributes:
        method: "hlda": hierarchical LDA, which finds the number of topics; "lda": LDA with a given number of topics.
        topics: The number of topics of LDA.
        depth: Levels of the tree of hierarchical LDA, with the root.
        gamma: Concentration of its nested Chinese restaurant process: the larger, the more topics.
        eta: Dirichlet prior of the words of a topic.
        alpha: Dirichlet prior of the levels of a passage (of LDA: of its topics), to begin with; tomotopy fits it.
        min_passages: A word counts if at least so many passages have it.
        most_frequent: Number of the most frequent words, which do not count.
        iterations: Sweeps of Gibbs sampling over all words.
        seed: Seed of the sampling, and of the drawn passages.
        words: Words by which a topic is named.
        merge_below: A topic with a smaller share of the passages is merged into another one.
        sample: The largest number of passages to fit on; of a larger corpus so many are drawn at random.
    """

    method: Method = "hlda"
    topics: int | None = None
    depth: int = 2
    gamma: float = 1.0
    eta: float = 0.5
    alpha: float = 0.1
    min_passages: int = 10
    most_frequent: int = 30
    iterations: int = 100
    seed: int = 0
    words: int = 32
    merge_below: float = 0.01
    sample: int = 50_000

    def __post_init__(self) -> None:
        if self.method not in ("hlda", "lda"):
            raise InputError(f"parameter method {self.method!r}: expected hlda or lda")
        if self.method == "lda" and (self.topics is None or self.topics < 2):
            raise InputError(f"parameter topics {self.topics}: expected the number of topics of LDA, at least 2")
        if self.method == "hlda" and self.topics is not None:
            raise InputError(
                f"parameter topics {self.topics}: the number of topics of hierarchical LDA is its outcome: leave it "
                "out, or set parameter method lda"
            )
        for name, least in (
            ("depth", 2),
            ("min_passages", 1),
            ("most_frequent", 0),
            ("iterations", 1),
            ("seed", 0),
            ("words", 1),
            ("sample", 1),
        ):
            if getattr(self, name) < least:
                raise InputError(f"parameter {name} {getattr(self, name)}: expected at least {least}")
        for name in ("gamma", "eta", "alpha"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"parameter {name} {getattr(self, name)}: expected a number above 0")
        if not 0 <= self.merge_below < 0.5:
            raise InputError(f"parameter merge_below {self.merge_below}: expected a share from 0 to below 0.5")

    def config(self) -> dict[str, Any]:
        """Returns the options that shape the content: those of the other method are left out."""
        others = ("depth", "gamma") if self.method == "lda" else ("topics",)
        return {name: value for name, value in asdict(self).items() if name not in others}
