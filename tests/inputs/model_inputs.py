"""Folders of models and prompts: headers of weights and JSON of settings."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from file_inputs import JSON_PIECES, at
from linear_cost import Content, Input
from tiny import save_encoder

from riptide.retriever.encoding.encoder import describe
from riptide.retriever.model.json_fields import parse_json, read_object
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.model.vocabulary import load_tokenizer
from riptide.retriever.model.weights import tensor_shapes
from riptide.retriever.options import EncoderOptions
from riptide.retriever.prompts.task_prompt import SETTINGS, WEIGHTS, TaskPrompt, backbone_of, load_prompt

EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
# Headers and texts of n units.
HEADERS: dict[str, Callable[[int], str]] = {
    "pairs of names": lambda n: "{" + ",".join(f'"{i // 2:x}":{EMPTY}' for i in range(n)) + "}",
    "one name": lambda n: "{" + ",".join([f'"a":{EMPTY}'] * n) + "}",
    "tensors": lambda n: "{" + ",".join(f'"{i:x}":{EMPTY}' for i in range(n)) + "}",
    "sizes": lambda n: f'{{"a":{{"dtype":"U8","shape":[{"1," * n}1],"data_offsets":[0,1]}}}}',
    "offsets": lambda n: f'{{"a":{{"dtype":"U8","shape":[1],"data_offsets":[{"1," * n}1]}}}}',
    "metadata": lambda n: '{"__metadata__":{' + ",".join(f'"{i:x}":"é"' for i in range(n)) + "}}",
    "a long name": lambda n: f'{{"{"é" * n}":{EMPTY}}}',
}
TEXTS: dict[str, Callable[[int], str]] = {
    "integers": lambda n: "[" + "1," * n + "1]",
    "digits": lambda n: "1" * n,
    "lists": lambda n: "[" + "[]," * n + "[]]",
    "depth": lambda n: "[" * n + "]" * n,
    "names": lambda n: "{" + ",".join(f'"{i:x}":1' for i in range(n)) + "}",
    "halves of pairs": lambda n: '["' + '\\ud83d\\ude00","' * n + '"]',
    "space": lambda n: " " * n + "1",
    "minus signs": lambda n: "-" * n,
    "numbers of 308 digits": lambda n: "[" + ("9" * 308 + ",") * n + "1]",
}
OPTIONS = EncoderOptions()
CONFIG = (
    *("hidden_size", "model_type", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"),
    *("max_position_embeddings", "dtype", "architectures", "pad_token_id", "auto_map", "quantization_config"),
    *("is_decoder", "layer_types", "rope_parameters", "tie_word_embeddings", "id2label", "transformers_version"),
)
TOKENIZER = (
    *("unk_token", "model_max_length", "cls_token", "pad_token", "tokenizer_class", "added_tokens_decoder"),
    *("extra_special_tokens", "add_eos_token", "auto_map", "padding_side", "chat_template", "backend"),
)


def write_header(folder: Path, content: Content) -> Path:
    """Writes a safetensors file of a header alone."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return at("model.safetensors")(folder, len(data).to_bytes(8, "little") + data)


@functools.cache
def _saved(kind: str) -> dict[str, bytes]:
    """Returns the files of a small model, or of a prompt of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = save_encoder(Path(name) / "model")
        if kind == "prompt":
            matrix = torch.zeros(2, 2, 4, 3, 8)
            prompt = TaskPrompt(backbone_of(describe(str(folder), OPTIONS)), OPTIONS, matrix, None)
            folder = Path(name) / "prompt"
            folder.mkdir()
            prompt.save(folder)
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def in_model(name: str, kind: str = "model") -> Callable[[Path, Content], Path]:
    """Returns a function that writes a model, or a prompt, of which one file has a content. It returns the folder.

    A JSON object with one field replaces this field.
    """

    def write(folder: Path, content: Content) -> Path:
        place = folder / kind
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for file, data in _saved(kind).items():
            (place / file).write_bytes(data)
        changes: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            changes = json.loads(content)
        before = json.loads(_saved(kind).get(name, b"{}"))
        if isinstance(changes, dict) and len(changes) == 1 and isinstance(before, dict):
            content = json.dumps(before | changes)
        at(name)(place, content)
        return place

    return write


def settings_of(kind: str, name: str) -> dict[str, Any]:
    """Returns the settings that a file of a small model, or of a prompt, has."""
    settings: dict[str, Any] = json.loads(_saved(kind).get(name, b"{}"))
    return settings


def write_weights(folder: Path, content: Content) -> Path:
    """Writes a prompt whose weights are a header, of which its settings have the SHA-256."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    weights = len(data).to_bytes(8, "little") + data
    settings = settings_of("prompt", SETTINGS) | {"sha256": hashlib.sha256(weights).hexdigest()}
    place = in_model(SETTINGS, "prompt")(folder, json.dumps(settings))
    (place / WEIGHTS).write_bytes(weights)
    return place


