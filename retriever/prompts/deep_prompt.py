"""Deep prompts (DPTDR, section 3.1) in their trained form: the same prompt for all texts.

A `PromptProvider` makes the prompts of a batch in the forward pass of training. `MatrixPrompt` and `MlpPrompt` are
saved as the same plain matrix.
"""

from __future__ import annotations

import torch
from torch import nn

from riptide.base.errors import InputError
from riptide.retriever.forward.prompt_rows import PromptInputs, PromptRows, PromptShape

BOTTLENECK = 512  # hidden size of the network of `mlp`: the authors' prefix_hidden_size
INIT = 0.02  # standard deviation of a new prompt, as for the backbone's weights


class DeepPrompt(nn.Module):
    """A PromptProvider with the same prompt for all texts; the base of `MatrixPrompt` and `MlpPrompt`.

    `start` continues from a saved prompt, and `matrix` returns it.

    Args:
        shape: The shape of the backbone's keys and values.
        length: Tokens of the prompt.
        dropout: Fraction of its numbers that are dropped out in training, with a separate mask for each text.
        position_offset: The positions of a text start after the prompt.
    """

    def __init__(self, shape: PromptShape, length: int, dropout: float = 0.1, *, position_offset: bool = False):
        super().__init__()
        if length < 1 or not 0 <= dropout < 1:
            raise InputError(f"prompt length {length}, dropout {dropout}: expected 1 or more, and 0 to less than 1")
        self.shape, self.length, self.dropout, self.position_offset = shape, length, dropout, position_offset

    def keys_and_values(self) -> torch.Tensor:
        """Returns the keys and values of all layers, [l, layers * 2 * heads * head_dim]."""
        raise NotImplementedError

    def start(self, matrix: torch.Tensor | None) -> None:
        """Initialises the prompt from a trained matrix [layers, 2, heads, l, head_dim].

        Raises:
            InputError: If the provider cannot start from it, or if it is None.
        """
        raise NotImplementedError

    def forward(self, inputs: PromptInputs) -> PromptRows:
        batch = len(inputs.lengths)
        position_offsets = inputs.lengths.new_full((batch,), self.length) if self.position_offset else None
        dropout = self.dropout if self.training else 0.0
        return PromptRows(self._matrix()[:, :, None], position_offsets=position_offsets, dropout=dropout)

    def matrix(self) -> torch.Tensor:
        """Returns the prompt in its saved form: float32 [layers, 2, heads, l, head_dim]."""
        with torch.no_grad():
            return self._matrix().float().contiguous()

    def _matrix(self) -> torch.Tensor:
        layers, heads, head_dim = self.shape
        return self.keys_and_values().view(self.length, layers, 2, heads, head_dim).permute(1, 2, 3, 0, 4)


class MatrixPrompt(DeepPrompt):
    """A prompt whose parameters are its keys and values (the paper's choice, `embedding`)."""

    def __init__(self, shape: PromptShape, length: int, dropout: float = 0.1, *, position_offset: bool = False):
        super().__init__(shape, length, dropout, position_offset=position_offset)
        self.embedding = nn.Parameter(INIT * torch.randn(length, 2 * shape.layers * shape.heads * shape.head_dim))

    def keys_and_values(self) -> torch.Tensor:
        return self.embedding

    def start(self, matrix: torch.Tensor | None) -> None:
        """Initialises from a matrix [layers, 2, heads, l, head_dim]. Raises InputError for None or another shape."""
        layers, heads, head_dim = self.shape
        expected = (layers, 2, heads, self.length, head_dim)
        if matrix is None or tuple(matrix.shape) != expected:
            actual = "missing for this side" if matrix is None else tuple(matrix.shape)
            raise InputError(f"the prompt to begin from is {actual}, expected {expected}: use its length")
        with torch.no_grad():
            self.embedding.copy_(matrix.permute(3, 0, 1, 2, 4).reshape(self.length, -1))


class MlpPrompt(DeepPrompt):
    """A prompt computed by a network (`mlp`, Li & Liang 2021): an embedding [l, hidden], 512 hidden units, tanh."""

    def __init__(self, shape: PromptShape, length: int, dropout: float = 0.1, *, position_offset: bool = False):
        super().__init__(shape, length, dropout, position_offset=position_offset)
        hidden = shape.heads * shape.head_dim
        self.embedding = nn.Parameter(torch.randn(length, hidden))
        self.mlp = nn.Sequential(
            nn.Linear(hidden, BOTTLENECK), nn.Tanh(), nn.Linear(BOTTLENECK, 2 * shape.layers * hidden)
        )

    def keys_and_values(self) -> torch.Tensor:
        keys_and_values: torch.Tensor = self.mlp(self.embedding)
        return keys_and_values

    def start(self, matrix: torch.Tensor | None) -> None:
        """Raises InputError: a matrix does not determine the parameters of the network that computes it."""
        raise InputError("parametrisation mlp cannot start from an initial prompt: use embedding")
