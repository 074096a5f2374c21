"""Training data with categories, a system over it, and a case for two workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_cases as cases
from training_cases import CPU, dual_system, make_data

from riptide.retriever.objectives.category_term import CategoryOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.training_data import CategoryTable

NAMES = ("a", "b", "c", "d", "e", "f", "g")


def category_table() -> CategoryTable:
    """Returns one or two of seven categories of each passage of `make_data`."""
    sets = [np.unique([row % 7, (row * row) % 5]) for row in range(make_data().num_passages)]
    offsets = np.cumsum([0, *map(len, sets)])
    return CategoryTable(NAMES, offsets, np.concatenate(sets).astype(np.int32))


def category_system(
    bert: Path, *, normalize: bool = False, chunk: int | None = None, **tuning: Any
) -> DualEncoderSystem:
    """Returns a system over `make_data` with categories, without dropout.

    Args:
        bert: Folder of the backbone.
        normalize: Vectors have length 1.
        chunk: Tokens per chunk.
        **tuning: Options of TuneOptions.
    """
    values: dict[str, Any] = {"negatives_per_query": 0, "terms": (CategoryOptions(),), **tuning}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "ENCODER", replace(cases.ENCODER, normalize=normalize))
        system = dual_system(bert, dropout=0.0, chunk=chunk, **values)
    assert system.data is not None
    system.data = replace(system.data, categories=category_table())
    return system


def four_steps_of_categories(rank: int, patch: pytest.MonkeyPatch, bert: Path, world: int) -> dict[str, Any]:
    """Returns the last loss, and weights and moments, after four steps."""
    system = category_system(bert, chunk=200)
    options = LoopOptions(steps=6, lr=1e-2)
    trainer = Trainer(system, options, device=CPU, dtype=torch.float32, rank=rank, world=world)
    losses = [trainer.step(number) for number in range(4)]
    return {"loss": losses[-1], **trainer.stepper.state()}
