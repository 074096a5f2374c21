"""Specifications of encoders: a model with options, or a task of the store, which every node opens the same way.

Importing this module loads no torch: the functions that open or describe a model import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from riptide.base.arguments import expand_home
from riptide.base.errors import InputError
from riptide.base.wording import Parameter, shorten
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import model_folder, resolve_model, stored_model
from riptide.indexing.store.store import Store
from riptide.retriever.options import LATER_OPTIONS, SIDES, EncoderOptions, Side

if TYPE_CHECKING:
    from riptide.retriever.encoding.encoder import Encoder
    from riptide.retriever.prompts.task_prompt import TaskPrompt

# Settings of an encoder that apply to queries only: the vectors of passages do not depend on them.
_QUERY_SETTINGS = ("query_prefix", "query_length", "query_terms")
# Settings of an encoder whose values are sha256 hashes, which messages do not show.
_HASHED_SETTINGS = ("backbone", "weights", "tokenizer", "tokenizer_args", "head", "prompt", "query_encoder")


@dataclass(frozen=True)
class EncoderSpec:
    """The specification of an encoder by names, which each worker resolves to files of its node.

    Attributes:
        store: The store that the names refer to.
        name: A Hugging Face name, a folder, or models/NAME of the store. It may hold an encoder of each side, in
            `query/` and `passage/`.
        options: The options of the encoder.
        task: Use the prompts of prompts/TASK; None: no prompts.
        query_model: models/NAME that holds the encoder of queries, in `query/`; None: `name` encodes queries too.
        numerics: The numerics class of the vectors that it belongs to, which the dtype "auto" follows; None: there are
            none yet.
    """

    store: Store
    name: str
    options: EncoderOptions
    task: str | None = None
    query_model: str | None = None
    numerics: str | None = None

    @property
    def named_by(self) -> tuple[str, str]:
        """The parameter and value that name this encoder: ("task", T) or ("encoder", NAME)."""
        task = self.task or (self.query_model or "").removeprefix("models/")
        return ("task", task) if task else ("encoder", self.name)

    @property
    def folder(self) -> str:
        """The folder of `name`, which holds one model or an encoder of each side."""
        return resolve_model(self.store, self.name)

    def folder_of(self, side: Side) -> str:
        """Returns the folder of the encoder of queries or of passages.

        Raises:
            InputError: If the model has an encoder of the other side only.
        """
        from riptide.retriever.model.model_folder import untied_sides

        name = self.query_model if side == "query" and self.query_model else self.name
        folder = resolve_model(self.store, name)
        sides = untied_sides(expand_home(folder))
        if not sides:
            return folder
        if side not in sides:
            raise InputError(
                f"{name}: has an encoder of {sides[0]} texts only: encode passages with the backbone that "
                f"it was trained over, and search their embeddings with it as {Parameter('task')}"
            )
        return str(expand_home(folder) / side)

    def folder_for_prompt(self, prompt: TaskPrompt) -> str:
        """Returns the folder of the encoder that uses a prompt; if the sides are untied, the encoder of queries.

        Raises:
            InputError: If each side has its own, and the prompt is not one of queries alone.
        """
        if self.is_untied and prompt.matrices("passage"):
            raise InputError(
                "each side has its own encoder, and the prompt is for passages too: expected a prompt of queries"
            )
        return self.folder_of("query")

    def options_of(self, side: Side) -> EncoderOptions:
        """Returns the options of the encoder of a side; the model of queries may have others than `options`."""
        if side == "passage" or self.query_model is None:
            return self.options
        notes = self.inputs()["query_model"].notes
        saved_options = EncoderOptions(**notes["query_options"]) if "query_options" in notes else self.options
        return _with_free_settings(saved_options, self.options)

    @property
    def is_untied(self) -> bool:
        """Whether queries and passages have separate encoders."""
        from riptide.retriever.model.model_folder import untied_sides

        return self.query_model is not None or bool(untied_sides(expand_home(self.folder)))

    def prompt(self) -> TaskPrompt | None:
        """Returns the task's prompt; None without a task. Raises InputError if the prompt is damaged."""
        from riptide.retriever.prompts.task_prompt import load_prompt

        if self.task is None:
            return None
        artifact = self.store.open("prompts", self.task)
        folder = model_folder(artifact)
        try:
            return load_prompt(folder)
        except InputError as error:  # replaces the folder of this node's cache in the message by the artifact
            raise InputError(f"{error}".replace(str(folder), artifact.url)) from error

    def length_limit(self, side: Side) -> int | None:
        """Returns the maximum tokens of a side's texts, by the positions left by a prompt; None: relative positions."""
        from riptide.retriever.model.model_folder import find_model_folder
        from riptide.retriever.model.recipe import read_recipe

        positions, prompt = (
            read_recipe(find_model_folder(self.folder_of(side)), self.options_of(side)).max_positions,
            self.prompt(),
        )
        return positions if positions is None or prompt is None else positions - prompt.offset(side)

    def settings(self, side: Side) -> dict[str, Any]:
        """Returns the settings that determine the vectors of a side, as JSON values; loads no model.

        Those of passages name the encoder of queries that belongs to them, if it is another one.
        """
        from riptide.retriever.model.recipe import describe
        from riptide.retriever.prompts.prompt_table import task_config

        settings = describe(self.folder_of(side), self.options_of(side))
        if side == "passage" and self.query_model:
            self._check_backbone(settings)
        return task_config(settings, self.prompt(), side) | self._other_side_fingerprint(side)

    def open(self, *, side: Side, device: str | None, threads: int | None = None) -> Encoder:
        """Loads the encoder of a side, with the prompt of the task.

        device: the one that the caller's runner assigned; None: CUDA if it is available.

        A model that has one encoder gives the same for both sides.
        """
        from riptide.retriever.encoding.encoder import Encoder

        prompt = self.prompt()
        tasks = None if prompt is None or self.task is None else {self.task: prompt}
        folder, device, pinned = self.folder_of(side), self.choose_device(device), self.numerics
        return Encoder(folder, self.options_of(side), device=device, threads=threads, tasks=tasks, pinned=pinned)

    def choose_device(self, device: str | None) -> str | None:
        """Returns the device of the encoder on a machine with the given one: the CPU for int8."""
        return "cpu" if self.options.dtype == "int8" else device

    def config_of(self, encoder: Encoder, side: Side) -> dict[str, Any]:
        """Computes `settings` from an open encoder, so from the files of this node."""
        from riptide.retriever.prompts.prompt_table import task_config

        return task_config(encoder.config, self.prompt(), side) | self._other_side_fingerprint(side)

    def inputs(self) -> dict[str, Artifact]:
        """Returns the artifacts of the store that the encoder consists of."""
        artifacts = {"prompt": self.store.open("prompts", self.task)} if self.task else {}
        for role, name in (("model", self.name), ("query_model", self.query_model)):
            if name and (artifact := stored_model(self.store, name)):
                artifacts[role] = artifact
        return artifacts

    def _check_backbone(self, settings: Mapping[str, Any]) -> None:
        """Raises InputError if the encoder of queries was trained over another backbone than that of the passages."""
        trained = self.inputs()["query_model"].config["backbone"]
        if differ := describe_differences({**trained, "dtype": settings["dtype"]}, settings, passages=True):
            raise InputError(
                f"{self.query_model}: was trained over another backbone than {self.name} is now "
                f"({differ}): train it again over this one"
            )

    def _other_side_fingerprint(self, side: Side) -> dict[str, str]:
        """Returns the fingerprint of the encoder of queries as a setting of an untied passage encoder; else {}."""
        if side == "query" or not self.is_untied:
            return {}
        from riptide.retriever.model.recipe import describe, fingerprint_of

        return {"query_encoder": fingerprint_of(describe(self.folder_of("query"), self.options_of("query")))}


