"""All options of a training run of a dual encoder: the trained weights, the batches, the loss and its terms."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option, option_name, stored_options
from riptide.base.wording import Parameter
from riptide.retriever.objectives.pair_losses import LossOptions
from riptide.retriever.options.encoding import Side
from riptide.retriever.options.lora import LoraOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.options.topics import TopicOptions
from riptide.retriever.options.tuning import (
    COMPUTED,
    BatchOptions,
    Method,
    Parametrisation,
    PromptOptions,
    WeightOptions,
)

JOINT_POSITIONS = (
    "a text starts at its usual position after a prompt that is trained together with the weights: leave it out"
)

Options = TypeVar("Options", bound="TermOptions")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The settings of a training run on which the defaults of a term's options depend.

    Attributes:
        tuning: The other options of the training run.
        pooling: The pooling of the backbone.
        max_minutes: The time limit, with which fewer steps may be made; None: no limit.
        by_category: Whether passages with a common category are positives.
        mixes_tasks: Whether a batch has queries of several tasks.
    """

    tuning: TuneOptions
    pooling: str
    max_minutes: float | None = None
    by_category: bool = False
    mixes_tasks: bool = False


class TermOptions(OptionGroup):
    """The base of the options of a loss term, which are also options of train_retriever.

    NAME is their key in the configuration of what is trained.
    """

    NAME: ClassVar[str]

    def resolve(self, run: PlannedRun) -> TermOptions | None:
        """Returns the options with all values; None if the term is not used. Needs no training data.

        Raises:
            InputError: If an option does not fit the run, or has no effect in it.
        """
        return self

    def with_steps(self, steps: int) -> TermOptions:
        """Returns resolved options for a run of a number of steps, which depends on the training data."""
        return self

    def check(self, tuning: TuneOptions) -> None:
        """Raises InputError if the term does not fit the other options of the training run."""

    def refuse(self, reason: str, *names: str) -> None:
        """Raises InputError if one of the named fields, or any field, differs from its default.

        Args:
            reason: Why none of the values has an effect.
            names: The fields; none: all.
        """
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if value != each.default and (not names or each.name in names):
                raise InputError(f"{Parameter(option_name(type(self), each.name), value)}: {reason}")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(WeightOptions, PromptOptions, BatchOptions, LossOptions):
    """Resolved options of the trained weights, the batches and the loss of a training run.

    Attributes:
        method: "prompt" trains deep prompts only, "lora" an adapter of the backbone, "finetune" all weights.
        parametrisation: "embedding" trains the prompt's values, "mlp" a network that computes them, "synthesised" a
            network that computes a prompt for each query (HYPER), "per-task" a prompt for each task, "topics" a network
            that makes the prompt of each topic from its words (Topic-DPR).
        joint_prompt: With method "finetune", tied sides and parametrisation "embedding": train one prompt for all texts
            together with the weights.
        seed: Seed of all random numbers.
        lora: Options of the adapter; None unless the method is "lora".
        synthesis: Options of prompts that are computed from each query, among them their length, or of prompts of each
            task, whose number is that of the tasks; None unless the parametrisation is "synthesised" or "per-task".
        topics: Options of prompts of topics; None unless the parametrisation is "topics".
        terms: Options of the terms of the loss that are used, apart from that of judged pairs.
    """

    method: Method = "prompt"
    parametrisation: Parametrisation = "embedding"
    length: int = 32
    prompt_dropout: float = 0.1
    negatives_per_query: int = 1
    joint_prompt: bool = option(False, later=True)
    seed: int = option(0, minimum=0)
    lora: LoraOptions | None = option(None, later=True)
    synthesis: SynthesisOptions | None = option(None, later=True)
    topics: TopicOptions | None = option(None, later=True)
    terms: tuple[TermOptions, ...] = option((), later=True)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as JSON-serialisable values for a configuration; see `stored_options`."""
        config = stored_options(replace(self, terms=())) | {each.NAME: stored_options(each) for each in self.terms}
        if self.lora is not None and self.lora.targets is not None:
            config["lora"]["targets"] = list(self.lora.targets)
        return config

    def __post_init__(self) -> None:
        """Raises InputError for a value that training cannot use."""
        super().__post_init__()
        self._check_synthesis()
        self._check_topics()
        if self.joint_prompt and (self.method, self.sides, self.parametrisation) != ("finetune", "tied", "embedding"):
            raise InputError(
                f"{Parameter('joint_prompt')}: found method {self.method}, sides {self.sides} and parametrisation "
                f"{self.parametrisation}, expected method finetune, sides tied and parametrisation embedding"
            )
        for each in self.terms:  # before losses, as a term may exclude a loss, which otherwise needs further options
            each.check(self)
        if self.distills and not self.negatives_per_query:
            raise InputError(
                f"{Parameter('loss', self.loss)}, {Parameter('negatives_per_query', '0')}: expected at least 1 "
                f"negative, whose "
                "score is compared with the teacher's"
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
            trains_none = f"method {self.method} trains no prompt after which a text could start"
            reason = JOINT_POSITIONS if self.trains_prompt_with_weights else trains_none
            raise InputError(f"{Parameter('position_offset')}: {reason}")
        if self.projection is not None and (self.method, self.sides == "query") != ("finetune", False):
            raise InputError(
                f"{Parameter('projection', self.projection)}: found method {self.method} and sides {self.sides}, "
                "expected method finetune, which trains the new layer, and both sides, whose vectors it changes"
            )
        if (self.method == "lora") != (self.lora is not None):
            raise InputError(
                f"method {self.method}: found {_count(self.lora)} of an adapter, expected options of an adapter for "
                "method lora alone"
            )

    @property
    def trains_prompt_with_weights(self) -> bool:
        """Whether prompts are trained together with all weights of the backbone."""
        has_network = self.synthesis is not None or self.topics is not None
        return self.method == "finetune" and (has_network or self.joint_prompt)

    def term_options(self, kind: type[Options]) -> Options | None:
        """Returns the options of a term by their class; None if the term is not used."""
        return next((each for each in self.terms if isinstance(each, kind)), None)

    def _check_topics(self) -> None:
        """Raises InputError for options that do not fit prompts of topics."""
        if (self.parametrisation == "topics") != (self.topics is not None):
            raise InputError(
                f"parametrisation {self.parametrisation}: found {_count(self.topics)} of prompts of topics, expected "
                "them for parametrisation topics alone"
            )
        if self.topics is None:
            return
        if self.method == "lora" or self.sides != "tied":
            raise InputError(
                f"parametrisation topics: found method {self.method} and sides {self.sides}, expected method prompt or "
                "finetune, and sides tied, because queries and passages share the prompts of topics"
            )

    def _check_synthesis(self) -> None:
        """Raises InputError for options that do not fit prompts computed for queries."""
        if (self.parametrisation in COMPUTED) != (self.synthesis is not None):
            raise InputError(
                f"parametrisation {self.parametrisation}: found {_count(self.synthesis)} of computed prompts, expected "
                f"them for parametrisation {' and '.join(COMPUTED)} alone"
            )
        if self.synthesis is None:
            return
        allowed = [("prompt", "query"), *([("finetune", "untied")] if self.parametrisation == "synthesised" else [])]
        if (self.method, self.sides) not in allowed:
            expected = " or ".join(f"method {method} and sides {sides}" for method, sides in allowed)
            raise InputError(
                f"parametrisation {self.parametrisation}: found method {self.method} and sides {self.sides}, expected "
                f"{expected}, because only queries have computed prompts"
            )
        if self.position_offset:
            raise InputError(
                f"{Parameter('position_offset')}: a text starts at its usual position after a prompt that is computed "
                f"(parametrisation {self.parametrisation}): leave it out"
            )


def _count(options: object | None) -> str:
    return "no options" if options is None else "options"


def offsets_of(tuning: TuneOptions) -> dict[Side, int]:
    """Returns the position offset of each side: positions by which its texts start later than usual."""
    offset = tuning.length if tuning.position_offset else 0
    return {"query": offset, "passage": 0 if tuning.sides == "query" else offset}
