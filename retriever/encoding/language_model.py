"""Masked language models of transformers: tests for their heads, loads them, and extracts the head alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.model.configuration import load_config
from riptide.retriever.model.libraries import import_transformers
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.model.weights import load_model


def has_head(config: Any) -> bool:
    """Whether transformers has a masked language model for the architecture of this configuration."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_MASKED_LM_MAPPING


def make_head_test(config: Any) -> Callable[[str], bool]:
    """Returns a function that tells by a tensor's name whether it belongs to the head of the masked language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    prefix = f"{MODEL_FOR_MASKED_LM_MAPPING[type(config)].base_model_prefix}."
    return lambda name: not name.startswith(prefix)


def load_masked_language_model(
    recipe: Recipe, dtype: torch.dtype, trust_remote_code: bool = False, **settings: Any
) -> Any:
    """Loads a backbone with its masked-language-model head.

    Args:
        recipe: The recipe of the model folder, from `read_recipe`.
        dtype: The dtype of the weights.
        trust_remote_code: Whether code in the folder may run.
        settings: Values that override those of config.json.

    Raises:
        InputError: If the weights are damaged or incomplete, or if the backbone has no such head.
    """
    transformers = import_transformers()

    model, lacking = load_model(
        transformers.AutoModelForMaskedLM,
        recipe.backbone,
        dtype=dtype,
        fresh=[make_head_test(_load_config_with_head(recipe, trust_remote_code))],
        trust_remote_code=trust_remote_code,
        **{**recipe.config_args, **settings},
    )
    if lacking:
        raise InputError(
            f"{recipe.backbone}: {Parameter('pooling', 'splade')} needs a masked-language-model head, and the weights "
            f"lack it ({lacking[0]}): use the folder of a masked language model, or pretrain a head with objective mlm"
        )
    return model


def make_empty_masked_language_model(recipe: Recipe) -> Any:
    """Builds a backbone and its head with new weights. Raises InputError if the architecture has no such head."""
    transformers = import_transformers()

    return transformers.AutoModelForMaskedLM.from_config(_load_config_with_head(recipe))


def _load_config_with_head(recipe: Recipe, trust_remote_code: bool = False) -> Any:
    """Loads the configuration of a masked language model; raises InputError for another architecture."""
    config = load_config(recipe.backbone, trust_remote_code=trust_remote_code, **recipe.config_args)
    if not has_head(config) or config.is_encoder_decoder:
        raise InputError(
            f"{recipe.backbone}: {Parameter('pooling', 'splade')} needs a masked-language-model head, and a "
            f"{config.model_type} has none: use a masked language model, for example BERT"
        )
    return config


def extract_language_model_head(model: Any) -> nn.Module:
    """Returns the head of a language model: `head(inputs_embeds=states).logits` are the logits of last hidden states.

    It is the model itself, with any structure, over a stand-in for its backbone, and shares all parameters with it.
    """
    head: nn.Module = replace_submodule(model, model.base_model, _PassThrough())
    return head


def replace_submodule(module: Any, old: Any, new: nn.Module) -> Any:
    """Returns a copy of a module with one submodule replaced; only modules on the path to it are copied.

    This function alone uses `_modules`: a shallow copy of a module shares its table of parts, and torch has no public
    function that gives it another one.
    """
    if module is old:
        return new
    parts = {
        name: None if part is None else replace_submodule(part, old, new) for name, part in module._modules.items()
    }
    if all(parts[name] is part for name, part in module._modules.items()):
        return module
    copied = copy.copy(module)
    copied._modules = parts
    return copied


class _PassThrough(nn.Module):
    """A backbone that returns its input embeddings as the last hidden state."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)
