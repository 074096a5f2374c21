"""Metrics of a job on Ray: the driver counts the work that workers commit, and Ray exports the counts to Prometheus.

The counts of a worker would be lost if it is killed; those of the driver are exported every 10 s and when it ends. Ray
puts `ray_` before a name and adds `_total` to that of a counter. Without Ray nothing is counted, and ray is
not imported.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from riptide.jobs.common.starting import job_name
from riptide.process.memory import format_bytes
from riptide.telemetry.phases import PHASES, merge_measures, take_measures
from riptide.telemetry.submission import submission_id

# Not `job`: Prometheus itself adds a label of that name, and would rename this one.
TAGS = ("store", "submission", "job_name", "artifact", "stage")
REFRESH_S = 5.0  # Ray exports a gauge once for each time that it is set, and drops it after 20 s

COUNTERS = {
    "rows": "Rows of the parts that this driver had made, in the unit of the stage: passages, queries, steps.",
    "parts": "Parts that are committed: made for this driver, or kept from an earlier one.",
    "tokens": "Tokens of the encoded passages.",
    "pairs": "Pairs that were scored by a re-ranker, and rows of training batches.",
    "phase_seconds": "Seconds of all workers and of the driver in a phase of their work.",
}
GAUGES = {
    "running": "1 while the stage runs.",
    "waiting_workers": "Workers that wait for a node.",
    "train_loss": "Loss of the last training step.",
    "train_lr": "Learning rate of the last training step.",
    "train_steps": "Number of the last training step.",
}

_store: ContextVar[str] = ContextVar("store", default="")  # the store of the job, for its metrics
_dashboard: ContextVar[str] = ContextVar("dashboard", default="")  # address of Ray's dashboard, if any
SHOWN_FROM_S = 1.0  # a job that spends less has no line about its time
LISTED_TASKS, LIST_TIMEOUT_S = 10_000, 5  # of the request for the tasks that Ray has run again
_gauges: dict[tuple[str, ...], float] = {}  # (name, *values of TAGS) -> value


class _Spent:
    """What this process and its workers have spent since the last summary.

    Attributes:
        lock: To be held while the measures change, as other jobs of this process add theirs.
        measures: The measures since the last summary.
        counted_retries: Retried tasks of this driver that were in an earlier summary.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.measures: dict[str, float] = {}
        self.counted_retries = 0


_spent = _Spent()


class StageMetrics:
    """The metrics of one stage of a job.

    Args:
        stage: Name of the stage.
        artifact: Key of the artifact that it makes.
    """

    def __init__(self, stage: str, artifact: str):
        self._values = _store.get(), submission_id(), job_name(), artifact, stage

    def add(self, name: str, amount: float, **tags: str) -> None:
        """Adds an amount to the counter `name`, one of COUNTERS."""
        if amount and _is_on_ray():
            counter = _ray_metric("Counter", name, COUNTERS[name], *tags)
            counter.inc(amount, tags=dict(zip(TAGS, self._values, strict=True)) | tags)

    def set(self, name: str, value: float) -> None:
        """Sets the gauge `name`, one of GAUGES, which keeps its value until `close`."""
        if _is_on_ray():
            _gauges[name, *self._values] = value
            _set_gauge(name, *self._values)
            _start_refreshing()

    def add_measures(self) -> None:
        """Adds the measures that this process has taken, or received from workers, since the last call."""
        taken = take_measures()
        with _spent.lock:
            merge_measures(_spent.measures, taken)
        for phase in PHASES:
            self.add("phase_seconds", taken.get(phase, 0.0), phase=phase)

    def close(self) -> None:
        """Removes the gauges of the stage."""
        for key in [key for key in list(_gauges) if key[1:] == self._values]:  # other threads add gauges
            del _gauges[key]


