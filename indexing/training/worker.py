"""Runs one worker of a training run, with or without Ray: creates the system, trains it and commits the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from riptide.base.errors import InputError
from riptide.indexing.store.draft import ABANDONED_S, Draft, keep_alive
from riptide.indexing.store.model_artifacts import StoredCheckpoint, commit_files, resolve_model
from riptide.indexing.store.store import Store
from riptide.indexing.training.messages import Message, TrainingResult
from riptide.indexing.training.workers import WorkerGroup
from riptide.process.temporary_folders import TemporaryFolder
from riptide.retriever.forward.numerics import choose_dtype
from riptide.retriever.model.model_folder import describe_backbone, find_model_folder
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.training.hooks import StopRequests, WorkerHooks, no_node_drains, no_stop_requests
from riptide.retriever.training.loop import Trainer
from riptide.retriever.training.system import Evaluate, NegativesRefresh, System
from riptide.telemetry.phases import Phase, measured


class SystemMaker(Protocol):
    """The interface of a factory of training systems. It is sent to workers, so it holds only names and options."""

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[System, Evaluate | None, NegativesRefresh | None]:
        """Creates the system of one worker.

        Args:
            device: The device of the worker.
            dtype: The dtype of the forward and backward pass.
            rank: The rank of the worker.
            world: The number of workers.

        Returns:
            The system, the function that evaluates it during training, and the function that mines its negatives again;
            None for a function that is not used.

        Raises:
            InputError: If the system cannot be made on this worker.
        """


@runtime_checkable
class JudgingMaker(Protocol):
    """A SystemMaker that also evaluates the trained system at the end; all workers call `judge` at the same time."""

    def judge(self, system: Any) -> dict[str, Any]:
        """Evaluates the system; returns results for the notes of the artifact, JSON-able."""


def open_backbone(store: Store, name: str, backbone_settings: dict[str, Any]) -> Path:
    """Returns the folder of a backbone. Raises InputError if its description differs from that of the job's node."""
    folder = find_model_folder(resolve_model(store, name))
    if describe_backbone(folder) != backbone_settings:
        raise InputError(f"{name}: this node has other weights of it than the node of the job: {folder}")
    return folder


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """The description of a training run that all workers receive.

    Attributes:
        draft: The model. It need not have begun: rank 0 begins it after all workers have opened the backbone.
        last_checkpoint: Where the last checkpoint is stored.
        best_checkpoint: Where the checkpoint with the best weights is stored.
        loop: Options of the training loop.
        maker: Makes the system of each worker.
        dtype: "auto", "float32" or "bfloat16".
        group: The workers.
    """

    draft: Draft
    last_checkpoint: StoredCheckpoint
    best_checkpoint: StoredCheckpoint
    loop: LoopOptions
    maker: SystemMaker
    dtype: str
    group: WorkerGroup

    @contextlib.contextmanager
    def begin_draft(self) -> Iterator[None]:
        """Begins the draft and renews it within the block; used on rank 0.

        If an exception ends the block before the first checkpoint, the next command replaces the draft at once.
        """
        self.draft.begin(abandoned_s=abandoned_after_s(self.last_checkpoint))
        try:
            with keep_alive([self.draft]):
                yield
        except BaseException as error:
            if not self.last_checkpoint.exists():
                self.draft.abandon(error)
            raise

    def save(self, checkpoints: StoredCheckpoint, step: int, write: Callable[[Path], object]) -> None:
        """Saves a checkpoint. Raises InputError if the draft was removed, or replaced by another run with its name."""
        self.draft.require_pinned()
        checkpoints.save(step, write)


def abandoned_after_s(last_checkpoint: StoredCheckpoint) -> float | None:
    """Returns `abandoned_s` for Draft.begin of a model: None (never) if a checkpoint exists, otherwise ABANDONED_S."""
    return None if last_checkpoint.exists() else ABANDONED_S


@measured("compute")
def train_on_worker(
    task: TrainingTask,
    send: Callable[[Message], object],
    *,
    device: torch.device,
    rank: int,
    world: int,
    stop_requests: StopRequests = no_stop_requests,
    is_node_draining: Callable[[], bool] = no_node_drains,
) -> TrainingResult | None:
    """Trains on one worker and commits the model on rank 0.

    The draft begins only after all workers have opened their weights, so a bad model leaves nothing in the store.

    Args:
        task: The task.
        send: Called with the messages of the worker (ProgressMessage).
        device: The device of the worker.
        rank: The rank of the worker.
        world: The number of workers.
        stop_requests: Where rank 0 learns that the run must stop.
        is_node_draining: As of WorkerHooks.

    Returns:
        The result on rank 0; None on the others.

    Raises:
        InputError: If the input is bad.
        Stopped: If a stop was requested.
    """

    dtype = choose_dtype(task.dtype, device, measure=False)  # all workers must decide alike
    with Phase("open"):
        system, evaluate, refresh = task.maker.make(device=device, dtype=dtype, rank=rank, world=world)
        trainer = Trainer(system, task.loop, device=device, dtype=dtype, rank=rank, world=world)
    if world > 1:
        dist.all_reduce(torch.zeros((), device=device))  # a barrier: waits for all workers
    save, save_best = partial(task.save, task.last_checkpoint), partial(task.save, task.best_checkpoint)
    load, load_best = task.last_checkpoint.load, task.best_checkpoint.load
    hooks = WorkerHooks(load, save, load_best, save_best, send, stop_requests, is_node_draining)
    with task.begin_draft() if rank == 0 else contextlib.nullcontext():
        progress = trainer.train(hooks, evaluate, refresh)
        judged = task.maker.judge(system) if isinstance(task.maker, JudgingMaker) else {}
        with TemporaryFolder("model") as folder:
            with trainer.stepper.gathered_weights():
                if rank == 0:
                    system.save(Path(folder))
            if rank == 0:
                commit_files(task.draft, Path(folder))
    if rank != 0:
        return None
    return TrainingResult(
        steps=progress.steps,
        workers=world,
        numerics=trainer.numerics,
        loss=progress.curve[-1][1] if progress.curve else None,
        curve=progress.curve,
        best=progress.best,
        best_step=progress.best_step,
        start=progress.start,
        cuts=progress.cuts,
        judged=judged,
    )


@contextlib.contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Sets torch's number of threads within the block, and then restores it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
