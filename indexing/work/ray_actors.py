"""Runs a task with a pool of Ray actors, by Ray Data: for workers that take long to open, such as encoders."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from indexing.work.nodes import (
    MAX_WORKERS,
    Say,
    can_grow,
    live_nodes,
    node_cores,
    nodes_for,
    num_gpus,
    say_waiting,
    wait_for_node,
)
from indexing.work.ray_progress import progress_board, reporter
from indexing.work.ray_tasks import RayTasks
from indexing.work.tasks import Item, Place, Report, Resources, Task, ignore, no_weight, reports_progress
from retriever.errors import InputError

PROCESS_BYTES = 1 << 30  # of an encoder's process in addition to its model's weights, compiled or not
GROWS_AT = 0.75  # utilisation at which a pool grows; it never exceeds 1, as no calls wait at an actor
RESTARTS = 100  # of an actor whose process or node is lost; its unfinished items are run again


@dataclass(frozen=True)
class Pool:
    """The number of workers, and the resources of each. A GPU worker has one GPU."""

    min_workers: int
    max_workers: int
    cpus: int  # cores and threads of each worker
    gpus: int

    def resources(self, calls: int = 1) -> Resources:
        """Returns the resources of a worker that takes so many calls at a time."""
        return Resources(cores=self.cpus, gpus=self.gpus, calls=calls)


class RayActors(RayTasks):
    """A runner that opens workers with several calls at a time in actors; other tasks run as Ray tasks.

    A lost actor is started again and its items are run again; an exception ends the run. An actor has as many calls
    at a time as its resources say, and no call waits at an actor, since another one may become ready.
    """

    def __init__(self, pool: Pool, say: Say = ignore):
        super().__init__(pool.max_workers, say)
        self.pool = pool

    def run(
        self,
        task: Task,
        items: Iterable[Item],
        *,
        on_progress: Report = ignore,
        weight: Callable[[Item], int] = no_weight,
    ) -> Iterator[tuple[Item, Any]]:
        """Runs the task for every item; see Runner. Tasks with several calls per worker get the pool of actors."""
        if task.resources.calls == 1:
            yield from super().run(task, items, on_progress=on_progress, weight=weight)
            return
        all_items = list(items)
        if not all_items:
            return
        import ray

        set_up(ray.data.DataContext.get_current())
        pool, calls = self.pool, task.resources.calls
        size = max(pool.min_workers, min(pool.max_workers, len(all_items)))  # pending actors are demand
        strategy = ray.data.ActorPoolStrategy(
            min_size=pool.min_workers,
            max_size=pool.max_workers,
            initial_size=size,
            max_concurrent_calls_per_actor=calls,
            max_tasks_in_flight_per_actor=calls,
            enable_true_multi_threading=True,
        )
        numbers = ray.data.from_items([{"item": n} for n in range(len(all_items))], override_num_blocks=len(all_items))
        remaining = len(all_items)
        with (
            progress_board(on_progress if reports_progress(task) else ignore) as board,
            say_waiting(self.say, pool.cpus, pool.gpus, lambda: min(size, remaining)),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the last two arguments have no replacement yet
                dataset = numbers.map(
                    PoolWorker,
                    fn_constructor_args=(task, self.place(task.resources), all_items, board),
                    compute=strategy,
                    num_cpus=pool.cpus,
                    num_gpus=pool.gpus,
                    max_restarts=RESTARTS,
                    max_task_retries=-1,  # a lost actor that waits for resources uses them up; restarts bound it
                )
            for row in dataset.iter_rows():
                number, error = row.pop("item"), row.pop("error")
                if error:
                    raise InputError(error)
                remaining -= 1
                yield all_items[number], row


class PoolWorker:
    """A worker in an actor. Results are dataclasses of numbers and strings, which Ray Data passes on as rows."""

    def __init__(self, task: Task, place: Place, items: list[Any], board: Any = None):
        self.items, self.board = items, board
        self.error = ""  # of opening; an InputError that left an actor would be wrapped and printed with its traceback
        try:
            self.worker = task.open(place)
        except InputError as error:
            self.error = str(error)

    def __call__(self, row: dict[str, int]) -> dict[str, Any]:
        if self.error:
            return {**row, "error": self.error}
        try:
            with reporter(self.board, row["item"]) as report:
                result = self.worker(self.items[row["item"]], report)
        except InputError as error:
            return {**row, "error": str(error)}
        return {**row, "error": "", **dataclasses.asdict(result)}


def set_up(context: Any) -> None:
    """Configures Ray Data's DataContext for a pool."""
    context.enable_progress_bars = False
    context.max_errored_blocks = 0  # an item that fails ends the job: no item is dropped
    context.actor_task_retry_on_errors = False
    context.autoscaling_config.actor_pool_util_upscaling_threshold = GROWS_AT


