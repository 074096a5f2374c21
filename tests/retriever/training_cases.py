"""Training data, systems and checkpoints that tests of the training loop share, and their cases for two workers."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from tiny import VOCABULARY

from riptide.retriever.forward import batching
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.objectives.flops_term import FlopsOptions
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import GRAPH_TOKENS, LoopOptions
from riptide.retriever.options.lora import LoraOptions
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.topics.training import TrainingTopics
from riptide.retriever.training import loop as training
from riptide.retriever.training.hooks import (
    ProgressMessage,
    RunResumed,
    StepDone,
    Stopped,
    TrainingProgress,
    WorkerHooks,
)
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.stepping import trained_parameters
from riptide.retriever.training.training_data import TeacherScores, TrainingData

ENCODER = EncoderOptions(pooling="cls", query_length=16, passage_length=48, dtype="float32", compile="never")
CPU = torch.device("cpu")
Result = TypeVar("Result")
LONG_AND_SHORT = ["w1 w2" if number % 2 else " ".join(["w3"] * 40) for number in range(12)]


def make_data(passages: int = 60) -> TrainingData:
    """Returns queries made of words of their passage: two queries per passage; every fourth has two positives.

    The teacher's probabilities are random numbers.
    """
    draw = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in draw.integers(VOCABULARY, size=draw.integers(10, 40))) for _ in range(passages)]
    queries = [" ".join(texts[number // 2].split()[:6]) for number in range(2 * passages)]
    positives = [
        np.array([number // 2, *([(number // 2 + 9) % passages] if number % 4 == 0 else [])])
        for number in range(2 * passages)
    ]
    negatives = [np.setdiff1d(draw.integers(passages, size=5), own) for own in positives]
    teacher = TeacherScores(
        *([draw.random(len(rows)).astype(np.float32) for rows in lists] for lists in (positives, negatives))
    )
    return TrainingData(
        queries,
        positives,
        negatives,
        passages,
        lambda rows: ([""] * len(rows), [texts[row] for row in rows]),
        teacher=teacher,
    )


def dual_system(
    bert: Path,
    dropout: float | None = 0.1,
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
    given: TrainingTopics | None = None,
    **tuning: Any,
) -> DualEncoderSystem:
    """Returns a dual encoder over `make_data`.

    Args:
        bert: Folder of the backbone.
        dropout: Dropout of the prompts and of all layers; None keeps that of the options and of the backbone.
        dtype: The dtype of the forward and backward pass.
        chunk: Tokens per chunk, so that a batch has several chunks; by default one chunk per side.
        given: The topics of the texts, for prompts of topics.
        **tuning: Options of TuneOptions; with FlopsOptions, vectors are sparse, and with sides "query", those of
            passages are random numbers.
    """
    defaults: dict[str, Any] = {"length": 4, "batch": 12, "negatives_per_query": 2}
    if dropout is not None:
        defaults["prompt_dropout"] = dropout
    if tuning.get("method") == "lora":
        defaults["lora"] = LoraOptions(rank=4, alpha=8)
    options = TuneOptions(**{**defaults, **tuning})
    encoder = ENCODER if options.term_options(FlopsOptions) is None else replace(ENCODER, pooling="splade")
    data, vectors = make_data(), None
    if options.sides == "query":
        draw, size = np.random.default_rng(0), (data.num_passages, read_recipe(bert, encoder).dim)
        stored = draw.normal(size=size).astype(np.float16)
        if options.term_options(FlopsOptions) is not None:
            stored = np.where(draw.random(size) < 0.05, np.abs(stored), 0.0).astype(np.float32)
        vectors = stored.__getitem__
    system = DualEncoderSystem(bert, encoder, options, data, device=CPU, dtype=dtype, vectors=vectors, assignment=given)
    for module in system.module.modules():
        if isinstance(module, torch.nn.Dropout) and dropout is not None:
            module.p = dropout
    if chunk is not None:

        def chunks(texts: Any, side: Any, rows: Any, *output: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(batching.BATCH_TOKENS, "cpu", chunk)
                return DualEncoderSystem.chunks(system, texts, side, rows, *output)

        system.chunks = chunks  # type: ignore[method-assign]
    return system


def short_system(bert: Path) -> DualEncoderSystem:
    """Returns a dual encoder that cuts most of the texts of `make_data`: queries to 6 tokens, passages to 20."""
    encoder = replace(ENCODER, query_length=6, passage_length=20)
    options = TuneOptions(length=4, batch=12, negatives_per_query=2)
    return DualEncoderSystem(bert, encoder, options, make_data(), device=CPU, dtype=torch.float32)


def gradients(
    system: DualEncoderSystem, step: int = 0, *, rank: int = 0, world: int = 1, **loop: Any
) -> dict[str, Any]:
    """Returns the loss and the gradients of one step, before the optimizer uses them."""
    options = LoopOptions(steps=10, lr=1e-3, **loop)
    trainer = Trainer(system, options, device=CPU, dtype=torch.float32, rank=rank, world=world)
    caught: dict[str, Any] = {}

    def catch(lr: float) -> float:
        for name, parameter in trained_parameters(system.module).items():
            caught[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        system.module.zero_grad()
        return 0.0

    trainer.stepper.step = catch  # type: ignore[method-assign]
    system.module.train()
    loss = trainer.step(step)
    return {"loss": loss, **caught}


def record_norms(trainer: Trainer) -> list[float]:
    """Returns a list to which each later step of the trainer adds the norm of its gradient."""
    norms: list[float] = []
    step = trainer.stepper.step

    def record(lr: float) -> float:
        norms.append(step(lr))
        return norms[-1]

    trainer.stepper.step = record  # type: ignore[method-assign]
    return norms


def steps_and_state(bert: Path, tuning: dict[str, Any], *, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Returns the last loss, and weights and moments, after four steps without dropout."""
    system = dual_system(bert, dropout=0.0, chunk=200, **tuning)
    options = LoopOptions(steps=6, lr=1e-2)
    trainer = Trainer(system, options, device=CPU, dtype=torch.float32, rank=rank, world=world)
    losses = [trainer.step(number) for number in range(4)]
    return {"loss": losses[-1], **trainer.stepper.state()}


