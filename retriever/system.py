"""What the training loop trains: a system is a model, a loss and data; the loop knows nothing else about it."""

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
    """Some texts of a batch that go through the model together.

    rows: their places among the vectors of the whole batch, int64 [n]. inputs: what `System.forward` needs, on the
    processor. tokens: how many, padding included.
    """

    rows: np.ndarray
    inputs: Any
    tokens: int = 0


@dataclass(frozen=True)
class Batch:
    """One worker's share of the batch at a step. total: vectors of the whole batch, over all workers; 0 where the loss
    is the sum of the chunks' own parts. given: what the loss needs beside them; the same on every worker."""

    total: int
    chunks: Sequence[Chunk]
    given: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """A model, its loss, its data.

    module: all of the model; parameters that do not require gradients are frozen, and kept out of checkpoints. What
    the batch at a step holds is a function of (seed, step, size of the whole batch), never of the number of workers;
    only the share of each does.
    """

    module: nn.Module

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """The share of worker `rank` of `world` in the batch at `step`, from 0. Every worker calls it at every step."""

    def forward(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Vectors float32 [n, dim] of a chunk, and its own part of the loss (a scalar already divided by counts of the
        whole batch, so that parts add up over chunks and workers), or None."""

    def loss(self, vectors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss over all vectors of the batch, float32 [total, dim] -> scalar; the same on every worker."""

    def save(self, folder: Path) -> None:
        """Write what was trained, as users open it, into an empty folder."""


class Refresh(Protocol):
    """What the system trains on, mined anew by the model as it is (ANCE, Xiong et al. 2021)."""

    def mine(self) -> torch.Tensor:
        """An integer tensor, the same on every worker, which all call it at the same step."""

    def take(self, mined: torch.Tensor) -> None:
        """Train on that from the next batch on."""


Evaluate = Callable[[], float]  # a quality that grows, measured with the model as it is now