def check_pool(min_workers: int, max_workers: int, cpus: int | None, gpus: int | None) -> None:
    """Raises InputError for sizes that no pool can have."""
    if cpus is not None and cpus < 1:
        raise InputError(f"parameter cpus {cpus}: expected at least 1")
    if gpus not in (None, 0, 1):
        raise InputError(f"parameter gpus {gpus}: expected 0 or 1")
    if min_workers < 1:
        raise InputError(f"parameter min_workers {min_workers}: expected at least 1")
    if max_workers < min_workers:
        raise InputError(
            f"parameter max_workers {max_workers}: expected at least the {min_workers} of parameter min_workers"
        )


def choose_pool(
    min_workers: int = 1,
    max_workers: int = MAX_WORKERS,
    cpus: int | None = None,
    gpus: int | None = None,
    *,
    weights: int = 0,
    packed: Callable[[], bool] = lambda: False,
    say: Say = ignore,
) -> Pool:
    """Returns a pool of encoders.

    Sizes that are None are chosen from the present nodes; without a node, waits for the first one. With
    `cpus`, waits for none, so that all nodes can be requested at once.
    Without GPUs, encoders with packed batches get about four cores each, which share one copy of the weights. Others
    get as few cores as memory allows: an encoder with one core is 7 % more efficient than one with two.

    Args:
        min_workers: The smallest number of encoders.
        max_workers: The largest number of encoders.
        cpus: Cores of each encoder; None: chosen.
        gpus: GPUs of each encoder, 0 or 1; None: 1 if the cluster has GPUs.
        weights: The model's size in bytes.
        packed: Returns whether the encoder's batches are packed, each in one thread.
        say: Prints a line for the user.

    Raises:
        InputError: If no node is large enough, and none can be added.
    """
    check_pool(min_workers, max_workers, cpus, gpus)
    if gpus is None:
        if cpus is None:
            wait_for_node(say)
        gpus = int(num_gpus() >= 1)
    if not can_grow():
        largest = max((node["CPU"] for node in live_nodes() if node.get("GPU", 0) >= gpus), default=0)
        if not largest:
            raise InputError(f"parameter gpus {gpus}: expected a cluster with GPUs, this one has {num_gpus()}")
        if cpus is not None and cpus > largest:
            node = f"the largest node{' with a GPU' * gpus}"
            raise InputError(f"parameter cpus {cpus}: expected at most {largest:.0f}, the cores of {node}")
    if cpus is None:
        wait_for_node(say, gpus)
        cpus = min(4, node_cores(gpus)) if gpus else _cores_each(weights, _shared_cores() if packed() else 1)
    return Pool(min_workers, max_workers, cpus, gpus)


def _shared_cores() -> int:
    """Returns the cores of each encoder, at most eight, as its threads share Python's lock.

    That is the size closest to four that leaves at most a tenth of all cores idle, or else the size that leaves the
    fewest idle.
    """
    nodes = [int(node["CPU"]) for node in nodes_for(0)]
    sizes, tenth = range(1, 1 + min(8, max([1, *nodes]))), sum(nodes) / 10
    return min(sizes, key=lambda each: (max(tenth, sum(cores % each for cores in nodes)), abs(each - 4), -each))


def _cores_each(weights: int, at_least: int) -> int:
    """Returns the smallest number of cores per encoder such that all encoders of a node use at most half of its memory.

    It is at least `at_least`, and at most the cores of the largest node.
    """
    nodes = nodes_for(0)
    each = PROCESS_BYTES + 2 * weights
    cores = max((node["CPU"] * each / (node.get("memory", 0) / 2 or each) for node in nodes), default=1)
    return min(int(max((node["CPU"] for node in nodes), default=1)), max(at_least, math.ceil(cores)))
