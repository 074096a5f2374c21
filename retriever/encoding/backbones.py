"""Loads a backbone with its pooling, or builds it with new weights to inspect its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from riptide.retriever.encoding.language_model import load_masked_language_model, make_empty_masked_language_model
from riptide.retriever.encoding.sparse_model import SpladePooled
from riptide.retriever.forward.pooling import PooledBackbone
from riptide.retriever.model.configuration import load_config
from riptide.retriever.model.failures import readable_errors
from riptide.retriever.model.libraries import import_transformers
from riptide.retriever.model.modules import DenseLayer
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.model.weights import load_model

_PROBE_LENGTH = 4  # tokens of the longer text with which a backbone is tried
_ENCODERS_OF_SEQ2SEQ = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


@dataclass(frozen=True)
class BackboneLoader:
    """The functions that load a backbone, build it with new weights, and add its pooling.

    Attributes:
        load: Loads the model, as `load_backbone` does.
        empty: Returns the model with new weights, for looking at its layers.
        pool: Puts the pooling over the model.
        is_eager: Whether its batches are neither packed nor compiled.
    """

    load: Callable[..., Any]
    empty: Callable[[Recipe], Any]
    pool: Callable[[Any, Recipe], PooledBackbone]
    is_eager: bool = False


def load_backbone(recipe: Recipe, dtype: torch.dtype, trust_remote_code: bool = False, **config: Any) -> Any:
    """Loads a backbone without a language-model head or a decoder.

    Args:
        recipe: The recipe of the model folder, from `read_recipe`.
        dtype: The dtype of the weights.
        trust_remote_code: Whether code in the folder may run.
        config: Values that override those of config.json.

    Raises:
        InputError: If the weights are damaged, incomplete, or hold more layers than config.json says. A pooler may be
            missing, because no vector depends on it.
    """
    transformers = import_transformers()

    kind = getattr(transformers, _ENCODERS_OF_SEQ2SEQ.get(recipe.model_type, "AutoModel"))
    settings = {**recipe.config_args, **config}
    model, _ = load_model(
        kind, recipe.backbone, dtype=dtype, unused=[is_pooler], trust_remote_code=trust_remote_code, **settings
    )
    return model


def empty_backbone(recipe: Recipe) -> Any:
    """Returns a backbone with new weights, whose layers can be inspected; the recipe is as in `load_backbone`."""
    transformers = import_transformers()

    kind = getattr(transformers, _ENCODERS_OF_SEQ2SEQ.get(recipe.model_type, "AutoModel"))
    config = load_config(recipe.backbone, **recipe.config_args)
    return kind.from_config(config) if kind is transformers.AutoModel else kind(config)


def is_pooler(name: str) -> bool:
    """Whether a tensor belongs to a pooler: a layer over the first token that sentence encoders do not use."""
    return any(piece.startswith("pooler") for piece in name.split("."))


_PLAIN_LOADER = BackboneLoader(load_backbone, empty_backbone, PooledBackbone.over)
_SPLADE_LOADER = BackboneLoader(
    load_masked_language_model, make_empty_masked_language_model, SpladePooled, is_eager=True
)
POOLINGS: dict[str, BackboneLoader] = {"splade": _SPLADE_LOADER}
"""The kind of backbone of each pooling that is not over a plain one."""


def backbone_loader(recipe: Recipe) -> BackboneLoader:
    """Returns the functions that open the backbone for the pooling of a recipe."""
    return POOLINGS.get(recipe.pooling, _PLAIN_LOADER)


def open_pooled(recipe: Recipe, dtype: torch.dtype, trust_remote_code: bool = False, **config: Any) -> PooledBackbone:
    """Loads a backbone with its pooling, and runs it once on two short texts; arguments as in `load_backbone`.

    Raises:
        InputError: As `load_backbone` does; for pooling "splade" without a masked-language-model head; for settings
            with which the layers cannot run, for example a sliding window of 0 tokens.
    """
    kind = backbone_loader(recipe)
    pooled = kind.pool(kind.load(recipe, dtype, trust_remote_code, **config), recipe)
    check_layers(pooled, load_config(recipe.backbone, trust_remote_code=trust_remote_code), recipe.backbone)
    return pooled


def check_layers(forward: Callable[[torch.Tensor, torch.Tensor], object], config: Any, folder: Path) -> None:
    """Runs a model once on two short texts. Raises InputError for settings with which its layers cannot run.

    Args:
        forward: Runs the model: (ids int64 [b, n], lengths int64 [b]).
        config: transformers' configuration.
        folder: The model folder.
    """
    padding = getattr(config, "pad_token_id", None)
    ids = torch.full((2, _PROBE_LENGTH), int(padding == 0))  # no padding, which some models do not encode
    with readable_errors(folder / "config.json"), torch.no_grad():
        forward(ids, torch.tensor([_PROBE_LENGTH, 1]))


def encoder_bytes(recipe: Recipe) -> int:
    """Returns the size in bytes of a float32 encoder, including its language-model head or its dense layers.

    Loads no weights; the recipe is as in `load_backbone`.
    """
    with torch.device("meta"):
        model = backbone_loader(recipe).empty(recipe)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    size = recipe.pooled_dim
    for step in recipe.head:
        if isinstance(step, DenseLayer):
            numbers += (size + step.bias) * step.size
            size = step.size
    return 4 * numbers
