"""Runs tasks in a pool of Ray actors by Ray Data, for workers that take long to open, such as encoders."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

from riptide.base.errors import InputError
from riptide.indexing.work.nodes import NO_REPORTS, ClusterNodes, NodeFailure, Reports, open_worker, wait_for_nodes
from riptide.indexing.work.ray_progress import open_reporter, progress_board
from riptide.indexing.work.ray_tasks import RETRIES, RayTasks
from riptide.indexing.work.visibility import StoreMarker
from riptide.indexing.work.worker_tasks import (
    Allocation,
    Item,
    Report,
    WorkerRequest,
    WorkerTask,
    ignore_progress,
    reports_progress,
    task_name,
)
from riptide.telemetry.phases import OTHER_MEASURES, PHASES, add_measures, iterate_uncounted, take_measures

PROCESS_BYTES = 1 << 30  # memory of an encoder's process without the weights, compiled or not
_MEASURES = (*PHASES, *OTHER_MEASURES)
RESTARTS = 100  # restarts of an actor whose process or node is lost; its unfinished items run again


class RayActors(RayTasks):
    """A runner that uses a pool of actors for workers with concurrent calls, and Ray tasks for all other workers.

    A lost actor is started again and its items are run again; an exception ends the run. If a worker cannot open, all
    actors start again for the unfinished items, without its node. An actor has as many calls at a time as its resources
    say, and no call waits at an actor, since another one may become ready.
    """

    def run(
        self, task: WorkerTask, items: Iterable[Item], *, on_progress: Report = ignore_progress
    ) -> Iterator[tuple[Item, Any]]:
        """Runs the task for every item in actors or Ray tasks; see Runner.

        A task whose workers take several calls at the same time runs in a pool of actors, every other one in Ray tasks.
        """
        if task.resources.calls == 1:
            yield from super().run(task, items, on_progress=on_progress)
            return
        unfinished = dict(enumerate(items))
        allocation = self.allocate(task.resources)
        with progress_board(on_progress if reports_progress(task) else ignore_progress) as board:
            while unfinished:
                failure = yield from self._run_pool(task, allocation, unfinished, board)
                if failure is not None:
                    self._exclude_node(failure, allocation)

    def _run_pool(
        self, task: WorkerTask, allocation: Allocation, unfinished: dict[int, Any], board: Any
    ) -> Generator[tuple[Any, Any], None, NodeFailure | None]:
        """Yields (item, result), and removes it from `unfinished`; returns the failure that ended the pool, or None."""
        import ray

        configure_data_context(ray.data.DataContext.get_current())
        calls, items = task.resources.calls, dict(unfinished)
        size = min(self.request.max_workers, len(items))  # an autoscaler adds nodes for pending actors
        wait_for_nodes(self.nodes, self.reports, self.request, allocation.cores, allocation.gpus, size)
        strategy = ray.data.ActorPoolStrategy(
            size=size,  # fixed: an elastic pool would end actors that wait for nodes
            max_concurrent_calls_per_actor=calls,
            max_tasks_in_flight_per_actor=calls,
            enable_true_multi_threading=True,
        )
        numbers = ray.data.from_items([{"item": n} for n in items], override_num_blocks=len(items))
        with self._watch(allocation, lambda: min(size, len(unfinished))) as marker:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # deprecated arguments without a replacement
                dataset = numbers.map(
                    type(task_name(task), (PoolWorker,), {}),  # the name of the class is that of the actors
                    fn_constructor_args=(task, allocation, items, board, marker),
                    compute=strategy,
                    num_cpus=allocation.cores,
                    num_gpus=allocation.gpus,
                    label_selector=self.nodes.selector,
                    max_restarts=RESTARTS,
                    max_task_retries=-1,  # unlimited, as waiting for an actor counts too; max_restarts is the limit
                )
            self._end_reserved()
            with contextlib.closing(iter(dataset.iter_rows())) as rows:
                for row in iterate_uncounted(rows):
                    add_measures(dict(zip(_MEASURES, row.pop("measures"), strict=True)))
                    number, error, failure = row.pop("item"), row.pop("error"), row.pop("failure")
                    if failure:
                        return NodeFailure(**failure)
                    if error:
                        raise InputError(error)
                    yield unfinished.pop(number), row
        return None


class PoolWorker:
    """A worker in an actor of Ray Data. Results are dataclasses of numbers and strings, which become rows."""

    def __init__(
        self,
        task: WorkerTask,
        allocation: Allocation,
        items: dict[int, Any],
        board: Any = None,
        marker: StoreMarker | None = None,
    ):
        import ray

        self.items, self.board = items, board
        if ray.get_runtime_context().was_current_actor_reconstructed:
            add_measures({"lost_workers": 1})
        self.worker = open_worker(task, allocation, marker)

    def __call__(self, row: dict[str, int]) -> dict[str, Any]:
        """Processes an item; returns a row with its result, or its error, as Ray would wrap and print an exception."""
        if isinstance(self.worker, NodeFailure):
            return {**row, "error": "", "failure": dataclasses.asdict(self.worker), "measures": _take_all_measures()}
        try:
            with open_reporter(self.board, row["item"]) as report:
                result = self.worker(self.items[row["item"]], report)
        except InputError as error:
            return {**row, "error": f"{error}", "failure": None, "measures": _take_all_measures()}
        return {**row, "error": "", "failure": None, "measures": _take_all_measures(), **dataclasses.asdict(result)}


def _take_all_measures() -> list[float]:
    """Takes the measures of this process, and returns all of _MEASURES, as all rows need the same columns."""
    taken = take_measures()
    return [taken.get(name, 0.0) for name in _MEASURES]


def configure_data_context(context: Any) -> None:
    """Sets the options of Ray Data's DataContext for a pool of workers."""
    context.enable_progress_bars = False
    context.max_errored_blocks = 0  # a failed item ends the job instead of being dropped
    context.actor_task_retry_on_errors = False
    context.max_consecutive_actor_init_deaths = RETRIES  # if processes are killed while workers open


