"""Deep prompts (DPTDR, section 3.1) in their saved form: keys and values for every layer.

A task's folder holds

    prompt.json          its backbone, the encoder options, and the prompt of each side
    prompt.safetensors   "query" and "passage", or "both": [layers, 2, heads, l, head_dim] each

A prompt that is computed from each query is trained by `riptide.retriever.prompts.synthesis_provider` and saved as the
network that computes it. Prompts of topics are trained by `riptide.retriever.topics.network` and saved as a matrix for
each topic, with the model that infers the topic of a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from safetensors.torch import save_file

from riptide.base.errors import InputError
from riptide.base.wording import Parameter, list_first
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.model.json_fields import check_object, field_errors, format_json, has_type, read_object
from riptide.retriever.model.model_folder import PROMPT_SETTINGS, PROMPT_WEIGHTS, sha256_of
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.model.weights import read_tensors
from riptide.retriever.options import LATER_OPTIONS, SIDES, EncoderOptions, Side
from riptide.retriever.prompts.saved_synthesis import PREFIX, SavedSynthesis, parse_synthesis, read_options
from riptide.retriever.topics.saved import PREFIX as TOPICS_PREFIX
from riptide.retriever.topics.saved import SavedTopics, parse_topics

PROMPT_FORMAT_VERSION = 1  # version of the format of prompt.json
WEIGHTS, SETTINGS = PROMPT_WEIGHTS, PROMPT_SETTINGS
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of saved prompts
# Fields of an encoder's configuration that identify the backbone, with their types. A prompt fits if all are equal,
# except for the normalisation of vectors in `head`.
_BACKBONE: dict[str, type] = {
    "model_type": str,
    "backbone": str,
    "weights": list,
    "tokenizer": list,
    "tokenizer_args": dict,
    "lower_case": bool,
    "head": list,
}
_FIELDS: dict[str, type] = {"format": int, "backbone": dict, "options": dict, "sides": dict, "sha256": str}
# Optional fields, stored if texts start after the prompt, if prompts are computed, and if each topic has a prompt.
_OPTIONAL: dict[str, type] = {"position_offset": bool, "synthesis": dict, "topics": dict}
_PLACE: dict[str, type] = {"tensor": str, "length": int}


@dataclass(frozen=True)
class TaskPrompt:
    """The trained prompts of a task, with the backbone and options for which they were trained.

    Attributes:
        backbone: The backbone that it fits (`backbone_of`).
        options: How its texts become vectors.
        query: [layers, 2, heads, l, head_dim], float32; None if queries have no prompt.
        passage: The same for passages; the same tensor if the sides are tied.
        position_offset: The positions of a text start after the prompt of its side.
        synthesis: Computes the prompt of each query from its words; then `query` is None.
        topics: The prompts of topics, for the texts of both sides; then `query` and `passage` are None.
    """

    backbone: dict[str, Any]
    options: EncoderOptions
    query: torch.Tensor | None
    passage: torch.Tensor | None
    position_offset: bool = False
    synthesis: SavedSynthesis | None = None
    topics: SavedTopics | None = None

    def fixed_matrix(self, side: Side) -> torch.Tensor | None:
        """Returns the single prompt for all texts of a side; None if the side has no such prompt."""
        return self.query if side == "query" else self.passage

    def matrices(self, side: Side) -> tuple[torch.Tensor, ...]:
        """Returns the fixed prompts of a side: a single one, or one per topic.

        Empty if there is none, or if prompts are computed. Each is [layers, 2, heads, l, head_dim].
        """
        if self.topics is not None:
            return tuple(self.topics.prompts)
        matrix = self.fixed_matrix(side)
        return () if matrix is None else (matrix,)

    def offset(self, side: Side) -> int:
        """Returns the number of positions by which texts of a side start later than usual; 0 by default."""
        matrices = self.matrices(side)
        return matrices[0].shape[3] if self.position_offset and matrices else 0

    def save(self, folder: Path) -> None:
        """Writes the weights file and the settings file; the same prompt gives the same bytes."""
        tied = self.query is not None and self.query is self.passage
        names = {"query": "both", "passage": "both"} if tied else {"query": "query", "passage": "passage"}
        matrices = {"query": self.query, "passage": self.passage}
        tensors = {names[side]: m.contiguous() for side, m in matrices.items() if m is not None}
        places = {
            side: {"tensor": name, "length": tensors[name].shape[3]} if name in tensors else None
            for side, name in names.items()
        }
        extra: dict[str, Any] = {"position_offset": True} if self.position_offset else {}
        if self.synthesis is not None:
            tensors |= self.synthesis.named_tensors()
            extra["synthesis"] = self.synthesis.settings()
        if self.topics is not None:
            tensors |= self.topics.named_tensors()
            extra["topics"] = self.topics.settings()
        save_file(tensors, folder / WEIGHTS)
        settings = {
            "format": PROMPT_FORMAT_VERSION,
            "backbone": self.backbone,
            "options": self.options.to_dict(),
            "sides": places,
            "sha256": sha256_of(folder / WEIGHTS),
            **extra,
        }
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_prompt(folder: Path) -> TaskPrompt:
    """Loads the trained prompt in a task's folder.

    Raises:
        InputError: If a file is missing or damaged, if a field of prompt.json is unknown, missing or of a wrong type,
            if the tensors are not the ones that prompt.json names, or if a number is not finite.
    """
    file, weights = folder / SETTINGS, folder / WEIGHTS
    if not file.is_file():
        raise InputError(f"{file}: no such file, so not a task's prompt")
    settings = read_object(file)
    if "format" in settings and has_type(settings["format"], int) and settings["format"] != PROMPT_FORMAT_VERSION:
        raise InputError(f"{file}: is of format {settings['format']}, this release reads {PROMPT_FORMAT_VERSION}")
    check_object({name: kind() for name, kind in _OPTIONAL.items()} | settings, _FIELDS | _OPTIONAL, "", file)
    synthesis_options = read_options(settings["synthesis"], file) if "synthesis" in settings else None
    check_object(settings["backbone"], _BACKBONE, "backbone.", file)
    options = _read_options(settings["options"], file)
    places = _read_tensor_names(settings["sides"], file)
    if synthesis_options is not None and places.get("query"):
        raise InputError(
            f"{file}: sides.query: expected null, since by the field synthesis the prompt of each query is computed"
        )
    if "topics" in settings and (places or synthesis_options is not None):
        raise InputError(
            f"{file}: sides, synthesis: expected null for both sides, and no synthesis, since by the field topics each "
            "text has the prompt of its topic"
        )
    if not weights.is_file():
        raise InputError(f"{weights}: no such file, so not a task's prompt")
    if settings["sha256"] != sha256_of(weights):
        raise InputError(f"{weights}: its sha256 is not the one in {SETTINGS}: copy both files again")
    tensors = read_tensors(weights)
    synthesis = None
    if synthesis_options is not None:
        network_tensor_names = [name for name in tensors if name.startswith(PREFIX)]
        network = {name.removeprefix(PREFIX): tensors.pop(name) for name in network_tensor_names}
        synthesis = parse_synthesis(synthesis_options, network, weights)
    topics = None
    if "topics" in settings:
        topic_tensor_names = [name for name in tensors if name.startswith(TOPICS_PREFIX)]
        topic_tensors = {name.removeprefix(TOPICS_PREFIX): tensors.pop(name) for name in topic_tensor_names}
        topics = parse_topics(settings["topics"], topic_tensors, file, weights)
    _check_tensors(tensors, {name for name, _ in places.values()}, weights)
    for side, (name, length) in places.items():
        if tensors[name].shape[3] != length:
            raise InputError(
                f"{file}: sides.{side}.length: expected the {tensors[name].shape[3]} tokens of {WEIGHTS}, got {length}"
            )
    query, passage = (tensors[places[side][0]] if side in places else None for side in SIDES)
    offset = settings.get("position_offset", False)
    return TaskPrompt(settings["backbone"], options, query, passage, offset, synthesis, topics)


def _read_tensor_names(sides: Any, file: Path) -> dict[str, tuple[str, int]]:
    """Returns the tensor name and prompt length of each side with a prompt. Raises InputError for a bad field."""
    check_object(sides, dict.fromkeys(SIDES), "sides.", file)
    places: dict[str, tuple[str, int]] = {}
    for side, place in sides.items():
        if place is not None:
            check_object(place, _PLACE, f"sides.{side}.", file)
            if place["tensor"] not in (side, "both"):
                raise InputError(
                    f"{file}: sides.{side}.tensor: expected {side} or both, got {format_json(place['tensor'])}"
                )
            if place["length"] < 1:
                raise InputError(f"{file}: sides.{side}.length: expected at least 1, got {place['length']}")
            places[side] = place["tensor"], place["length"]
    names = [place[0] for place in places.values()]
    if "both" in names and names != ["both", "both"]:
        raise InputError(f"{file}: sides: one side has the tensor both and the other has another: expected the same")
    return places


def _read_options(content: dict[str, Any], file: Path) -> EncoderOptions:
    """Reads encoder options and checks their types; a missing option is refused. EncoderOptions checks the values."""
    content = {**dict.fromkeys(LATER_OPTIONS), **content} if isinstance(content, dict) else content
    check_object(content, dict.fromkeys(field.name for field in fields(EncoderOptions)), "options.", file)
    hints = get_type_hints(EncoderOptions)
    for name in content:
        kinds = _types_of(hints[name])
        if not any(content[name] is None if kind is type(None) else has_type(content[name], kind) for kind in kinds):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InputError(f"{file}: options.{name}: expected {names}, got {format_json(content[name])}")
    with field_errors(file, "options.", EncoderOptions):
        return EncoderOptions(**content)


def _types_of(hint: Any) -> list[type]:
    """Returns the value types of a type hint, including the members of unions and literals."""
    if get_origin(hint) is Literal:
        return list(dict.fromkeys(type(value) for value in get_args(hint)))
    members = get_args(hint)
    return list(dict.fromkeys(kind for member in members for kind in _types_of(member))) if members else [hint]


def _check_tensors(tensors: Mapping[str, torch.Tensor], names: set[str], file: Path) -> None:
    """Raises InputError unless tensors have the names in prompt.json, equal dtype and shape, and finite values."""
    if set(tensors) != names:
        raise InputError(
            f"{file}: holds {list_first(sorted(tensors)) or 'no tensor'}, expected "
            f"{', '.join(sorted(names)) or 'none'} as {SETTINGS} says"
        )
    for name, tensor in tensors.items():
        if tensor.ndim != 5 or tensor.shape[1] != 2 or not tensor.numel() or tensor.dtype not in _DTYPES:
            raise InputError(
                f"{file}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected float32, "
                "float16 or bfloat16 [layers, 2, heads, l, head_dim]"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{file}: {name} holds numbers that are not finite")
    shapes = {(tensor.dtype, tensor.shape[0], tensor.shape[2], tensor.shape[4]) for tensor in tensors.values()}
    if len(shapes) > 1:
        kinds = list_first(sorted(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()))
        raise InputError(f"{file}: tensors of different dtypes, layers or heads: {kinds}")


def backbone_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an encoder's configuration on which a prompt depends."""
    return {name: config[name] for name in _BACKBONE}


