"""Measures the seconds that a process spends in each phase of its work: reading, computing, writing, and others.

A thread is in one phase at a time. A phase within another one pauses the outer one, so no second is counted twice in a
thread. The seconds of all threads of the process are added up until `take_measures` takes them, for example to send
them with the result of an item to the process that adds up those of all workers. They travel with other measures of the
process: what it makes again after a loss, and its use of GPUs.

A phase costs about a microsecond, so it is for whole files, batches and requests, not for rows.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

from riptide.telemetry.gpus import measure_gpus

PHASES = ("open", "read", "tokenise", "compute", "write", "commit", "wait", "driver")
"""open: opening workers with their models; read, write, commit: requests to the storage (commit: conditional writes);
wait: workers without an item, or a job that waits for nodes; driver: the process of the job, except while it waits."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

OTHER_MEASURES = ("lost_nodes", "lost_workers", "restarts", "gpu_bytes", "gpu_percent", "gpu_samples")
"""lost_nodes, lost_workers: nodes, and worker processes, that were lost, and whose work runs again; restarts: of all
workers of a training, after a loss or for more nodes; gpu_...: as of `measure_gpus`."""
_MAXIMA = {"gpu_bytes"}  # measures of which the largest one counts; the others are added up


class _Thread(threading.local):
    """The current phase of a thread, None if its time is not counted, and the time since which it is uncounted."""

    phase: str | None = None
    since_s: float = 0.0


_thread = _Thread()
_lock = threading.Lock()
_measures: dict[str, float] = {}


class Phase:
    """A context in which the time of the current thread counts as that of a phase; None: it does not count.

    Args:
        name: One of PHASES, or None.
    """

    __slots__ = ("_name", "_outer")

    def __init__(self, name: str | None):
        self._name = name

    def __enter__(self) -> None:
        self._outer = _change(self._name)

    def __exit__(self, *error: object) -> None:
        _change(self._outer)


def _change(name: str | None) -> str | None:
    """Changes the phase of this thread, adds the seconds of the previous phase, and returns its name."""
    now = time.perf_counter()
    previous = _thread.phase
    if previous is not None:
        add_measures({previous: now - _thread.since_s})
    _thread.phase, _thread.since_s = name, now
    return previous


def current_phase() -> str | None:
    """Returns the phase of the current thread; None if its time is not counted."""
    return _thread.phase


def add_measures(measures: Mapping[str, float]) -> None:
    """Adds seconds by phase, or OTHER_MEASURES, for example those of a worker in another process."""
    with _lock:
        merge_measures(_measures, measures)


def merge_measures(total: dict[str, float], measures: Mapping[str, float]) -> None:
    """Adds measures to a total; of the peak of the memory, the total keeps the largest one."""
    for name, amount in measures.items():
        before = total.get(name, 0.0)
        total[name] = max(before, amount) if name in _MAXIMA else before + amount


def take_measures() -> dict[str, float]:
    """Returns the measures that are not 0, since the last call, with those of GPUs now, and sets them to 0."""
    global _measures
    add_measures(measure_gpus())
    with _lock:
        taken, _measures = _measures, {}
    return taken


def measured(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Returns a decorator of functions whose time counts as that of a phase; not for generators."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with Phase(name):
                return function(*args, **kwargs)

        return call

    return decorate


def call_in_thread(executor: Executor, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Calls a function in a thread of an executor and returns its result.

    The function's time counts in the phase of the caller, in which the time that the caller waits is not counted.
    """
    name = _thread.phase

    def call() -> Result:
        with Phase(name):
            return function(*args, **kwargs)

    with Phase(None):
        return executor.submit(call).result()


def iterate_uncounted(items: Iterator[Result]) -> Iterator[Result]:
    """Yields the items of an iterator; the time that it takes to return them is not counted."""
    end: Any = object()
    while True:
        with Phase(None):
            item = next(items, end)
        if item is end:
            return
        yield item