def find_encoder_spec(store: Store, name: str | None, task: str | None, options: EncoderOptions) -> EncoderSpec:
    """Returns the specification of the encoder that `--encoder NAME` or `--task T` names.

    A task is prompts/T, or models/T if it was fine-tuned. It has its own options, of which only dtype, compile and the
    number of words of sparse vectors are replaced by those of `options`. If only its encoder of queries was trained,
    passages are encoded by its backbone.

    Raises:
        InputError: If not exactly one of them is named, or if it does not exist.
    """
    if (name is None) == (task is None):
        raise InputError(f"{Parameter('encoder', 'NAME')} and {Parameter('task', 'T')}: expected one of them")
    if task is None:
        assert name is not None
        return EncoderSpec(store, name, options)
    if task in store.names("prompts") and task in store.names("models"):
        raise InputError(
            f"{Parameter('task', task)}: {store.url} has a prompt and a model of this name; give "
            f"{Parameter('encoder')} models/{task}, or remove one of them"
        )
    if task in store.names("prompts"):
        artifact = store.open("prompts", task)
        task_options = EncoderOptions(**artifact.notes["options"])
        return EncoderSpec(store, artifact.notes["backbone"], _with_free_settings(task_options, options), task)
    if task in store.names("models"):
        artifact = store.open("models", task)
        task_options = _with_free_settings(EncoderOptions(**artifact.notes.get("options", {})), options)
        if _untied_sides_of(artifact) == ("query",):
            return EncoderSpec(store, artifact.notes["backbone"], task_options, query_model=f"models/{task}")
        return EncoderSpec(store, f"models/{task}", task_options)
    have = ", ".join([*store.names("prompts"), *store.names("models")]) or "none"
    raise InputError(f"{Parameter('task', task)}: {store.url} has no such prompt and no such model (there are: {have})")


