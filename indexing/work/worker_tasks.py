"""The interfaces of tasks and runners, and the resources of workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from riptide.base.errors import InputError
from riptide.base.option_fields import check_values, option
from riptide.base.wording import Parameter

MAX_WORKERS = 64
"""The default of the largest number of workers of a job. The limits of the cluster bound them too."""

Item = TypeVar("Item")
Result = TypeVar("Result")

Report = Callable[[int], object]
"""Called by a worker with the number of rows of its current item that are done."""


def ignore_progress(*_: object) -> None:
    """A Report that does nothing."""


@dataclass(frozen=True)
class WorkerResources:
    """The resources that one worker needs.

    Attributes:
        cores: Number of cores; None: all cores of a node, for multi-threaded work.
        gpus: Number of GPUs, 0 or 1; None: 1 if there are any.
        calls: Calls that one worker takes at the same time.
        python_bound: Whether the work holds Python's GIL most of the time, so that threads do not help.
        one_per_process: Whether a process can hold only one worker, for example because of its JVM.
    """

    cores: int | None = 1
    gpus: int | None = 0
    calls: int = 1
    python_bound: bool = False
    one_per_process: bool = False


ONE_CORE = WorkerResources()
ALL_CORES = WorkerResources(cores=None)
PYTHON_CORE = WorkerResources(python_bound=True)
JVM_CORE = WorkerResources(one_per_process=True)


@dataclass(frozen=True)
class WorkerRequest:
    """The number, size and placement of the workers of a job, as a user requests them.

    Attributes:
        min_workers: Number of workers that nodes must have room for before work begins.
        max_workers: Largest number of workers.
        cpus: Cores of a worker whose size is not fixed (`Resources.cores` None); None: the runner chooses.
        gpus: GPUs of a worker that can use one (`Resources.gpus` None), 0 or 1; None: 1 if there are any.
        wait_s: Seconds to wait for nodes; None: long if an autoscaler may add some, else 0.
        labels: Labels that the nodes of the workers must have.

    Raises:
        InputError: If a number is out of range.
    """

    min_workers: int = option(1, minimum=1)
    max_workers: int = option(MAX_WORKERS, minimum=1)
    cpus: int | None = option(None, minimum=1)
    gpus: int | None = None
    wait_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_values(self)
        if self.gpus not in (None, 0, 1):
            raise InputError(f"{Parameter('gpus', self.gpus)}: expected 0 or 1")
        if self.max_workers < self.min_workers:
            raise InputError(
                f"{Parameter('min_workers', self.min_workers)}: expected at most the {self.max_workers} of "
                f"{Parameter('max_workers')}"
            )
        if self.wait_s is not None and self.wait_s < 0:
            raise InputError(f"{Parameter('wait', f'{self.wait_s:g}')}: expected seconds, at least 0")

    def complete_resources(self, resources: WorkerResources) -> WorkerResources:
        """Replaces cores and GPUs of `resources` that are None by the requested ones."""
        cores = self.cpus if resources.cores is None else resources.cores
        return replace(resources, cores=cores, gpus=self.gpus if resources.gpus is None else resources.gpus)


ANY_WORKERS = WorkerRequest()
"""The request of a user who leaves all to the runner."""


@dataclass(frozen=True)
class Allocation:
    """The cores and the device that a runner assigns to a worker.

    Attributes:
        cores: Threads that the worker may use.
        device: "cpu", or "cuda" for the GPU that the worker has.
    """

    cores: int
    device: str = "cpu"

    @property
    def gpus(self) -> int:
        """The number of GPUs of the worker, 0 or 1."""
        return int(self.device == "cuda")


class WorkerTask(Protocol):
    """The interface of a task. It is sent to workers' processes, so it holds names, options and small arrays."""

    @property
    def resources(self) -> WorkerResources:
        """The resources that one worker needs."""

    def open(self, allocation: Allocation) -> Callable[[Any, Report], Any]:
        """Opens a worker, once in each worker's process, and returns it; may load a model or start a JVM.

        The worker takes an item and a Report, and returns the item's result.
        """


def task_name(task: WorkerTask) -> str:
    """Returns the name of a task in Ray's dashboard and metrics: `riptide search bm25` for a SearchBm25Task."""
    return "riptide " + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", type(task).__name__.removesuffix("Task")).lower()


def are_workers_kept_open(task: WorkerTask) -> bool:
    """Returns whether the workers of a task stay open for its next run, as `stays_open` of tasks with a model says."""
    return bool(getattr(task, "stays_open", False))


def reports_progress(task: WorkerTask) -> bool:
    """Returns whether the workers of a task call their Report, as `reports_progress` of tasks with long items says."""
    return bool(getattr(task, "reports_progress", False))


class Runner(Protocol):
    """The interface of a runner, which spreads the items of a task over workers."""

    @property
    def request(self) -> WorkerRequest:
        """The workers that the user requests."""

    def run(
        self, task: WorkerTask, items: Iterable[Item], *, on_progress: Report = ignore_progress
    ) -> Iterator[tuple[Item, Any]]:
        """Runs the task for every item; yields (item, result) as items finish, in any order.

        The first exception ends the run: it is raised, and no further item is begun.

        Args:
            task: The task.
            items: May be endless; drawn as workers become free (`may_submit`).
            on_progress: Called with the rows of unfinished items that are done so far.
        """

    def run_on_first_available(self, task: WorkerTask, item: Any, count: int) -> Any:
        """Runs the task for one item on the first available worker, and returns the result.

        Args:
            task: The task.
            item: The item.
            count: The number of workers that the job will use next. On a cluster, nodes for all of them are requested.
        """

    def allocate(self, resources: WorkerResources) -> Allocation:
        """Returns the cores and the device that a worker with these resources gets, the same for the whole job."""


MAX_PREFETCH_BYTES = 4 << 30
"""Bytes of items that a runner draws ahead: the driver, and on a cluster the object store, hold them."""

END: Any = object()
"""Stands for the end of an iterator in `next`, since an item may be None."""


def may_submit(pending: Collection[Any], limit: int) -> bool:
    """Returns whether a runner may draw another item: pending ones are below `limit` and MAX_PREFETCH_BYTES."""
    return len(pending) < limit and sum(getattr(item, "size_bytes", 0) for item in pending) < MAX_PREFETCH_BYTES
