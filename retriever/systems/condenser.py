"""Condenser's head: layers over the last layer's first token and the other tokens of an early layer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.model.json_fields import format_json, read_object
from riptide.retriever.model.model_folder import sha256_of
from riptide.retriever.model.weights import load_tensors

FOLDER = "condenser"  # sub-folder of a model folder that holds the head
_SHAPE, _WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class HeadShape:
    """The shape of Condenser's head.

    Attributes:
        layers: Number of layers.
        skip_from: The backbone's layer whose output gives the tokens other than the first one; 0: the embeddings.
    """

    layers: int
    skip_from: int


class CondenserHead(nn.Module):
    """Layers of the backbone's size that predict masked tokens from the first token and early token vectors.

    The late layers of the backbone reach the head through the first token only, so this token must hold what the text
    says. The head is used in pretraining only.

    Args:
        config: The backbone's configuration.
        shape: The shape of the head.
    """

    def __init__(self, config: Any, shape: HeadShape):
        super().__init__()
        if not 0 <= shape.skip_from < int(config.num_hidden_layers) or shape.layers < 1:
            raise InputError(
                f"{Parameter('head_layers', shape.layers)}, {Parameter('skip_from', shape.skip_from)}: expected at "
                f"least 1 layer, and one of the backbone's layers 0 to {int(config.num_hidden_layers) - 1}"
            )
        self.shape = shape
        self.layers = nn.ModuleList(_layer(config) for _ in range(shape.layers))

    def forward(self, last: torch.Tensor, early: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        """Computes the vectors from which masked tokens are predicted, float [n, width, hidden].

        Args:
            last: The output of the backbone, of which the first token is used, float [n, width, hidden].
            early: The output of its layer `skip_from`, of which the other tokens are used, float [n, width, hidden].
            is_token: Which tokens are not padding, bool [n, width].
        """
        hidden = torch.cat([last[:, :1], early[:, 1:]], dim=1)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~is_token)
        return hidden

    def save(self, folder: Path) -> None:
        """Saves the head in a sub-folder of the backbone's folder."""
        target = folder / FOLDER
        target.mkdir(parents=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.layers.state_dict().items()}
        save_file(tensors, target / _WEIGHTS)
        (target / _SHAPE).write_text(json.dumps(asdict(self.shape), indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Loads the weights of a head that was saved with a backbone.

        Raises:
            InputError: If the files are damaged, or of another shape.
        """
        expected = {name: tuple(value.shape) for name, value in self.layers.state_dict().items()}
        self.layers.load_state_dict(load_tensors(folder / FOLDER, expected, ""))


def saved_head_shape(folder: Path) -> HeadShape | None:
    """Returns the shape of the head saved with a backbone; None if there is no head.

    Raises:
        InputError: If the head's configuration is missing or damaged.
    """
    if not (folder / FOLDER).is_dir():
        return None
    file = folder / FOLDER / _SHAPE
    settings = read_object(file, required=True)
    values = [settings.get(name) for name in ("layers", "skip_from")]
    if set(settings) != {"layers", "skip_from"} or not all(type(value) is int for value in values):
        raise InputError(
            f"{file}: expected the integers layers and skip_from, got {format_json(settings)}; save the head "
            "again, or remove the folder to start with a new head"
        )
    return HeadShape(**settings)


def describe_head(folder: Path) -> dict[str, str] | None:
    """Returns hashes that identify the head saved with a backbone; None if there is no head."""
    if not (folder / FOLDER).is_dir():
        return None
    return {name: sha256_of(folder / FOLDER / name) for name in (_SHAPE, _WEIGHTS)}


def choose_head_shape(folder: Path, num_layers: int, layers: int | None, skip_from: int | None) -> HeadShape:
    """Returns the shape of the head to train: that of the saved head, or of a new one. Raises InputError on conflict.

    Args:
        folder: Folder of the backbone.
        num_layers: Number of layers of the backbone.
        layers: Number of layers of the head; None: as saved, or 2, as the authors have it.
        skip_from: The early layer; None: as saved, or half of the backbone's layers, as the authors have it.

    Raises:
        InputError: If the saved head has another shape than the given one.
    """
    saved = saved_head_shape(folder)
    if saved is None:
        return HeadShape(2 if layers is None else layers, num_layers // 2 if skip_from is None else skip_from)
    shape = HeadShape(saved.layers if layers is None else layers, saved.skip_from if skip_from is None else skip_from)
    if shape != saved:
        raise InputError(
            f"{folder / FOLDER}: the saved head has {Parameter('head_layers', saved.layers)} and "
            f"{Parameter('skip_from', saved.skip_from)}, found {Parameter('head_layers', shape.layers)} and "
            f"{Parameter('skip_from', shape.skip_from)}: leave both out, or start from a backbone without a head"
        )
    return saved


def _layer(config: Any) -> nn.Module:
    """Builds a BERT layer of the backbone's size, without attention dropout."""
    hidden = int(config.hidden_size)
    layer = nn.TransformerEncoderLayer(
        hidden,
        int(config.num_attention_heads),
        int(getattr(config, "intermediate_size", 4 * hidden)),
        float(getattr(config, "hidden_dropout_prob", 0.1)),
        "gelu",
        layer_norm_eps=1e-12,
        batch_first=True,
    )
    layer.self_attn.dropout = 0.0
    for name, parameter in layer.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return layer
