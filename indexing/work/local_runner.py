"""Runs tasks on this machine: inline, in threads, or in spawned processes for work that holds Python's GIL."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError, StorageError
from riptide.base.wording import Parameter
from riptide.indexing.work.measured_worker import open_measured
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
)
from riptide.process.temporary_folders import TemporaryFolder
from riptide.telemetry.phases import Phase, add_measures, take_measures

KEPT_TASKS = 8  # maximum number of tasks whose workers stay open, for example encoders and a re-ranker of a search
RETRIES = 5  # times that pending items run again after a spawned process was killed; exceptions are not retried
PROGRESS_S = 0.5  # seconds between two progress reports
# The program that a spawned process executes at its end in its own place, to remove its temporary folder.
REMOVE = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
SPAWN_AFTER_S = 2.0  # seconds of inline work before processes are spawned, as spawning them takes time

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # CPU quota of the container, or "max", and period in microseconds

log = logging.getLogger(__name__)

_program_lock = threading.Lock()  # held while `__main__.__file__` is removed; see _without_program
_unfinished_threads: set[threading.Thread] = set()


def cores_of_process() -> int:
    """Returns the number of cores that this process may use by its CPU affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = CPU_MAX.read_text(encoding="utf-8").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    return cores


def check_cores(cpus: int, cores: int) -> None:
    """Raises InputError if a worker has more CPUs than there are cores here."""
    if cpus > cores:
        raise InputError(f"{Parameter('cpus', cpus)}: expected at most {cores}, the cores that this process may use")


def has_unfinished_threads() -> bool:
    """Returns whether threads of ended runs still process items; Python would wait for them when it exits."""
    return any(thread.is_alive() for thread in _unfinished_threads)


def _register_thread() -> None:
    """Adds the current thread to the unfinished ones, and removes those that have ended."""
    _unfinished_threads.difference_update([thread for thread in _unfinished_threads if not thread.is_alive()])
    _unfinished_threads.add(threading.current_thread())


