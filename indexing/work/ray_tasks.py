"""Runs tasks on a Ray cluster: bounded in flight, results as they are done, errors as they were raised."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from indexing.work.ray_progress import progress_board, reporter
from indexing.work.tasks import (
    MAX_BYTES,
    Item,
    Place,
    Report,
    Resources,
    Task,
    ignore,
    no_weight,
    reports_progress,
    stays_open,
)

RETRIES = 5  # a lost node or a killed worker costs its items another attempt; an exception is final
MIN_IN_FLIGHT = 4  # tasks in flight, however small the cluster is
LOOK_S = 5.0  # seconds between looks at the cluster's size while no task ends
KEPT_TASKS = 8  # tasks whose workers stay open in a worker's process; see stays_open


class RayTasks:
    """A runner on the Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        self._handles: list[tuple[Task, str, Any]] = []

    def place(self, resources: Resources) -> Place:
        """Returns what a worker with these resources gets: all cores means those of the smallest node."""
        gpu = resources.gpus if resources.gpus is not None else int(num_gpus() >= 1)
        cores = resources.cores if resources.cores is not None else node_cores()
        return Place(min(4, cores) if gpu and resources.cores is None else cores, "cuda" if gpu else "cpu")

    def slots(self, resources: Resources) -> int:
        """Returns how many workers with these resources run at once now, at least 1."""
        place = self.place(resources)
        return max(1, num_places(place.cores, int(place.device == "cuda")))

    def run(
        self,
        task: Task,
        items: Iterable[Item],
        *,
        on_progress: Report = ignore,
        weight: Callable[[Item], int] = no_weight,
    ) -> Iterator[tuple[Item, Any]]:
        """Runs the task for every item; see Runner.

        At most twice as many items are in flight as the cluster's cores can run, and at least MIN_IN_FLIGHT. The
        size of the cluster is polled. Pending tasks make an autoscaler add nodes: an empty cluster gets MIN_IN_FLIGHT
        pending tasks, a full one as many as it runs.
        """
        import ray

        place = self.place(task.resources)
        gpus = int(place.device == "cuda")
        # max_calls=0: a worker keeps what it has opened; Ray would end one that has a GPU after each task.
        call = ray.remote(num_cpus=place.cores, num_gpus=gpus, max_retries=RETRIES, max_calls=0)(_call)
        call = call.options(name=type(task).__name__)
        key, handle = self._put(task)
        pending: dict[Any, tuple[Item, int]] = {}
        source = iter(items)
        exhausted = False
        number = size = 0
        with contextlib.ExitStack() as stack:
            board = stack.enter_context(progress_board(on_progress if reports_progress(task) else ignore))
            stack.callback(lambda: [ray.cancel(left, force=True) for left in pending])
            while True:
                bound = max(MIN_IN_FLIGHT, int(2 * ray.cluster_resources().get("CPU", 0) / max(place.cores, 1)))
                while not exhausted and len(pending) < bound and (size < MAX_BYTES or not pending):
                    try:
                        item = next(source)
                    except StopIteration:
                        exhausted = True
                        break
                    pending[call.remote(item, key, [handle], place, board, number)] = item, weight(item)
                    number, size = number + 1, size + weight(item)
                if not pending:
                    return
                ready, _ = ray.wait(list(pending), num_returns=1, timeout=None if exhausted else LOOK_S)
                if ready:
                    done = ready.pop()
                    item, bytes_ = pending.pop(done)
                    size -= bytes_
                    yield item, ray.get(done)
                    del done

    def _put(self, task: Task) -> tuple[str, Any]:
        """Returns the key and the object reference of a task, which is put into the object store once."""
        import ray

        entry = next((entry for entry in self._handles if entry[0] is task), None) or (
            task,
            uuid.uuid4().hex,
            ray.put(task),
        )
        if stays_open(task):
            others = [other for other in self._handles if other[0] is not task]
            self._handles = [*others, entry][-KEPT_TASKS:]
        return entry[1], entry[2]


_workers: dict[tuple[str, Place], tuple[Callable[[Any, Report], Any], bool]] = {}  # with whether it stays open


def _call(item: Any, key: str, handles: list[Any], place: Place, board: Any, number: int) -> Any:
    """Calls the worker of this process; it is opened for the first item of its task."""
    import ray

    entry = _workers.pop((key, place), None)
    if entry is None:
        [task] = ray.get(handles)
        for other in [other for other, (_, stays) in _workers.items() if not stays]:
            del _workers[other]  # of an earlier run
        entry = task.open(place), stays_open(task)
    _workers[key, place] = entry
    while len(_workers) > KEPT_TASKS:
        del _workers[next(iter(_workers))]
    worker, _ = entry
    with reporter(board, number) as report:
        return worker(item, report)


def num_gpus() -> int:
    """Returns the number of GPUs of the cluster now."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def node_cores() -> int:
    """Returns the cores of the smallest node that has some: what a task is sure to get. 1 while there is no node."""
    import ray

    cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return int(min((c for c in cores if c >= 1), default=1))


def num_places(cores: int, gpus: int = 0) -> int:
    """Returns how many workers of so many cores and GPUs the nodes hold at once; 0 if none is large enough."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = [node.get("CPU", 0) // cores for node in nodes]
    if gpus:
        places = [min(place, node.get("GPU", 0) // gpus) for place, node in zip(places, nodes, strict=True)]
    return int(sum(places))
