"""Runs training on Ray: Ray Train starts workers, which read the store and write checkpoints to it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from riptide.base.errors import DivergedError, InputError
from riptide.indexing.training.messages import (
    InvalidInput,
    Message,
    RunFinished,
    SecondsSpent,
    Show,
    TrainingResult,
    WorkerFailed,
    WorkerStarted,
    to_json,
)
from riptide.indexing.training.monitor import Listener, start_monitor
from riptide.indexing.training.worker import TrainingTask, train_on_worker
from riptide.indexing.training.workers import announce_waiting
from riptide.indexing.work.visibility import StoreMarker, mark_store
from riptide.process.temporary_folders import TemporaryFolder
from riptide.retriever.training.hooks import Stopped, StopRequests, no_node_drains, no_stop_requests
from riptide.telemetry.logs import start_json
from riptide.telemetry.phases import Phase, take_measures

MAX_LOSSES = 100  # maximum number of worker losses in a run, regardless of progress between losses
SECONDS_EVERY_S = 5.0  # seconds between two messages of a worker about the seconds that it spends in phases
POLL_S = 0.2  # seconds between two checks for a stop request
STOP_S = 300.0  # seconds in which workers finish their step and save; equals the default time between checkpoints


def run_on_ray(
    task: TrainingTask,
    count: Callable[[int, bool], object],
    show: Show,
    say: Callable[[str], object],
    stop_requests: StopRequests = no_stop_requests,
) -> TrainingResult:
    """Trains on Ray with the workers of the task, and commits the model.

    If a worker is lost, it is started again, and all workers resume from the last checkpoint. If the cluster has no
    room for it, training continues with fewer workers, down to `min_workers`, on the same batches. If a node of
    the workers is draining, they save checkpoints often until the node ends, and then resume without it.

    If a stop is requested, the workers save a checkpoint at the end of their step and end, within STOP_S seconds. If no
    step was done, there is nothing to save, and they are left at once.

    Args:
        task: The training task.
        count: Called as count(steps, is_reused) when steps are done; is_reused: by an earlier run.
        show: Called once with each message for the user.
        say: Prints a message for the user.
        stop_requests: Where the run learns that it must stop.

    Returns:
        The result.

    Raises:
        InputError: If the input is bad, also if a worker finds it so, or if workers are lost too often.
        Stopped: If a stop was requested.
    """
    with Phase(None), stop_requests() as must_stop:  # the workers send the seconds that they spend
        return _run_with_monitor(task, count, show, say, must_stop)


def _run_with_monitor(
    task: TrainingTask,
    count: Callable[[int, bool], object],
    show: Show,
    say: Callable[[str], object],
    must_stop: Callable[[], bool],
) -> TrainingResult:
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    import ray
    from ray.exceptions import RayActorError
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    group = task.group
    monitor = start_monitor()
    started = threading.Event()
    listener = Listener(
        lambda: ray.get(monitor.next_messages.remote()), lambda: ray.get(monitor.stop.remote()), count, show, started
    )
    thread = threading.Thread(target=listener.follow, daemon=True)
    thread.start()
    folder = TemporaryFolder("train")
    run = RunConfig(storage_path=str(folder.path), failure_config=FailureConfig(max_failures=MAX_LOSSES))
    try:
        with mark_store(task.last_checkpoint.store) as marker, announce_waiting(group, started, say):
            trainer = TorchTrainer(
                functools.partial(run_ray_worker, task, monitor, marker),
                scaling_config=ScalingConfig(
                    num_workers=(group.min_workers, group.workers) if group.is_elastic else group.workers,
                    use_gpu=group.gpus > 0,
                    resources_per_worker=group.resources,
                    label_selector=dict(group.labels) or None,
                ),
                run_config=run,
            )
            failure = fit(trainer.fit, must_stop, monitor.stop.remote, listener)
    finally:
        with contextlib.suppress(RayActorError):  # the listener reports the same error
            ray.get(monitor.close.remote())
        thread.join()
        ray.kill(monitor)
        folder.close()
    if listener.error is not None:
        raise listener.error
    state = listener.state
    if state.error:
        raise DivergedError(state.error) if state.diverged else InputError(state.error)
    if state.result is None and must_stop():
        raise Stopped
    if failure is not None:
        raise failure
    assert state.result is not None
    return state.result


def fit(
    run: Callable[[], object], must_stop: Callable[[], bool], stop: Callable[[], object], listener: Listener
) -> Exception | None:
    """Runs Ray Train until it ends; after a stop request, for at most STOP_S more seconds.

    Ray Train runs in a thread: in the main thread it replaces the handler of SIGINT and aborts the workers at once.

    Args:
        run: Runs Ray Train.
        must_stop: Whether a stop is requested.
        stop: Passes the request on to the workers.
        listener: What follows the run.

    Returns:
        The exception of Ray Train, None without one. Bad input that a worker has reported explains it better.
    """
    failures: list[Exception] = []

    def target() -> None:
        try:
            run()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    end: float | None = None
    while thread.is_alive() and (end is None or time.monotonic() < end):
        if end is None and must_stop():
            if not listener.has_stepped:
                break
            stop()
            end = time.monotonic() + STOP_S
        thread.join(POLL_S)
    return failures[0] if failures else None


def run_ray_worker(task: TrainingTask, monitor: Any, marker: StoreMarker | None) -> None:
    """Runs training in a worker process of Ray Train, unless the run has ended already.

    Args:
        task: The training task.
        monitor: The handle of the Monitor actor.
        marker: The file that shows whether the node sees the store; None: nothing is checked.
    """
    import ray
    from ray.exceptions import RayActorError
    from ray.train import get_context
    from ray.train.torch import get_device

    try:
        if ray.get(monitor.must_stop.remote()):
            return
    except RayActorError:  # the monitor is gone, so the run has ended
        return
    start_json()
    torch.set_num_threads(task.group.cpus)
    context = get_context()
    run_worker(
        task,
        lambda message: ray.get(monitor.send.remote(to_json(message))),
        device=torch.device(str(get_device())),
        rank=context.get_world_rank(),
        world=context.get_world_size(),
        stop_requests=functools.partial(stop_requests, monitor),
        is_node_draining=is_node_draining,
        marker=marker,
        node=f"node {ray.util.get_node_ip_address()}",
    )


@contextlib.contextmanager
def stop_requests(monitor: Any) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns, without blocking, whether the monitor requests this worker to stop."""
    import ray

    request = monitor.stop_requested.remote()
    yield lambda: bool(ray.wait([request], timeout=0)[0])


