"""Exports the metrics of a replica through Ray, whose agent on each node serves them to Prometheus."""

from __future__ import annotations

from ray.serve import metrics as serve_metrics

from riptide.serve.server_metrics import METHODS, PREFIX, Metric, RecordValue
from riptide.telemetry.submission import submission_id


class RayExporter:
    """Exports the metrics of one replica as `ray_riptide_…`, with the labels of Ray Serve, store and submission.

    Ray Serve adds deployment, replica and application; `submission` is that of the program that started Ray Serve.

    Args:
        store: URL of the store.
    """

    def __init__(self, store: str):
        self._tags = {"store": store, "submission": submission_id()}

    def add(self, metric: Metric) -> RecordValue:
        """Adds a metric to those of Ray and returns the function that records its values."""
        kind = getattr(serve_metrics, metric.kind)
        buckets = {"boundaries": list(metric.buckets)} if metric.buckets else {}
        family = kind(f"{PREFIX}_{metric.name}", metric.help, tag_keys=(*self._tags, *metric.labels), **buckets)
        record_value = getattr(family, METHODS[metric.kind])

        def record(value: float, *labels: str) -> None:
            if value or metric.kind != "Counter":  # Ray refuses to add 0
                record_value(value, self._tags | dict(zip(metric.labels, labels, strict=True)))

        return record

    def remove(self, name: str, *labels: str) -> None:
        """Keeps the labels: Ray exports only the values of the last seconds."""

    def render(self) -> None:
        """Returns None: Ray exports the metrics."""
