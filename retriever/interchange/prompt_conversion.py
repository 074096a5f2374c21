"""Converts prompts of DPTDR's authors and PEFT to a TaskPrompt, and a TaskPrompt to PEFT folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.forward.pooling import PooledBackbone
from riptide.retriever.interchange.backbone import Backbone
from riptide.retriever.interchange.dptdr import FOLDERS, read_dptdr
from riptide.retriever.interchange.prefix_rows import prompt_from_rows
from riptide.retriever.interchange.prefix_tuning import CONFIG, read_prefix_tuning, write_prefix_tuning
from riptide.retriever.model.model_folder import weight_files
from riptide.retriever.model.recipe import Recipe, settings_of
from riptide.retriever.options import SIDES, EncoderOptions, Side
from riptide.retriever.prompts.task_prompt import TaskPrompt, backbone_of, check_prompt_positions

PromptFormat = Literal["dptdr", "peft"]
_WITHOUT_PREFIX_TUNING = ("t5", "mt5", "umt5")


@dataclass(frozen=True)
class ImportedPrompt:
    """A prompt read from the files of another tool.

    Attributes:
        format: The kind of the files.
        query: [layers, 2, heads, l, head_dim]; None if the files have no prompt for queries.
        passage: The same for passages; the same tensor if the sides are tied.
        num_equal_tensors: The number of tensors of a backbone in the files, all equal to those of the backbone; 0: the
            files hold none, so only the shape shows whether the prompt is for the backbone.
    """

    format: PromptFormat
    query: torch.Tensor | None
    passage: torch.Tensor | None
    num_equal_tensors: int


def read_prompt(path: Path, backbone: Backbone) -> ImportedPrompt:
    """Reads a prompt of DPTDR's authors or of PEFT from a file or folder.

    Args:
        path: DPTDR: a state dict, the folder of a model, or a folder with query_model and passage_model. PEFT: the
            folder of one adapter, which serves both sides, or a folder with query/ and passage/ or one of them.
        backbone: The backbone that the prompt must fit.

    Raises:
        InputError: If files are missing or damaged, or if the prompt is for another backbone.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: give a checkpoint of DPTDR or a folder of PEFT")
    adapters: dict[Side, Path] = dict.fromkeys(SIDES, path)
    if not (path / CONFIG).is_file():
        adapters = {side: path / side for side in SIDES if (path / side / CONFIG).is_file()}
    kind: PromptFormat = "peft" if adapters else "dptdr"
    if adapters:
        read = {folder: read_prefix_tuning(folder, backbone) for folder in adapters.values()}
        rows, num_equal_tensors = {side: read[folder] for side, folder in adapters.items()}, 0
    else:
        if path.is_dir() and not weight_files(path) and not any((path / name).is_dir() for name in FOLDERS.values()):
            raise InputError(
                f"{path}: no {CONFIG}, as PEFT writes it, and no pytorch_model.bin, model.safetensors or query_model, "
                "as DPTDR's trainer writes them: give the folder of a prompt"
            )
        rows, num_equal_tensors = read_dptdr(path, backbone)
    matrices = {id(tensor): prompt_from_rows(tensor, backbone.shape) for tensor in rows.values()}
    query, passage = (matrices[id(rows[side])] if side in rows else None for side in SIDES)
    return ImportedPrompt(kind, query, passage, num_equal_tensors)


def make_task_prompt(
    imported: ImportedPrompt,
    backbone: Backbone,
    recipe: Recipe,
    options: EncoderOptions,
    *,
    side: Literal["query", "both"] = "both",
    position_offset: bool,
) -> TaskPrompt:
    """Converts an imported prompt to a TaskPrompt for an encoder.

    Args:
        imported: The prompt from the files of another tool.
        backbone: The backbone that it was read for.
        recipe: The recipe of the backbone with the options.
        options: How the texts become vectors.
        side: "query": passages have no prompt, and the one for them is left out; "both": both sides have one.
        position_offset: The positions of a text start after the prompt, as they do in the code of DPTDR's authors and
            in PEFT's.

    Raises:
        InputError: If the files have no prompt for a side, if the sides differ in dtype, or if the backbone has too few
            positions.
    """
    query, passage = imported.query, None if side == "query" else imported.passage
    if query is None or (side == "both" and passage is None):
        lacking, remedy = ("queries", "") if query is None else ("passages", f", or give {Parameter('side', 'query')}")
        raise InputError(f"the files hold no prompt for {lacking}: expected one for each side{remedy}")
    if passage is not None and passage.dtype != query.dtype:
        raise InputError(
            f"the prompt of queries is {query.dtype}, and that of passages {passage.dtype}: save both in one dtype"
        )
    pooled = PooledBackbone.over(backbone.model, recipe)
    prompt = TaskPrompt(backbone_of(settings_of(recipe, options)), options, query, passage, position_offset)
    if position_offset:
        pooled.check_offsets()
    check_prompt_positions(recipe, {side: prompt.offset(side) for side in SIDES})
    return prompt


def check_writable(prompt: TaskPrompt) -> None:
    """Raises InputError if a prompt cannot be written in PEFT's format."""
    if prompt.synthesis is not None:
        raise InputError(
            "the prompt is computed from each query, and PEFT's prefix tuning has one prompt for all "
            "texts: it cannot be written for PEFT"
        )
    if prompt.topics is not None:
        raise InputError(
            f"the prompt is one of {prompt.topics.model.num_topics} prompts of topics, and PEFT's prefix tuning has "
            "one prompt for all texts: it cannot be written for PEFT"
        )
    if (kind := prompt.backbone.get("model_type")) in _WITHOUT_PREFIX_TUNING:
        raise InputError(
            f"the prompt is for a backbone of type {kind}: PEFT's prefix tuning puts its prompts into the "
            "decoder as well, so it cannot open this one"
        )


def write_prompt(folder: Path, prompt: TaskPrompt, base_model: str | None) -> None:
    """Writes a prompt for PEFT: one adapter in `folder` if the sides are tied, otherwise query/ and passage/.

    A side without a prompt has no folder. The same prompt gives the same bytes.

    Args:
        folder: The folder; it is created.
        prompt: The prompt.
        base_model: The name of the backbone; None: unknown.

    Raises:
        InputError: If PEFT has no prefix tuning for the encoder of such a backbone, or if the prompt depends on the
            text.
    """
    check_writable(prompt)
    if prompt.query is not None and prompt.query is prompt.passage:
        write_prefix_tuning(folder, prompt.query, base_model)
        return
    for side in SIDES:
        matrix = prompt.fixed_matrix(side)
        if matrix is not None:
            write_prefix_tuning(folder / side, matrix, base_model)
