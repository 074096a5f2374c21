"""The options of a fit of topics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from retriever.errors import InputError

Method = Literal["hlda", "lda"]

# tomotopy computes in float32, and other values end the process. With a large gamma every passage adds a node to each
# level, so memory grows with the depth.
MAX_DEPTH = 10
MAX_SEED = 2**63 - 1
PRIORS = (1e-6, 1e6)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The options of a fit. The defaults gave 9 topics on 9,217 abstracts of arXiv, and 13 on 4,020 news of Reuters.

    Attributes:
        method: "hlda": hierarchical LDA, which finds the number of topics; "lda": LDA with a given number of topics.
        topics: The number of topics of LDA.
        depth: Levels of the tree of hierarchical LDA, with the root: 2 to 10.
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
        if self.method == "lda" and (self.depth, self.gamma) != (FitOptions.depth, FitOptions.gamma):
            raise InputError(
                f"parameter depth {self.depth}, parameter gamma {self.gamma:g}: LDA has no tree: leave both out, or "
                "set parameter method hlda"
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
        for name, most in (("depth", MAX_DEPTH), ("seed", MAX_SEED)):
            if getattr(self, name) > most:
                raise InputError(f"parameter {name} {getattr(self, name)}: expected at most {most}")
        for name in ("gamma", "eta", "alpha"):
            if not PRIORS[0] <= getattr(self, name) <= PRIORS[1]:
                raise InputError(
                    f"parameter {name} {getattr(self, name)}: expected a number from {PRIORS[0]:g} to {PRIORS[1]:g}"
                )
        if not 0 <= self.merge_below < 0.5:
            raise InputError(f"parameter merge_below {self.merge_below}: expected a share from 0 to below 0.5")

    def config(self) -> dict[str, Any]:
        """Returns the options that shape the content: those of the other method are left out."""
        others = ("depth", "gamma") if self.method == "lda" else ("topics",)
        return {name: value for name, value in asdict(self).items() if name not in others}
