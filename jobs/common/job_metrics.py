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
from typing import Any

from riptide.jobs.common.starting import job_name

# Not `job`: Prometheus itself adds a label of that name, and would rename this one.
TAGS = ("job_name", "artifact", "stage")
REFRESH_S = 5.0  # Ray exports a gauge once for each time that it is set, and drops it after 20 s

COUNTERS = {
    "rows": "Rows of the parts that this driver had made, in the unit of the stage: passages, queries, steps.",
    "parts": "Parts that are committed: made for this driver, or kept from an earlier one.",
    "tokens": "Tokens of the encoded passages.",
    "pairs": "Pairs that were scored by a re-ranker, and rows of training batches.",
}
GAUGES = {
    "running": "1 while the stage runs.",
    "waiting_workers": "Workers that wait for a node.",
    "train_loss": "Loss of the last training step.",
    "train_lr": "Learning rate of the last training step.",
    "train_steps": "Number of the last training step.",
}

_gauges: dict[tuple[str, ...], float] = {}  # (name, *values of TAGS) -> value


class StageMetrics:
    """The metrics of one stage of a job.

    Args:
        stage: Name of the stage.
        artifact: Key of the artifact that it makes.
    """

    def __init__(self, stage: str, artifact: str):
        self._values = job_name(), artifact, stage

    def add(self, name: str, amount: int, **tags: str) -> None:
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

    def close(self) -> None:
        """Removes the gauges of the stage."""
        for key in [key for key in list(_gauges) if key[1:] == self._values]:  # other threads add gauges
            del _gauges[key]


def report_waiting_workers(count: int) -> None:
    """Sets the gauge of workers that wait for a node."""
    StageMetrics("", "").set("waiting_workers", count)


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