def choose_pool(
    request: WorkerRequest,
    *,
    weights: int = 0,
    packed: Callable[[], bool] = lambda: False,
    reports: Reports = NO_REPORTS,
) -> WorkerRequest:
    """Completes the request for a pool of encoders: chooses the CPUs and GPUs of each encoder where they are None.

    Sizes that are None are chosen from the present nodes; without a node, waits for the first one. With
    `cpus`, waits for none, so that all nodes can be requested at once.
    Without GPUs, encoders with packed batches get about four cores each, which share one copy of the weights. Others
    get as few cores as memory allows: an encoder with one core is 7 % more efficient than one with two.

    Args:
        request: What the user requests.
        weights: The model's size in bytes.
        packed: Returns whether the encoder's batches are packed, each in one thread.
        reports: Receives lines and numbers about waiting workers.

    Raises:
        InputError: If no node is large enough, and none is added.
    """
    nodes, cpus, gpus = ClusterNodes(request.labels), request.cpus, request.gpus
    if gpus is None:
        if cpus is None:
            wait_for_nodes(nodes, reports, request)
        gpus = int(nodes.num_gpus() >= 1)
    if cpus is None:
        wait_for_nodes(nodes, reports, request, gpus=gpus)
        at_least = 1 if gpus or not packed() else _shared_cores(nodes)
        cpus = min(4, nodes.cores_of_smallest(gpus)) if gpus else _cores_per_encoder(nodes, weights, at_least)
    return replace(request, cpus=cpus, gpus=gpus)


def _shared_cores(nodes: ClusterNodes) -> int:
    """Returns the number of cores per encoder, at most eight, as the threads of an encoder share Python's GIL.

    That is the size closest to four that leaves at most a tenth of all cores idle, or else the size that leaves the
    fewest idle.
    """
    cores = [int(node["CPU"]) for node in nodes.resources_for(0)]
    sizes, tenth = range(1, 1 + min(8, max([1, *cores]))), sum(cores) / 10
    return min(sizes, key=lambda each: (max(tenth, sum(n % each for n in cores)), abs(each - 4), -each))


def _cores_per_encoder(nodes: ClusterNodes, weight_bytes: int, at_least: int) -> int:
    """Returns the smallest number of cores per encoder such that all encoders of a node use at most half of its memory.

    It is at least `at_least`, and at most the cores of the largest node.
    """
    live = nodes.resources_for(0)
    size = PROCESS_BYTES + 2 * weight_bytes
    cores = max((node["CPU"] * size / (node.get("memory", 0) / 2 or size) for node in live), default=1)
    return min(int(max((node["CPU"] for node in live), default=1)), max(at_least, math.ceil(cores)))
