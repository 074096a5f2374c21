"""Options of pretraining: RIP, Condenser, coCondenser, masked language modelling and plain pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter

Objective = Literal["rip", "cocondenser", "condenser", "mlm", "pairs"]
Unit = Literal["sentence", "span"]
MaskUnit = Literal["token", "word"]
Trains = Literal["backbone", "prompts"]

LENGTH = 32  # default number of prompt tokens (DPTDR)
_PROBABILITY = 0.15


@dataclass(frozen=True, kw_only=True)
class PretrainingOptions(OptionGroup):
    """Options of pretraining; defaults are DPTDR's where the paper gives them. None: the default of the objective."""

    GROUP: ClassVar = "objective"

    objective: Objective = "rip"
    """rip: two sentences of a passage retrieve each other, and masked language modelling (DPTDR); condenser: masked
    language modelling with a head that reads the last layer's first token and an early layer's other tokens;
    cocondenser: the same over two spans of a passage that retrieve each other, from a backbone that condenser trained;
    mlm: masked language modelling alone; pairs: two spans of a passage retrieve each other by their cosine, and no word
    is masked (a first stage of GTR without queries; use --pooling mean)."""
    train: Trains = "backbone"
    """backbone: train all weights; prompts: train a deep prompt over the frozen backbone and make prompts/NAME."""
    prompt_length: int | None = option(None, minimum=1)
    """Length of the prompt, in tokens (with --train prompts). Default: 32. `riptide tune-prompts --init` needs
    the same."""
    batch: int = option(2048, minimum=1)
    """Passages per step, summed over all workers (2,048 in DPTDR); at most the number of eligible passages, because
    they are negatives of each other."""
    max_length: int = option(128, group="texts", minimum=1)
    """Maximum number of tokens of a sentence (of a passage with --objective condenser and mlm), special tokens
    included. Longer ones are cut; the job says how many of those in its batches."""
    pooling: Literal["cls", "mean"] = option("cls", group="texts")
    """Pooling of token vectors into the vector of a sentence."""
    min_words: int = option(8, group="texts", minimum=1)
    """Minimum number of words of a sentence or span. Shorter ones are not drawn; a passage without two is not
    eligible."""
    language: str = option("en", group="texts")
    """Language of the passages, for the detection of sentence ends."""
    unit: Unit | None = option(None, group="details of the objective")
    """What a pair of a passage consists of: two sentences, or two spans of words. Default: span with --objective
    cocondenser and pairs, otherwise sentence."""
    mask: MaskUnit | None = option(None, group="details of the objective")
    """What is masked: single tokens, or all tokens of a word. Default: word with --objective condenser and cocondenser,
    otherwise token."""
    mlm_probability: float = option(_PROBABILITY, group="details of the objective", positive=True, share=True)
    """Fraction of the tokens that are masked."""
    temperature: float | None = option(None, group="details of the objective")
    """With --objective pairs: cosines are divided by this. Default: 0.01 (GTR)."""
    head_layers: int | None = option(None, group="details of the objective")
    """Layers of Condenser's head. Default: as the backbone's saved head, or 2."""
    skip_from: int | None = option(None, group="details of the objective")
    """Layer whose output gives Condenser's head the tokens other than the first. Default: as the backbone's saved head,
    or half of the backbone's layers."""
    late_loss: bool = option(True, group="details of the objective")
    """With Condenser's head, also predict the masked tokens from the last layer."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        super().__post_init__()
        if self.trains_condenser_head and (self.pooling, self.train) != ("cls", "backbone"):
            raise InputError(
                f"{Parameter('objective', self.objective)} trains a backbone's first token: expected "
                f"{Parameter('pooling', 'cls')} and {Parameter('train', 'backbone')}, got {self.pooling} and "
                f"{self.train}"
            )
        if not self.trains_condenser_head and (self.head_layers, self.skip_from, self.late_loss) != (None, None, True):
            raise InputError(
                f"{Parameter('objective', self.objective)} has no head: {Parameter('head_layers')}, "
                f"{Parameter('skip_from')} and {Parameter('late_loss')} are for condenser and cocondenser"
            )
        if not self.has_masks and (self.mask not in (None, "token") or self.mlm_probability != _PROBABILITY):
            raise InputError(
                f"{Parameter('objective', self.objective)}: no token is masked; leave out {Parameter('mask')} and "
                f"{Parameter('mlm_probability')}, which are for the other objectives"
            )
        if self.temperature is not None and not (
            self.objective == "pairs" and self.temperature > 0 and math.isfinite(self.temperature)
        ):
            raise InputError(
                f"{Parameter('temperature', self.temperature)} {Parameter('objective', self.objective)}: expected more "
                "than 0, and objective pairs, whose similarities are cosines"
            )
        if self.has_pairs and self.batch < 2:
            raise InputError(f"{Parameter('batch', '1')}: the pairs of one passage have no negatives, give 2 or more")
        if self.train != "prompts" and self.prompt_length not in (None, LENGTH):
            raise InputError(
                f"{Parameter('prompt_length', self.prompt_length)}: expected {Parameter('train', 'prompts')} too"
            )

    @property
    def default_unit(self) -> Unit:
        """The unit of pairs of the objective's authors: sentences in RIP, otherwise spans (coCondenser, and Contriever,
        whose training data "pairs" simplifies)."""
        return "span" if self.objective in ("cocondenser", "pairs") else "sentence"

    @property
    def default_mask(self) -> MaskUnit:
        """The masking unit of the objective's authors: whole words in Condenser and coCondenser, otherwise tokens."""
        return "word" if self.trains_condenser_head else "token"

    @property
    def has_pairs(self) -> bool:
        """Whether two units of a passage are drawn for the loss of Eq. 4, instead of the whole passage."""
        return self.objective in ("rip", "cocondenser", "pairs")

    @property
    def whole_texts(self) -> str | None:
        """Plural noun for texts that should not be cut; None for random spans, whose ends have no meaning."""
        if not self.has_pairs:
            return "passages"
        return "sentences" if self.unit == "sentence" else None

    @property
    def has_masks(self) -> bool:
        """Whether the objective masks tokens and predicts them."""
        return self.objective != "pairs"

    @property
    def trains_condenser_head(self) -> bool:
        """Whether the objective trains a Condenser head."""
        return self.objective in ("cocondenser", "condenser")


@dataclass(frozen=True, kw_only=True)
class RipOptions(PretrainingOptions):
    """Resolved options of a pretraining run.

    Attributes:
        steps: Number of steps.
        lr: Learning rate.
        seed: Seed of all random numbers.
    """

    steps: int = option(minimum=1)
    lr: float = option(1e-4, positive=True)
    seed: int = option(0, minimum=0)
    unit: Unit = "sentence"
    mask: MaskUnit = "token"
    prompt_length: int = LENGTH
