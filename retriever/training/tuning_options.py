"""Options of training a dual encoder: the trained weights, the batches and the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from retriever.errors import InputError
from retriever.losses import DISTILLATION, MAX_SCALE, Loss, NegativesFrom
from retriever.losses.flops import FlopsOptions
from retriever.options import Side
from retriever.prompts.prompts import Parametrisation, Sides
from retriever.prompts.synthesis_options import DivergenceOptions, SynthesisOptions
from retriever.topics.options import TopicOptions
from retriever.training.category_options import CategoryOptions
from retriever.training.lora_options import LoraOptions
from retriever.training.reranker_data import NegativeDraw, PositiveDraw

Method = Literal["prompt", "lora", "finetune"]

_COMPUTED: tuple[Parametrisation, ...] = ("synthesised", "per-task")  # prompts of queries alone, by networks


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of the trained weights and the batches.

    Attributes:
        method: "prompt" trains deep prompts only, "lora" an adapter of the backbone, "finetune" all weights.
        sides: "tied" trains one prompt, or one encoder, for queries and passages, "untied" one for each (DPR; DPTDR on
            NQ; HYPER, Eq. 8), "query" one for queries only.
        length: Tokens of a prompt (DPTDR: 32; 128 on MS MARCO).
        parametrisation: "embedding" trains the prompt's values, "mlp" a network that computes them, "synthesised" a
            network that computes a prompt for each query (HYPER), "per-task" a prompt for each task, "topics" a network
            that makes the prompt of each topic from its words (Topic-DPR).
        prompt_dropout: Fraction of the prompt's values that are dropped out, with a separate mask for each text.
        position_offset: The positions of a text start after the prompt; False: at their usual place.
        projection: Numbers of a vector after a new linear layer over the pooled vector, without bias and in float32
            (GTR: 768); None: there is no new layer. Method "finetune" only.
        dropout: Train with the backbone's dropout of hidden states; False: without (GTR).
        batch: Queries per step over all workers, each with one positive and `negatives_per_query` mined negatives.
        negatives_from: "batch": the other passages of the batch are negatives of the contrastive loss too; "own": only
            the query's mined ones are (HYPER, Eq. 6).
        negatives_per_query: Mined negatives per query.
        draw_positive: Which positive a query brings: "random" in each epoch, "weighted" by the weights of the
            positives, or always the "first".
        draw_negatives: Which mined negatives a query brings: "random" in each epoch, or "windows" of one shuffled
            order.
        loss: The loss of a batch; "kl" and "margin-mse" need the teacher scores of a re-ranker.
        contrastive_weight: A distillation loss is increased by this times the contrastive loss.
        temperature: Similarities are divided by it (None: 1, or 0.05 for cosines).
        learn_temperature: Train the temperature, from that value, with 1 / temperature at most 100.
        temperature_lr: Peak learning rate of a learned temperature (None: 1e-3).
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
    sides: Sides = "tied"
    length: int = 32
    parametrisation: Parametrisation = "embedding"
    prompt_dropout: float = 0.1
    position_offset: bool = False
    projection: int | None = None
    dropout: bool = True
    batch: int = 32
    negatives_from: NegativesFrom = "batch"
    negatives_per_query: int = 1
    draw_positive: PositiveDraw = "random"
    draw_negatives: NegativeDraw = "random"
    loss: Loss = "contrastive"
    contrastive_weight: float = 0.0
    temperature: float | None = None
    learn_temperature: bool = False
    temperature_lr: float | None = None
    seed: int = 0
    lora: LoraOptions | None = None
    flops: FlopsOptions | None = None
    synthesis: SynthesisOptions | None = None
    divergence: DivergenceOptions | None = None
    categories: CategoryOptions | None = None
    topics: TopicOptions | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        for name, allowed in (
            ("method", get_args(Method)),
            ("sides", get_args(Sides)),
            ("parametrisation", get_args(Parametrisation)),
            ("negatives_from", get_args(NegativesFrom)),
            ("draw_positive", get_args(PositiveDraw)),
            ("draw_negatives", get_args(NegativeDraw)),
            ("loss", get_args(Loss)),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.length < 1 or self.batch < 1 or self.negatives_per_query < 0 or self.seed < 0:
            raise InputError(
                f"length={self.length} batch={self.batch} negatives_per_query={self.negatives_per_query} "
                f"seed={self.seed}: expected counts"
            )
        if not 0 <= self.prompt_dropout < 1 or (self.temperature is not None and not self.temperature > 0):
            raise InputError(
                f"prompt_dropout={self.prompt_dropout} temperature={self.temperature}: expected a share, "
                "and more than 0"
            )
        if not (self.contrastive_weight >= 0 and math.isfinite(self.contrastive_weight)):
            raise InputError(f"contrastive_weight={self.contrastive_weight}: expected 0 or more")
        if self.contrastive_weight and not self.distills:
            raise InputError(
                f"contrastive_weight={self.contrastive_weight} loss={self.loss}: expected a distillation "
                f"loss, to which it is added: {' or '.join(DISTILLATION)}"
            )
        if self.distills and not self.negatives_per_query:
            raise InputError(
                f"loss={self.loss} negatives_per_query=0: expected at least 1 negative, whose score is "
                "compared with the teacher's"
            )
        has_contrastive = not self.distills or self.contrastive_weight
        if self.negatives_from == "own" and (not self.negatives_per_query or "symmetric" in self.loss):
            raise InputError(
                f"parameter negatives_from own, parameter negatives_per_query {self.negatives_per_query}, "
                f"parameter loss {self.loss}: expected at least 1 negative, and no symmetric loss, whose "
                "negatives are those of the batch"
            )
        if self.negatives_from == "own" and not has_contrastive:
            raise InputError(
                f"parameter negatives_from own, parameter loss {self.loss}: expected a contrastive loss, "
                "whose negatives they are, or parameter contrastive_weight above 0"
            )
        if self.learn_temperature and self.temperature is not None and self.temperature * MAX_SCALE < 1:
            raise InputError(
                f"learn_temperature temperature={self.temperature}: expected at least {1 / MAX_SCALE}, "
                "below which a learned temperature does not fall"
            )
        if self.temperature_lr is not None and not self.learn_temperature:
            raise InputError(
                f"temperature_lr={self.temperature_lr} learn_temperature=False: expected a learned "
                "temperature, whose learning rate it is"
            )
        if self.temperature_lr is not None and not (self.temperature_lr > 0 and math.isfinite(self.temperature_lr)):
            raise InputError(f"temperature_lr={self.temperature_lr}: expected more than 0")
        if self.method != "prompt" and self.position_offset:
            raise InputError(f"position_offset: method {self.method} trains no prompt after which a text could start")
        if self.projection is not None and (self.method, self.sides == "query") != ("finetune", False):
            raise InputError(
                f"projection={self.projection} method={self.method} sides={self.sides}: expected method finetune, "
                "which trains the new layer, and both sides, whose vectors it changes"
            )
        if self.projection is not None and self.projection < 1:
            raise InputError(f"projection={self.projection}: expected at least 1")
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

    def topics_of_loss(self, number: int) -> int:
        """Returns under how many of `number` topics the loss of topics encodes the passages of a step; 0: no loss."""
        if self.topics is None or not self.has_topic_loss or number < 2:
            return 0
        return min(self.topics.sample or number, number)

    def _check_categories(self) -> None:
        """Raises InputError for options that positives with a common category cannot be trained with."""
        if self.categories is None:
            return
        if self.loss != "contrastive" or self.negatives_from != "batch":
            raise InputError(
                f"parameter positives categories, parameter loss {self.loss}, parameter negatives_from "
                f"{self.negatives_from}: expected loss contrastive over the batch, which they replace: leave both out"
            )
        if self.negatives_per_query or self.batch < 2:
            raise InputError(
                f"parameter positives categories, parameter negatives_per_query {self.negatives_per_query}, parameter "
                f"batch {self.batch}: expected 0 mined negatives, and at least 2 queries, whose passages are the "
                "negatives of each other"
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
        if (self.parametrisation in _COMPUTED) != (self.synthesis is not None):
            raise InputError(
                f"parametrisation={self.parametrisation} synthesis={self.synthesis}: expected options of "
                f"computed prompts for parametrisation {' and '.join(_COMPUTED)} alone"
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

    @property
    def distills(self) -> bool:
        """Whether the loss needs the teacher scores of a re-ranker."""
        return self.loss in DISTILLATION


def offsets_of(tuning: TuneOptions) -> dict[Side, int]:
    """Returns by how many positions the texts of each side start later than usual."""
    offset = tuning.length if tuning.position_offset else 0
    return {"query": offset, "passage": 0 if tuning.sides == "query" else offset}
