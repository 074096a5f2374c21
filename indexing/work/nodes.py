"""The nodes of the Ray cluster: what a worker gets of one, how many workers they hold, and what a job waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

MAX_WORKERS = 64
"""The default of the largest number of workers of a job. The limits of the cluster bound them too."""
HEAD = "node:__internal_head__"  # a resource that only the head of a cluster has
WAIT_S = 30.0  # seconds between two lines about workers that have no node yet

Say = Callable[[str], object]
"""Prints a line for the user."""


def live_nodes() -> list[Mapping[str, float]]:
    """Returns the resources of the live nodes that have CPUs."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [node for node in nodes if node.get("CPU", 0) >= 1]


def nodes_for(gpus: int) -> list[Mapping[str, float]]:
    """Returns the resources of the live nodes for workers with so many GPUs.

    Work without GPUs counts the nodes without GPUs; if all nodes have GPUs, it counts all of them.
    """
    nodes = live_nodes()
    if gpus:
        return [node for node in nodes if node.get("GPU", 0) >= gpus]
    return [node for node in nodes if not node.get("GPU", 0)] or nodes


def node_cores(gpus: int = 0) -> int:
    """Returns the cores of the smallest node for workers with so many GPUs; 0 while there is no such node."""
    return int(min((node["CPU"] for node in nodes_for(gpus)), default=0))


def num_gpus() -> int:
    """Returns the number of GPUs of the cluster now."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def num_places(cores: int, gpus: int = 0) -> int:
    """Returns how many workers of so many cores and GPUs the nodes hold at once; 0 if none is large enough."""
    places = 0
    for node in live_nodes():
        by_cores = int(node["CPU"] // cores)
        places += min(by_cores, int(node.get("GPU", 0) // gpus)) if gpus else by_cores
    return places


def can_grow() -> bool:
    """Returns whether an autoscaler may add nodes.

    Ray does not report whether a cluster has an autoscaler. A cluster whose head has no CPUs is assumed to have one, as
    in the cluster files of this project: only other nodes can run work.
    """
    import ray

    heads = [node["Resources"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]]
    return bool(heads) and not any(head.get("CPU", 0) for head in heads)


def wait_for_node(say: Say, gpus: int = 0) -> None:
    """Waits until there is a node for workers with so many GPUs. A pending task makes an autoscaler add one."""
    import ray

    if nodes_for(gpus):
        return
    with say_waiting(say, 1, gpus, lambda: 1):
        ray.get(ray.remote(num_cpus=1, num_gpus=gpus)(_need_node).options(name="first node").remote())


def _need_node() -> None:
    """A task that only needs a node."""


@contextlib.contextmanager
def say_waiting(say: Say, cores: int, gpus: int, wanted: Callable[[], int]) -> Iterator[None]:
    """Says every WAIT_S seconds within the block that workers wait for nodes, if some do.

    Args:
        say: Prints a line for the user.
        cores: CPUs of a worker.
        gpus: GPUs of a worker.
        wanted: Returns the number of workers that the job could use now.
    """
    stop = threading.Event()

    def look() -> None:
        previous = 0, 0
        while not stop.wait(WAIT_S):
            present, count = num_places(cores, gpus), wanted()
            if present < count and (not present or (can_grow() and (present, count) != previous)):
                say(describe_waiting(cores, gpus, count, present))
            previous = present, count

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def describe_waiting(cores: int, gpus: int, wanted: int, present: int) -> str:
    """Returns what a job waits for: `waits for 4 workers of 8 CPUs and 1 GPU: 1 is there`."""
    size = _count(cores, "CPU") + (f" and {_count(gpus, 'GPU')}" if gpus else "")
    return f"waits for {_count(wanted, 'worker')} of {size}: {present} {'is' if present == 1 else 'are'} there"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
