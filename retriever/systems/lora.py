"""Adds a LoRA adapter to a backbone, saves it in PEFT's format, and merges it into the backbone's weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.process.extras import require
from riptide.retriever.encoding.backbones import empty_backbone, is_pooler
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.options.lora import LoraOptions

FOLDER = "adapter"  # sub-folder of a merged model that holds its adapter
_ALL_LINEAR = "all-linear"
_NAME = "default"  # PEFT's name for the first adapter of a model


def import_peft() -> Any:
    """Imports the package peft and returns it. Raises InputError if peft is not installed."""
    require("LoRA", "peft")
    import peft

    return peft


def add_adapter(backbone: Any, options: LoraOptions) -> None:
    """Adds a new adapter to a transformers model, and freezes all other parameters.

    The adapter is float32, B is 0, and A depends on torch's seed.

    Args:
        backbone: The model, which is changed.
        options: The options of the adapter.

    Raises:
        InputError: If PEFT is missing, or if the model has no linear layers of these names.
    """
    peft = import_peft()
    linear = [name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)]
    targets: Any = None if options.targets is None else list(options.targets)
    poolers = None
    if options.targets == (_ALL_LINEAR,):
        targets, poolers = _ALL_LINEAR, [name for name in linear if is_pooler(name)] or None
    config = peft.LoraConfig(
        task_type="FEATURE_EXTRACTION",
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        exclude_modules=poolers,
    )
    try:
        peft.inject_adapter_in_model(config, backbone, _NAME)
    except ValueError as error:
        named = "PEFT's default" if options.targets is None else ", ".join(options.targets)
        ends = sorted({name.rpartition(".")[2] for name in linear if not is_pooler(name)})
        raise InputError(
            f"{Parameter('lora_targets', named)}: a {type(backbone).__name__} has no such linear layers: give "
            f"{_ALL_LINEAR}, or some of {', '.join(ends)}"
        ) from error
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()


def adapter_bytes(recipe: Recipe, options: LoraOptions) -> int:
    """Returns the size in bytes of a backbone's adapter, without loading weights.

    Args:
        recipe: The recipe of the backbone.
        options: The options of the adapter.

    Raises:
        InputError: As `add_adapter` does.
    """
    with torch.device("meta"):
        backbone = empty_backbone(recipe)
        add_adapter(backbone, options)
    return sum(4 * value.numel() for name, value in backbone.named_parameters() if is_adapter(name))


def is_adapter(name: str) -> bool:
    """Whether a parameter with this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def save_adapter(folder: Path, backbone: Any) -> None:
    """Saves the adapter of a model in PEFT's format; the same adapter gives the same bytes.

    `PeftModel.from_pretrained(AutoModel.from_pretrained(BACKBONE), folder)` opens it.

    Args:
        folder: The folder; it is created.
        backbone: A model with an adapter from `add_adapter`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": parameter.detach().float().cpu().contiguous()
        for name, parameter in backbone.named_parameters()
        if is_adapter(name)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    # PEFT saves a set of layers in an order that differs between processes, so sets are sorted.
    config = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in backbone.peft_config[_NAME].to_dict().items()
    }
    config |= {"inference_mode": True, "base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def merge_adapter(backbone: Any, folder: Path) -> Any:
    """Returns a model with the adapter merged into its weights: W + (alpha / rank) B A.

    Args:
        backbone: The backbone without the adapter; it is changed.
        folder: The adapter, as `save_adapter` or PEFT writes it.

    Raises:
        InputError: If PEFT is missing.
    """
    peft = import_peft()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads deprecated attributes of transformers
        return peft.PeftModel.from_pretrained(backbone, str(folder)).merge_and_unload(safe_merge=True)
