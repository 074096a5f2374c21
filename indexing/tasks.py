"""Ray tasks over many small items: bounded in flight, results as they come, failures told as they were raised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

RETRIES = 5  # a lost node or a killed worker costs its items another try; an exception is final
LEAST = 4  # tasks in flight, however small the cluster is
LOOK = 5.0  # seconds between looks at the cluster's size while no task ends


def run_tasks(
    function: Callable[..., R],
    items: Iterable[T],
    *shared: Any,
    num_cpus: float = 1,
    num_gpus: int = 0,
    max_in_flight: int | None = None,
) -> Iterator[tuple[T, R]]:
    """Run `function(item, *shared)` on the cluster for every item; yield (item, result) as they are done.

    `shared` is put into the object store once. `items` may be endless: at most `max_in_flight` are drawn ahead, by
    default twice as many as the cluster's cores can run, and 4 at least. The cluster is looked at again and again: it
    is the tasks without a place that make an autoscaler add nodes, so an empty cluster gets 4 of them, and a full one
    as many again as it runs, until it stops growing; what is drawn, and held, grows only with it. The first exception
    ends it, and the rest is cancelled.
    """
    import ray

    # max_calls=0: a worker keeps what it has opened; Ray would end one that has a GPU after each task.
    task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=RETRIES, max_calls=0)(function)
    handles = [ray.put(value) for value in shared]
    pending: dict[Any, T] = {}
    source = iter(items)
    exhausted = False
    try:
        while True:
            bound = max_in_flight or max(LEAST, int(2 * ray.cluster_resources().get("CPU", 0) / max(num_cpus, 0.1)))
            while not exhausted and len(pending) < bound:
                try:
                    item = next(source)
                except StopIteration:
                    exhausted = True
                    break
                pending[task.remote(item, *handles)] = item
            if not pending:
                return
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=None if exhausted else LOOK)
            if ready:
                done = ready.pop()
                item = pending.pop(done)
                yield item, ray.get(done)
                del done
    finally:
        for left in pending:
            ray.cancel(left, force=True)


def node_cores() -> int:
    """Cores of the smallest node that has some: what one task can ask for and be sure to get. 1 while there is none."""
    import ray

    cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return int(min((c for c in cores if c >= 1), default=1))


def num_slots(cores: int) -> int:
    """How many tasks of so many cores the cluster runs at once, now; 1 at least."""
    return max(1, room(cores))


def room(cores: int, gpus: int = 0) -> int:
    """How many tasks of so many cores and GPUs the nodes hold at once, now; 0 where none is large enough for one."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = [node.get("CPU", 0) // cores for node in nodes]
    if gpus:
        places = [min(place, node.get("GPU", 0) // gpus) for place, node in zip(places, nodes, strict=True)]
    return int(sum(places))
