"""A task's two files are refused unless every field and tensor is the one that is expected, each by name in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from riptide.base.errors import InputError
from riptide.retriever.model.model_folder import sha256_of
from riptide.retriever.options import EncoderOptions
from riptide.retriever.prompts.task_prompt import TaskPrompt, load_prompt

BACKBONE: dict[str, Any] = {
    "model_type": "bert",
    "backbone": "0" * 64,
    "weights": ["1" * 64],
    "tokenizer": ["2" * 64],
    "tokenizer_args": {},
    "lower_case": False,
    "head": ["normalize"],
}


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """The folder of a task with a prompt of 3 tokens for queries and one of 5 for passages."""
    matrices = [torch.full((2, 2, 4, length, 8), 0.5) for length in (3, 5)]
    TaskPrompt(BACKBONE, EncoderOptions(query_length=20), *matrices).save(tmp_path)
    return tmp_path


def line_of(folder: Path) -> str:
    with pytest.raises(InputError) as raised:
        load_prompt(folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def change(folder: Path, path: str, value: Any) -> None:
    """Sets the field at a dotted path of prompt.json; the value `...` removes it."""
    content = json.loads((folder / "prompt.json").read_text())
    *outer, name = path.split(".")
    inner = content
    for key in outer:
        inner = inner[key]
    if value is ...:
        del inner[name]
    else:
        inner[name] = value
    (folder / "prompt.json").write_text(json.dumps(content))


def test_the_whole_prompt_is_opened(prompt: Path) -> None:
    found = load_prompt(prompt)
    assert (found.backbone, found.options) == (BACKBONE, EncoderOptions(query_length=20))
    assert [matrix.shape[3] for matrix in (found.query, found.passage) if matrix is not None] == [3, 5]


OPTIONS = EncoderOptions().to_dict()
REQUIRED = [
    "format",
    "backbone",
    "options",
    "sides",
    "sha256",
    "sides.query",
    "sides.query.tensor",
    "sides.query.length",
    *(f"backbone.{name}" for name in BACKBONE),
    *(f"options.{name}" for name in OPTIONS),
]


@pytest.mark.parametrize("path", REQUIRED)
def test_a_missing_field_is_named(prompt: Path, path: str) -> None:
    change(prompt, path, ...)
    assert line_of(prompt).endswith(f"prompt.json: {path}: missing")


@pytest.mark.parametrize(
    "path",
    ["more", "backbone.more", "options.more", "sides.more", "sides.query.more", "sides.answer", "options.compile_mode"],
)
def test_an_unknown_field_is_named(prompt: Path, path: str) -> None:
    change(prompt, path, None)
    assert f"prompt.json: {path}: unknown field" in line_of(prompt)


NAN = float("nan")


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("format", [True, 1.0, "1", None, [1]]),
        ("backbone", [None, [], "x"]),
        ("backbone.model_type", [5, None, []]),
        ("backbone.weights", ["x", None, {}]),
        ("backbone.tokenizer_args", [[], None]),
        ("backbone.lower_case", [0, "no", None]),
        ("options", [None, []]),
        ("options.query_length", [True, 20.0, "20", -1, 0, NAN, [20]]),
        ("options.passage_length", [False, 1.5, "x", -3]),
        ("options.dimension", [True, 8.0, "8", 0]),
        ("options.append_eos", [0, 1, "true", None]),
        ("options.normalize", [0, "true", 1.0]),
        ("options.pooling", [5, "max", True]),
        ("options.query_prefix", [5, False, []]),
        ("options.title", [None, 5, "tab"]),
        ("options.dtype", [None, "float16", 5]),
        ("sides", [None, [], "x"]),
        ("sides.query", [5, "query", [], False]),
        ("sides.query.tensor", [5, None, "passage", "other", True, "both"]),
        ("sides.query.length", [True, 3.0, "3", 0, -3, NAN, None, 4, 10**9]),
        ("sha256", [None, 5, []]),
        ("position_offset", [None, 1, "true", []]),
    ],
)
def test_a_wrong_value_is_named(prompt: Path, path: str, values: list[Any]) -> None:
    whole = (prompt / "prompt.json").read_text()
    for value in values:
        change(prompt, path, value)
        line = line_of(prompt)
        assert "prompt.json: " in line, (value, line)
        assert path.rpartition(".")[2] in line or "sides" in line, (value, line)
        (prompt / "prompt.json").write_text(whole)


def retensored(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> str:
    save_file(edit(load_file(folder / "prompt.safetensors")), folder / "prompt.safetensors")
    change(folder, "sha256", sha256_of(folder / "prompt.safetensors"))
    return line_of(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: {**t, "more": t["query"].clone()}, "holds more, passage, query, expected passage, query"),
        (lambda t: {"query": t["query"]}, "holds query, expected passage, query"),
        (lambda t: {"query": t["query"], "both": t["passage"]}, "holds both, query, expected passage, query"),
        (lambda t: {}, "holds no tensor, expected passage, query"),
        (lambda t: {**t, "query": t["query"].double()}, "query is torch.float64"),
        (lambda t: {**t, "query": t["query"].int()}, "query is torch.int32"),
        (lambda t: {**t, "query": t["query"].bool()}, "query is torch.bool"),
        (lambda t: {**t, "query": t["query"].half()}, "different dtypes, layers or heads"),
        (lambda t: {**t, "query": t["query"][:1].clone()}, "different dtypes, layers or heads"),
        (lambda t: {**t, "query": t["query"][:, :, :2].clone()}, "different dtypes, layers or heads"),
        (lambda t: {**t, "query": t["query"][..., :4].clone()}, "different dtypes, layers or heads"),
        (lambda t: {**t, "query": t["query"][:, :1].clone()}, "expected float32, float16 or bfloat16 [layers, 2,"),
        (lambda t: {**t, "query": t["query"][0].clone()}, "expected float32, float16 or bfloat16 [layers, 2,"),
        (lambda t: {**t, "query": t["query"][:, :, :, :0].clone()}, "expected float32, float16 or bfloat16 [layers"),
        (lambda t: {**t, "query": t["query"][:, :, :, :2].clone()}, "sides.query.length: expected the 2 tokens"),
        (lambda t: {**t, "query": t["query"] * float("inf")}, "query holds numbers that are not finite"),
    ],
)
def test_other_tensors_than_the_settings_name_are_refused(
    prompt: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], message: str
) -> None:
    assert message in retensored(prompt, edit)


def test_a_tensor_that_comes_twice_is_refused(prompt: Path) -> None:
    """safetensors' header is JSON, in which a name can stand twice."""
    file = prompt / "prompt.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode().rstrip()
    entry = json.dumps({"query": json.loads(header)["query"]})[1:-1]
    doubled = f"{header[:-1]},{entry}}}".encode()
    file.write_bytes(len(doubled).to_bytes(8, "little") + doubled + data[8 + size :])
    change(prompt, "sha256", sha256_of(file))
    assert "prompt.safetensors" in line_of(prompt)


def test_files_of_another_kind_are_refused(prompt: Path) -> None:
    file = prompt / "prompt.json"
    whole = file.read_bytes()
    for content in (b"", b"\0" * 10, b"{", b"[]", b"5", b"null", b"\xff", b"[" * 100_000, whole[:50], whole + b"}"):
        file.write_bytes(content)
        assert "prompt.json" in line_of(prompt)
    file.unlink()
    file.mkdir()
    assert "prompt.json: no such file" in line_of(prompt)