class LocalRunner:
    """A runner on this machine, in this process or in processes that it spawns.

    Args:
        cores: Cores to use; None: all that this process may use.
        gpus: Number of GPUs of this machine that the process may use.
        request: What the user requests of the workers; numbers of workers and nodes have no meaning here, except that
            at most `max_workers` of `cpus` cores are opened.

    Raises:
        InputError: If a worker is larger than this machine.
    """

    def __init__(self, *, cores: int | None = None, gpus: int = 0, request: WorkerRequest = ANY_WORKERS):
        self.cores, self.gpus, self.request = cores or cores_of_process(), gpus, request
        if request.cpus is not None:
            check_cores(request.cpus, self.cores)
            self.cores = min(self.cores, request.cpus * request.max_workers)
        if request.gpus and not gpus:
            raise InputError(f"{Parameter('gpus', request.gpus)}: this machine has no GPU")
        self._open: list[tuple[WorkerTask, list[Callable[[Any, Report], Any]]]] = []
        self._opening = threading.RLock()

    def allocate(self, resources: WorkerResources) -> Allocation:
        """Returns the cores and the device that a worker with these resources gets."""
        resources = self.request.complete_resources(resources)
        wants_gpu = resources.gpus is None or resources.gpus > 0
        cores = self.cores if resources.cores is None else min(resources.cores, self.cores)
        return Allocation(cores, "cuda" if wants_gpu and self.gpus else "cpu")

    def slots(self, resources: WorkerResources) -> int:
        """Returns the number of workers with these resources that run at once, at least 1."""
        allocation = self.allocate(resources)
        return self.gpus if allocation.device == "cuda" else max(1, self.cores // allocation.cores)

    def run(
        self, task: WorkerTask, items: Iterable[Item], *, on_progress: Report = ignore_progress
    ) -> Iterator[tuple[Item, Any]]:
        """Runs the task for every item, inline, in threads or in spawned processes; see Runner."""
        resources = task.resources
        slots = self.slots(resources)
        source = iter(items)
        if resources.one_per_process:
            first = list(itertools.islice(source, 2))
            source = itertools.chain(first, source)
            slots = slots if len(first) > 1 else 1
        if resources.one_per_process and slots > 1:
            yield from self._run_processes(task, source, slots)
        elif resources.python_bound and slots > 1:
            finish_at = time.monotonic() + SPAWN_AFTER_S
            for item in source:
                yield item, self._open_workers(task, 1)[0](item, on_progress)
                if time.monotonic() > finish_at:
                    break
            yield from self._run_processes(task, source, slots)
        elif slots * resources.calls == 1:
            worker = None
            for item in source:
                worker = worker or self._open_workers(task, 1)[0]
                yield item, worker(item, on_progress)
        else:
            yield from self._run_threads(task, source, slots, on_progress)

    def run_on_first_available(self, task: WorkerTask, item: Any, count: int) -> Any:
        """Runs the task for one item and returns its result; `count` is not used."""
        [(_, result)] = self.run(task, [item])
        return result

    def _open_workers(self, task: WorkerTask, count: int) -> list[Callable[[Any, Report], Any]]:
        """Returns `count` workers of a task, opened now or in an earlier run (`are_workers_kept_open`)."""
        allocation = self.allocate(task.resources)
        if not are_workers_kept_open(task):
            return [open_measured(task, allocation) for _ in range(count)]
        with self._opening:
            workers = next((workers for other, workers in self._open if other is task), [])
            while len(workers) < count:
                workers.append(open_measured(task, allocation))
            others = [entry for entry in self._open if entry[0] is not task]
            self._open = [*others, (task, workers)][-KEPT_TASKS:]
            return workers[:count]

    def _run_threads(
        self, task: WorkerTask, items: Iterator[Item], slots: int, on_progress: Report
    ) -> Iterator[tuple[Item, Any]]:
        first = list(itertools.islice(items, slots))
        if not first:
            return
        slots = min(slots, len(first))  # does not open workers without an item
        free: queue.SimpleQueue[int] = queue.SimpleQueue()
        workers = self._open_workers(task, slots)
        for number in range(slots * task.resources.calls):
            free.put(number % slots)
        rows: dict[int, int] = {}

        def call(number: int, item: Item) -> Any:
            _register_thread()
            slot = free.get()
            try:
                return workers[slot](item, lambda done: rows.__setitem__(number, done))
            finally:
                rows.pop(number, None)
                free.put(slot)

        with _shut_down_after(ThreadPoolExecutor(slots * task.resources.calls, "riptide-worker")) as threads:
            yield from _run_bounded(
                lambda number, item: threads.submit(call, number, item),
                itertools.chain(first, items),
                slots * task.resources.calls,
                lambda: on_progress(sum(list(rows.values()))),
            )

    def _run_processes(self, task: WorkerTask, items: Iterator[Item], slots: int) -> Iterator[tuple[Item, Any]]:
        first = list(itertools.islice(items, 1))
        if not first:
            return
        unfinished = first
        for attempt in range(RETRIES + 1):
            pending: dict[Future, Item] = {}
            reader, writer = multiprocessing.Pipe(duplex=False)
            folder = TemporaryFolder("workers")
            arguments = (task, self.allocate(task.resources), reader, str(folder.path))
            pool = ProcessPoolExecutor(slots, multiprocessing.get_context("spawn"), _start_process, arguments)
            try:
                with folder, _shut_down_after(pool, writer) as processes:
                    for item, (result, measures) in _run_bounded(
                        functools.partial(_submit, task, processes),
                        itertools.chain(unfinished, items),
                        2 * slots,
                        ignore_progress,
                        pending,
                    ):
                        add_measures(measures)
                        yield item, result
                return
            except BrokenProcessPool as error:
                unfinished = list(pending.values())
                if attempt == RETRIES:
                    raise StorageError(
                        f"{RETRIES + 1} worker processes were killed, for example because memory ran out; committed "
                        "parts are kept: run the same command again"
                    ) from error
                add_measures({"lost_workers": 1})
                log.warning("a worker process was killed: its items run again, attempt %d of %d", attempt + 1, RETRIES)


@contextlib.contextmanager
def _shut_down_after(
    executor: Executor, alive: multiprocessing.connection.Connection | None = None
) -> Iterator[Executor]:
    """Shuts down an executor at the end of the block; after an exception, without waiting for running items.

    Args:
        executor: The executor.
        alive: A pipe whose end tells spawned processes to end at once.
    """
    with alive or contextlib.nullcontext():
        try:
            yield executor
        except BaseException:
            if alive is not None:
                alive.close()
            executor.shutdown(wait=False, cancel_futures=True)
            raise
        executor.shutdown()


def _run_bounded(
    submit: Callable[[int, Item], Future],
    items: Iterator[Item],
    limit: int,
    on_time: Callable[[], object],
    pending: dict[Future, Item] | None = None,
) -> Iterator[tuple[Item, Any]]:
    """Submits items, at most `limit` and MAX_PREFETCH_BYTES at a time; yields (item, result) as they finish.

    After an exception, `pending` has the items whose result was not yielded.
    """
    pending = {} if pending is None else pending
    number = 0
    while True:
        while may_submit(pending.values(), limit) and (item := next(items, END)) is not END:
            pending[_submit_or_keep(submit, number, item, pending)] = item
            number += 1
        if not pending:
            return
        with Phase(None):
            done, _ = wait(pending, timeout=PROGRESS_S, return_when=FIRST_COMPLETED)
        on_time()
        for future in done:
            result = future.result()
            yield pending.pop(future), result


def _submit(task: WorkerTask, processes: Executor, number: int, item: Any) -> Future:
    """Submits an item to a pool of spawned processes, which may spawn another process."""
    with _deferred_interrupts(), _without_program(task):
        return processes.submit(_call_worker, item)


@contextlib.contextmanager
def _without_program(task: WorkerTask) -> Iterator[None]:
    """Removes `__main__.__file__` within the block, so that spawned processes do not run the main program again.

    Python would run it as a module to find what is pickled from it. A program of a few lines that calls jobs would do
    all its work once more. Only a task whose class is in the program needs the program.
    """
    main = sys.modules["__main__"]
    with _program_lock:
        file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        if file is None or type(task).__module__ == "__main__":
            yield
            return
        del main.__file__
        main.__spec__ = None
        try:
            yield
        finally:
            main.__file__, main.__spec__ = file, spec


@contextlib.contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Defers the handling of SIGINT and SIGTERM to the end of the block, in which processes are spawned.

    Otherwise a new process would print a traceback: an exception of a handler would keep its first data from it, and
    Ctrl-C reaches it before `_start_process` does. It inherits that SIGINT is blocked.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: received.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        if received:
            handlers[received[0]](received[0], None)


def _submit_or_keep(
    submit: Callable[[int, Item], Future], number: int, item: Item, pending: dict[Future, Item]
) -> Future:
    """Submits an item; if the executor is broken, adds the item to the pending ones before it raises."""
    try:
        return submit(number, item)
    except BrokenProcessPool:
        pending[Future()] = item
        raise


_task_of_process: tuple[WorkerTask, Allocation] | None = None
_worker_of_process: Callable[[Any, Report], Any] | None = None


def _start_process(
    task: WorkerTask, allocation: Allocation, alive: multiprocessing.connection.Connection, folder: str
) -> None:
    """Initialises a spawned process: it ignores SIGINT, which the main process handles, and ends with its parent.

    If the main process is killed, or closes the other end of `alive`, the process ends at once. Otherwise it would wait
    for items forever, because every process of a pool holds the pipe on which they come. All temporary files of the
    processes are in `folder`. A process ends by becoming a program that removes this folder: none of its threads writes
    there any more, so the last process to end leaves nothing.
    """
    global _task_of_process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel, alive])
        try:
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", REMOVE, folder])
        finally:
            os._exit(1)  # execv failed

    tempfile.tempdir = folder
    threading.Thread(target=end_with_parent, daemon=True).start()
    _task_of_process = task, allocation


def _call_worker(item: Any) -> tuple[Any, dict[str, float]]:
    """Processes an item by the worker of this spawned process, which the first call opens.

    Returns its result, and the seconds of the process by phase.
    """
    global _worker_of_process
    assert _task_of_process is not None
    task, allocation = _task_of_process
    _worker_of_process = _worker_of_process or open_measured(task, allocation)
    result = _worker_of_process(item, ignore_progress)
    return result, take_measures()