def is_node_draining() -> bool:
    """Returns whether a node of the workers is draining. All workers must call it after the same steps."""
    from ray.train import get_preemption_info

    return get_preemption_info() is not None


def run_worker(
    task: TrainingTask,
    send: Callable[[Message], object],
    *,
    device: torch.device,
    rank: int,
    world: int,
    stop_requests: StopRequests = no_stop_requests,
    is_node_draining: Callable[[], bool] = no_node_drains,
    marker: StoreMarker | None = None,
    node: str = "this node",
) -> None:
    """Trains on one worker and sends all of its messages, from WorkerStarted to RunFinished.

    Rank 0 sends the seconds that it spends in phases during the run; all ranks send them at the end.

    A run that is stopped sends no message at its end.

    Bad input is sent and not raised, because Ray Train would start the worker again. Other workers that fail because
    this one is missing are started again, and end at once.

    Args:
        task: The training task.
        send: Sends a message to the monitor.
        device: The device of the worker.
        rank: The rank of the worker.
        world: The number of workers.
        stop_requests: Where rank 0 learns that the run must stop.
        is_node_draining: As of WorkerHooks.
        marker: The file that shows whether the node sees the store; None: nothing is checked.
        node: The node, for errors.
    """
    send(WorkerStarted(rank))
    sent_s = time.monotonic()

    def send_seconds() -> None:
        nonlocal sent_s
        sent_s = time.monotonic()
        send(SecondsSpent(take_measures()))

    def report(message: Message) -> None:
        send(message)
        if time.monotonic() - sent_s > SECONDS_EVERY_S:
            send_seconds()

    try:
        if marker is not None:
            marker.check(node)
        result = train_on_worker(
            task,
            report,
            device=device,
            rank=rank,
            world=world,
            stop_requests=stop_requests,
            is_node_draining=is_node_draining,
        )
        send_seconds()
        if result is not None:
            send(RunFinished(result))
    except Stopped:
        return
    except InputError as error:
        send(InvalidInput(f"{error}", diverged=isinstance(error, DivergedError)))
        if dist.is_initialized():
            dist.destroy_process_group()  # aborts collectives in which other workers wait for this one
    except Exception as error:
        send(WorkerFailed(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"))
        raise