def check_backbone(
    prompt: TaskPrompt, config: Mapping[str, Any], shape: PromptShape | None = None, width: int | None = None
) -> None:
    """Raises InputError if the prompt does not fit an encoder's backbone, or the scale of its vectors.

    Args:
        prompt: The prompt.
        config: The configuration of the encoder (`settings_of`).
        shape: The shape of the backbone's keys and values, if it is known.
        width: Length of the embedding of a word of the backbone, if it is known.
    """
    check_initial_prompt(prompt, config, shape)
    if width is not None and prompt.synthesis is not None and prompt.synthesis.width != width:
        raise InputError(
            f"the prompt of a query is computed from word embeddings of {prompt.synthesis.width} numbers, "
            f"expected {width} as the backbone's have"
        )
    if prompt.backbone.get("head") != config["head"]:
        is_scaled = "normalize" in config["head"]
        trained, here = ("unscaled vectors", "vectors of length 1")[:: 1 if is_scaled else -1]
        raise InputError(
            f"the prompt was trained for {trained}, and the encoder makes {here} (head differs): open the "
            f"encoder with {Parameter('normalize', not is_scaled)}, or train a prompt for these vectors"
        )


def check_initial_prompt(prompt: TaskPrompt, config: Mapping[str, Any], shape: PromptShape | None = None) -> None:
    """Raises InputError if training cannot start from the prompt: it has another backbone or another shape.

    Whether vectors are scaled to length 1 makes no difference: it is not a property of the backbone. Arguments as in
    `check_backbone`.
    """
    actual, expected = _without_scaling(prompt.backbone), _without_scaling(backbone_of(config))
    if differ := [name for name in _BACKBONE if actual.get(name) != expected[name]]:
        kinds = f"model_type {actual.get('model_type')} instead of {expected['model_type']}"
        names = ", ".join(kinds if name == "model_type" else name for name in differ)
        raise InputError(
            f"the prompt is for another backbone ({names} differ): open the backbone that it was "
            "trained with, or train a prompt for this one"
        )
    for matrix in [matrix for side in SIDES for matrix in prompt.matrices(side)[:1]]:
        if shape and (matrix.shape[0], matrix.shape[2], matrix.shape[4]) != tuple(shape):
            raise InputError(
                f"the prompt is of shape {tuple(matrix.shape)}, expected that of a backbone of {shape.layers} layers, "
                f"{shape.heads} heads of {shape.head_dim}"
            )
    if shape and prompt.synthesis is not None and not prompt.synthesis.fits(shape):
        raise InputError(
            f"the prompt of a query has {prompt.synthesis.numbers_per_token} numbers per token, expected those of a "
            f"backbone of {shape.layers} layers, {shape.heads} heads of {shape.head_dim}"
        )


