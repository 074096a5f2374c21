"""Reads and writes prompt folders of PEFT's prefix tuning (Hugging Face PEFT, `PrefixTuningConfig`).

    adapter_config.json         peft_type PREFIX_TUNING, and the shape of keys and values
    adapter_model.safetensors   prompt_embeddings, [l, 2 * layers * heads * head_dim]

PEFT saves what its network (`prefix_projection`) has computed, and not the network. Heads are those of keys and values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from riptide.base.errors import InputError
from riptide.retriever.interchange.backbone import REMEDY, Backbone, describe_shape
from riptide.retriever.interchange.prefix_rows import check_rows, prompt_to_rows
from riptide.retriever.interchange.state_dicts import read_state
from riptide.retriever.model.json_fields import format_json, read_count, read_field, read_object

CONFIG = "adapter_config.json"
_WEIGHTS, _OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_TENSOR = "prompt_embeddings"


def read_prefix_tuning(folder: Path, backbone: Backbone) -> torch.Tensor:
    """Reads the prompt of a PEFT folder: rows [l, 2 * layers * heads * head_dim], in the file's dtype.

    Args:
        folder: The folder with adapter_config.json.
        backbone: The backbone that the prompt must fit.

    Raises:
        InputError: If files are missing or damaged, if the adapter is no prefix tuning, or if it is for a backbone of
            another shape.
    """
    file = folder / CONFIG
    content = read_object(file, required=True)
    kind = read_field(content, "peft_type", str, file)
    if kind != "PREFIX_TUNING":
        raise InputError(
            f"{file}: peft_type: expected PREFIX_TUNING, got {format_json(kind)}: only prefix tuning puts keys and "
            "values before each layer; merge a LoRA adapter into its model, and use that as a backbone"
        )
    _check_model_type(content, file, backbone)
    if (read_count(content, "num_transformer_submodules", file) or 1) != 1:
        raise InputError(
            f"{file}: num_transformer_submodules is {content['num_transformer_submodules']}, as for an "
            "encoder-decoder model: expected 1"
        )
    length = read_count(content, "num_virtual_tokens", file)
    layers, heads, size = (
        read_count(content, name, file) for name in ("num_layers", "num_attention_heads", "token_dim")
    )
    if layers and heads and size and (layers, heads, size / heads) != tuple(backbone.shape):
        raise InputError(
            f"{file}: the prompt is for {describe_shape(layers, heads, size // heads)}, and {backbone}: {REMEDY}"
        )
    weights = folder / _WEIGHTS
    if not weights.is_file() and (folder / _OLD_WEIGHTS).is_file():
        weights = folder / _OLD_WEIGHTS
    if not weights.is_file():
        raise InputError(f"{weights}: no such file: the adapter is incomplete; copy it again")
    state = read_state([weights])
    if _TENSOR not in state:
        raise InputError(f"{weights}: no {_TENSOR} among its {len(state)} tensors: copy the adapter again")
    if others := sorted(set(state) - {_TENSOR}):
        raise InputError(
            f"{weights}: holds {others[0]} beside {_TENSOR}: an adapter that also trains layers of the "
            "model is no prompt; train it with modules_to_save=None"
        )
    rows = state[_TENSOR].detach()
    check_rows(rows, _TENSOR, weights, backbone)
    if length is not None and length != len(rows):
        raise InputError(
            f"{file}: num_virtual_tokens is {length}, and {_TENSOR} of {weights.name} has {len(rows)} "
            "rows: copy both files again"
        )
    return rows


def write_prefix_tuning(folder: Path, matrix: torch.Tensor, base_model: str | None) -> None:
    """Writes a prompt as a PEFT folder; the same prompt gives the same bytes.

    `PeftModel.from_pretrained(AutoModel.from_pretrained(BACKBONE), folder)` opens it.

    Args:
        folder: The folder; it is created.
        matrix: The prompt, [layers, 2, heads, l, head_dim].
        base_model: The name of the backbone; None: unknown.
    """
    layers, _, heads, length, head_dim = matrix.shape
    config: dict[str, Any] = {
        "auto_mapping": None,
        "base_model_name_or_path": base_model,
        "encoder_hidden_size": heads * head_dim,
        "inference_mode": True,
        "init_weights": None,
        "modules_to_save": None,
        "num_attention_heads": heads,
        "num_layers": layers,
        "num_transformer_submodules": 1,
        "num_virtual_tokens": length,
        "peft_type": "PREFIX_TUNING",
        "prefix_projection": False,
        "revision": None,
        "task_type": "FEATURE_EXTRACTION",
        "token_dim": heads * head_dim,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({_TENSOR: prompt_to_rows(matrix)}, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _check_model_type(content: dict[str, Any], file: Path, backbone: Backbone) -> None:
    """Raises InputError if auto_mapping names a transformers module of another architecture than the backbone's."""
    mapping = read_field(content, "auto_mapping", dict, file, {})
    module = read_field(mapping, "parent_library", str, file, "")
    actual = type(backbone.model).__module__
    if module.startswith("transformers.models.") and module.split(".")[2] != actual.split(".")[2]:
        raise InputError(
            f"{file}: the prompt is for a backbone of {module.split('.')[2]}, and {backbone.name} is of "
            f"{actual.split('.')[2]}: {REMEDY}"
        )
