"""Training of a re-ranker on the cluster: Ray Train starts the workers, each of which reads the store itself."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexing.artifact import Draft
from indexing.corpus import Corpus
from indexing.models import Checkpoints, commit_model, resolve_model
from indexing.negatives import training_data
from indexing.placement import Places
from indexing.queries import Queries
from indexing.store import Store
from indexing.tasks import RETRIES
from retriever.errors import InputError
from retriever.files import resolve
from retriever.reranker_data import TrainingOptions
from retriever.reranker_training import Hooks, Trainee, describe_backbone


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker is told; `backbone` is a name, `described` what it must be; `queries` and `negatives` are keys."""

    store: Store
    draft: Draft
    checkpoints: Checkpoints
    training: TrainingOptions
    backbone: str
    described: dict[str, Any]
    corpus: Corpus
    queries: str
    negatives: str
    split: str
    limit: int | None
    places: Places
    checkpoint_every: int


def train(task: Task, count: Callable[[int], object]) -> dict[str, Any]:
    """Train in the task's places and commit the model's parts; count(steps) is called as steps are done.

    A worker that is lost is started again, and all go on from the last checkpoint. Returns the last step's loss and
    the numerics class. Raises InputError, a worker's own too.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    told = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    heard: dict[str, Any] = {}
    listener = threading.Thread(target=_listen, args=(told, heard, count), daemon=True)
    listener.start()
    folder = tempfile.mkdtemp(prefix="riptide-train-")
    try:
        TorchTrainer(
            functools.partial(work, task, told),
            scaling_config=ScalingConfig(num_workers=task.places.workers, use_gpu=task.places.gpus > 0,
                                         resources_per_worker=task.places.resources),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=RETRIES)),
        ).fit()  # fmt: skip
    finally:
        told.put(None)
        listener.join()
        told.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        if "error" in heard:
            raise InputError(heard["error"])
    return {"loss": heard["loss"], "numerics": heard["numerics"]}


def _listen(told: Any, heard: dict[str, Any], count: Callable[[int], object]) -> None:
    """Take in what workers tell until None comes. Steps that are done again after a loss are not counted again."""
    last = 0
    while (message := told.get()) is not None:
        heard |= message
        if message.get("step", 0) > last:
            count(message["step"] - last)
            last = message["step"]


def work(task: Task, told: Any) -> None:
    """One worker, from opening the store to the committed model. What is wrong with the input is told, not raised:
    Ray Train would start it again."""
    import torch
    import torch.distributed as dist
    from ray.train import get_context
    from ray.train.torch import get_device

    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    torch.set_num_threads(task.places.cpus)
    try:
        train_one(task, told.put, device=str(get_device()), rank=rank, world=world)
    except InputError as error:
        told.put({"error": str(error)})
        if dist.is_initialized():
            dist.destroy_process_group()  # the others wait for this worker's gradients no longer


def train_one(task: Task, tell: Callable[[dict[str, Any]], object], *, device: str, rank: int, world: int) -> None:
    """What a worker does, without Ray. Raises InputError."""
    store = task.store
    negatives = store.open(*task.negatives.split("/", 1))
    queries = Queries(store.open(*task.queries.split("/", 1)))
    data = training_data(task.corpus, queries, task.split, negatives, task.limit)
    backbone = resolve(resolve_model(store, task.backbone))
    if describe_backbone(backbone) != task.described:
        raise InputError(f"{task.backbone}: this node has other weights of it than the node of the job: {backbone}")
    trainee = Trainee(backbone, task.training, device=device, rank=rank, world=world)

    def note(step: int, loss: float) -> None:
        tell({"step": step, "loss": loss, "numerics": trainee.conditions["numerics"]})

    hooks = Hooks(task.checkpoints.load, task.checkpoints.save, note)
    trainee.train(data, hooks, checkpoint_every=task.checkpoint_every)
    if rank == 0:
        with tempfile.TemporaryDirectory(prefix="riptide-model-") as folder:
            trainee.save_model(Path(folder))
            commit_model(task.draft, Path(folder))
