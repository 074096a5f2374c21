"""Prompts in a forward pass: their shape, the prompts of a batch, and the interface of their providers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from riptide.retriever.forward.kernels import apply_dropout
from riptide.retriever.options import Side


class PromptShape(NamedTuple):
    """The shape of a backbone's keys and values: layers, heads, and dimension per head."""

    layers: int
    heads: int
    head_dim: int


class PromptRows(NamedTuple):
    """The prompts of a batch of b rows, one per row.

    Attributes:
        table: Keys and values, [layers, 2, prompts, heads, l, head_dim].
        rows: The prompt of each row, int64 [b]; None: there is one prompt, which all rows share.
        is_prompt_token: bool [prompts, l], False after the end of a shorter prompt; None: all prompts have l tokens.
        position_offsets: int64 [b], by how many positions the text of each row starts later than usual; None: by none.
            The attention function does not use it: `PooledBackbone` and `PackedBackbone` compute positions from it.
        dropout: Fraction of the keys' and values' numbers that are dropped out, with a separate mask for each row and
            layer. The masks depend on torch's seed, and are drawn in the order of the layers.
    """

    table: torch.Tensor
    rows: torch.Tensor | None = None
    is_prompt_token: torch.Tensor | None = None
    position_offsets: torch.Tensor | None = None
    dropout: float = 0.0

    def keys_and_values(
        self, layer: int, batch: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of a layer, each [batch, heads, l, head_dim].

        Args:
            layer: The layer.
            batch: Number of rows.
            dtype: The dtype of the result; None: that of the table.
        """
        both = self.table[layer]
        if self.rows is not None:
            both = both.index_select(1, self.rows)
        if self.dropout:
            both = apply_dropout(both, self.dropout, batch, dtype or both.dtype)
        key, value = both.expand(2, batch, *both.shape[2:]).to(dtype or both.dtype).unbind()
        return key, value

    def prompt_columns(self, batch: int) -> torch.Tensor:
        """Returns a mask of the columns that belong to the prompt of each row: bool [batch, 1, 1, l]."""
        if self.is_prompt_token is None:
            return self.table.new_ones((batch, 1, 1, self.table.shape[4]), dtype=torch.bool)
        is_prompt_token = (
            self.is_prompt_token.expand(batch, -1)
            if self.rows is None
            else self.is_prompt_token.index_select(0, self.rows)
        )
        return is_prompt_token[:, None, None]


class PromptInputs(NamedTuple):
    """The texts of a batch, as the input from which a provider may compute their prompts.

    Attributes:
        ids: Token ids with padding, int64 [b, n].
        lengths: Tokens of each text, int64 [b].
        tasks: The number of the task of each text, or of its topic, int64 [b]; None: unknown, or no provider needs it.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    tasks: torch.Tensor | None = None


class PromptProvider(Protocol):
    """The interface of modules that provide the prompts of a batch in the forward pass.

    The training systems know nothing else about a prompt, so that a prompt may also depend on a text or its topic.
    """

    def __call__(self, inputs: PromptInputs) -> PromptRows:
        """Returns the prompts of a batch; gradients flow to the provider's parameters."""


class PromptAssignment(Protocol):
    """Assigns one of several prompts to each text, for example the prompt of its topic."""

    @property
    def of_passages(self) -> np.ndarray:
        """The prompt number of each passage of the corpus, int64 [rows]."""

    def of_queries(self, queries: np.ndarray, positives: np.ndarray) -> np.ndarray:
        """Returns the prompt number of each training query, int64 [m].

        Args:
            queries: The numbers of the queries, int64 [m].
            positives: The row of the positive of each query, int64 [m].
        """

    def infer(self, texts: Sequence[str], side: Side) -> np.ndarray:
        """Infers the prompt numbers of texts outside of the training data, int64 [n]."""


def separate_prompt_rows(keys_and_values: torch.Tensor, shape: PromptShape) -> PromptRows:
    """Returns the prompts of a batch in which every row has a separate prompt.

    Args:
        keys_and_values: [b, m, layers * 2 * heads * head_dim].
        shape: The shape of the backbone's keys and values.
    """
    table = to_attention_axes(keys_and_values, shape).permute(1, 2, 0, 3, 4, 5)
    return PromptRows(table, torch.arange(len(keys_and_values), device=keys_and_values.device))


def to_attention_axes(keys_and_values: torch.Tensor, shape: PromptShape) -> torch.Tensor:
    """Reorders the axes of keys and values for attention, as a view.

    Args:
        keys_and_values: [b, m, layers * 2 * heads * head_dim].
        shape: The shape of the backbone's keys and values.

    Returns:
        [b, layers, 2, heads, m, head_dim].
    """
    layers, heads, head_dim = shape
    return keys_and_values.unflatten(2, (layers, 2, heads, head_dim)).permute(0, 2, 3, 4, 1, 5)
