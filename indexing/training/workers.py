"""Plans the workers of a run on Ray: waits for nodes, and decides whether all workers have a GPU or none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from riptide.base.wording import Parameter
from riptide.indexing.work.nodes import (
    ClusterNodes,
    Reports,
    StartedActors,
    WaitForNodes,
    announce_waiting_workers,
    check_room,
    describe_resources,
    describe_workers,
    seconds_to_wait,
    wait_for_room,
)

PATIENCE_S = 30.0  # seconds of waiting before a line reports it


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """The number, the size and the node labels of the workers of a training run.

    Attributes:
        workers: Number of workers.
        min_workers: Smallest number of workers with which the run continues if the cluster loses nodes.
        cpus: CPUs of each worker.
        gpus: GPUs of each worker, 0 or 1.
        labels: Labels of the nodes on which they run.
    """

    workers: int
    min_workers: int
    cpus: int
    gpus: int
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return describe_workers(self.workers, self.cpus, self.gpus)

    @property
    def capacity(self) -> int:
        """The number of such workers that the present nodes could hold if nothing else ran there."""
        return ClusterNodes(self.labels).count_worker_slots(self.cpus, self.gpus)

    @property
    def resources(self) -> dict[str, float]:
        """The Ray resources of each worker."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    @property
    def is_elastic(self) -> bool:
        """Whether the run may continue with fewer workers."""
        return self.min_workers < self.workers


def plan_workers(
    workers: int,
    cpus: int,
    reports: Reports,
    *,
    gpus: int | None = None,
    min_workers: int | None = None,
    wait_s: float | None = None,
    labels: Mapping[str, str] | None = None,
) -> WorkerGroup:
    """Plans the workers of a run on the cluster, with GPUs or without.

    If there is no room, waits for nodes, which pending actors request from an autoscaler. Tells the user about the
    waiting, and about GPUs that stay unused.

    Args:
        workers: Number of workers.
        cpus: CPUs of each worker.
        reports: Receives lines for the user, and the number of workers that wait for nodes.
        gpus: GPUs of each worker, 0 or 1; None: 1 if `min_workers` of them can have one now.
        min_workers: Smallest number of workers that may start; None: all.
        wait_s: Seconds to wait for nodes; None: see `wait_for_room`.
        labels: Labels of the nodes on which they run.

    Raises:
        InputError: If the cluster has no room for `min_workers` in the end; see `check_room`.
    """
    nodes = ClusterNodes(labels or {})
    min_workers = min_workers or workers
    with_gpus = WorkerGroup(workers=workers, min_workers=min_workers, cpus=cpus, gpus=1, labels=nodes.labels)
    group = replace(with_gpus, gpus=int(with_gpus.capacity >= min_workers) if gpus is None else gpus)
    longest_s = seconds_to_wait(wait_s)
    if longest_s and group.capacity < workers:
        reports.say(f"waits up to {longest_s:.0f} s for nodes: room for {group.capacity} of {group}")
        with announce_waiting_workers(reports, lambda: nodes, cpus, group.gpus, lambda: workers):
            request_room(group, wait_s)
    option = Parameter("min_workers", min_workers) if group.is_elastic else Parameter("workers", workers)
    check_room(nodes, cpus, group.gpus, min_workers, longest_s, option)
    capacity = group.capacity
    if gpus is None and group.gpus and capacity < workers:
        reports.say(f"starts with {capacity} of {group}; {Parameter('gpus', '0')} trains all of them on CPUs")
    if gpus is None and not group.gpus and nodes.num_gpus() >= 1:
        reports.say(f"trains on CPUs: the cluster has GPUs, but room for only {with_gpus.capacity} of {with_gpus}")
    return group


def request_room(group: WorkerGroup, wait_s: float | None) -> None:
    """Requests resources for all workers and waits until the cluster has room; see `wait_for_room`.

    One empty actor for each worker waits for its resources, so that an autoscaler adds the nodes of all of them.
    """
    nodes = ClusterNodes(group.labels)
    with StartedActors(WaitForNodes, nodes, group.cpus, group.gpus, group.workers):
        wait_for_room(nodes, group.cpus, group.gpus, group.workers, wait_s)


@contextlib.contextmanager
def announce_waiting(group: WorkerGroup, started: threading.Event, say: Callable[[str], object]) -> Iterator[None]:
    """Prints a line if `started` is not set within PATIENCE_S seconds: workers wait for resources."""
    timer = threading.Timer(PATIENCE_S, tell_missing_room, (group, started, say))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell_missing_room(group: WorkerGroup, started: threading.Event, say: Callable[[str], object]) -> None:
    """Prints the resources for which the workers wait, unless `started` is set."""
    import ray

    if not started.is_set():
        say(f"waits for {group}; free now: {describe_resources(ray.available_resources())}")
