"""Options of training a dual encoder: its trained weights, prompts and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.option_fields import OptionGroup, option

Method = Literal["prompt", "lora", "finetune"]
Sides = Literal["tied", "untied", "query"]
NetworkPrompt = Literal["mlp", "synthesised", "per-task", "topics"]  # prompts that a network computes
Parametrisation = Literal["embedding", NetworkPrompt]
NegativesFrom = Literal["batch", "own"]
PositiveDraw = Literal["random", "first", "weighted"]
NegativeDraw = Literal["random", "windows"]

# Default learning rate of synthesised, per-task and topic prompts, and of prompts trained with the backbone (HYPER).
PROMPT_LR = 1e-3
# Query prompts that a network computes; passages have no prompt.
COMPUTED: tuple[Parametrisation, ...] = ("synthesised", "per-task")


@dataclass(frozen=True, kw_only=True)
class WeightOptions(OptionGroup):
    """Options of the trained weights, apart from the prompt."""

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
    """Options of any kind of prompt. None: the default depends on the kind."""

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
    """Options of the contents of a batch. None: the default depends on the training sets."""

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
