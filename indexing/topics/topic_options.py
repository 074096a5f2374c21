"""The options of fitting topics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter

Method = Literal["hlda", "lda"]

# Bounds memory: with a large gamma every passage adds a node to each level.
MAX_DEPTH = 10
MAX_SEED = 2**63 - 1
# tomotopy computes in float32 and aborts the process for priors outside of this range.
PRIORS = (1e-6, 1e6)


@dataclass(frozen=True, kw_only=True)
class FitOptions(OptionGroup):
    """The options of a fit. The defaults gave 9 topics on 9,217 abstracts of arXiv, and 13 on 4,020 news of Reuters."""

    GROUP: ClassVar = "topics"

    method: Method = "hlda"
    """hlda: hierarchical LDA, whose number of topics is an outcome; lda: LDA with --topics topics, a control."""
    topics: int | None = None
    """Number of topics of --method lda."""
    depth: int = option(2, minimum=2)
    """Levels of the tree with its root, 2 to 10 (hlda). The nodes below the root are the topics; deeper levels refine
    them."""
    gamma: float = 1.0
    """Concentration of the nested Chinese restaurant process (hlda): the larger, the more topics."""
    eta: float = 0.5
    """Dirichlet prior of the words of a topic. Smaller values give topics with fewer words each."""
    alpha: float = 0.1
    """Initial Dirichlet prior of the levels of a passage (lda: of its topics); tomotopy fits it."""
    min_passages: int = option(10, minimum=1)
    """A word counts if at least N passages have it; smaller values for a small corpus."""
    most_frequent: int = option(30, minimum=0)
    """Number of the most frequent words, after stop words, that do not count."""
    iterations: int = option(100, minimum=1)
    """Sweeps of Gibbs sampling over all words. More of them give topics that depend less on the seed."""
    seed: int = option(0, minimum=0)
    """Seed of the sampling, and of the drawn passages. The same seed gives the same bytes on the same kind of CPU."""
    words: int = option(32, minimum=1)
    """Number of words by which a topic is named; its prompt is computed from them."""
    merge_below: float = 0.01
    """A topic with a smaller share of the passages is merged into another one; 0: topics are not merged."""
    sample: int = option(50_000, minimum=1)
    """Number of passages to fit on, at most; a larger corpus gives a random sample, and the topics of its other
    passages are inferred. Time grows in proportion to it, as one thread does the work."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that a fit cannot use."""
        super().__post_init__()
        if self.method == "lda" and (self.topics is None or self.topics < 2):
            raise InputError(f"{Parameter('topics', self.topics)}: expected the number of topics of LDA, at least 2")
        if self.method == "hlda" and self.topics is not None:
            raise InputError(
                f"{Parameter('topics', self.topics)}: the number of topics of hierarchical LDA is its outcome: leave "
                f"it out, or set {Parameter('method', 'lda')}"
            )
        if self.method == "lda" and (self.depth, self.gamma) != (FitOptions.depth, FitOptions.gamma):
            raise InputError(
                f"{Parameter('depth', self.depth)}, {Parameter('gamma', f'{self.gamma:g}')}: LDA has no tree: leave "
                f"both out, or set {Parameter('method', 'hlda')}"
            )
        for name, most in (("depth", MAX_DEPTH), ("seed", MAX_SEED)):
            if getattr(self, name) > most:
                raise InputError(f"{Parameter(name, getattr(self, name))}: expected at most {most}")
        for name in ("gamma", "eta", "alpha"):
            if not PRIORS[0] <= getattr(self, name) <= PRIORS[1]:
                raise InputError(
                    f"{Parameter(name, getattr(self, name))}: expected a number from {PRIORS[0]:g} to {PRIORS[1]:g}"
                )
        if not 0 <= self.merge_below < 0.5:
            raise InputError(f"{Parameter('merge_below', self.merge_below)}: expected a share from 0 to below 0.5")

    def config(self) -> dict[str, Any]:
        """Returns the options that determine the content, without the options of the other method."""
        others = ("depth", "gamma") if self.method == "lda" else ("topics",)
        return {name: value for name, value in asdict(self).items() if name not in others}
