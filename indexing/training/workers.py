"""Plans the workers of a run on Ray: waits for nodes, and decides whether all workers have a GPU or none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from indexing.work.nodes import can_grow, num_places
from retriever.errors import InputError

PATIENCE_S = 30.0  # seconds before a line reports that workers wait for room
GROWTH_S = 1_800.0  # seconds to wait for the nodes of an autoscaler, by default


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """The workers of a run.

    Attributes:
        workers: Number of workers.
        min_workers: Smallest number of workers with which the run continues if the cluster loses nodes.
        cpus: CPUs of each worker.
        gpus: GPUs of each worker, 0 or 1.
    """

    workers: int
    min_workers: int
    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.workers} workers of {self.cpus} CPUs{' and 1 GPU' if self.gpus else ''}"

    @property
    def capacity(self) -> int:
        """Number of such workers that the present nodes could hold if nothing else ran there."""
        return num_places(self.cpus, self.gpus)

    @property
    def resources(self) -> dict[str, float]:
        """Ray resources of each worker."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    @property
    def is_elastic(self) -> bool:
        """Whether the run may continue with fewer workers."""
        return self.min_workers < self.workers


def plan_workers(
    workers: int,
    cpus: int,
    say: Callable[[str], object],
    *,
    gpus: int | None = None,
    min_workers: int | None = None,
    wait_s: float | None = None,
) -> WorkerGroup:
    """Returns the workers of a run on the cluster.

    If there is no room, waits for nodes, which pending actors request from an autoscaler. Tells the user about the
    waiting, and about GPUs that stay unused.

    Args:
        workers: Number of workers.
        cpus: CPUs of each worker.
        say: Prints a message for the user.
        gpus: GPUs of each worker, 0 or 1; None: 1 if `min_workers` of them can have one now.
        min_workers: Smallest number of workers that may start; None: all.
        wait_s: Seconds to wait for nodes; None: GROWTH_S if an autoscaler may add some, else 0.

    Raises:
        InputError: If the cluster has no room for `min_workers` in the end.
    """
    import ray

    min_workers = min_workers or workers
    with_gpus = WorkerGroup(workers=workers, min_workers=min_workers, cpus=cpus, gpus=1)
    group = replace(with_gpus, gpus=int(with_gpus.capacity >= min_workers) if gpus is None else gpus)
    wait_s = wait_s if wait_s is not None else GROWTH_S * can_grow()
    if wait_s and group.capacity < workers:
        say(f"waits up to {wait_s:.0f} s for nodes: room for {group.capacity} of {group}")
        wait_for_room(group, wait_s)
    total = ray.cluster_resources()
    capacity = group.capacity
    if capacity < min_workers:
        waited = f", after {wait_s:.0f} s" if wait_s else ""
        with_gpu = "" if gpus is None else f", parameter gpus {gpus}"
        raise InputError(
            f"parameter workers {workers}, parameter cpus {cpus}{with_gpu}: the cluster has "
            f"{describe_resources(total)}, room for {capacity} of {group}{waited}; expected at least {min_workers}"
        )
    if gpus is None and group.gpus and capacity < workers:
        say(f"starts with {capacity} of {group}; parameter gpus 0 trains all of them on CPUs")
    if gpus is None and not group.gpus and total.get("GPU", 0) >= 1:
        say(f"trains on CPUs: the cluster has GPUs, but room for only {with_gpus.capacity} of {with_gpus}")
    return group


def wait_for_room(group: WorkerGroup, wait_s: float) -> None:
    """Waits until the cluster has room for all workers, at most `wait_s` seconds.

    One empty actor for each worker waits for its resources, so that an autoscaler adds the nodes of all of them.
    """
    import ray

    empty = ray.remote(num_cpus=group.cpus, num_gpus=group.gpus)(RoomForWorker)
    actors = [empty.remote() for _ in range(group.workers)]
    try:
        ray.wait([actor.ready.remote() for actor in actors], num_returns=len(actors), timeout=wait_s)
    finally:
        for actor in actors:
            ray.kill(actor)


class RoomForWorker:
    """An actor that only takes the resources of a worker."""

    def ready(self) -> None:
        """Returns once the actor has its resources."""


@contextlib.contextmanager
def announce_waiting(group: WorkerGroup, started: threading.Event, say: Callable[[str], object]) -> Iterator[None]:
    """Tells the user once that workers wait for resources, if they have not `started` after PATIENCE_S seconds."""
    timer = threading.Timer(PATIENCE_S, say_waiting, (group, started, say))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say_waiting(group: WorkerGroup, started: threading.Event, say: Callable[[str], object]) -> None:
    """Tells the user which resources the workers wait for, unless they have started."""
    import ray

    if not started.is_set():
        say(f"waits for {group}; free now: {describe_resources(ray.available_resources())}")


def describe_resources(resources: Mapping[str, float]) -> str:
    """Returns Ray resources in words: `8 CPUs and 2 GPUs`."""
    gpus = f" and {resources['GPU']:.0f} GPUs" if "GPU" in resources else ""
    return f"{resources.get('CPU', 0):.0f} CPUs{gpus}"
