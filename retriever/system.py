"""The interface of a system to train: a model, its loss and its data. The training loop knows nothing else about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Chunk:
    """Texts of a batch that go through the model together.

    Attributes:
        rows: Their positions among the vectors of the whole batch, int64 [n].
        inputs: The arguments of `System.forward`, on the CPU.
        tokens: The number of tokens, padding included.
    """

    rows: np.ndarray
    inputs: Any
    tokens: int = 0


@dataclass(frozen=True)
class Batch:
    """One worker's share of the batch of a step.

    Attributes:
        total: The number of vectors of the whole batch, over all workers; 0 if the loss is the sum of chunk parts.
        chunks: The worker's chunks.
        given: Further arguments of the loss, the same on every worker.
    """

    total: int
    chunks: Sequence[Chunk]
    given: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """A model, its loss and its data.

    `module` holds the whole model; parameters that do not require gradients are frozen and are not written to
    checkpoints. The batch of a step is a function of (seed, step, size of the whole batch); the number of workers
    decides only about the share of each.
    """

    module: nn.Module

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Returns the share of worker `rank` of `world` in the batch of `step`, counted from 0.

        Every worker calls it at every step.
        """

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the vectors of a chunk, float32 [n, dim], and its own part of the loss or None.

        The part is a scalar, already divided by counts of the whole batch: parts add up over chunks and workers.
        """

    def loss(self, vectors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the loss over all vectors of the batch, float32 [total, dim] -> scalar, equal on every worker."""

    def save(self, folder: Path) -> None:
        """Writes the trained model into an empty folder, in the layout that users open."""


class Refresh(Protocol):
    """Mines new training data with the current model (ANCE, Xiong et al. 2021)."""

    def mine(self) -> torch.Tensor:
        """Returns the mined rows, an integer tensor that is equal on every worker; all call it at the same step."""

    def take(self, mined: torch.Tensor) -> None:
        """Trains on the mined rows from the next batch on."""


Evaluate = Callable[[], float]  # returns a quality of the current model; higher is better


def checkpoint_activations(model: Any) -> None:
    """Makes a transformers model recompute its activations in the backward pass instead of keeping them."""
    # The method has two names: transformers 5.17 knows only the older one, later versions warn about it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
