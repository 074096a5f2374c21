"""Options of training a dual encoder: the trained weights, the batches and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from riptide.base.errors import InputError
from riptide.base.options import OptionGroup, option, stored_options
from riptide.base.wording import Parameter
from riptide.retriever.options.categories import CategoryOptions
from riptide.retriever.options.encoding import Side
from riptide.retriever.options.flops import FlopsOptions
from riptide.retriever.options.lora import LoraOptions
from riptide.retriever.options.losses import LossOptions
from riptide.retriever.options.synthesis import DivergenceOptions, SynthesisOptions
from riptide.retriever.options.topics import TopicOptions

Method = Literal["prompt", "lora", "finetune"]
Sides = Literal["tied", "untied", "query"]
NetworkPrompt = Literal["mlp", "synthesised", "per-task", "topics"]  # prompts that a network computes
Parametrisation = Literal["embedding", NetworkPrompt]
NegativesFrom = Literal["batch", "own"]
PositiveDraw = Literal["random", "first", "weighted"]
NegativeDraw = Literal["random", "windows"]

PROMPT_LR = 1e-3  # of HYPER's modules, if the backbone is trained too
COMPUTED: tuple[Parametrisation, ...] = ("synthesised", "per-task")  # prompts of queries alone, by networks


@dataclass(frozen=True, kw_only=True)
class WeightOptions(OptionGroup):
    """Which weights are trained, apart from the prompt."""

    GROUP: ClassVar = "what is trained"

    sides: Sides = "tied"
    """tied: queries and passages share what is trained; untied: each side has its own prompt or encoder (DPR; DPTDR on
    NQ); query: only queries do, and passages keep the vectors of the backbone, which are read from --embeddings. An
    index over these serves the task."""
    projection: int | None = option(None, minimum=1, later=True)
    """With --train all: add a linear layer that maps the pooled vector to N numbers, without bias and in float32 (GTR:
    768, also where the backbone has as many), for a backbone without such a layer. A backbone that has one trains it
    further without this option."""
    dropout: bool = option(True, later=True)
    """Train with the backbone's dropout of hidden states, as its config.json says; --no-dropout: without (GTR). The
    dropout of a prompt is --prompt-dropout."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(OptionGroup):
    """Options of any prompt. None: the default depends on the kind of prompt."""

    GROUP: ClassVar = "prompt"

    length: int | None = option(None, minimum=1)
    """Length of each prompt, in tokens. Default: 32 (DPTDR; 128 on MS MARCO), or 100 with --prompt synthesised (HYPER)
    or per-task."""
    prompt_dropout: float | None = option(None, share=True)
    """Fraction of the prompt's values that are dropped out, with a separate mask for each text. Default: 0.1, or 0 with
    --prompt synthesised or per-task."""
    position_offset: bool = option(False, later=True)
    """Let the positions of a text start after the prompt, as in the RoBERTa of DPTDR's authors. The prompt's length and
    the maximum length of a text together then need as many positions. It is stored with the prompt."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(OptionGroup):
    """Options of the content of a batch. None: the default depends on the training sets."""

    GROUP: ClassVar = "batches"

    batch: int = option(32, minimum=1)
    """Queries per step, summed over all workers. Each has one positive."""
    negatives_per_query: int | None = option(None, minimum=0)
    """Mined negatives per query and step. A query that has fewer gets random passages. Default: 1, or 0 if no training
    set has mined negatives."""
    negatives_from: NegativesFrom = option("batch", later=True)
    """batch: negatives of a query in the contrastive loss are its mined ones and all passages of the other queries of
    the batch, and more of them make the loss harder; own: its mined ones alone (HYPER, Eq. 6)."""
    draw_positive: PositiveDraw = "random"
    """Which positive a query brings: random, drawn in each epoch; weighted, drawn in each epoch with a probability in
    proportion to the score of its judgement; or the first that is judged, in all epochs, as DPTDR's authors do with
    --positive_passage_no_shuffle (without it, they take the next one in each epoch)."""
    draw_negatives: NegativeDraw = "random"
    """Which mined negatives a query brings: random, drawn again in each epoch; or windows: shuffled once, then the next
    --negatives-per-query ones in each epoch, as DPTDR's authors do, so that all are used before one comes again."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions(WeightOptions, PromptOptions, BatchOptions, LossOptions):
    """Options of the trained weights, the batches and the loss of a training run, with a value for each.

    Attributes:
        method: "prompt" trains deep prompts only, "lora" an adapter of the backbone, "finetune" all weights.
        parametrisation: "embedding" trains the prompt's values, "mlp" a network that computes them, "synthesised" a
            network that computes a prompt for each query (HYPER), "per-task" a prompt for each task, "topics" a network
            that makes the prompt of each topic from its words (Topic-DPR).
        seed: Seed of all random numbers.
        lora: Options of the adapter; None unless the method is "lora".
        flops: Options of the regulariser of sparse vectors; None for dense ones.
        synthesis: Options of prompts that are computed from each query, among them their length, or of prompts of each
            task, whose number is that of the tasks; None unless the parametrisation is "synthesised" or "per-task".
        divergence: Options of the regulariser of these prompts; None: they are not regularised.
        topics: Options of prompts of topics; None unless the parametrisation is "topics".
        categories: Options of positives with a common category, in place of the loss of judged ones; None: the judged
            ones alone.
    """

    method: Method = "prompt"
    parametrisation: Parametrisation = "embedding"
    length: int = 32
    prompt_dropout: float = 0.1
    negatives_per_query: int = 1
    seed: int = option(0, minimum=0)
    lora: LoraOptions | None = option(None, later=True)
    flops: FlopsOptions | None = option(None, later=True)
    synthesis: SynthesisOptions | None = option(None, later=True)
    divergence: DivergenceOptions | None = option(None, later=True)
    categories: CategoryOptions | None = option(None, later=True)
    topics: TopicOptions | None = option(None, later=True)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options for a configuration, JSON-able; see `stored_options`."""
        config = stored_options(self)
        if self.lora is not None and self.lora.targets is not None:
            config["lora"]["targets"] = list(self.lora.targets)
        return config

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        super().__post_init__()
        if self.distills and not self.negatives_per_query:
            raise InputError(
                f"{Parameter('loss', self.loss)}, {Parameter('negatives_per_query', '0')}: expected at least 1 "
                "negative, whose score is compared with the teacher's"
            )
        has_contrastive = not self.distills or self.contrastive_weight
        if self.negatives_from == "own" and (not self.negatives_per_query or self.is_symmetric):
            raise InputError(
                f"{Parameter('negatives_from', 'own')}, {Parameter('negatives_per_query', self.negatives_per_query)}, "
                f"{Parameter('loss', self.loss)}: expected at least 1 negative, and no symmetric loss, whose "
                "negatives are those of the batch"
            )
        if self.negatives_from == "own" and not has_contrastive:
            raise InputError(
                f"{Parameter('negatives_from', 'own')}, {Parameter('loss', self.loss)}: expected a contrastive loss, "
                f"whose negatives they are, or {Parameter('contrastive_weight')} above 0"
            )
        if self.method != "prompt" and self.position_offset:
            raise InputError(f"position_offset: method {self.method} trains no prompt after which a text could start")
        if self.projection is not None and (self.method, self.sides == "query") != ("finetune", False):
            raise InputError(
                f"projection={self.projection} method={self.method} sides={self.sides}: expected method finetune, "
                "which trains the new layer, and both sides, whose vectors it changes"
            )
        if (self.method == "lora") != (self.lora is not None):
            raise InputError(
                f"method {self.method} lora={self.lora}: expected options of the adapter for method lora alone"
            )
        self._check_synthesis()
        self._check_categories()
        self._check_topics()
        if self.flops is not None and self.flops.passages and self.sides == "query":
            raise InputError(
                f"sides=query flops_passages={self.flops.passages:g}: vectors of passages are stored, and "
                "no regulariser changes them: expected 0"
            )

    @property
    def has_topic_loss(self) -> bool:
        """Whether the loss of topics is added."""
        return bool(self.topics and self.topics.loss and self.categories and self.categories.weight)

    def num_topics_of_loss(self, num_topics: int) -> int:
        """Returns under how many topics of all the loss of topics encodes the passages of a step; 0: no loss."""
        if self.topics is None or not self.has_topic_loss or num_topics < 2:
            return 0
        return min(self.topics.sample or num_topics, num_topics)

    def _check_categories(self) -> None:
        """Raises InputError for options that positives with a common category cannot be trained with."""
        if self.categories is None:
            return
        if self.loss != "contrastive" or self.negatives_from != "batch":
            raise InputError(
                f"{Parameter('positives', 'categories')}, {Parameter('loss', self.loss)}, "
                f"{Parameter('negatives_from')} "
                f"{self.negatives_from}: expected loss contrastive over the batch, which they replace: leave both out"
            )
        if self.negatives_per_query or self.batch < 2:
            raise InputError(
                f"{Parameter('positives', 'categories')}, "
                f"{Parameter('negatives_per_query', self.negatives_per_query)}, {Parameter('batch', self.batch)}: "
                "expected 0 mined negatives, and at least 2 queries, whose passages are the negatives of each other"
            )

    def _check_topics(self) -> None:
        """Raises InputError for options that prompts of topics cannot be trained with."""
        if (self.parametrisation == "topics") != (self.topics is not None):
            raise InputError(
                f"parametrisation={self.parametrisation} topics={self.topics}: expected options of prompts of topics "
                "for parametrisation topics alone"
            )
        if self.topics is None:
            return
        if self.method == "lora" or self.sides != "tied":
            raise InputError(
                f"parametrisation=topics method={self.method} sides={self.sides}: expected method prompt or finetune, "
                "and sides tied, because queries and passages share the prompts of topics"
            )
        if self.topics.loss and self.categories is None:
            raise InputError(
                "parametrisation=topics: the loss of topics has the weight of the loss of pairs of queries, which is "
                "for positives with a common category: expected positives categories, or no loss of topics"
            )

    def _check_synthesis(self) -> None:
        """Raises InputError for options that prompts of queries cannot be trained with."""
        if (self.parametrisation in COMPUTED) != (self.synthesis is not None):
            raise InputError(
                f"parametrisation={self.parametrisation} synthesis={self.synthesis}: expected options of "
                f"computed prompts for parametrisation {' and '.join(COMPUTED)} alone"
            )
        if self.divergence is not None and self.parametrisation != "synthesised":
            raise InputError(
                f"parametrisation={self.parametrisation} divergence={self.divergence}: regularises "
                "prompts that are computed from each query: use synthesised"
            )
        if self.synthesis is None:
            return
        allowed = [("prompt", "query"), *([("finetune", "untied")] if self.parametrisation == "synthesised" else [])]
        if (self.method, self.sides) not in allowed:
            expected = " or ".join(f"method {method} and sides {sides}" for method, sides in allowed)
            raise InputError(
                f"parametrisation={self.parametrisation} method={self.method} sides={self.sides}: "
                f"expected {expected}, because only queries have computed prompts"
            )
        if self.position_offset:
            raise InputError(
                f"parametrisation={self.parametrisation} position_offset=True: a text starts at its usual "
                "position after a computed prompt: leave out position_offset"
            )
        if self.divergence is not None and self.synthesis.attention == "uniform":
            raise InputError(
                "attention=uniform with a prompt regulariser: all queries have the same weights, which it "
                "cannot change: give it weight 0"
            )


def offsets_of(tuning: TuneOptions) -> dict[Side, int]:
    """Returns by how many positions the texts of each side start later than usual."""
    offset = tuning.length if tuning.position_offset else 0
    return {"query": offset, "passage": 0 if tuning.sides == "query" else offset}
