"""The prompt of --init must fit the options of a training run; this is checked before the backbone is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from riptide.base.errors import InputError
from riptide.jobs.common.flat_options import build_options, replace_options
from riptide.jobs.common.starting import COMMAND_LINE
from riptide.jobs.training.start_prompt import check_start
from riptide.jobs.training.training_options import TrainRetriever
from riptide.retriever.options import DEFAULT_OPTIONS
from riptide.retriever.prompts.task_prompt import TaskPrompt

BACKBONE: dict[str, Any] = {
    "model_type": "bert",
    "backbone": "1",
    "weights": ["2"],
    "tokenizer": ["3"],
    "tokenizer_args": {},
    "lower_case": True,
    "head": [],
}
MATRIX = torch.zeros(2, 2, 4, 5, 8)
PROMPT = TaskPrompt(BACKBONE, DEFAULT_OPTIONS, MATRIX, MATRIX)
OPTIONS = build_options(
    TrainRetriever,
    {"store": "s", "task": "t", "backbone": "models/b", "train": "prompts", "init": "begun", "length": 5},
)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, {}),
        ({"passage": None}, {}),
        ({"passage": None}, {"sides": "query"}),
        ({}, {"position_offset": True}),
        ({"position_offset": True}, {"position_offset": True}),
    ],
)
def test_a_prompt_that_fits(change: dict[str, Any], more: dict[str, Any]) -> None:
    options = replace_options(OPTIONS, more)
    check_start(options, replace(PROMPT, **change), BACKBONE, options.prompts.length or 0)


@pytest.mark.parametrize(
    ("change", "more", "line"),
    [
        (
            {},
            {"length": 6},
            "--init begun --length 6: its prompt of the query side has 5 tokens; give --length 5, or another prompt",
        ),
        (
            {"passage": MATRIX[:, :, :, :3]},
            {"sides": "untied"},
            "--init begun --length 5: its prompt of the passage side has 3 tokens; give --length 3, or another prompt",
        ),
        (
            {"passage": None},
            {"sides": "untied"},
            "--init begun --sides untied: it has no prompt for the passage side, which training starts from; give "
            "another prompt, or other --sides",
        ),
        (
            {"position_offset": True},
            {},
            "--init begun --no-position-offset: it was trained with texts whose positions start after the prompt; give "
            "--position-offset",
        ),
        (
            {"backbone": {**BACKBONE, "model_type": "roberta", "weights": ["4"]}},
            {},
            "--init begun --backbone models/b: the prompt is for another backbone (model_type roberta instead of "
            "bert, weights differ): open the backbone that it was trained with, or train a prompt for this one",
        ),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_in_one_line(
    change: dict[str, Any], more: dict[str, Any], line: str
) -> None:
    options = replace_options(OPTIONS, more)
    with pytest.raises(InputError) as raised:
        check_start(options, replace(PROMPT, **change), BACKBONE, options.prompts.length or 0)
    assert COMMAND_LINE.render(f"{raised.value}") == line