def _without_scaling(backbone: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that identify a backbone, without the normalisation in `head`."""
    return {**backbone, "head": [step for step in backbone.get("head", []) if step != "normalize"]}


def check_prompt_backbone(prompt: TaskPrompt, recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Raises InputError if an encoder cannot use a prompt, as far as is known before its model is loaded.

    The message holds values of the prompt and of the settings, without paths and hashes.

    Args:
        prompt: The prompt.
        recipe: The recipe of the encoder.
        config: The configuration of the encoder (`settings_of`).
    """
    check_backbone(prompt, config)
    check_prompt_positions(recipe, {side: prompt.offset(side) for side in SIDES})


def check_prompt_positions(recipe: Recipe, offsets: Mapping[Side, int]) -> None:
    """Raises InputError if a backbone has too few positions for texts that start after their prompts.

    Args:
        recipe: The recipe of the encoder, with the maximum lengths of the texts.
        offsets: The number of positions before the texts of each side; 0: they start as usual.
    """
    lengths = {"query": recipe.query_length, "passage": recipe.passage_length}
    for side, offset in offsets.items():
        if offset and recipe.max_positions is None:
            raise InputError(
                f"{Parameter('position_offset')}: a backbone of type {recipe.model_type} has no positions to start "
                "from: train the prompt without it"
            )
        if offset and recipe.max_positions is not None and lengths[side] + offset > recipe.max_positions:
            raise InputError(
                f"{Parameter('position_offset')}: {Parameter(f'{side}_length', lengths[side])} and a prompt of "
                f"{offset} tokens need {lengths[side] + offset} positions, and the backbone has "
                f"{recipe.max_positions}: use {Parameter(f'{side}_length', max(1, recipe.max_positions - offset))} or "
                "less, or a shorter prompt"
            )
