"""Reads prompts of DPTDR's authors (FreedomIntelligence/DPTDR) in the layout of P-tuning v2's prefix encoder.

Their trainer saves, with `save_pretrained`, either one model for both sides or the folders query_model and
passage_model (untied). A model's state dict holds the backbone and

    prefix_encoder.embedding.weight   [l, 2 * layers * hidden]: the prompt; or, with --prefix_projection,
    prefix_encoder.embedding.weight   [l, hidden], and the network that computes the prompt:
    prefix_encoder.trans.0.*          a linear layer to prefix_hidden_size, then tanh
    prefix_encoder.trans.2.*          a linear layer to 2 * layers * hidden

A state dict of the whole dual encoder has the prefixes lm_q. and lm_p.; one of the prefix encoder alone has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

from riptide.base.errors import InputError
from riptide.retriever.interchange.backbone import REMEDY, Backbone
from riptide.retriever.interchange.prefix_rows import check_numbers, check_rows
from riptide.retriever.interchange.state_dicts import read_state
from riptide.retriever.model.json_fields import read_count, read_object
from riptide.retriever.model.model_folder import weight_files
from riptide.retriever.options import SIDES, Side

FOLDERS: dict[Side, str] = {"query": "query_model", "passage": "passage_model"}
_PREFIXES: dict[str | None, Side | None] = {"lm_q.": "query", "lm_p.": "passage", None: None}
_NAME = re.compile(r"(?:module\.)?(lm_[qp]\.)?(?:prefix_encoder\.)?(embedding\.weight|trans\.[02]\.(?:weight|bias))")
_EMBEDDING, _NETWORK = "embedding.weight", ("trans.0.weight", "trans.0.bias", "trans.2.weight", "trans.2.bias")


class CheckpointPrompts(NamedTuple):
    """The prompts of both sides in a checkpoint, and the number of backbone tensors that were compared.

    Attributes:
        rows_by_side: Rows [l, 2 * layers * heads * head_dim] of each side; the same tensor if the sides are tied.
        num_equal_tensors: The number of tensors of the backbone, all equal to its own; see `Backbone.compare_weights`.
    """

    rows_by_side: dict[Side, torch.Tensor]
    num_equal_tensors: int


def read_dptdr(path: Path, backbone: Backbone) -> CheckpointPrompts:
    """Reads the prompts in a checkpoint of DPTDR's authors.

    Args:
        path: A state dict, or the folder of a model, or a folder with query_model or passage_model or both.
        backbone: The backbone, whose weights must be those of the checkpoint if it holds any.

    Returns:
        The prompts of the sides that the checkpoint has.

    Raises:
        InputError: If files are missing or damaged, or if the prompt is for another backbone.
    """
    folders = {side: path / name for side, name in FOLDERS.items() if (path / name).is_dir()}
    if not folders:
        return _read_model(path, backbone)
    rows_by_side: dict[Side, torch.Tensor] = {}
    num_equal_tensors = 0
    for side, folder in folders.items():
        model_prompts = _read_model(folder, backbone)
        rows_by_side[side] = model_prompts.rows_by_side[side]
        num_equal_tensors += model_prompts.num_equal_tensors
    return CheckpointPrompts(rows_by_side, num_equal_tensors)


def _read_model(path: Path, backbone: Backbone) -> CheckpointPrompts:
    """Reads one state dict: a model for both sides, a dual encoder, or a prefix encoder."""
    files = weight_files(path) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: no model.safetensors and no pytorch_model.bin: give the folder of a checkpoint")
    config_file = path / "config.json"
    config = read_object(config_file) if path.is_dir() else {}
    backbone.check_config(config, config_file)
    state = read_state(files)
    encoders: dict[Side | None, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        if match := _NAME.fullmatch(name):
            encoders.setdefault(_PREFIXES[match[1]], {})[match[2]] = value
    if not encoders:
        hint = "; this is a tensor of PEFT: give its folder" if "prompt_embeddings" in state else ""
        raise InputError(
            f"{files[0]}: no prefix_encoder.embedding.weight among its {len(state)} tensors, so not a "
            f"deep prompt of DPTDR{hint}"
        )
    num_equal_tensors = backbone.compare_weights(state, files[0])
    rows = {side: _read_prompt_rows(tensors, files[0], backbone) for side, tensors in encoders.items()}
    length = read_count(config, "pre_seq_len", config_file)
    for tensor in rows.values():
        if length is not None and length != len(tensor):
            raise InputError(
                f"{config_file}: pre_seq_len is {length}, and the prompt of {files[0]} has {len(tensor)} "
                "tokens: copy the checkpoint again"
            )
    if None in rows:
        if len(rows) > 1:
            raise InputError(f"{files[0]}: holds a prompt for both sides and one for a side: expected one of these")
        return CheckpointPrompts(dict.fromkeys(SIDES, rows[None]), num_equal_tensors)
    rows_by_side = {side: rows[side] for side in SIDES if side in rows}
    # The state dict may contain one model under two names; then the sides are tied.
    if len(rows_by_side) == 2 and torch.equal(rows_by_side["query"], rows_by_side["passage"]):
        rows_by_side["passage"] = rows_by_side["query"]
    return CheckpointPrompts(rows_by_side, num_equal_tensors)


def _read_prompt_rows(tensors: Mapping[str, torch.Tensor], file: Path, backbone: Backbone) -> torch.Tensor:
    """Returns the prompt vectors of a prefix encoder; computes them if an MLP reparametrises it."""
    network = [name for name in _NETWORK if name in tensors]
    needed = (_EMBEDDING, *_NETWORK) if network else (_EMBEDDING,)
    if missing := [name for name in needed if name not in tensors]:
        raise InputError(
            f"{file}: no prefix_encoder.{missing[0]}, and {', '.join(tensors)} are there: copy the checkpoint again"
        )
    if not network:
        rows = tensors[_EMBEDDING].detach()
        check_rows(rows, f"prefix_encoder.{_EMBEDDING}", file, backbone)
        return rows
    for name in needed:
        check_numbers(tensors[name], f"prefix_encoder.{name}", file)
    embedding, *layers = (tensors[name].detach().float() for name in needed)
    shapes = [tuple(layer.shape) for layer in layers]
    hidden, width = embedding.shape[-1] if embedding.ndim else 0, shapes[0][0] if shapes[0] else 0
    expected = [(width, hidden), (width,), (backbone.num_columns, width), (backbone.num_columns,)]
    if embedding.ndim != 2 or not len(embedding) or shapes != expected:
        raise InputError(
            f"{file}: prefix_encoder.trans.0 and trans.2 are {', '.join(str(list(shape)) for shape in shapes)} over "
            f"an embedding of {list(embedding.shape)}, and {backbone}, for which they are "
            f"{', '.join(str(list(shape)) for shape in expected)}: {REMEDY}"
        )
    rows = functional.linear(torch.tanh(functional.linear(embedding, layers[0], layers[1])), layers[2], layers[3])
    check_rows(rows, "the prompt that prefix_encoder.trans computes", file, backbone)
    return rows