class Checkpoints:
    """Hooks that keep checkpoints in a folder.

    Attributes:
        reports: What the trainer reported.
        saved: The steps of the checkpoints that were written, those of the best weights aside.
        polls: How often the trainer asked whether a node is draining.

    Args:
        folder: The folder; created if it does not exist.
        die_at: The process is lost before the checkpoint of this step is written.
        stop_at: A stop is requested when this step is done; 0: before the first one.
        drains_at: From this step on, a node is draining.
    """

    def __init__(
        self, folder: Path, die_at: int | None = None, stop_at: int | None = None, drains_at: float = math.inf
    ):
        self.folder, self.die_at, self.stop_at, self.drains_at = folder, die_at, stop_at, drains_at
        folder.mkdir(exist_ok=True)
        self.reports: list[ProgressMessage] = []
        self.saved: list[int] = []
        self.polls = 0

    @property
    def step_reports(self) -> list[StepDone]:
        """The steps that the trainer reported."""
        return [report for report in self.reports if isinstance(report, StepDone)]

    @contextlib.contextmanager
    def stop_requests(self) -> Iterator[Callable[[], bool]]:
        """The StopRequests of `stop_at`."""
        yield lambda: self.stop_at in [0, *(report.step for report in self.step_reports)]

    def is_node_draining(self) -> bool:
        self.polls += 1
        return bool(self.step_reports) and self.step_reports[-1].step >= self.drains_at

    def hooks(self) -> WorkerHooks:
        def save(name: str, step: int, write: Callable[[Path], object]) -> None:
            if self.die_at is not None and step >= self.die_at:
                raise KeyboardInterrupt
            write(self.folder / name)
            if name == "last":
                self.saved.append(step)

        def load(name: str) -> Path | None:
            if not (self.folder / name).exists():
                return None
            return Path(shutil.copy(self.folder / name, self.folder / f"copy-{name}-{os.getpid()}"))

        part = functools.partial
        last, best = (part(load, "last"), part(save, "last")), (part(load, "best"), part(save, "best"))
        return WorkerHooks(*last, *best, self.reports.append, self.stop_requests, self.is_node_draining)