def take_summary(store_url: str) -> str:
    """Describes the work of the stages since the last call; "" if it took less than SHOWN_FROM_S and nothing was lost.

    Args:
        store_url: The store, whose scheme names the requests to it: `S3 reads`, or `disk reads` of a folder.

    Returns:
        A line such as `spent 812 s in all processes: compute 71%, S3 reads 18%, tokenising 6%, driver 5%; GPUs 64%
        busy, tensors of at most 12.3 GB; losses: 1 node, 3 retried tasks`.
    """
    with _spent.lock:
        taken, _spent.measures = _spent.measures, {}
    losses = _describe_losses(taken)
    total = sum(taken.get(phase, 0.0) for phase in PHASES)
    if total < SHOWN_FROM_S and not losses:
        return ""
    storage = store_url.partition("://")[0].upper() if "://" in store_url else "disk"
    words = {
        "open": "opening workers",
        "read": f"{storage} reads",
        "tokenise": "tokenising",
        "write": f"{storage} writes",
        "commit": f"{storage} commits",
        "wait": "waiting",
    }
    by_share = sorted(((taken.get(phase, 0.0), words.get(phase, phase)) for phase in PHASES), reverse=True)
    shown = ", ".join(
        f"{word} {seconds / total:.0%}" for seconds, word in by_share if seconds and seconds >= 0.005 * total
    )
    spent = f"spent {total:,.1f} s in all processes: {shown}" if total else ""
    return "; ".join(each for each in (spent, _describe_gpus(taken), losses) if each)


def _describe_gpus(measures: Mapping[str, float]) -> str:
    """Describes the use of GPUs by all processes; "" without GPUs. Without NVML, only the memory is known."""
    if "gpu_bytes" not in measures:
        return ""
    samples = measures.get("gpu_samples")
    busy = f"{measures['gpu_percent'] / samples:.0f}% busy, " if samples else ""
    return f"GPUs {busy}tensors of at most {format_bytes(int(measures['gpu_bytes']))}"


def _describe_losses(measures: Mapping[str, float]) -> str:
    """Describes the lost nodes and workers, and the work that ran again; "" without any."""
    counts = {
        "node": measures.get("lost_nodes", 0),
        "worker process": measures.get("lost_workers", 0),
        "restart of the training": measures.get("restarts", 0),
        "retried task": _count_retried_tasks(_dashboard.get()) if _is_on_ray() and _dashboard.get() else 0,
    }
    plurals = {"worker process": "worker processes", "restart of the training": "restarts of the training"}
    shown = [
        f"{count:,.0f} {noun if count == 1 else plurals.get(noun, f'{noun}s')}"
        for noun, count in counts.items()
        if count
    ]
    return f"losses: {', '.join(shown)}" if shown else ""


def _count_retried_tasks(dashboard: str) -> int:
    """Returns how often Ray has run a task of this driver again since the last call; 0 if its dashboard cannot say."""
    import ray
    from ray.util.state import list_tasks

    job_id = ray.get_runtime_context().get_job_id()
    filters = [("job_id", "=", job_id), ("type", "=", "NORMAL_TASK"), ("attempt_number", "!=", "0")]
    try:
        tasks = list_tasks(
            f"http://{dashboard}",
            filters=filters,
            limit=LISTED_TASKS,
            timeout=LIST_TIMEOUT_S,
            raise_on_missing_output=False,
        )
    except Exception:  # the dashboard is busy, or needs a token that this process lacks; the line is for information
        return 0
    count, _spent.counted_retries = len(tasks) - _spent.counted_retries, len(tasks)
    return max(0, count)


def name_store(url: str, dashboard: str = "") -> None:
    """Sets the store of the jobs of this context, which labels the metrics of their stages.

    Args:
        url: The store.
        dashboard: `HOST:PORT` of Ray's dashboard, which counts retried tasks; "": the one that was set before, if any.
    """
    _store.set(url)
    _dashboard.set(dashboard or _dashboard.get())


def _is_on_ray() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@functools.cache
def _ray_metric(kind: str, name: str, description: str, *tags: str) -> Any:
    """Returns the Ray metric of a name; it is created once, as Ray allows one object per name."""
    from ray.util import metrics

    return getattr(metrics, kind)(f"riptide_{name}", description, tag_keys=(*TAGS, *tags))


def _set_gauge(name: str, *values: str) -> None:
    """Exports the value of a gauge to Ray; does nothing if its stage has ended."""
    value = _gauges.get((name, *values))
    if value is not None:
        _ray_metric("Gauge", name, GAUGES[name]).set(value, tags=dict(zip(TAGS, values, strict=True)))


@functools.cache
def _start_refreshing() -> None:
    """Starts a thread that exports all gauges to Ray every REFRESH_S seconds."""

    def refresh() -> None:
        while True:
            time.sleep(REFRESH_S)
            for key in list(_gauges) if _is_on_ray() else ():
                _set_gauge(*key)

    threading.Thread(target=refresh, name="riptide-metrics", daemon=True).start()
