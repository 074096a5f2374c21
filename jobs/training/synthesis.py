"""Options of prompts that are computed from each query, or for each task, on the command line."""

from __future__ import annotations

from jobs.common.cli import Common

import math
from dataclasses import dataclass
from typing import Any, Literal

from retriever.errors import InputError
from retriever.prompts.synthesis_options import DivergenceOptions, SynthesisOptions, find_bad_value

# The option of each field of SynthesisOptions.
_OPTIONS = {
    "prompts": "basic_prompts",
    "length": "length",
    "hidden": "prompt_hidden",
    "bottleneck": "prompt_bottleneck",
    "temperature": "prompt_temperature",
    "mix": "mix",
    "attention": "attention",
}
_REGULARISER = {"divergence_weight": None, "alignment": True, "uniformity": True}  # with their defaults


@dataclass(frozen=True, kw_only=True)
class SynthesisTraining(Common):
    """Options of jobs that can train prompts that are computed from each query."""

    length: int | None = None
    """Length of each prompt, in tokens; default: 32, or 100 with --prompt synthesised (HYPER) or per-task."""
    basic_prompts: int | None = None
    """With --prompt synthesised: number of basic prompts, which are mixed for each query. Default: 20 (HYPER)."""
    prompt_hidden: int | None = None
    """With --prompt synthesised: size of the hidden layer over the words of a query. Default: 400 (HYPER). With
    --prompt topics: size of the hidden layer over the words of a topic. Default: 512 (our choice)."""
    prompt_bottleneck: int | None = None
    """With --prompt synthesised or per-task: size of the hidden layer of the prefix encoder, which makes keys and
    values for all layers. Default: 100 (HYPER)."""
    prompt_temperature: float | None = None
    """With --prompt synthesised: the scores of the basic prompts are divided by this before their softmax; smaller
    values choose fewer of them. Default: e (HYPER)."""
    mix: Literal["before", "after"] | None = None
    """With --prompt synthesised: before: the prefix encoder reads the weighted sum of the basic prompts (HYPER's
    paper); after: it reads each basic prompt, and its outputs are summed (the authors' code), which serves faster and
    needs more memory. Default: before."""
    attention: Literal["learned", "uniform"] | None = None
    """With --prompt synthesised: learned: the weights of the basic prompts depend on the query; uniform: all have the
    same weight, so that all queries have one prompt. Default: learned."""
    divergence_weight: float | None = None
    """With --prompt synthesised: add this times the prompt regulariser to the loss: the mean Jensen-Shannon divergence
    of the weights of two queries of one task, minus that of two queries of different tasks. Default: 1 if batches mix
    several tasks (our choice; HYPER's 0.1 is the weight of sums over all pairs of a batch), otherwise 0."""
    alignment: bool = True
    """--no-alignment: leave the term of two queries of one task out of the prompt regulariser."""
    uniformity: bool = True
    """--no-uniformity: leave the term of two queries of different tasks out of the prompt regulariser."""

    def check_unused(self, prompt: str) -> None:
        """Raises InputError if an option of computed prompts is set that the given value of --prompt does not use."""
        used = {"per-task": ("length", "prompt_bottleneck"), "topics": ("length", "prompt_hidden")}.get(
            prompt, ("length",)
        )
        defaults: dict[str, Any] = {name: None for name in _OPTIONS.values() if name not in used} | _REGULARISER
        for name, default in defaults.items():
            if (value := getattr(self, name)) != default:
                option = f"--no-{name}" if value is False else f"--{name.replace('_', '-')} {value}"
                has_topics = name == "prompt_hidden"
                what = f"computed from each query{' or of topics' if has_topics else ''}"
                raise InputError(
                    f"{option} --prompt {prompt}: is for prompts that are {what}: give --prompt "
                    f"synthesised{' or topics' if has_topics else ''}, or leave it out"
                )

    def synthesis(self, saved: SynthesisOptions | None = None) -> SynthesisOptions:
        """Returns the options of the synthesiser.

        Args:
            saved: The options of the synthesiser that training continues from; None: it starts from random values.

        Raises:
            InputError: If an option has a bad value, or another one than the synthesiser that training continues from.
        """
        values = {field: getattr(self, name) for field, name in _OPTIONS.items()}
        set_values = {field: value for field, value in values.items() if value is not None}
        for field, value in set_values.items():
            if saved is not None and value != getattr(saved, field):
                raise InputError(
                    f"parameter init: its prompts have parameter {_OPTIONS[field]} {getattr(saved, field)}"
                    f", and {value} is given: leave it out"
                )
        return saved or _options(**set_values)

    def per_task(self) -> SynthesisOptions:
        """Returns the options of a prompt for each task, as if there were one task.

        Raises:
            InputError: If an option has a bad value.
        """
        sizes = {"length": self.length, "bottleneck": self.prompt_bottleneck}
        values: dict[str, Any] = {field: value for field, value in sizes.items() if value is not None}
        return _options(prompts=1, hidden=1, mix="after", attention="uniform", **values)

    def divergence(self, attention: str, tasks: int, batches: str) -> DivergenceOptions | None:
        """Returns the options of the prompt regulariser; None if its weight is 0.

        Args:
            attention: Whether weights depend on the query.
            tasks: The number of tasks.
            batches: The value of --batches.

        Raises:
            InputError: If the regulariser has nothing to act on.
        """
        has_pairs = tasks > 1 and batches == "mixed"
        default = 1.0 if has_pairs and attention == "learned" else 0.0
        weight = default if self.divergence_weight is None else self.divergence_weight
        if weight == 0:
            for name in ("alignment", "uniformity"):
                if not getattr(self, name):
                    raise InputError(
                        f"--no-{name}: the prompt regulariser has weight 0 here, so nothing changes: give "
                        "--divergence-weight, or leave it out"
                    )
            return None
        if attention == "uniform":
            raise InputError(
                f"--attention uniform --divergence-weight {weight:g}: all queries have the same weights, "
                "which the regulariser cannot change: give 0, or leave it out"
            )
        if not self.alignment and not has_pairs:
            raise InputError(
                f"--no-alignment --divergence-weight {weight:g}: no batch has queries of different tasks, "
                "so nothing is left to regularise: give --also-train with --batches mixed, or weight "
                "0"
            )
        if not (weight > 0 and math.isfinite(weight)):
            raise InputError(f"--divergence-weight {weight:g}: expected 0 or more; correct it or leave it out")
        return DivergenceOptions(weight=weight, alignment=self.alignment, uniformity=self.uniformity)


def _options(**values: Any) -> SynthesisOptions:
    """Returns the options of the synthesiser. Raises InputError for a bad value, by the name of the job's option."""
    if (bad := find_bad_value(values)) is not None:
        field, expected = bad
        raise InputError(
            f"parameter {_OPTIONS[field]} {values[field]}: expected {expected}; correct it or leave it out"
        )
    return SynthesisOptions(**values)
