"""Runs tasks on a Ray cluster with a bounded number of items in flight, and yields results as they finish."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from riptide.indexing.store.store import Store
from riptide.indexing.work.nodes import (
    NO_REPORTS,
    ClusterNodes,
    NodeFailure,
    Reports,
    StartedActors,
    announce_lost_nodes,
    announce_waiting_workers,
    open_worker,
    wait_for_nodes,
    wait_for_required_room,
)
from riptide.indexing.work.ray_progress import open_reporter, progress_board
from riptide.indexing.work.visibility import StoreMarker, mark_store
from riptide.indexing.work.worker_tasks import (
    ANY_WORKERS,
    END,
    Allocation,
    Item,
    Report,
    WorkerRequest,
    WorkerResources,
    WorkerTask,
    are_workers_kept_open,
    ignore_progress,
    may_submit,
    reports_progress,
    task_name,
)
from riptide.telemetry.phases import Phase, add_measures, take_measures

RETRIES = 5  # times that an item runs again after its node or process was lost; exceptions are not retried
KEPT_TASKS = 8  # maximum number of tasks whose workers stay open in a process; see are_workers_kept_open


class RayTasks:
    """A runner on the Ray cluster to which this process is connected.

    Pending tasks are demand, for which an autoscaler adds nodes. Therefore twice as many items are in flight as there
    are `max_workers`, regardless of the present nodes.

    A worker that cannot open, or does not see the store, counts as a failure of its node: the node is excluded, and its
    items run elsewhere.

    Args:
        request: What the user requests of the workers.
        reports: Receives lines for the user, and the number of workers that wait for nodes.
        store: The store that the nodes must see; None: no store.
    """

    def __init__(
        self, request: WorkerRequest = ANY_WORKERS, reports: Reports = NO_REPORTS, store: Store | None = None
    ) -> None:
        self.request, self.reports, self.store = request, reports, store
        self.nodes = ClusterNodes(request.labels)
        self._handles: list[tuple[WorkerTask, str, Any]] = []
        # GPUs per worker -> cores of a worker that uses all cores of a node.
        self._cores: dict[int, int] = {}
        self._room: dict[Allocation, int] = {}  # allocation -> number of workers for which the nodes had room
        self._reserved: StartedActors | None = None  # actors that keep nodes from being idle until the next work

    def allocate(self, resources: WorkerResources) -> Allocation:
        """Returns the cores and the device that a worker with these resources gets, decided at the first call.

        All cores are those of the smallest node of the kind that the work needs. If there is no such node, waits for
        one.
        """
        resources = self.request.complete_resources(resources)
        if resources.gpus is None and resources.cores is None:
            self._wait_for_node(0)
        gpus = self._gpus if resources.gpus is None else resources.gpus
        return Allocation(resources.cores or self._all_cores(gpus), "cuda" if gpus else "cpu")

    @functools.cached_property
    def _gpus(self) -> int:
        """The number of GPUs (0 or 1) of a worker that can use one, decided once."""
        return int(self.nodes.num_gpus() >= 1)

    def _all_cores(self, gpus: int) -> int:
        """Returns the cores of a worker that uses all cores of a node, decided once; at most 4 with a GPU."""
        if gpus not in self._cores:
            self._wait_for_node(gpus)
            cores = self.nodes.cores_of_smallest(gpus)
            self._cores[gpus] = min(4, cores) if gpus else cores
        return self._cores[gpus]

    def _wait_for_node(self, gpus: int) -> None:
        wait_for_nodes(self.nodes, self.reports, self.request, gpus=gpus)

    def _check_room(self, allocation: Allocation, workers: int) -> None:
        """Waits until nodes have room for min(`workers`, `min_workers`) workers, unless they had it before."""
        workers = min(workers, self.request.min_workers)
        if self._room.get(allocation, 0) < workers:
            wait_for_required_room(self.nodes, allocation.cores, allocation.gpus, workers, self.request)
            self._room[allocation] = workers

    def _exclude_node(self, failure: NodeFailure, allocation: Allocation) -> None:
        """Excludes a failed node and prints a line about it. Raises InputError if no other node is left.

        The work then continues with any number of workers, but needs room for one.
        """
        if failure.node not in self.nodes.excluded:
            self.nodes = failure.exclude(self.nodes, allocation)
            self.request = replace(self.request, min_workers=1)
            self._room.clear()
            self.reports.say(f"node {failure.address} is excluded, as a worker could not open there: {failure.reason}")

    def run(
        self, task: WorkerTask, items: Iterable[Item], *, on_progress: Report = ignore_progress
    ) -> Iterator[tuple[Item, Any]]:
        """Runs the task for every item as Ray tasks, at most twice `max_workers` at a time; see Runner.

        If the run ends early, the items in flight are still processed, unless this process ends.
        """
        import ray

        pending: dict[Any, Item] = {}
        source = iter(items)
        number = 0
        allocation, max_workers = self.allocate(task.resources), self.request.max_workers
        with contextlib.ExitStack() as stack:
            board = stack.enter_context(progress_board(on_progress if reports_progress(task) else ignore_progress))
            marker = stack.enter_context(self._watch(allocation, lambda: min(max_workers, len(pending))))
            submit = self._make_submitter(task, marker)
            while True:
                while may_submit(pending.values(), 2 * max_workers) and (item := next(source, END)) is not END:
                    pending[submit(item, board, number)] = item
                    number += 1
                self._end_reserved()
                if not pending:
                    return
                self._check_room(allocation, len(pending))
                with Phase(None):
                    [done], _ = ray.wait(list(pending), num_returns=1)
                    item = pending.pop(done)
                    result, measures = ray.get(done)
                del done
                add_measures(measures)
                if isinstance(result, NodeFailure):
                    self._exclude_node(result, allocation)
                    submit = self._make_submitter(task, marker)
                    pending[submit(item, board, number)] = item
                    number += 1
                    continue
                yield item, result
                del result

    def run_on_first_available(self, task: WorkerTask, item: Any, count: int) -> Any:
        """Runs the task for one item on the first of `count` pending workers that starts; see Runner.

        One pending actor for each worker makes an autoscaler add the nodes for all of them at once. The actors keep the
        nodes until the next work is submitted: an autoscaler removes nodes that are idle meanwhile.
        """
        import ray

        allocation = self.allocate(task.resources)
        count = max(1, min(count, self.request.max_workers))
        actor_class = type(f"probe {task_name(task)}", (SingleCall,), {})
        key, handle = self._put_task(task)
        lost = 0
        with self._watch(allocation, lambda: count) as marker:
            while True:
                with contextlib.ExitStack() as stack:
                    actors = StartedActors(actor_class, self.nodes, allocation.cores, allocation.gpus, count)
                    stack.callback(actors.end)
                    pending = [actor.call.remote(item, key, [handle], allocation, marker) for actor in actors.handles]
                    self._end_reserved()
                    self._check_room(allocation, count)
                    with Phase(None):
                        [done], _ = ray.wait(pending, num_returns=1)
                    try:  # retries here, as Ray's own retries would print a line per killed actor
                        result, measures = ray.get(done)
                    except ray.exceptions.RayActorError:  # the process or node of the actor is lost
                        lost += 1
                        add_measures({"lost_workers": 1})
                        if lost > RETRIES:
                            raise
                        continue
                    add_measures(measures)
                    if not isinstance(result, NodeFailure):
                        stack.pop_all()
                        self._reserved = actors
                        return result
                self._exclude_node(result, allocation)

    def _end_reserved(self) -> None:
        if self._reserved is not None:
            self._reserved.end()
            self._reserved = None

    @contextlib.contextmanager
    def _watch(self, allocation: Allocation, num_workers: Callable[[], int]) -> Iterator[StoreMarker | None]:
        """Prints lines about waiting workers and lost nodes within the block; yields the marker of the store."""
        cores, gpus = allocation.cores, allocation.gpus
        with (
            announce_waiting_workers(self.reports, lambda: self.nodes, cores, gpus, num_workers),
            announce_lost_nodes(self.reports.say),
            mark_store(self.store) as marker,
        ):
            yield marker

    def _make_submitter(self, task: WorkerTask, marker: StoreMarker | None) -> Callable[[Any, Any, int], Any]:
        """Returns a function that submits (item, board, number of the item) as a Ray task and returns its reference."""
        import ray

        allocation = self.allocate(task.resources)
        # max_calls=0 keeps processes and their open workers; by default Ray ends a process with a GPU after each task.
        call = ray.remote(num_cpus=allocation.cores, num_gpus=allocation.gpus, max_retries=RETRIES, max_calls=0)(
            _call_worker
        )
        call = call.options(name=task_name(task), label_selector=self.nodes.selector)
        key, handle = self._put_task(task)
        return lambda item, board, number: call.remote(item, key, [handle], allocation, marker, board, number)

    def _put_task(self, task: WorkerTask) -> tuple[str, Any]:
        """Puts a task into the object store once; returns (key of the task, object reference)."""
        import ray

        entry = next((entry for entry in self._handles if entry[0] is task), None) or (
            task,
            uuid.uuid4().hex,
            ray.put(task),
        )
        if are_workers_kept_open(task):
            others = [other for other in self._handles if other[0] is not task]
            self._handles = [*others, entry][-KEPT_TASKS:]
        return entry[1], entry[2]


class SingleCall:
    """An actor that processes a single item by the worker of a task; see `RayTasks.run_on_first_available`."""

    def call(self, item: Any, key: str, handles: list[Any], allocation: Allocation, marker: StoreMarker | None) -> Any:
        """Processes the item; returns what `_call_worker` returns."""
        return _call_worker(item, key, handles, allocation, marker, None, 0)


# (key of the task, allocation) -> (open worker of this process, whether it stays open after its run).
_workers: dict[tuple[str, Allocation], tuple[Callable[[Any, Report], Any], bool]] = {}


def _call_worker(
    item: Any,
    key: str,
    handles: list[Any],
    allocation: Allocation,
    marker: StoreMarker | None,
    board: Any,
    number: int,
) -> tuple[Any, dict[str, float]]:
    """Processes an item by this process' worker of the task, which the first call opens.

    Returns its result, or a NodeFailure if the worker could not open, and the measures of this process.
    """
    import ray

    entry = _workers.pop((key, allocation), None)
    if entry is None:
        [task] = ray.get(handles)
        for other in [other for other, (_, stays) in _workers.items() if not stays]:
            del _workers[other]  # a worker of an earlier run
        worker = open_worker(task, allocation, marker)
        if isinstance(worker, NodeFailure):
            return worker, take_measures()
        entry = worker, are_workers_kept_open(task)
    _workers[key, allocation] = entry
    while len(_workers) > KEPT_TASKS:
        del _workers[next(iter(_workers))]
    worker, _ = entry
    with open_reporter(board, number) as report:
        result = worker(item, report)
    return result, take_measures()