def _untied_sides_of(artifact: Artifact) -> tuple[Side, ...]:
    """Returns the sides that have a separate encoder in models/NAME, by its files; () if one model serves both."""
    files = {str(part.facts["path"]) for part in artifact.numbered_parts("file")}
    return tuple(side for side in SIDES if {f"{side}/config.json", f"{side}/modules.json"} & files)


def _with_free_settings(task_options: EncoderOptions, options: EncoderOptions) -> EncoderOptions:
    """Returns a task's options with those of `options` that training does not fix: dtype, compile, and word pruning.

    Words are pruned as the task's options say unless `options` sets another number of them.
    """
    word_limits = {name: getattr(options, name) or getattr(task_options, name) for name in LATER_OPTIONS}
    return replace(task_options, dtype=options.dtype, compile=options.compile, **word_limits)


def differing_settings(expected: Mapping[str, Any], actual: Mapping[str, Any], *, passages: bool = False) -> list[str]:
    """Returns the names of the settings in which two encoders differ.

    Args:
        expected: The result of `EncoderSpec.settings` for the first encoder.
        actual: The result of `EncoderSpec.settings` for the second encoder.
        passages: Compare only the settings that the vectors of passages depend on, and the encoders of queries that
            belong to them if both have one.
    """
    ignored: tuple[str, ...] = _QUERY_SETTINGS if passages else ()
    if passages and not ("query_encoder" in expected and "query_encoder" in actual):
        ignored = (*ignored, "query_encoder")
    return [key for key in {**expected, **actual} if key not in ignored and expected.get(key) != actual.get(key)]


def describe_differences(expected: Mapping[str, Any], actual: Mapping[str, Any], *, passages: bool = False) -> str:
    """Describes `differing_settings` for a message, such as `passage_length 128 instead of 256, another prompt`."""

    def describe_difference(key: str) -> str:
        if key in _HASHED_SETTINGS:
            is_plural = key in ("weights", "tokenizer_args")
            return f"{'other' if is_plural else 'another'} {key}"
        return f"{key} {_format_value(actual.get(key))} instead of {_format_value(expected.get(key))}"

    return ", ".join(map(describe_difference, differing_settings(expected, actual, passages=passages)))


def find_closest(
    encoders: Mapping[str, Mapping[str, Any]], actual: Mapping[str, Any], *, passages: bool = False
) -> str:
    """Returns the name of the encoder with the fewest `differing_settings`; the first one if there is a tie.

    Args:
        encoders: The settings of encoders by name, at least one.
        actual: As of `differing_settings`, like `passages`.
        passages: As of `differing_settings`.
    """
    return min(encoders, key=lambda name: len(differing_settings(encoders[name], actual, passages=passages)))


def check_prompt_settings(prompt: TaskPrompt, spec: EncoderSpec) -> None:
    """Raises InputError if an encoder cannot serve a prompt along with other prompts; loads no model.

    Args:
        prompt: A task's prompt.
        spec: The encoder, with the options that all its texts share; its task is ignored.

    Raises:
        InputError: If the prompt was trained for another backbone, or with other settings that shape vectors, or if
            the backbone has too few positions for texts that start after it.
    """
    from riptide.retriever.model.model_folder import find_model_folder
    from riptide.retriever.model.recipe import describe, read_recipe, settings_of
    from riptide.retriever.prompts.task_prompt import check_prompt_backbone

    folder = spec.folder_for_prompt(prompt)
    options = spec.options_of("query")
    recipe = read_recipe(find_model_folder(folder), options)
    encoder_settings = settings_of(recipe, options)
    check_prompt_backbone(prompt, recipe, encoder_settings)
    prompt_settings = describe(folder, _with_free_settings(prompt.options, options))
    if differ := describe_differences(encoder_settings, prompt_settings):
        raise InputError(
            f"its prompt was trained with other settings than the encoder has: {differ}; serve embeddings "
            "with the prompt's settings, or tune the task again with the encoder's"
        )


def _format_value(value: Any) -> str:
    """Returns the repr of a setting's value, shortened to 40 characters for messages."""
    return shorten(repr(value), 40)
