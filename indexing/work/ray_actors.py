"""Runs a task with a pool of Ray actors, by Ray Data: for workers that take long to open, such as encoders."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from indexing.work.ray_progress import progress_board, reporter
from indexing.work.ray_tasks import RayTasks, node_cores, num_places
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

    def __init__(self, pool: Pool):
        super().__init__()
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
        size = max(pool.min_workers, min(pool.max_workers, num_places(pool.cpus, pool.gpus), len(all_items)))
        strategy = ray.data.ActorPoolStrategy(
            min_size=pool.min_workers,
            max_size=pool.max_workers,
            initial_size=size,
            max_concurrent_calls_per_actor=calls,
            max_tasks_in_flight_per_actor=calls,
            enable_true_multi_threading=True,
        )
        numbers = ray.data.from_items([{"item": n} for n in range(len(all_items))], override_num_blocks=len(all_items))
        with progress_board(on_progress if reports_progress(task) else ignore) as board:
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


def check_pool(min_workers: int, max_workers: int | None, cpus: int | None, gpus: int | None) -> None:
    """Raises InputError for sizes that no pool can have."""
    if cpus is not None and cpus < 1:
        raise InputError(f"parameter cpus {cpus}: expected at least 1")
    if gpus not in (None, 0, 1):
        raise InputError(f"parameter gpus {gpus}: expected 0 or 1")
    if min_workers < 1:
        raise InputError(f"parameter min_workers {min_workers}: expected at least 1")
    if max_workers is not None and max_workers < min_workers:
        raise InputError(
            f"parameter max_workers {max_workers}: expected at least the {min_workers} of parameter min_workers"
        )


def choose_pool(
    min_workers: int,
    max_workers: int | None,
    cpus: int | None,
    gpus: int | None,
    weights: int = 0,
    packed: Callable[[], bool] = lambda: False,
) -> Pool:
    """Returns a pool of encoders; sizes that are not given are chosen from the current cluster.

    Without GPUs, encoders with packed batches get about four cores each, which share one copy of the weights. Others
    get as few cores as memory allows: an encoder with one core is 7 % more efficient than one with two.

    Args:
        min_workers: The smallest number of encoders.
        max_workers: The largest number of encoders; None: as many as the cluster has room for now.
        cpus: Cores of each encoder; None: chosen.
        gpus: GPUs of each encoder, 0 or 1; None: 1 if the cluster has GPUs.
        weights: The model's size in bytes.
        packed: Returns whether the encoder's batches are packed, each in one thread.

    Raises:
        InputError: If the cluster cannot provide the resources.
    """
    import ray

    check_pool(min_workers, max_workers, cpus, gpus)
    total = ray.cluster_resources()
    gpus = gpus if gpus is not None else int(total.get("GPU", 0) >= 1)
    if gpus > total.get("GPU", 0) and max_workers is None:
        raise InputError(
            f"parameter gpus {gpus}: the cluster has {total.get('GPU', 0):.0f} GPUs now; give parameter max_workers to "
            "wait for more"
        )
    if cpus is not None and max_workers is None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        largest = max((node.get("CPU", 0) for node in nodes if node.get("GPU", 0) >= gpus), default=0)
        if cpus > largest:
            raise InputError(
                f"parameter cpus {cpus}: the largest node{' with a GPU' * gpus} has {largest:.0f} cores now; give "
                "parameter max_workers to wait for a larger one"
            )
    cpus = cpus or (min(4, node_cores()) if gpus else _cores_each(weights, _shared_cores() if packed() else 1))
    room = int(total.get("GPU", 0) // gpus) if gpus else max(1, num_places(cpus))
    return Pool(min_workers, max(min_workers, max_workers or room), cpus, gpus)


def _shared_cores() -> int:
    """Returns the cores of each encoder, at most eight, as its threads share Python's lock.

    That is the size closest to four that leaves at most a tenth of all cores idle, or else the size that leaves the
    fewest idle.
    """
    import ray

    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    sizes, tenth = range(1, 1 + min(8, max([1, *nodes]))), sum(nodes) / 10
    return min(sizes, key=lambda each: (max(tenth, sum(cores % each for cores in nodes)), abs(each - 4), -each))


def _cores_each(weights: int, at_least: int) -> int:
    """Returns the smallest number of cores per encoder such that all encoders of a node use at most half of its memory.

    It is at least `at_least`, and at most the cores of the largest node.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    each = PROCESS_BYTES + 2 * weights
    cores = max((node["CPU"] * each / (node.get("memory", 0) / 2 or each) for node in nodes), default=1)
    return min(int(max((node["CPU"] for node in nodes), default=1)), max(at_least, math.ceil(cores)))
