"""Runs training with one worker in this process, without Ray."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.training.messages import Message, RunState, Show, TrainingResult, receive, report_update
from riptide.indexing.training.worker import TrainingTask, limited_threads, train_on_worker
from riptide.indexing.training.workers import WorkerGroup
from riptide.indexing.work.local_runner import check_cores, cores_of_process
from riptide.retriever.training.hooks import StopRequests, no_stop_requests

# The environment variables in which DeepSpeed expects rank and world size from a launcher.
LAUNCHER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}


def plan_local_worker(cpus: int, gpus: int | None = None) -> WorkerGroup:
    """Plans a run in this process: returns a group of one worker.

    Args:
        cpus: Number of threads.
        gpus: 0: train on the CPU; 1: on a GPU; None: on a GPU if there is one.

    Raises:
        InputError: If this machine has fewer CPUs, or no GPU although one is required.
    """
    check_cores(cpus, cores_of_process())
    has_gpu = gpus != 0 and torch.cuda.is_available()
    if gpus and not has_gpu:
        raise InputError(f"{Parameter('gpus', '1')}: this machine has no GPU that torch can use")
    return WorkerGroup(workers=1, min_workers=1, cpus=cpus, gpus=int(has_gpu))


def run_local(
    task: TrainingTask,
    count: Callable[[int, bool], object],
    show: Show,
    stop_requests: StopRequests = no_stop_requests,
) -> TrainingResult:
    """Trains with one worker in this process and commits the model.

    The weights are those of a run on Ray with one worker of as many CPUs.

    Args:
        task: The training task, of one worker.
        count: Called as count(steps, is_reused) when steps are done; is_reused: by an earlier run.
        show: Called with each message for the user.
        stop_requests: Where the run learns that it must stop.

    Returns:
        The result.

    Raises:
        InputError: If the input is bad, or if the memory of the GPU does not suffice.
        Stopped: If a stop was requested.
    """
    state = RunState()

    def send(message: Message) -> None:
        nonlocal state
        state, update = receive(state, message)
        report_update(update, count, show)

    device = torch.device("cuda:0" if task.group.gpus else "cpu")
    group = contextlib.nullcontext() if task.loop.zero is None else single_process_group(device)
    try:
        with limited_threads(task.group.cpus), group:
            result = train_on_worker(task, send, device=device, rank=0, world=1, stop_requests=stop_requests)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"step {state.last_step + 1:,}: the memory of the GPU does not suffice ({str(error).splitlines()[0]}); "
            f"earlier steps are kept: run the command again with {Parameter('checkpointing')}, or with more memory"
        ) from error
    assert result is not None
    return result


@contextlib.contextmanager
def single_process_group(device: torch.device) -> Iterator[None]:
    """Opens a torch process group of one process for DeepSpeed; at the end undoes DeepSpeed's global changes."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    before = {name: os.environ.get(name) for name in LAUNCHER}
    linear = torch.nn.functional.linear  # ZeRO stage 3 replaces it for the whole process
    os.environ |= LAUNCHER
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed calls deprecated functions of torch
            yield
    finally:
        forget_process_groups()
        dist.destroy_process_group()
        torch.nn.functional.linear = linear
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def forget_process_groups() -> None:
    """Resets DeepSpeed's module variables with process groups, as the next run creates new groups."""
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    groups = sys.modules.get("deepspeed.utils.groups")
    if comm is not None and groups is not None:
        comm.cdb = None
        importlib.reload(groups)
