"""A new term of the loss is a class and an entry of the registry: nothing else knows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_bert
from training_cases import CPU, dual_system

from riptide.retriever.objectives.loss_term import EncodedChunk, LossTerm, StepBatch, query_and_passage_vectors
from riptide.retriever.objectives.terms import TERMS
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.systems import dual
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput

WEIGHT = 25.0


class ComponentTerm(LossTerm):
    """The mean square of the first components of the queries' vectors, from a separate output.

    (Their lengths would not change: the last layer of the backbone normalises them.)
    """

    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        return True

    def add_to(self, step: StepBatch) -> None:
        step.outputs["squares"] = BatchOutput(1)
        step.arguments["step"] = step.number

    def outputs(self, chunk: BatchChunk, encoded: EncodedChunk) -> dict[str, torch.Tensor]:
        return {"squares": encoded.vectors[:, :1].square().sum()[None, None]} if encoded.side == "query" else {}

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        return WEIGHT * outputs["squares"].sum() / batch.arguments["queries"]


class NamelessTerm(LossTerm):
    @classmethod
    def is_used(cls, tuning: TuneOptions) -> bool:
        return True


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


def first_losses(bert: Path, **tuning: Any) -> list[float]:
    """Returns the losses of eight steps of a prompt."""
    system = dual_system(bert, dropout=0.0, chunk=100, **tuning)
    trainer = Trainer(system, LoopOptions(steps=8, lr=3e-2), device=CPU, dtype=torch.float32)
    return [trainer.step(step) for step in range(8)]


def test_a_term_is_added_to_the_loss_and_trains(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = first_losses(bert)
    system = dual_system(bert, dropout=0.0, chunk=100)
    batch = system.batch(0, 0, 1)
    chunks = [(chunk, system.forward(chunk)[0]["dense"]) for chunk in batch.chunks]
    vectors = torch.zeros(batch.outputs["dense"].rows or 0, system.dim)
    for chunk, of_chunk in chunks:
        vectors[torch.from_numpy(chunk.rows["dense"])] = of_chunk.detach()
    queries, _ = query_and_passage_vectors({"dense": vectors}, batch)
    monkeypatch.setattr(dual, "TERMS", [*TERMS, ComponentTerm])
    losses = first_losses(bert)
    # 1e-4: the batch is encoded in other chunks here, so the sums of float32 are rounded otherwise.
    assert losses[0] - without[0] == pytest.approx(WEIGHT * float(queries[:, 0].square().mean()), rel=1e-4)
    assert losses[7] - without[7] < 0.9 * (losses[0] - without[0]), "training makes the components smaller"


def test_a_term_without_a_method_is_named(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual, "TERMS", [*TERMS, NamelessTerm])
    with pytest.raises(NotImplementedError, match=r"^NamelessTerm: expected a method loss\(outputs, batch\)$"):
        first_losses(bert)
