"""Training on the cluster: Ray Train starts the workers; each reads the store itself, and keeps checkpoints there."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from indexing.artifact import Draft
from indexing.models import Checkpoints, commit_files, resolve_model
from indexing.placement import Places, tell_of_waiting
from indexing.store import Store
from indexing.tasks import RETRIES
from retriever.errors import InputError
from retriever.files import describe_backbone, resolve
from retriever.numerics import choose_dtype
from retriever.system import Evaluate, Refresh, System
from retriever.training import Hooks, LoopOptions, Trainer

MOST = 100  # losses that one run bears, however far it comes between them


class Maker(Protocol):
    """What a worker makes its system from; travels there, so it holds names and options only."""

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[System, Evaluate | None, Refresh | None]:
        """The system, how it is judged while it trains, and what mines for it anew. Raises InputError."""


def open_backbone(store: Store, name: str, described: dict[str, Any]) -> Path:
    """The folder of a Maker's backbone. Raises InputError where it is not what the node of the job described."""
    folder = resolve(resolve_model(store, name))
    if describe_backbone(folder) != described:
        raise InputError(f"{name}: this node has other weights of it than the node of the job: {folder}")
    return folder


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """What a worker is told. best: where the best weights are kept apart from the last checkpoint."""

    draft: Draft
    last: Checkpoints
    best: Checkpoints
    loop: LoopOptions
    maker: Maker
    dtype: str
    places: Places


def run_training(
    task: TrainingTask, count: Callable[[int, bool], object], note: Callable[[dict[str, Any]], object],
    say: Callable[[str], object],
) -> dict[str, Any]:  # fmt: skip
    """Train in the task's places and commit what came of it; count(steps, kept) is called as steps are done, kept: by
    an earlier run; note: told of each step, once (see Hooks); say: what a person should know of.

    A lost worker is started again, and all go on from the last checkpoint; with fewer workers, down to the least,
    where the cluster has no place for it, on the same batches. Returns the last loss, the numerics class, the curve and
    the best quality. Raises InputError, a worker's own too.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    places = task.places
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    told, over = (Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here}) for _ in range(2))
    heard: dict[str, Any] = {}
    begun = threading.Event()

    def listen() -> None:
        try:
            _listen(told, over, begun, heard, count, note)
        except Exception as error:
            heard["broken"] = error
            over.put(True)  # nobody hears the workers any more

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    folder = tempfile.mkdtemp(prefix="riptide-train-")
    try:
        with tell_of_waiting(places, begun, say):
            TorchTrainer(
                functools.partial(work, task, told, over),
                scaling_config=ScalingConfig(
                    num_workers=(places.least, places.workers) if places.least < places.workers else places.workers,
                    use_gpu=places.gpus > 0,
                    resources_per_worker=places.resources,
                ),
                run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=MOST)),
            ).fit()
    finally:
        told.put(None)
        listener.join()
        told.shutdown()
        over.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        if "broken" in heard:
            raise heard["broken"]
        if "error" in heard:
            raise InputError(heard["error"])
    return {name: heard.get(name) for name in ("loss", "numerics", "curve", "best", "best_step", "steps", "workers")}


def _listen(
    told: Any, over: Any, begun: threading.Event, heard: dict[str, Any], count: Callable[[int, bool], object],
    note: Callable[[dict[str, Any]], object],
) -> None:  # fmt: skip
    """Take in what workers tell until None comes; an error, to `over` too. begun: set once one has a place.

    It is an error too where they are lost again and again before they come to a step that is new.

    Steps that are done again after a loss are not counted again.
    """
    last = tries = 0
    why = lost = ""  # the first that was told since the workers began; that they are lost too often
    while (message := told.get()) is not None:
        heard |= message
        why = why or message.get("failed", "")
        if message.get("begun") == 0:
            begun.set()
            tries += 1
            if tries == RETRIES + 2:
                cause = f" ({why})" if why else ""
                lost = (f"workers were lost {RETRIES + 1} times on their way to step {last + 1:,}{cause}; what came "
                        "before is kept: run it again when the reason is gone")  # fmt: skip
                over.put(True)  # those that come next end at once; these may still come further
            why = ""
        if "error" in message:
            over.put(True)
        further = message.get("step", 0) > last
        if further or "steps" in message:
            tries = 0
            if lost:
                lost = ""
                over.get()
        if further:
            note(message)
        done = max(message.get("step", 0), message.get("resumed", 0))
        if done > last:
            count(done - last, "resumed" in message)
            last = done
    if lost:
        heard.setdefault("error", lost)


def work(task: TrainingTask, told: Any, over: Any) -> None:
    """One worker, from opening the store to the committed model. What is wrong with the input is told, not raised:
    Ray Train would start it again. Others that fail for want of this worker are started again, and end at once."""
    import torch.distributed as dist
    from ray.train import get_context
    from ray.train.torch import get_device

    if not over.empty():
        return
    torch.set_num_threads(task.places.cpus)
    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    told.put({"begun": rank})
    try:
        train_one(task, told.put, device=torch.device(str(get_device())), rank=rank, world=world)
    except InputError as error:
        told.put({"error": str(error)})
        if dist.is_initialized():
            dist.destroy_process_group()  # the others wait for this worker no longer
    except Exception as error:
        told.put({"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"})
        raise


def train_one(
    task: TrainingTask, tell: Callable[[dict[str, Any]], object], *, device: torch.device, rank: int, world: int
) -> None:
    """What a worker does, without Ray. Raises InputError."""
    dtype = choose_dtype(task.dtype, device)
    system, evaluate, refresh = task.maker.make(device=device, dtype=dtype, rank=rank, world=world)
    hooks = Hooks(task.last.load, task.last.save, task.best.load, task.best.save, tell)
    trainer = Trainer(system, task.loop, device=device, dtype=dtype, rank=rank, world=world)
    progress = trainer.train(hooks, evaluate, refresh)
    with tempfile.TemporaryDirectory(prefix="riptide-model-") as folder:
        with trainer.stepper.whole():
            if rank == 0:
                system.save(Path(folder))
        if rank == 0:
            commit_files(task.draft, Path(folder))
    if rank == 0:
        tell({"numerics": trainer.numerics, "curve": progress.curve, "best": progress.best,
              "best_step": progress.best_step, "steps": progress.steps, "workers": world,
              "loss": progress.curve[-1][1] if progress.curve else None})  # fmt: skip
