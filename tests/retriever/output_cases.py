"""A system with named outputs of several widths, some of them sums, and its cases for two workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from riptide.retriever.objectives.contrastive import contrastive_loss
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.stepping import trained_parameters
from riptide.retriever.training.system import Batch, BatchChunk, BatchOutput

CPU = torch.device("cpu")
FEATURES, HIDDEN, DENSE, VOCABULARY, PROMPTS = 6, 16, 5, 40, 3
NUM_QUERIES, NUM_PASSAGES = 7, 11


class NamedSystem:
    """A System of two towers: dense and sparse vectors of all texts, and attention weights of queries.

    The loss has FLOPS, which needs the mean activations of all queries and of all passages; a term over pairs of
    attention weights; and a part that each chunk computes alone.

    Args:
        chunk: Texts per chunk, all of one side.
        num_queries: Queries of a batch.
        rate: Dropout of the hidden layer.
    """

    def __init__(self, chunk: int = 2, num_queries: int = NUM_QUERIES, rate: float = 0.0):
        torch.manual_seed(0)
        self.chunk, self.num_queries, self.rate = chunk, num_queries, rate
        self.hidden = nn.Linear(FEATURES, HIDDEN)
        self.heads = nn.ModuleDict(
            {
                "dense": nn.Linear(HIDDEN, DENSE),
                "sparse": nn.Linear(HIDDEN, VOCABULARY),
                "attention": nn.Linear(HIDDEN, PROMPTS),
            }
        )
        self.module: nn.Module = nn.ModuleDict({"hidden": self.hidden, "heads": self.heads})

    def texts(self, step: int) -> torch.Tensor:
        """Returns the features of the texts of a batch, queries first."""
        draw = np.random.default_rng(step)
        return torch.from_numpy(draw.normal(size=(self.num_queries + NUM_PASSAGES, FEATURES)).astype(np.float32))

    def batch(self, step: int, rank: int, world: int) -> Batch:
        texts, total = self.texts(step), self.num_queries + NUM_PASSAGES
        chunks = []
        for first, last in ((0, self.num_queries), (self.num_queries, total)):
            mine = np.arange(first + rank, last, world)
            for start in range(0, len(mine), self.chunk):
                rows = mine[start : start + self.chunk]
                is_query = first == 0
                named = {"dense": rows, "sparse": rows, **({"attention": rows} if is_query else {})}
                chunks.append(BatchChunk(named, (texts[torch.from_numpy(rows)], is_query), len(rows)))
        outputs = {
            "dense": BatchOutput(DENSE, total),
            "sparse": BatchOutput(VOCABULARY, total),
            "attention": BatchOutput(PROMPTS, self.num_queries),
            "queries": BatchOutput(VOCABULARY),
            "passages": BatchOutput(VOCABULARY),
        }
        return Batch(outputs, chunks)

    def forward(self, chunk: BatchChunk) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        features, is_query = chunk.inputs
        hidden = nn.functional.dropout(self.hidden(features).tanh(), self.rate, training=self.rate > 0)
        sparse = self.heads["sparse"](hidden).relu().log1p()
        outputs = {"dense": self.heads["dense"](hidden), "sparse": sparse}
        attention = self.heads["attention"](hidden).softmax(1)
        part = hidden.square().sum() / 100
        if is_query:
            outputs["attention"] = attention
        else:
            part = part + 0 * attention.sum()  # with ZeRO's stages 2 and 3 all chunks must train the same weights
        # A sum may be given row by row, or added up already.
        outputs["queries" if is_query else "passages"] = sparse if is_query else sparse.sum(0, keepdim=True)
        return outputs, part

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        count = self.num_queries
        loss = torch.zeros(())
        for name in ("dense", "sparse"):
            vectors = outputs[name]
            loss = loss + contrastive_loss(vectors[:count], vectors[count:], torch.arange(count))
        for name, texts in (("queries", count), ("passages", NUM_PASSAGES)):
            loss = loss + 0.3 * (outputs[name] / texts).square().sum()
        attention = outputs["attention"]
        return loss + (attention @ attention.T).square().mean()

    def save(self, folder: Path) -> None:
        raise NotImplementedError


def one_graph(system: NamedSystem, step: int = 0) -> dict[str, Any]:
    """Returns the loss and the gradients of a batch, computed in one graph and without the training loop."""
    texts, count = system.texts(step), system.num_queries
    hidden = system.hidden(texts).tanh()
    sparse = system.heads["sparse"](hidden).relu().log1p()
    outputs = {
        "dense": system.heads["dense"](hidden),
        "sparse": sparse,
        "attention": system.heads["attention"](hidden[:count]).softmax(1),
        "queries": sparse[:count].sum(0, keepdim=True),
        "passages": sparse[count:].sum(0, keepdim=True),
    }
    loss = system.loss(outputs, system.batch(step, 0, 1)) + hidden.square().sum() / 100
    loss.backward()
    return {"loss": loss.item(), **{name: p.grad.clone() for name, p in trained_parameters(system.module).items()}}  # type: ignore[union-attr]


# Cases: functions that TwoWorkers runs on both workers.


def two_steps(
    rank: int, patch: pytest.MonkeyPatch, world: int, num_queries: int, grad_cache: str, zero: int | None
) -> dict[str, Any]:
    """Returns the losses of two steps and the state after them."""
    loop = LoopOptions(steps=4, lr=1e-2, grad_cache=grad_cache, zero=zero)  # type: ignore[arg-type]
    system = NamedSystem(num_queries=num_queries)
    trainer = Trainer(system, loop, device=CPU, dtype=torch.float32, rank=rank, world=world)
    losses = [trainer.step(number) for number in range(2)]
    return {"losses": torch.tensor(losses), **trainer.stepper.state()}


def gradients(rank: int, patch: pytest.MonkeyPatch, world: int, num_queries: int, grad_cache: str) -> dict[str, Any]:
    """Returns the loss and the gradients of a step, summed over the workers as the stepper does."""
    loop = LoopOptions(steps=4, lr=1e-2, grad_cache=grad_cache)  # type: ignore[arg-type]
    system = NamedSystem(num_queries=num_queries)
    trainer = Trainer(system, loop, device=CPU, dtype=torch.float32, rank=rank, world=world)
    caught: dict[str, Any] = {}

    def catch(lr: float) -> float:
        for name, parameter in trained_parameters(system.module).items():
            caught[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if world > 1:
                torch.distributed.all_reduce(caught[name])
        return 0.0

    trainer.stepper.step = catch  # type: ignore[method-assign]
    return {"loss": trainer.step(0), **caught}
