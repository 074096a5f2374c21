"""Prompts of topics: saved and opened with the same numbers and topics, and refused where they are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from topic_prompts import random_saved_topics, small_topics

from riptide.base.errors import InputError
from riptide.retriever.interchange.prompt_conversion import check_writable
from riptide.retriever.model.model_folder import sha256_of
from riptide.retriever.model.recipe import describe
from riptide.retriever.options import EncoderOptions
from riptide.retriever.prompts.prompt_table import task_config
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of, load_prompt
from riptide.retriever.topics.model import with_default_topic
from riptide.retriever.topics.saved import SavedTopics

Tiny = Callable[..., Path]
OPTIONS = EncoderOptions(dtype="float32", compile="never")


@pytest.fixture
def prompt(tiny: Tiny) -> TaskPrompt:
    backbone = backbone_of(describe(tiny("bert"), OPTIONS))
    return TaskPrompt(backbone, OPTIONS, None, None, topics=random_saved_topics())


def test_it_is_saved_and_opened(prompt: TaskPrompt, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        prompt.save(tmp_path / name)
    for file in ("prompt.json", "prompt.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    loaded = load_prompt(tmp_path / "one")
    assert loaded.topics is not None
    assert prompt.topics is not None
    assert torch.equal(loaded.topics.prompts, prompt.topics.prompts)
    assert loaded.topics.model.fingerprint() == prompt.topics.model.fingerprint()
    assert loaded.topics.digest() == prompt.topics.digest()
    assert (loaded.query, loaded.passage, loaded.synthesis) == (None, None, None)
    texts = ["the river flows", "a bank of money", "answer : query"]
    assert loaded.topics.text_topics.topics_of(texts, "query").tolist() == [0, 1, 2]
    tensors = load_file(tmp_path / "one" / "prompt.safetensors")
    assert torch.equal(tensors["topics.1"], prompt.topics.prompts[1])  # in the ordinary format


def test_the_configuration_names_the_prompts_and_the_topics(prompt: TaskPrompt) -> None:
    assert prompt.topics is not None
    configs = [task_config({}, prompt, side) for side in ("query", "passage")]  # type: ignore[arg-type]
    assert configs[0] == configs[1]
    assert [*configs[0]] == ["prompt"]
    others = [random_saved_topics(seed=1), SavedTopics(small_topics((("a",), ("b",), ("c",))), prompt.topics.prompts)]
    for other in others:
        assert task_config({}, replace(prompt, topics=other), "query") != configs[0]
    offset = task_config({}, replace(prompt, position_offset=True), "query")
    assert offset == {**configs[0], "position_offset": 5}


def test_a_passage_without_a_known_word_has_the_most_probable_topic(prompt: TaskPrompt) -> None:
    assert prompt.topics is not None
    texts = ["the river", "beta", ""]
    assert prompt.topics.text_topics.topics_of(texts, "query").tolist() == [0, -1, -1]
    assert prompt.topics.text_topics.topics_of(texts, "passage").tolist() == [0, 2, 2]
    known = replace(prompt.topics, wordless="prior")
    assert known.text_topics.topics_of(texts, "query").tolist() == [0, 2, 2]
    assert known.digest() != prompt.topics.digest()
    assert with_default_topic(np.array([-1, 1]), prompt.topics.model).tolist() == [2, 1]


def test_other_tools_have_no_such_prompt(prompt: TaskPrompt) -> None:
    with pytest.raises(InputError, match="the prompt is one of 3 prompts of topics, and PEFT's prefix tuning has one"):
        check_writable(prompt)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"length": 4}, r"topics\.0 is torch\.float32 \(2, 2, 4, 5, 8\), expected float32 \[layers, 2, heads, 4,"),
        ({"wordless": "no"}, r'topics\.wordless: expected refuse or prior, got "no"'),
        ({"length": 0}, r"topics\.length: expected an integer of at least 1, got 0"),
        ({"other": 1}, r"topics: expected an object with length, model, wordless, got"),
        ({"model": {"words": [["river"]]}}, r"path_topics: expected topics from 0 to 0"),
        ({"model": {"words": [["\ud800"], ["a"], ["b"]]}}, r"prompt.json:1: not JSON: .* an unpaired surrogate"),
    ],
)
def test_damaged_settings_are_refused(
    prompt: TaskPrompt, tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    prompt.save(tmp_path)
    file = tmp_path / "prompt.json"
    settings = json.loads(file.read_text())
    settings["topics"] |= change
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=expected):
        load_prompt(tmp_path)


def test_damaged_tensors_are_refused(prompt: TaskPrompt, tmp_path: Path) -> None:
    prompt.save(tmp_path)
    file, weights = tmp_path / "prompt.json", tmp_path / "prompt.safetensors"
    settings = json.loads(file.read_text())

    def refused(changes: dict[str, torch.Tensor | None], expected: str) -> None:
        tensors = load_file(tmp_path / "whole.safetensors") | changes
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, weights)
        file.write_text(json.dumps({**settings, "sha256": sha256_of(weights)}))
        with pytest.raises(InputError, match=expected):
            load_prompt(tmp_path)

    (tmp_path / "whole.safetensors").write_bytes(weights.read_bytes())
    refused({"topics.2": None}, r"prompts of the topics 0, 1: expected one for each of the 3 topics, topics\.0 to")
    refused({"topics.2": torch.full((2, 2, 4, 5, 8), torch.nan)}, r"topics\.2 holds numbers that are not finite")
    refused({"topics.2": torch.zeros(3, 2, 4, 5, 8)}, r"topics\.2 is torch\.float32 \(3, 2, 4, 5, 8\), expected")
    for dtype in (torch.bfloat16, torch.float16):
        expected = r"topics\.model\.log_prior is torch\.b?float16, expected integers or float32$"
        refused({"topics.model.log_prior": torch.zeros(4, dtype=dtype)}, expected)
    refused({"topics.model.log_prior": torch.zeros(3)}, r"log_prior is float32 \(3,\), expected float32 \(4,\)")
    refused({"query": torch.zeros(2, 2, 4, 5, 8)}, r"holds query, expected none as prompt\.json says")


def test_a_fixed_prompt_beside_topics_is_refused(prompt: TaskPrompt, tmp_path: Path) -> None:
    assert prompt.topics is not None
    replace(prompt, query=prompt.topics.prompts[0].clone()).save(tmp_path)
    with pytest.raises(InputError, match="since by the field topics each text has the prompt of its topic"):
        load_prompt(tmp_path)
    with pytest.raises(InputError, match=r"^3 prompts of 2 topics: expected one for each$"):
        SavedTopics(small_topics((("river",), ("bank",))), prompt.topics.prompts)