def train(system: DualEncoderSystem, checkpoints: Checkpoints, **loop: Any) -> TrainingProgress:
    """Trains a system, six steps by default."""
    options = LoopOptions(**{"steps": 6, "lr": 1e-2, "checkpoint_every": 2, **loop})
    return Trainer(system, options, device=CPU, dtype=torch.float32).train(checkpoints.hooks())


def whole_and_resumed(run: Callable[[Checkpoints], Result], folder: Path) -> tuple[Result, Result]:
    """Returns the results of an undisturbed run, and of one that is killed at step 4 and run again."""
    whole = run(Checkpoints(folder / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run(Checkpoints(folder / "killed", die_at=4))
    checkpoints = Checkpoints(folder / "killed")
    resumed = run(checkpoints)
    assert checkpoints.reports[0] == RunResumed(2)
    return whole, resumed


def clock(seconds: float) -> SimpleNamespace:
    """Returns what takes the place of the module `time`: a clock that goes forward by so much whenever it is read."""
    readings = iter(range(1_000_000))
    return SimpleNamespace(monotonic=lambda: seconds * next(readings))


# Cases: functions that TwoWorkers runs on both workers.


def limited_run(rank: int, patch: pytest.MonkeyPatch, bert: Path, folder: Path) -> tuple[int, int | None]:
    """Trains with a time limit; the clock of rank 1 is slower. Returns the steps, and those that were decided."""
    loop = LoopOptions(steps=1000, lr=1e-2, max_minutes=0.5)
    trainer = Trainer(dual_system(bert), loop, device=CPU, dtype=torch.float32, rank=rank, world=2)
    patch.setattr(training, "time", clock(0.5 if rank == 0 else 0.1))
    progress = trainer.train(Checkpoints(folder / "limited").hooks())
    return progress.steps, progress.run_steps


def summed_gradients(rank: int, patch: pytest.MonkeyPatch, bert: Path, method: str) -> dict[str, Any]:
    """Returns the loss and the gradients of a step, summed over the workers as the stepper does."""
    result = gradients(dual_system(bert, dropout=0.0, method=method), rank=rank, world=2)
    for name in sorted(result.keys() - {"loss"}):
        torch.distributed.all_reduce(result[name])
    return result


def resumed_steps(
    rank: int, patch: pytest.MonkeyPatch, bert: Path, method: str, stage: int, tuning: dict[str, Any]
) -> dict[str, Any]:
    """Returns loss, norm and state after four steps of DeepSpeed, the last one from a state that was loaded."""
    system = dual_system(bert, dropout=0.0, method=method, chunk=200, **tuning)
    loop = LoopOptions(steps=6, lr=1e-2, zero=stage)
    trainer = Trainer(system, loop, device=CPU, dtype=torch.float32, rank=rank, world=2)
    shares = [sum(chunk.tokens for chunk in system.batch(0, each, 2).chunks) for each in range(2)]
    # The graphs of one worker need more than this, those of the other do not.
    patch.setitem(GRAPH_TOKENS, "cpu", max(shares) - 1)
    assert min(shares) < GRAPH_TOKENS["cpu"]
    norms = record_norms(trainer)
    losses = [trainer.step(number) for number in range(3)]
    # As a new process resumes.
    state = trainer.stepper.state()
    losses.append(trainer.step(3))
    trainer.stepper.load(state.__getitem__, 3, trainer._output_sum)
    assert trainer.step(3) == losses[-1]
    return {"loss": losses[-1], "norm": torch.tensor(norms[-1]), **trainer.stepper.state()}


def losses_with_dropout(
    rank: int, patch: pytest.MonkeyPatch, bert: Path, stage: int, dtype: torch.dtype
) -> dict[str, list[float]]:
    """Returns losses and norms of two steps with dropout, without GradCache ("off") and with it ("on")."""
    result = {}
    for choice in ("off", "on"):
        method = "finetune" if stage > 1 else "prompt"
        system = dual_system(bert, dropout=None, dtype=dtype, chunk=200, method=method)
        loop = LoopOptions(steps=6, lr=1e-3, zero=stage, grad_cache=choice)  # type: ignore[arg-type]
        trainer = Trainer(system, loop, device=CPU, dtype=dtype, rank=rank, world=2)
        norms = record_norms(trainer)
        system.module.train()
        result[choice] = [trainer.step(number) for number in range(2)] + norms
    return result


def sharded_weights(
    rank: int, patch: pytest.MonkeyPatch, bert: Path, out: Path, tuning: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes and saves with weights that DeepSpeed shards; the workers have unequal numbers of chunks.

    Returns:
        Vectors of LONG_AND_SHORT, and of its first text alone, for which the second worker has no text.
    """
    system = dual_system(bert, dropout=0.0, chunk=100, method="finetune", **tuning)
    loop = LoopOptions(steps=6, lr=1e-3, zero=3)
    trainer = Trainer(system, loop, device=CPU, dtype=torch.float32, rank=rank, world=2)
    system.module.train()
    trainer.step(0)
    system.module.eval()
    assert system.pooled.backbone.embeddings.word_embeddings.weight.numel() == 0, "each worker holds all of it"
    vectors = system.encode(LONG_AND_SHORT, "passage", rank, 2)
    first = system.encode(LONG_AND_SHORT[:1], "passage", rank, 2)
    with trainer.stepper.gathered_weights():
        if rank == 0:
            system.save(out)
    return vectors, first


def four_steps(rank: int, patch: pytest.MonkeyPatch, bert: Path, tuning: dict[str, Any]) -> dict[str, Any]:
    """Returns the loss and the state after four steps of two workers."""
    return steps_and_state(bert, tuning, rank=rank, world=2)


def cuts_of_six_steps(rank: int, patch: pytest.MonkeyPatch, bert: Path, folder: Path) -> dict[str, Any]:
    """Returns the counts of cut texts after six steps of two workers."""
    options = LoopOptions(steps=6, lr=1e-2, checkpoint_every=4)
    trainer = Trainer(short_system(bert), options, device=CPU, dtype=torch.float32, rank=rank, world=2)
    return trainer.train(Checkpoints(folder / str(rank)).hooks()).cuts


def first_four_steps(rank: int, patch: pytest.MonkeyPatch, bert: Path, folder: Path) -> None:
    """Runs four of nine steps and writes the checkpoint."""
    loop = LoopOptions(steps=9, lr=1e-2)
    trainer = Trainer(dual_system(bert, dropout=0.0), loop, device=CPU, dtype=torch.float32, rank=rank, world=2)
    curve: list[Any] = [[number + 1, trainer.step(number), loop.learning_rate(number), None] for number in range(4)]
    trainer._save_checkpoint(Checkpoints(folder).hooks().save, TrainingProgress(4, curve))


def stopped_and_resumed(
    rank: int, patch: pytest.MonkeyPatch, bert: Path, folder: Path, method: str, zero: int | None
) -> list[dict[str, torch.Tensor]]:
    """Runs six steps; then again, stopped at step 4 and resumed. The flag and the clock of rank 0 decide, not rank 1's.

    Both ask after the same steps whether a node is draining.

    Returns:
        The state after the last step of the run that was not stopped, and of the one that was.
    """
    states = []
    for name, stop_at in (("whole", None), ("stopped", 4 if rank == 0 else 1), ("stopped", None)):
        system = dual_system(bert, method=method, chunk=200)
        loop = LoopOptions(steps=6, lr=1e-2, zero=zero)
        trainer = Trainer(system, loop, device=CPU, dtype=torch.float32, rank=rank, world=2)
        checkpoints = Checkpoints(folder / name, stop_at=stop_at)
        patch.setattr(training, "time", clock(200.0 if rank == 0 else 1e6 if stop_at is None else 0.0))
        stops = contextlib.nullcontext() if stop_at is None else pytest.raises(Stopped)
        with stops:
            trainer.train(checkpoints.hooks())
        torch.distributed.barrier()  # rank 0 has written the checkpoint
        assert checkpoints.polls == {"whole": 6, "stopped": 4 if stop_at else 2}[name]
        if stop_at is None:
            states.append(trainer.stepper.state())
        if rank == 0:
            assert checkpoints.saved == {"whole": [2, 4, 6], "stopped": [2, 4] if stop_at else [6]}[name]
            assert checkpoints.reports[0] == (RunResumed(4) if (name, stop_at) == ("stopped", None) else ANY)
    return states
