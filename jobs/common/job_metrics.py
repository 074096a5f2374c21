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
from contextvars import ContextVar
from typing import Any

from riptide.jobs.common.starting import job_name
from riptide.telemetry.phases import take_seconds
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
_seconds_lock = threading.Lock()
SHOWN_FROM_S = 1.0  # a job that spends less has no line about its time
_seconds: dict[str, float] = {}  # seconds of this process and its workers since `take_time_shares`, by phase
_gauges: dict[tuple[str, ...], float] = {}  # (name, *values of TAGS) -> value


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

    def add_seconds(self) -> None:
        """Adds the seconds that this process has measured by phase, or received from workers, since the last call."""
        for phase, seconds in take_seconds().items():
            with _seconds_lock:
                _seconds[phase] = _seconds.get(phase, 0.0) + seconds
            self.add("phase_seconds", seconds, phase=phase)

    def close(self) -> None:
        """Removes the gauges of the stage."""
        for key in [key for key in list(_gauges) if key[1:] == self._values]:  # other threads add gauges
            del _gauges[key]


def take_time_shares(store_url: str) -> str:
    """Describes the time that the stages have spent since the last call; "" if it is less than SHOWN_FROM_S.

    Args:
        store_url: The store, whose scheme names the requests to it: `S3 reads`, or `disk reads` of a folder.

    Returns:
        A line such as `spent 812 s in all processes: compute 71%, S3 reads 18%, tokenising 6%, driver 5%`.
    """
    with _seconds_lock:  # other jobs of this process add seconds
        taken = dict(_seconds)
        _seconds.clear()
    total = sum(taken.values())
    storage = store_url.partition("://")[0].upper() if "://" in store_url else "disk"
    words = {
        "open": "opening workers",
        "read": f"{storage} reads",
        "tokenise": "tokenising",
        "write": f"{storage} writes",
        "commit": f"{storage} commits",
        "wait": "waiting",
    }
    by_share = sorted(taken.items(), key=lambda entry: -entry[1])
    shares = [(words.get(phase, phase), seconds / total) for phase, seconds in by_share if seconds]
    shown = ", ".join(f"{word} {share:.0%}" for word, share in shares if share >= 0.005)
    return f"spent {total:,.1f} s in all processes: {shown}" if total >= SHOWN_FROM_S else ""


def name_store(url: str) -> None:
    """Sets the store of the jobs of this context, which labels the metrics of their stages."""
    _store.set(url)


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
