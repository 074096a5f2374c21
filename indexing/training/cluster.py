"""A training run on Ray: Ray Train starts the workers; each worker reads the store and writes checkpoints to it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from indexing.training.messages import (
    Failed,
    Finished,
    InvalidInput,
    Message,
    RunState,
    Started,
    StepDone,
    TrainingResult,
)
from indexing.training.monitor import Listener, start_monitor
from indexing.training.worker import TrainingTask, train_one
from indexing.training.workers import announce_waiting
from retriever.errors import Diverged, InputError

MAX_LOSSES = 100  # worker losses that one run tolerates, regardless of its progress between them


def run_on_ray(
    task: TrainingTask,
    count: Callable[[int, bool], object],
    show: Callable[[StepDone], object],
    say: Callable[[str], object],
) -> TrainingResult:
    """Trains on the workers of the task and commits the result.

    If a worker is lost, it is started again, and all workers resume from the last checkpoint. If the cluster has no
    room for it, training continues with fewer workers, down to `min_workers`, on the same batches.

    Args:
        task: The training task.
        count: Called as count(steps, is_reused) when steps are done; is_reused: by an earlier run.
        show: Called once with each step.
        say: Prints a message for the user.

    Returns:
        The result.

    Raises:
        InputError: If the input is bad, also if a worker finds it so, or if workers are lost too often.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    import ray
    from ray.exceptions import RayActorError
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    group = task.group
    monitor = start_monitor()
    started = threading.Event()
    listener = Listener(
        lambda: ray.get(monitor.next_updates.remote()), lambda: ray.get(monitor.abort.remote()), count, show, started
    )
    thread = threading.Thread(target=listener.follow, daemon=True)
    thread.start()
    folder = tempfile.mkdtemp(prefix="riptide-train-")
    failure: Exception | None = None
    state = RunState()
    try:
        with announce_waiting(group, started, say):
            TorchTrainer(
                functools.partial(work, task, monitor),
                scaling_config=ScalingConfig(
                    num_workers=(group.min_workers, group.workers) if group.is_elastic else group.workers,
                    use_gpu=group.gpus > 0,
                    resources_per_worker=group.resources,
                ),
                run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=MAX_LOSSES)),
            ).fit()
    except Exception as error:
        failure = error  # bad input that a worker has reported explains it better
    finally:
        with contextlib.suppress(RayActorError):  # the listener has met the same error
            state = ray.get(monitor.close.remote())
        thread.join()
        ray.kill(monitor)
        shutil.rmtree(folder, ignore_errors=True)
    if listener.error is not None:
        raise listener.error
    if state.error:
        raise Diverged(state.error) if state.diverged else InputError(state.error)
    if failure is not None:
        raise failure
    assert state.result is not None
    return state.result


def work(task: TrainingTask, monitor: Any) -> None:
    """Runs one worker of Ray Train, unless the run has ended already.

    Args:
        task: The training task.
        monitor: The handle of the Monitor actor.
    """
    import ray
    from ray.exceptions import RayActorError
    from ray.train import get_context
    from ray.train.torch import get_device

    try:
        if ray.get(monitor.must_stop.remote()):
            return
    except RayActorError:  # the driver no longer follows the run
        return
    torch.set_num_threads(task.group.cpus)
    context = get_context()
    run_worker(
        task,
        lambda message: ray.get(monitor.send.remote(message)),
        device=torch.device(str(get_device())),
        rank=context.get_world_rank(),
        world=context.get_world_size(),
    )


def run_worker(
    task: TrainingTask, send: Callable[[Message], object], *, device: torch.device, rank: int, world: int
) -> None:
    """Trains on one worker and sends its messages, from Started to Finished.

    Bad input is sent and not raised, because Ray Train would start the worker again. Other workers that fail because
    this one is missing are started again, and end at once.

    Args:
        task: The training task.
        send: Sends a message to the monitor.
        device: The device of the worker.
        rank: The rank of the worker.
        world: The number of workers.
    """
    send(Started(rank))
    try:
        result = train_one(task, send, device=device, rank=rank, world=world)
        if result is not None:
            send(Finished(result))
    except InputError as error:
        send(InvalidInput(str(error), diverged=isinstance(error, Diverged)))
        if dist.is_initialized():
            dist.destroy_process_group()  # so that the other workers no longer wait for this one
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"))
        raise