def field_of(kind: str, name: str, field: str) -> dict[str, Callable[[int], str]]:
    """Returns patterns in which a field of a file has a large value."""

    def pattern(make: Callable[[int], str]) -> Callable[[int], str]:
        return lambda n: json.dumps(settings_of(kind, name) | {field: 0}).replace(
            f'"{field}": 0', f'"{field}": {make(n)}'
        )

    return {key: pattern(make) for key, make in TEXTS.items()}


INPUTS = [
    Input(
        "model: header of weights",
        tensor_shapes,
        HEADERS,
        (*JSON_PIECES, '"a":', EMPTY, '"dtype":', '"shape":', '"data_offsets":', "[0,0]", '"U8"'),
        write_header,
        frame=('{"a":', "}"),
        max_bytes=4 << 20,
        modules=("retriever.model.weights",),
    ),
    Input(
        "model: JSON",
        parse_json,
        TEXTS,
        JSON_PIECES,
        refusals=(json.JSONDecodeError,),
        modules=("retriever.model.json_fields",),
    ),
    Input("model: a file of JSON", read_object, TEXTS, JSON_PIECES, at("a.json"), frame=('{"a":', "}")),
    *(
        Input(
            f"model: {name}",
            lambda folder: read_recipe(folder, OPTIONS),
            field_of("model", name, fields[0]) if fields else TEXTS,
            JSON_PIECES,
            in_model(name),
            frame=('{"FIELD":', "}") if fields else ('[{"idx":0,"name":"0","path":"","FIELD":', "}]"),
            fields=fields or ("type", "path", "idx", "name"),
            max_bytes=1 << 20,
            modules=modules,
        )
        for name, fields, modules in (
            ("config.json", CONFIG, ("retriever.model.recipe", "retriever.model.configuration")),
            ("tokenizer_config.json", TOKENIZER, ()),
            ("modules.json", (), ("retriever.model.modules",)),
            ("config_sentence_transformers.json", ("prompts", "default_prompt_name", "similarity_fn_name"), ()),
        )
    ),
    Input(
        "model: tokens of the tokenizer",
        lambda folder: load_tokenizer(folder, vocabulary_size=None),
        field_of("model", "tokenizer_config.json", "unk_token"),
        JSON_PIECES,
        in_model("tokenizer_config.json"),
        frame=('{"FIELD":', "}"),
        fields=TOKENIZER,
        max_bytes=1 << 20,
        modules=("retriever.model.vocabulary",),
    ),
    Input(
        "prompt: settings",
        load_prompt,
        field_of("prompt", SETTINGS, "options") | field_of("prompt", SETTINGS, "topics"),
        JSON_PIECES,
        in_model(SETTINGS, "prompt"),
        frame=('{"FIELD":', "}"),
        fields=("options", "sides", "backbone", "format", "sha256", "synthesis", "topics", "position_offset", "more"),
        max_bytes=256 << 10,
        modules=("retriever.prompts.task_prompt", "retriever.prompts.saved_synthesis", "retriever.topics.saved"),
    ),
    Input(
        "prompt: header of weights",
        load_prompt,
        HEADERS,
        (*JSON_PIECES, EMPTY, '"a":'),
        write_weights,
        frame=('{"query":', "}"),
        max_bytes=256 << 10,
    ),
]
