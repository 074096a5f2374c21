"""A System with factored and other parameters, for tests of optimizers, and its cases for two workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training_cases import Checkpoints

from riptide.retriever.objectives.contrastive import contrastive_loss
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.training.hooks import TrainingProgress
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.parameter_groups import ParameterGroup
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput

CPU = torch.device("cpu")
FEATURES, HIDDEN, WIDTH, PAIRS = 130, 140, 6, 8
Groups = Callable[[nn.ModuleDict], Sequence[ParameterGroup]]


class TwoLayers:
    """A System of two layers, the first of which is large enough to be factored; each worker has one chunk."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.Tanh())
        self.module: nn.Module = nn.ModuleDict({"body": body, "head": nn.Linear(HIDDEN, WIDTH)})

    def features(self, step: int) -> torch.Tensor:
        """Returns the texts of a batch, first all queries, then the passage of each."""
        draw = np.random.default_rng(step)
        return torch.from_numpy(draw.normal(size=(2 * PAIRS, FEATURES)).astype(np.float32))

    def vectors(self, features: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.module.head(self.module.body(features))  # type: ignore[operator]
        return vectors

    def batch(self, step: int, rank: int, world: int) -> Batch:
        rows = np.arange(rank, 2 * PAIRS, world)
        chunk = BatchChunk({"dense": rows}, self.features(step)[torch.from_numpy(rows)], len(rows))
        return Batch({"dense": BatchOutput(WIDTH, 2 * PAIRS)}, [chunk])

    def forward(self, chunk: BatchChunk) -> tuple[dict[str, torch.Tensor], None]:
        return {"dense": self.vectors(chunk.inputs)}, None

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        vectors = outputs["dense"]
        return contrastive_loss(vectors[:PAIRS], vectors[PAIRS:], torch.arange(PAIRS))

    def save(self, folder: Path) -> None:
        raise NotImplementedError


class Grouped(TwoLayers):
    """The same with parameter groups."""

    def __init__(self, groups: Groups):
        super().__init__()
        self.groups = groups

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        assert isinstance(self.module, nn.ModuleDict)
        return self.groups(self.module)


def head_apart(module: nn.ModuleDict) -> list[ParameterGroup]:
    return [ParameterGroup(parameters=module["head"].parameters(), lr=1e-4, lr_factor=3.0, weight_decay=0.5)]


def body_with_adafactor(module: nn.ModuleDict) -> list[ParameterGroup]:
    return [ParameterGroup(parameters=module["body"].parameters(), optimizer="adafactor", weight_decay=0.0)]


def trainer_of(groups: Groups | None = None, rank: int = 0, world: int = 1, **loop: Any) -> Trainer:
    system = TwoLayers() if groups is None else Grouped(groups)
    options = LoopOptions(**{"steps": 6, "lr": 1e-2, "checkpoint_every": 2, **loop})
    return Trainer(system, options, device=CPU, dtype=torch.float32, rank=rank, world=world)


# Cases: functions that TwoWorkers runs on both workers.


def states(
    rank: int, patch: pytest.MonkeyPatch, world: int, groups: Groups | None, loop: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Returns the state after four steps."""
    trainer = trainer_of(groups, rank, world, **loop)
    for number in range(4):
        trainer.step(number)
    return trainer.stepper.state()


def resumed_states(
    rank: int, patch: pytest.MonkeyPatch, folder: Path, groups: Groups | None, loop: dict[str, Any]
) -> list[dict[str, torch.Tensor]]:
    """Returns the state after six steps, and after a run that was lost after four steps and resumed."""
    whole = trainer_of(groups, rank, 2, **loop)
    whole.train(Checkpoints(folder / f"whole{rank}").hooks())
    lost = trainer_of(groups, rank, 2, **loop)
    for number in range(4):
        lost.step(number)
    lost._save_checkpoint(Checkpoints(folder / "lost").hooks().save, TrainingProgress(4, []))
    torch.distributed.barrier()
    checkpoints = Checkpoints(folder / f"resumed{rank}")
    shutil.copy(folder / "lost" / "last", checkpoints.folder / "last")
    resumed = trainer_of(groups, rank, 2, **loop)
    assert resumed.train(checkpoints.hooks()).steps == 6
    return [whole.stepper.state(), resumed.stepper.state()]
