"""Saves a trained encoder as a folder that transformers, sentence-transformers and Encoder can load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from riptide.retriever.encoding.backbones import open_pooled
from riptide.retriever.forward.pooling import VectorHead
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.model.modules import POOLING_MODES, DenseLayer
from riptide.retriever.model.recipe import Recipe, read_recipe
from riptide.retriever.model.vocabulary import append_eos_token, load_tokenizer
from riptide.retriever.options import EncoderOptions


def save_model(model: Any, folder: Path) -> None:
    """Saves a transformers model; DeepSpeed, which transformers imports for it, prints no line about a missing GPU."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    model.save_pretrained(folder)


def save_encoder(folder: Path, recipe: Recipe, backbone: Any, head: VectorHead | None = None) -> None:
    """Saves a backbone in the sentence-transformers layout, with the recipe's pooling, head, prefixes and lengths.

    Args:
        folder: The folder; it is created.
        recipe: How the model turns text into vectors.
        backbone: The backbone. If the recipe's vectors are sparse, it has its masked-language-model head, and the
            layout is that of SparseEncoder.
        head: The trained head, if the recipe's head has weights; needed if a layer of it is new.
    """
    save_model(backbone, folder)
    tokenizer = load_tokenizer(recipe.backbone, vocabulary_size=recipe.vocabulary_size, **recipe.tokenizer_args)
    if recipe.append_eos:
        append_eos_token(tokenizer, recipe.backbone, "append_eos")
    tokenizer.save_pretrained(folder)
    layout = _layout(recipe)
    modules = [("", layout.transformer), (f"1_{layout.pooling}", layout.pooling)]
    _write(folder / f"1_{layout.pooling}" / "config.json", layout.settings)
    size = recipe.hidden
    for place, step in enumerate(recipe.head, 2):
        if isinstance(step, DenseLayer):
            modules.append((f"{place}_Dense", "Dense"))
            if step.folder is not None:
                shutil.copytree(recipe.folder / step.folder, folder / f"{place}_Dense")
            else:
                _write(
                    folder / f"{place}_Dense" / "config.json",
                    {
                        "in_features": size,
                        "out_features": step.size,
                        "bias": step.bias,
                        "activation_function": f"torch.nn.modules.linear.{step.activation}",
                    },
                )
            size = step.size
            if head is not None:
                (folder / f"{place}_Dense" / "pytorch_model.bin").unlink(missing_ok=True)
                layers = head.steps[place - 2]
                assert isinstance(layers, nn.Sequential)
                save_file(
                    {
                        f"linear.{name}": value.detach().cpu().contiguous()
                        for name, value in layers[0].state_dict().items()
                    },
                    folder / f"{place}_Dense" / "model.safetensors",
                )
        else:
            modules.append((f"{place}_Normalize", "Normalize"))
            (folder / f"{place}_Normalize").mkdir()
    lengths = {"max_seq_length": max(recipe.query_length, recipe.passage_length)}
    if recipe.query_length != recipe.passage_length:
        lengths |= {"query_length": recipe.query_length, "document_length": recipe.passage_length}
    _write(folder / "sentence_bert_config.json", {**lengths, "do_lower_case": recipe.lower_case})
    _write(
        folder / "modules.json",
        [
            {"idx": place, "name": str(place), "path": path, "type": f"{layout.package}.{kind}"}
            for place, (path, kind) in enumerate(modules)
        ],
    )
    normalized = bool(recipe.head) and recipe.head[-1] == "normalize"
    _write(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": recipe.query_prefix, "document": recipe.passage_prefix},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if normalized else "dot",
            **layout.encoder_settings,
        },
    )


def save_mapped_encoder(
    folder: Path, name_or_path: str, options: EncoderOptions, weights: np.ndarray, offset: np.ndarray
) -> None:
    """Saves an encoder with a map of its vectors to another space as further layers of its head.

    Args:
        folder: The folder; it is created.
        name_or_path: The encoder: a Hugging Face name or a model folder.
        options: Its options. `normalize` and `dimension` become layers; the others are not all saved, so use them again
            with the saved encoder.
        weights: float32 [d, e]. The vectors are scaled to length 1, multiplied by it, and scaled again.
        offset: float32 [e], which is added to the product.
    """
    recipe = read_recipe(find_model_folder(name_or_path), options)
    full = next((step.size for step in reversed(recipe.head) if isinstance(step, DenseLayer)), recipe.hidden)
    maps = [(weights, offset)]
    if recipe.dim < full:
        maps.insert(0, (np.eye(full, recipe.dim, dtype=np.float32), np.zeros(recipe.dim, np.float32)))
    steps = list(recipe.head)
    for matrix, _ in maps:
        steps += ["normalize"] if steps[-1:] != ["normalize"] else []
        steps.append(DenseLayer(None, "Identity", matrix.shape[1], bias=True))
    recipe = replace(recipe, head=(*steps, "normalize"), dim=weights.shape[1])
    head = VectorHead(recipe, None)
    layers = [step for step in head.steps if isinstance(step, nn.Sequential)]
    with torch.no_grad():
        for (linear, _), (matrix, shift) in zip(layers[-len(maps) :], maps, strict=True):
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(torch.from_numpy(matrix.T.copy()))
            linear.bias.copy_(torch.from_numpy(shift))
    save_encoder(folder, recipe, open_pooled(recipe, torch.float32).model_to_save, head)


@dataclass(frozen=True)
class _Layout:
    """The module names and settings that sentence-transformers uses for a kind of vectors.

    Attributes:
        package: The package of all modules.
        transformer, pooling: The classes of the first two modules.
        settings: Those of the pooling.
        encoder_settings: What config_sentence_transformers.json says in addition.
    """

    package: str
    transformer: str
    pooling: str
    settings: dict[str, Any]
    encoder_settings: dict[str, Any] = field(default_factory=dict)


def _layout(recipe: Recipe) -> _Layout:
    """Returns the sentence-transformers layout for a recipe; SparseEncoder has one word limit for both sides."""
    if not recipe.is_sparse:
        mode = {"pooling_mode": POOLING_MODES[recipe.pooling], "include_prompt": True}
        settings = {"word_embedding_dimension": recipe.hidden, **mode}
        return _Layout("sentence_transformers.models", "Transformer", "Pooling", settings)
    limits = {} if recipe.passage_terms is None else {"max_active_dims": recipe.passage_terms}
    return _Layout(
        "sentence_transformers.sparse_encoder.models",
        "MLMTransformer",
        "SpladePooling",
        {"pooling_strategy": "max", "activation_function": "relu", "embedding_dimension": recipe.dim},
        {"model_type": "SparseEncoder", **limits},
    )


@contextlib.contextmanager
def with_original_values(config: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Restores the original values of a configuration, from before training, for the duration of the context."""
    trained_with = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in trained_with.items():
            setattr(config, name, value)


def _write(file: Path, document: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
