"""Training data and systems that tests of training a re-ranker share, and their case for two workers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import Checkpoints

from riptide.retriever.forward import batching
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.reranking import CrossEncoderOptions
from riptide.retriever.systems.cross import CrossSystem
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.training_data import TrainingData

SMALL = CrossEncoderOptions(batch=4, negatives_per_query=3, max_length=32, seed=5)
CPU = torch.device("cpu")
NUM_QUERIES, NUM_ANSWERS, NUM_PASSAGES = 10, 200, 400


def texts_of(rows: np.ndarray) -> tuple[list[str], list[str]]:
    """Returns titles and texts of random words; the passages of rows below NUM_ANSWERS, and no other, contain w500."""
    texts = []
    for row in rows:
        draw = random.Random(int(row))
        words = [f"w{draw.randrange(400)}" for _ in range(draw.randint(4, 14))]
        if row < NUM_ANSWERS:
            words.insert(draw.randrange(len(words)), "w500")
        texts.append(" ".join(words))
    return ["w7" if row % 2 else "" for row in rows], texts


def make_pairs(answers: int = 2, negatives: int = 3) -> TrainingData:
    """Returns queries with `answers` positives and `negatives` to `negatives + 4` negatives each."""
    draw = np.random.default_rng(0)
    wrong = np.arange(NUM_ANSWERS, NUM_PASSAGES)
    return TrainingData(
        queries=[f"w{400 + number} w{410 + number}" for number in range(NUM_QUERIES)],
        positives=[20 * number + np.arange(answers) for number in range(NUM_QUERIES)],
        negatives=[draw.choice(wrong, negatives + number % 5, replace=False) for number in range(NUM_QUERIES)],
        num_passages=NUM_PASSAGES,
        passages=texts_of,
    )


def cross_system(folder: Path, data: TrainingData | None = None, dtype: str = "float32", **changes: Any) -> CrossSystem:
    options = replace(SMALL, **changes)
    return CrossSystem(folder, options, data or make_pairs(), device=CPU, dtype=getattr(torch, dtype))


def trainer_of(system: CrossSystem, rank: int = 0, world: int = 1, **loop: Any) -> Trainer:
    options = LoopOptions(**{"steps": 8, "lr": 1e-3, "seed": 5, "checkpoint_every": 2, **loop})
    return Trainer(system, options, device=CPU, dtype=system.dtype, rank=rank, world=world)


def trained_state(
    rank: int, patch: pytest.MonkeyPatch, backbone: Path, folder: Path, zero: int | None
) -> dict[str, torch.Tensor]:
    """Trains in small chunks, of which the workers have unequal numbers in some steps; returns the final state."""
    patch.setitem(batching.BATCH_TOKENS, "cpu", 200)
    trainer = trainer_of(cross_system(backbone), rank, 2, zero=zero)
    trainer.train(Checkpoints(folder / f"run{rank}").hooks())
    return trainer.stepper.state()


def scored(rank: int, patch: pytest.MonkeyPatch, folder: Path, texts: list[str]) -> np.ndarray:
    """Returns the logits of pairs that two workers share; each text is its own query."""
    return cross_system(folder).score(texts, texts, rank, 2)
