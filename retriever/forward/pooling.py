"""Pooling and head: convert token vectors of a backbone to one vector per text, in float32."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.retriever.forward.prompt_rows import PromptRows
from riptide.retriever.model.modules import DenseLayer
from riptide.retriever.model.recipe import Recipe
from riptide.retriever.model.weights import load_tensors


def check_first_token(backbone: nn.Module, pooling: str) -> None:
    """Raises InputError for first-token pooling of a causal backbone, whose first token attends to no other token."""
    if pooling == "cls" and any(getattr(module, "is_causal", False) is True for module in backbone.modules()):
        raise InputError(
            f"{Parameter('pooling', 'cls')}: the first token of a {type(backbone).__name__} sees no other, so all "
            "texts have one vector: use last or mean"
        )


def takes_positions(backbone: nn.Module) -> bool:
    """Whether a backbone's forward pass has the argument `position_ids`."""
    return "position_ids" in inspect.signature(backbone.forward).parameters


class PooledBackbone(nn.Module):
    """A backbone with pooling: (ids int64 [b, n], lengths int64 [b], prompts of the rows) -> float32 [b, hidden].

    Args:
        backbone: A transformers model.
        pooling: "cls", "mean" or "last".
        padding_side: The side on which batches are padded.
        takes_positions: The backbone has the argument `position_ids`.
        first_position: The usual position of a text's first token; above 0, padding tokens take the position before it
            and are not counted (RoBERTa).
    """

    def __init__(
        self, backbone: nn.Module, pooling: str, padding_side: str, takes_positions: bool, first_position: int = 0
    ):
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.left = padding_side == "left"
        self.takes_positions, self.first_position = takes_positions, first_position
        # Models that count positions from the padding token's id compute those of left-padded texts themselves.
        self.pass_positions = takes_positions and self.left and not first_position

    @classmethod
    def over(cls, backbone: nn.Module, recipe: Recipe) -> PooledBackbone:
        """Adds a recipe's pooling to a backbone. Raises InputError if the pooled token attends to no other token."""
        check_first_token(backbone, recipe.pooling)
        return cls(backbone, recipe.pooling, recipe.padding_side, takes_positions(backbone), recipe.first_position)

    @property
    def model_to_save(self) -> Any:
        """The model to save: the backbone without its pooling."""
        return self.backbone

    def check_offsets(self) -> None:
        """Raises InputError if the backbone takes no positions, so that texts cannot start after their prompts."""
        if not self.takes_positions:
            raise InputError(
                f"{Parameter('position_offset')}: a {type(self.backbone).__name__} takes no positions: train the "
                "prompt without it"
            )

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, prompt: PromptRows | None = None) -> torch.Tensor:
        hidden, is_token, first = self.states(ids, lengths, prompt)
        if self.pooling == "mean":
            return (hidden.float() * is_token[..., None]).sum(1) / lengths[:, None]
        at = first if self.pooling == "cls" else first + lengths[:, None] - 1
        return hidden.gather(1, at[..., None].expand(-1, 1, hidden.shape[-1])).squeeze(1).float()

    def states(
        self, ids: torch.Tensor, lengths: torch.Tensor, prompt: PromptRows | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the last hidden states [b, n, hidden], a token mask, bool [b, n], and first token columns [b, 1]."""
        width = ids.shape[1]
        columns = torch.arange(width, device=ids.device)[None]
        first = (width - lengths if self.left else torch.zeros_like(lengths))[:, None]
        is_token = (columns >= first) & (columns < first + lengths[:, None])
        extra: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
        if prompt is not None and prompt.position_offsets is not None:
            extra["position_ids"] = self._positions_after(ids, columns - first, is_token, prompt.position_offsets)
        elif self.pass_positions:
            extra["position_ids"] = (columns - first).clamp(min=0)
        hidden = self.backbone(input_ids=ids, attention_mask=is_token.long(), **extra).last_hidden_state
        return hidden, is_token, first

    def _positions_after(
        self, ids: torch.Tensor, text_positions: torch.Tensor, is_token: torch.Tensor, position_offsets: torch.Tensor
    ) -> torch.Tensor:
        """Returns the positions of tokens in texts that start after their prompts: int64 [b, n].

        Args:
            ids: int64 [b, n].
            text_positions: The position of each column in its text, int64 [b, n] or [1, n].
            is_token: bool [b, n], False at padding.
            position_offsets: int64 [b], the number of positions before each text.
        """
        if self.first_position == 0:
            return torch.where(is_token, text_positions + position_offsets[:, None], 0)
        is_counted = (ids != self.first_position - 1).long()
        return (is_counted.cumsum(1) + position_offsets[:, None]) * is_counted + self.first_position - 1


class VectorHead(nn.Module):
    """The head after pooling: dense layers and normalisation in the model's order, then truncation; all in float32.

    Args:
        recipe: The recipe of the model.
        dimension: Keep this many leading numbers; None: all.
        seed: Seed of the weights of a new layer.

    Raises:
        InputError: If the file of a dense layer is damaged, or holds other tensors than its config.json says.
    """

    def __init__(self, recipe: Recipe, dimension: int | None, seed: int = 0):
        super().__init__()
        self.steps = nn.ModuleList()
        size = recipe.pooled_dim
        for step in recipe.head:
            if isinstance(step, DenseLayer):
                # Read first: a layer of another size than that of the file could take any amount of memory.
                stored = None if step.folder is None else _read_dense(recipe.folder / step.folder, size, step)
                layer = nn.Linear(size, step.size, bias=step.bias)
                if stored is None:
                    # The same variance as flax's default, with which GTR's authors initialise the layer.
                    nn.init.normal_(layer.weight, std=size**-0.5, generator=torch.Generator().manual_seed(seed))
                else:
                    layer.load_state_dict(stored)
                self.steps.append(nn.Sequential(layer, getattr(nn, step.activation)()))
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
        # `functional.normalize` gives the same bytes; for one vector it takes twice as long.
        return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(1e-12)


def _read_dense(folder: Path, input_size: int, step: DenseLayer) -> dict[str, torch.Tensor]:
    """Returns the tensors of a dense layer. Raises InputError if they have other shapes than its settings say."""
    expected: dict[str, tuple[int, ...]] = {"weight": (step.size, input_size)}
    return load_tensors(folder, expected | ({"bias": (step.size,)} if step.bias else {}), "linear.")
