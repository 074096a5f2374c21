"""From a backbone's token vectors to one vector per text: pooling, dense layers, scaling; all in float32."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retriever.attention import PromptRows
from retriever.errors import InputError
from retriever.recipe import OFFSET_POSITIONS, Dense, Recipe


def check_first_token(backbone: nn.Module, pooling: str) -> None:
    """Raises InputError for pooling by the first token of a backbone whose tokens see none behind them."""
    if pooling == "cls" and any(getattr(module, "is_causal", False) is True for module in backbone.modules()):
        raise InputError(f"pooling=cls: the first token of a {type(backbone).__name__} sees no other, so all texts "
                         "have one vector: take last, or mean")  # fmt: skip


class Pooled(nn.Module):
    """A backbone and its pooling: (ids int64 [b, n], lengths int64 [b], prompts of the rows) -> float32 [b, hidden]."""

    def __init__(self, backbone: nn.Module, pooling: str, padding_side: str, pass_positions: bool):
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.left = padding_side == "left"
        self.pass_positions = pass_positions and self.left

    @classmethod
    def over(cls, backbone: nn.Module, recipe: Recipe) -> Pooled:
        """As a recipe says. Raises InputError where its first token sees no other."""
        check_first_token(backbone, recipe.pooling)
        parameters = inspect.signature(backbone.forward).parameters
        positions = "position_ids" in parameters and recipe.model_type not in OFFSET_POSITIONS
        return cls(backbone, recipe.pooling, recipe.padding_side, positions)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, prompt: PromptRows | None = None) -> torch.Tensor:
        width = ids.shape[1]
        columns = torch.arange(width, device=ids.device)[None]
        first = (width - lengths if self.left else torch.zeros_like(lengths))[:, None]
        inside = (columns >= first) & (columns < first + lengths[:, None])
        extra: dict[str, Any] = {"position_ids": (columns - first).clamp(min=0)} if self.pass_positions else {}
        if prompt is not None:
            extra["prompt"] = prompt
        hidden = self.backbone(input_ids=ids, attention_mask=inside.long(), **extra).last_hidden_state
        if self.pooling == "mean":
            return (hidden.float() * inside[..., None]).sum(1) / lengths[:, None]
        at = first if self.pooling == "cls" else first + lengths[:, None] - 1
        return hidden.gather(1, at[..., None].expand(-1, 1, hidden.shape[-1])).squeeze(1).float()


class Head(nn.Module):
    """What follows pooling: dense layers and scaling in the model's order, then truncation; float32 throughout."""

    def __init__(self, recipe: Recipe, dimension: int | None):
        super().__init__()
        self.steps = nn.ModuleList()
        size = recipe.hidden
        for step in recipe.head:
            if isinstance(step, Dense):
                self.steps.append(_load_dense(recipe.folder / step.folder, step, size))
                size = step.size
            else:
                self.steps.append(_Normalize())
        self.dimension = dimension
        self.normalized = dimension is not None or (bool(recipe.head) and recipe.head[-1] == "normalize")

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            vectors = step(vectors)
        if self.dimension is not None:
            vectors = nn.functional.normalize(vectors[:, : self.dimension], dim=-1)
        return vectors


class _Normalize(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(vectors, dim=-1)


def _load_dense(folder: Path, step: Dense, size: int) -> nn.Module:
    from safetensors.torch import load_file

    layer = nn.Linear(size, step.size, bias=step.bias)
    if (folder / "model.safetensors").exists():
        weights = load_file(folder / "model.safetensors")
    else:
        weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    weights = {name.removeprefix("linear."): value.float() for name, value in weights.items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    expected = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    if found != expected:
        raise InputError(f"{folder}: expected tensors {expected}, found {found}")
    layer.load_state_dict(weights)
    return nn.Sequential(layer, getattr(nn, step.activation)())
