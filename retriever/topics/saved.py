"""The saved form of topic prompts: one matrix per topic, and the model that infers the topic of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from riptide.base.errors import InputError
from riptide.base.wording import list_first, shorten
from riptide.retriever.model.json_fields import format_json, has_type
from riptide.retriever.options import Side
from riptide.retriever.options.topics import Wordless
from riptide.retriever.topics.model import TopicModel, with_default_topic

PREFIX = "topics."  # prefix of the names of topic tensors in a task's file
_MODEL = "model."
_TYPES = (torch.float32, torch.int64, torch.uint8)  # dtypes of a topic model's arrays
_FIELDS = ("length", "model", "wordless")
NO_TOPIC_WORDS = (
    "has no word that the topics of its task know, by which its prompt could be chosen: use words of the passages"
)


@dataclass(frozen=True, eq=False)
class TextTopics:
    """The rule by which the topics of a task's texts are inferred.

    Attributes:
        model: The topics.
        wordless: "refuse": a query without a known word has no topic; "prior": that of the most probable path.
    """

    model: TopicModel
    wordless: Wordless

    def topics_of(self, texts: Sequence[str], side: Side) -> np.ndarray:
        """Returns the topic of each text, int64 [texts].

        A query without a known word has NO_TOPIC (-1) if `wordless` is "refuse". Otherwise it has the topic of the most
        probable path, as passages always have, which cannot be left out.
        """
        topics = self.model.infer(texts)
        return topics if side == "query" and self.wordless == "refuse" else with_default_topic(topics, self.model)


@dataclass(frozen=True, eq=False)
class SavedTopics:
    """Trained topic prompts; queries and passages of a topic share a prompt.

    Attributes:
        model: The topics.
        prompts: float32 [K, layers, 2, heads, l, head_dim], the prompt of each topic.
        wordless: As of TextTopics.

    Raises:
        InputError: If the number of prompts is not that of the topics.
    """

    model: TopicModel
    prompts: torch.Tensor
    wordless: Wordless = "refuse"

    def __post_init__(self) -> None:
        if len(self.prompts) != self.model.num_topics:
            raise InputError(f"{len(self.prompts)} prompts of {self.model.num_topics} topics: expected one for each")

    @property
    def length(self) -> int:
        """The number of tokens of each prompt."""
        return self.prompts.shape[4]

    @property
    def text_topics(self) -> TextTopics:
        """The rule that infers topics of texts, without the prompts."""
        return TextTopics(self.model, self.wordless)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by their names in a task's file."""
        prompts = {f"{PREFIX}{topic}": matrix.contiguous() for topic, matrix in enumerate(self.prompts)}
        arrays = self.model.arrays_by_name().items()
        return prompts | {f"{PREFIX}{_MODEL}{name}": torch.from_numpy(array.copy()) for name, array in arrays}

    def settings(self) -> dict[str, Any]:
        """Returns the settings as JSON-serialisable values."""
        return {"length": self.length, "model": self.model.json_fields(), "wordless": self.wordless}

    def digest(self) -> str:
        """Returns the sha256 of the topic model, of `wordless`, and of the shape and values of the prompts."""
        content = f"{self.model.fingerprint()} {self.wordless} {tuple(self.prompts.shape)}"
        digest = hashlib.sha256(content.encode())
        digest.update(self.prompts.detach().float().cpu().contiguous().numpy().reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def parse_topics(content: Any, tensors: Mapping[str, torch.Tensor], file: Path, weights: Path) -> SavedTopics:
    """Builds the topic prompts of a task from the settings and tensors of its folder, after checking them.

    Args:
        content: The object of the field `topics`.
        tensors: The tensors, by their names without PREFIX.
        file: The file of the settings, for messages.
        weights: The file of the tensors, for messages.

    Raises:
        InputError: If a field or a tensor is unknown, missing, of another type or shape, or not finite.
    """
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        raise InputError(f"{file}: topics: expected an object with {', '.join(_FIELDS)}, got {format_json(content)}")
    length = content["length"]
    if not has_type(length, int) or length < 1:
        raise InputError(f"{file}: topics.length: expected an integer of at least 1, got {format_json(length)}")
    if content["wordless"] not in get_args(Wordless):
        expected_values = " or ".join(get_args(Wordless))
        raise InputError(f"{file}: topics.wordless: expected {expected_values}, got {format_json(content['wordless'])}")
    arrays = {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items() if name.startswith(_MODEL)}
    for name, tensor in arrays.items():
        if tensor.dtype not in _TYPES:  # For example bfloat16, which numpy does not have.
            full_name = shorten(f"{PREFIX}{_MODEL}{name}", 60)
            raise InputError(f"{weights}: {full_name} is {tensor.dtype}, expected integers or float32")
    model = TopicModel.from_arrays({name: array.numpy() for name, array in arrays.items()}, content["model"], weights)
    expected = [str(topic) for topic in range(model.num_topics)]
    actual = {name for name in tensors if not name.startswith(_MODEL)}
    if actual != set(expected):
        raise InputError(
            f"{weights}: holds prompts of the topics {list_first(sorted(actual)) or 'none'}: expected one for each of "
            f"the {model.num_topics} topics, {PREFIX}0 to {PREFIX}{model.num_topics - 1}"
        )
    first = tensors["0"]
    for name in expected:
        tensor = tensors[name]
        is_prompt = tensor.ndim == 5 and tensor.shape[1] == 2 and tensor.shape[3] == length and tensor.numel()
        if tensor.dtype != torch.float32 or not is_prompt or tensor.shape != first.shape:
            raise InputError(
                f"{weights}: {PREFIX}{name} is {tensor.dtype} {tuple(tensor.shape)}, expected float32 "
                f"[layers, 2, heads, {length}, head_dim], the same for all topics"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{weights}: {PREFIX}{name} holds numbers that are not finite")
    return SavedTopics(model, torch.stack([tensors[name] for name in expected]), content["wordless"])
