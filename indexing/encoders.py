"""An encoder as artifacts name it: a model and its options, or a task of the store, opened the same on every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from indexing.artifact import Artifact
from indexing.models import model_folder, resolve_model
from indexing.store import Store
from retriever.encoder import Encoder, describe
from retriever.errors import InputError
from retriever.options import EncoderOptions, Side
from retriever.prompt_table import task_config
from retriever.prompts import TaskPrompt, load_prompt

# Of an encoder's configuration, what concerns questions alone: passages' vectors do not depend on it.
_QUESTIONS = ("query_prefix", "query_length")


@dataclass(frozen=True)
class EncoderSpec:
    """name: a Hugging Face name, a folder, or models/NAME of the store. task: prompts/TASK, whose prompts its texts
    take; None: no prompts. Travels to workers, and is resolved there."""

    store: Store
    name: str
    options: EncoderOptions
    task: str | None = None

    @property
    def folder(self) -> str:
        return resolve_model(self.store, self.name)

    def prompt(self) -> TaskPrompt | None:
        """Raises InputError for a damaged one."""
        return None if self.task is None else load_prompt(model_folder(self.store.open("prompts", self.task)))

    def describe(self, side: Side) -> dict[str, Any]:
        """What shapes a side's vectors, JSON-able; loads no model."""
        return task_config(describe(self.folder, self.options), self.prompt(), side)

    def open(self, *, device: str | None = None, threads: int | None = None) -> Encoder:
        prompt = self.prompt()
        tasks = None if prompt is None or self.task is None else {self.task: prompt}
        return Encoder(self.folder, self.options, device=device, threads=threads, tasks=tasks)

    def config_of(self, encoder: Encoder, side: Side) -> dict[str, Any]:
        """`describe`, of an encoder that is open: what this node's files made it."""
        return task_config(encoder.config, self.prompt(), side)

    def inputs(self) -> dict[str, Artifact]:
        """The artifacts of the store that it is made of."""
        found = {"prompt": self.store.open("prompts", self.task)} if self.task else {}
        kind, _, own = self.name.partition("/")
        return found | ({"model": self.store.open(kind, own)} if kind == "models" and own else {})


def spec_of(store: Store, name: str | None, task: str | None, options: EncoderOptions) -> EncoderSpec:
    """The encoder that `--encoder NAME` or `--task T` names: a task's own options count, but for dtype and compile.

    A task is prompts/T, or models/T where it was fine-tuned. Raises InputError where not just one is named, or none is
    there.
    """
    if (name is None) == (task is None):
        raise InputError("give one of --encoder NAME and --task T")
    if task is None:
        assert name is not None
        return EncoderSpec(store, name, options)
    if task in store.names("prompts") and task in store.names("models"):
        raise InputError(f"--task {task}: {store.url} has a prompt and a model of this name; give "
                         f"--encoder models/{task}, or remove one of them")  # fmt: skip
    if task in store.names("prompts"):
        artifact = store.open("prompts", task)
        own = EncoderOptions(**artifact.notes["options"])
        return EncoderSpec(store, artifact.notes["backbone"], _as_asked(own, options), task)
    if task in store.names("models"):
        own = EncoderOptions(**store.open("models", task).notes.get("options", {}))
        return EncoderSpec(store, f"models/{task}", _as_asked(own, options))
    have = ", ".join([*store.names("prompts"), *store.names("models")]) or "none"
    raise InputError(f"--task {task}: {store.url} has no such prompt and no such model (there are: {have})")


def _as_asked(own: EncoderOptions, options: EncoderOptions) -> EncoderOptions:
    return replace(own, dtype=options.dtype, compile=options.compile)


def differing(made: Mapping[str, Any], found: Mapping[str, Any], *, passages: bool = False) -> list[str]:
    """Names of the settings in which two encoders differ. passages: of those that passages' vectors depend on."""
    left_out = _QUESTIONS if passages else ()
    return [key for key in {**made, **found} if key not in left_out and made.get(key) != found.get(key)]
