"""Measures the phases of workers: opening, the calls, and waiting between two calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from riptide.indexing.work.worker_tasks import Allocation, Report, WorkerTask
from riptide.telemetry.logs import start_json
from riptide.telemetry.phases import Phase, add_measures, current_phase


class MeasuredWorker:
    """Calls a worker in the phase "compute"; phases within it, such as requests to the storage, pause it.

    The time between two calls counts as "wait", unless the calling thread is in another phase between them, or another
    call of the worker runs at that time.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Callable[[Any, Report], Any]):
        self._worker = worker
        self._lock = threading.Lock()
        self._calls = 0  # calls that run now
        self._idle_since_s: float | None = None

    def __call__(self, item: Any, report: Report) -> Any:
        """Calls the worker, and returns its result."""
        with self._lock:
            if self._idle_since_s is not None and not self._calls and current_phase() is None:
                add_measures({"wait": time.perf_counter() - self._idle_since_s})
            self._calls += 1
        try:
            with Phase("compute"):
                return self._worker(item, report)
        finally:
            with self._lock:
                self._calls -= 1
                self._idle_since_s = time.perf_counter()


def open_measured(task: WorkerTask, allocation: Allocation) -> MeasuredWorker:
    """Opens a worker of a task in the phase "open", in a process whose log lines have the format of the job."""
    start_json()
    with Phase("open"):
        return MeasuredWorker(task.open(allocation))
