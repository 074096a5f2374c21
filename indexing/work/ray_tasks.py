"""Runs tasks on a Ray cluster: bounded in flight, results as they are done, errors as they were raised."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from indexing.work.nodes import MAX_WORKERS, Say, node_cores, num_gpus, say_waiting, wait_for_node
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
KEPT_TASKS = 8  # tasks whose workers stay open in a worker's process; see stays_open


class RayTasks:
    """A runner on the Ray cluster that this process is connected to.

    What waits is demand: pending tasks make an autoscaler add nodes. Therefore as many items are in flight as
    `max_workers` workers take, twice, regardless of the present nodes.

    Args:
        max_workers: The largest number of workers.
        say: Prints a line for the user, about workers that wait for nodes.
    """

    def __init__(self, max_workers: int = MAX_WORKERS, say: Say = ignore) -> None:
        self.max_workers, self.say = max_workers, say
        self._handles: list[tuple[Task, str, Any]] = []
        self._places: dict[tuple[int | None, int | None], Place] = {}

    def place(self, resources: Resources) -> Place:
        """Returns what a worker with these resources gets. It is decided once, at the first call.

        All cores are those of the smallest node of the kind that the work needs. If there is no such node, waits for
        one.
        """
        key = resources.cores, resources.gpus
        if key not in self._places:
            self._places[key] = self._choose_place(*key)
        return self._places[key]

    def _choose_place(self, cores: int | None, gpus: int | None) -> Place:
        if gpus is None:
            wait_for_node(self.say)
            gpus = int(num_gpus() >= 1)
        if cores is None:
            wait_for_node(self.say, gpus)
            cores = node_cores(gpus)
            cores = min(4, cores) if gpus else cores
        return Place(cores, "cuda" if gpus else "cpu")

    def run(
        self,
        task: Task,
        items: Iterable[Item],
        *,
        on_progress: Report = ignore,
        weight: Callable[[Item], int] = no_weight,
    ) -> Iterator[tuple[Item, Any]]:
        """Runs the task for every item; see Runner. At most twice `max_workers` items are in flight."""
        import ray

        call = self._call_of(task)
        pending: dict[Any, tuple[Item, int]] = {}
        source = iter(items)
        exhausted = False
        number = size = 0
        place = self.place(task.resources)
        with contextlib.ExitStack() as stack:
            board = stack.enter_context(progress_board(on_progress if reports_progress(task) else ignore))
            stack.enter_context(
                say_waiting(self.say, place.cores, place.gpus, lambda: min(self.max_workers, len(pending)))
            )
            stack.callback(lambda: [ray.cancel(left, force=True) for left in pending])
            while True:
                while not exhausted and len(pending) < 2 * self.max_workers and (size < MAX_BYTES or not pending):
                    try:
                        item = next(source)
                    except StopIteration:
                        exhausted = True
                        break
                    pending[call(item, board, number)] = item, weight(item)
                    number, size = number + 1, size + weight(item)
                if not pending:
                    return
                [done], _ = ray.wait(list(pending), num_returns=1)
                item, bytes_ = pending.pop(done)
                size -= bytes_
                yield item, ray.get(done)
                del done

    def first(self, task: Task, item: Any, count: int) -> Any:
        """Returns the result of the first of `count` workers that runs the task; see Runner.

        One pending task for each worker makes an autoscaler add the nodes for all of them at once.
        """
        import ray

        call, place = self._call_of(task), self.place(task.resources)
        count = max(1, min(count, self.max_workers))
        pending = [call(item, None, number) for number in range(count)]
        try:
            with say_waiting(self.say, place.cores, place.gpus, lambda: count):
                [done], pending = ray.wait(pending, num_returns=1)
            return ray.get(done)
        finally:
            for left in pending:
                ray.cancel(left, force=True)

    def _call_of(self, task: Task) -> Callable[[Any, Any, int], Any]:
        """Returns a function that submits a task for (item, board, number of the item) and returns its reference."""
        import ray

        place = self.place(task.resources)
        # max_calls=0: a worker keeps what it has opened; Ray would end one that has a GPU after each task.
        call = ray.remote(num_cpus=place.cores, num_gpus=place.gpus, max_retries=RETRIES, max_calls=0)(_call)
        call = call.options(name=type(task).__name__)
        key, handle = self._put(task)
        return lambda item, board, number: call.remote(item, key, [handle], place, board, number)

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
