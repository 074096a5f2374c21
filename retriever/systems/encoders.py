"""The encoders of a dual system, one for both sides or one per side: opens them for training and saves them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.encoding.backbones import open_pooled
from riptide.retriever.encoding.saving import save_encoder, with_original_values
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.kernels import attention_dropouts, remove_dropout, swap_dropout
from riptide.retriever.forward.pooling import PooledBackbone, VectorHead
from riptide.retriever.model.configuration import load_config
from riptide.retriever.model.recipe import Recipe, read_recipe, with_projection
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import SIDES, EncoderOptions, Side
from riptide.retriever.systems.lora import FOLDER as ADAPTER_FOLDER
from riptide.retriever.systems.lora import add_adapter, merge_adapter, save_adapter
from riptide.retriever.training.system import checkpoint_activations


class Encoders:
    """The encoder of each side: tied sides share one, and sides "query" trains none for passages.

    A frozen backbone is stored in the dtype of the forward pass, a trained one in float32. There is no attention
    dropout, which prevents fused kernels.

    Attributes:
        by_side: The backbone with its pooling, and the head, by side.

    Args:
        recipe: How text becomes a vector.
        options: Options of the encoder.
        tuning: Options of the trained weights.
        device: The device of the weights.
        dtype: The dtype of the forward and backward pass.
        checkpointing: Use activation checkpointing.
    """

    def __init__(
        self,
        recipe: Recipe,
        options: EncoderOptions,
        tuning: TuneOptions,
        *,
        device: torch.device,
        dtype: torch.dtype,
        checkpointing: bool,
    ):
        self.recipe, self.options, self.tuning, self.device, self.dtype = recipe, options, tuning, device, dtype
        self._dropouts = attention_dropouts(load_config(recipe.backbone, **recipe.config_args))
        self.by_side: dict[Side, tuple[PooledBackbone, VectorHead]] = dict.fromkeys(SIDES, self._open())
        if tuning.method != "prompt" and tuning.sides == "untied":
            self.by_side["passage"] = self._open()
        elif tuning.method != "prompt" and tuning.sides == "query":
            del self.by_side["passage"]  # Stored passage vectors need no passage encoder.
        if checkpointing:
            for model in {model for model, _ in self.by_side.values()}:
                checkpoint_activations(model.backbone)

    def save(self, folder: Path) -> None:
        """Saves sentence-transformers models: one, or untied ones in `query/` and `passage/`.

        The model of an adapter has it merged into its weights, and in its folder `adapter/` in PEFT's format.
        """
        for side, (model, head) in self.by_side.items():
            if self.tuning.sides == "tied" and side == "passage":
                continue  # Tied sides share the encoder that is already saved.
            place = folder if self.tuning.sides == "tied" else folder / side
            if self.tuning.method == "lora":
                save_adapter(place / ADAPTER_FOLDER, model.backbone)
                merged = open_pooled(self.recipe, torch.float32)
                merge_adapter(merged.backbone, place / ADAPTER_FOLDER)
                save_encoder(place, self.recipe, merged.model_to_save)
                continue
            with with_original_values(model.model_to_save.config, self._dropouts):
                save_encoder(place, self.recipe, model.model_to_save, head)

    def _open(self) -> tuple[PooledBackbone, VectorHead]:
        """Opens an encoder with the backbone's weights."""
        frozen = self.tuning.method != "finetune"
        off: dict[str, Any] = dict.fromkeys(self._dropouts, 0.0)
        pooled = open_pooled(self.recipe, self.dtype if frozen else torch.float32, **off).to(self.device)
        pooled.requires_grad_(not frozen)
        backbone: Any = pooled.backbone
        head = (
            VectorHead(self.recipe, self.options.dimension, self.tuning.seed).to(self.device).requires_grad_(not frozen)
        )
        swap_dropout(pooled)
        if not self.tuning.dropout:
            remove_dropout(pooled)
        if self.tuning.lora is not None:
            add_adapter(backbone, self.tuning.lora)
        if self.tuning.method != "prompt":
            # Architectures without support for prompts train with torch's own attention.
            with contextlib.suppress(InputError):
                enable_prompts(backbone)
        return pooled, head


def trained_recipe(folder: Path, encoder: EncoderOptions, tuning: TuneOptions) -> Recipe:
    """Returns the recipe of the trained system: that of the backbone's folder, plus a new projection if requested.

    Raises:
        InputError: If the folder cannot be used, or has layers after pooling already, or if vectors would be cut.
    """
    recipe = read_recipe(folder, encoder)
    if tuning.projection is None:
        return recipe
    if recipe.is_sparse:
        raise InputError(
            f"{Parameter('projection', tuning.projection)}, {Parameter('pooling', recipe.pooling)}: sparse vectors "
            "have a number for each word, which a layer would mix: leave out the projection"
        )
    if encoder.dimension is not None:
        raise InputError(
            f"{Parameter('projection', tuning.projection)}, {Parameter('dimension', encoder.dimension)}: vectors of a "
            "new layer are not cut: give the projection the wanted size"
        )
    return with_projection(recipe, tuning.projection)
