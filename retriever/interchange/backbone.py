"""The backbone of a prompt from another tool: opens it and checks that the prompt fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from riptide.base.errors import InputError
from riptide.retriever.encoding.backbones import is_pooler, load_backbone
from riptide.retriever.forward.attention import enable_prompts
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.model.recipe import Recipe

REMEDY = "give the backbone that it was trained with"
# Prefixes of tensor names: from distributed training, and from a separate model per side.
_WRAPPERS = re.compile(r"(module\.)?(lm_[qp]\.)?")
_ROUNDING = 2.0**-8  # maximum relative difference of equal weights when one file stores them in bfloat16


@dataclass(frozen=True)
class Backbone:
    """A loaded backbone, against which the prompts of other tools are checked.

    Attributes:
        name: The name for messages.
        model: The model of transformers, float32.
        shape: The shape of the keys and values of its prompts.
    """

    name: str
    model: Any
    shape: PromptShape

    @property
    def num_columns(self) -> int:
        """The number of values per prompt token: keys and values of all layers."""
        return 2 * self.shape.layers * self.shape.heads * self.shape.head_dim

    def __str__(self) -> str:
        return f"{self.name} has {describe_shape(*self.shape)}"

    def check_config(self, content: Mapping[str, Any], file: Path) -> None:
        """Raises InputError if a config.json has another architecture or other sizes than the backbone.

        Args:
            content: The content of the file; fields that it lacks are not compared.
            file: The file.
        """
        names = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size")
        actual = {name: getattr(self.model.config, name, None) for name in names}
        if differ := [name for name in names if name in content and content[name] != actual[name]]:
            stored = ", ".join(f"{name} {content[name]}" for name in differ)
            expected = ", ".join(f"{name} {actual[name]}" for name in differ)
            raise InputError(
                f"{file}: the prompt is for a backbone of {stored}, and {self.name} has {expected}: {REMEDY}"
            )

    def compare_weights(self, state: Mapping[str, torch.Tensor], file: Path) -> int:
        """Counts the equal backbone weights of a checkpoint, except poolers. Raises InputError if a weight differs.

        Args:
            state: The tensors of the checkpoint by name.
            file: The file with the checkpoint.

        Returns:
            The number of tensors compared, all equal; 0 if the checkpoint holds no weights of a backbone.

        Raises:
            InputError: If a tensor differs; names it.
        """
        weights, prefix, num_equal_tensors = self.model.state_dict(), f"{self.model.base_model_prefix}.", 0
        for name, value in state.items():
            plain = _WRAPPERS.sub("", name, count=1)
            expected = weights.get(plain.removeprefix(prefix)) if plain.startswith(prefix) else None
            if expected is None or is_pooler(plain) or not expected.is_floating_point():
                continue
            is_comparable = value.shape == expected.shape and value.is_floating_point()
            if not is_comparable or not torch.allclose(value.float(), expected.float(), rtol=_ROUNDING, atol=1e-7):
                raise InputError(
                    f"{file}: its {name} is not that of {self.name}: the prompt is for another backbone, {REMEDY}"
                )
            num_equal_tensors += 1
        return num_equal_tensors


def open_backbone(name: str, recipe: Recipe) -> Backbone:
    """Loads a backbone in float32 for the conversion of prompts.

    Args:
        name: The name for messages.
        recipe: The recipe of the model folder, from `read_recipe`.

    Raises:
        InputError: If the weights are damaged, or if no prompts can be put into the model.
    """
    model = load_backbone(recipe, torch.float32).eval()
    return Backbone(name, model, enable_prompts(model))


def describe_shape(layers: int, heads: int, head_dim: int) -> str:
    """Formats the shape of keys and values for messages."""
    return f"{layers} layers, {heads} heads of {head_dim}"
