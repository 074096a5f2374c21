"""The metrics of a server, which prometheus_client exports in one process and Ray exports on Ray Serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import prometheus_client

from riptide.serve.callers import Caller
from riptide.serve.http.connections import Connections
from riptide.serve.parts.query_states import QueryAnswer
from riptide.serve.service.certification import IndexSearches, RecallGroup
from riptide.serve.service.service import Service

PREFIX = "riptide"
# The method that records a value, by kind of metric.
METHODS = {"Counter": "inc", "Gauge": "set", "Histogram": "observe"}
SIZES = (1, 2, 4, 8, 16, 32, 64)
TOKENS = tuple(8 * 4**n for n in range(8))  # up to 64 texts of 2,048 tokens
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
RECALL = RecallGroup._fields  # labels of the metrics of recall
RAISED = IndexSearches._fields  # labels of the metric of raised settings
SAMPLE_S = 2.0  # seconds between two samples of the gauges; Ray exports the values of the last 10 s


@dataclass(frozen=True)
class Metric:
    """The definition of a metric: name, kind, help, labels and buckets.

    Attributes:
        kind: Its kind, as the libraries of Prometheus and of Ray name it.
        name: Its name, without the prefix and the suffix that exporters add.
        help: What it counts or measures.
        labels: Names of its labels.
        buckets: Upper bounds of the buckets of a histogram.
    """

    kind: Literal["Counter", "Gauge", "Histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric("Counter", "requests", "Requests, by route and status.", ("route", "status")),
    Metric("Histogram", "request_seconds", "Seconds of a request, by route.", ("route",), SECONDS),
    Metric("Histogram", "stage_seconds", "Seconds of a stage of a search.", ("stage",), SECONDS),
    Metric("Counter", "embedding_tokens", "Tokens of texts that were encoded for requests for embeddings."),
    Metric("Counter", "shard_errors", "Searchers that failed or timed out.", ("how",)),
    Metric("Histogram", "encoder_texts", "Texts of one forward pass of the encoder.", buckets=SIZES),
    Metric(
        "Histogram", "encoder_tokens", "Tokens of one forward pass of the encoder, without padding.", buckets=TOKENS
    ),
    *(
        Metric("Gauge", f"{queue}_{name}", help.format(queue))
        for queue in ("filters", "search", "embeddings", "rerank")
        for name, help in (
            ("queue_length", "Items that wait in the queue of {}."),
            ("batches", "Batches that the queue of {} has formed."),
            ("batched_items", "Items of these batches of {}."),
        )
    ),
    Metric("Gauge", "tasks", "Tasks of the live release."),
    Metric("Gauge", "newer_artifacts", "Artifacts of the store that are newer than the live release."),
    Metric("Gauge", "quota_remaining", "Queries that the quota of a client leaves for today (UTC).", ("client",)),
    Metric(
        "Gauge",
        "stored_similarity",
        "Smallest similarity of stored vectors to those of the encoder for the same passages; of models/NAME, "
        "which has a map: for 8 fixed queries.",
        ("embeddings",),
    ),
    Metric("Gauge", "recall", "Estimated recall of searches in an index.", RECALL),
    Metric("Gauge", "recall_lower", "Lower end of the 95% confidence interval of this recall.", RECALL),
    Metric("Gauge", "recall_upper", "Upper end of the 95% confidence interval of this recall.", RECALL),
    Metric("Gauge", "recall_samples", "Queries that this recall was measured with.", RECALL),
    Metric("Gauge", "recall_below_target", "1: the whole interval is below --certify-recall; otherwise 0.", RECALL),
    Metric("Gauge", "raised_setting", "nprobe or ef_search of an index, if --certify-raise has raised it.", RAISED),
    Metric("Gauge", "sampled_queries", "Queries that were sampled to be searched again exactly.", ("outcome",)),
    Metric("Gauge", "certification_cpu_seconds", "CPU seconds of these exact searches."),
)
# These exist only without Ray Serve, whose proxy holds the connections.
CONNECTION_METRICS = (
    Metric("Gauge", "connections", "Open connections."),
    Metric("Counter", "connections_closed", "Connections closed by the server, by reason.", ("why",)),
)


class RecordValue(Protocol):
    """A function that increases a counter, sets a gauge, or adds a value to a histogram."""

    def __call__(self, value: float, *labels: str) -> None: ...


class Exporter(Protocol):
    """The interface for recording metrics and exporting their values."""

    def add(self, metric: Metric) -> RecordValue:
        """Adds a metric and returns the function that records its values. Thread-safe."""

    def remove(self, name: str, *labels: str) -> None:
        """Stops exporting the value of a metric with these labels."""

    def render(self) -> bytes | None:
        """Returns all metrics in the text format of Prometheus; None if they are exported in another way."""


class PrometheusExporter:
    """Exports the metrics of one process from a separate registry, with the label of the store.

    Args:
        store: URL of the store.
    """

    def __init__(self, store: str):
        self._store = store
        self._registry = prometheus_client.CollectorRegistry()
        self._remove: dict[str, Callable[..., None]] = {}

    def add(self, metric: Metric) -> RecordValue:
        """Adds a metric to the registry and returns the function that records its values."""
        kind = getattr(prometheus_client, metric.kind)
        buckets = {"buckets": metric.buckets} if metric.buckets else {}
        labels = ("store", *metric.labels)
        family = kind(metric.name, metric.help, labels, namespace=PREFIX, registry=self._registry, **buckets)

        @cache  # a look-up of labels takes longer than recording a value
        def method_of(*labels: str) -> Callable[[float], None]:
            return getattr(family.labels(self._store, *labels), METHODS[metric.kind])

        def remove(*labels: str) -> None:
            family.remove(self._store, *labels)
            method_of.cache_clear()

        self._remove[metric.name] = remove
        if not metric.labels:
            method_of()  # a counter starts at 0
        return lambda value, *labels: method_of(*labels)(value)

    def remove(self, name: str, *labels: str) -> None:
        """Removes the value of a metric with these labels from the registry."""
        self._remove[name](*labels)

    def render(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        return prometheus_client.generate_latest(self._registry)


class Metrics:
    """Records the metrics of a service.

    Args:
        service: The service, whose queues and encoder passes are counted.
        exporter: Exports the metrics.
        connections: Connections of its HTTP server; None: another server, such as Ray's, answers HTTP.
        callers: Its clients with tokens.

    Attributes:
        on_search: Called with (name, seconds) of the stages of each query of a search, unless it is None.
    """

    def __init__(
        self,
        service: Service,
        exporter: Exporter,
        connections: Connections | None = None,
        callers: Iterable[Caller] = (),
    ):
        self._exporter = exporter
        self.on_search: Callable[[list[tuple[str, float]]], object] | None = None
        metrics = METRICS if connections is None else METRICS + CONNECTION_METRICS
        self._record = {metric.name: exporter.add(metric) for metric in metrics}
        for how in ("failed", "timed_out"):
            self._record["shard_errors"](0, how)
        self._limited = [caller for caller in callers if caller.quota is not None]
        self._certifier = service.certifier
        self._groups: set[RecallGroup] = set()  # the groups whose recall is exported
        self._raised: set[tuple[str, ...]] = set()  # the labels of the raised settings that are exported
        self._stored_similarities: Callable[[], dict[str, float]] = lambda: service.stored_similarities
        self._compared: set[str] = set()  # the embeddings whose similarity is exported
        self._gauges: dict[str, Callable[[], float]] = {
            "tasks": lambda: len(service.live.tasks) if service.live else 0,
            "newer_artifacts": lambda: math.nan if (newer := service.newer_artifacts) is None else len(newer),
        }
        for name, queue in service.queues.items():
            self._gauges[f"{name}_queue_length"] = queue.__len__
            self._gauges[f"{name}_batches"] = lambda queue=queue: queue.batches  # type: ignore[misc]
            self._gauges[f"{name}_batched_items"] = lambda queue=queue: queue.items  # type: ignore[misc]
        service.engine.on_encoded = self.count_forward_pass
        if connections is not None:
            self._gauges["connections"] = connections.__len__
            connections.on_refusal = lambda status: self.count_request("other", status, 0.0)
            connections.on_close = lambda why: self._record["connections_closed"](1, why)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Records the status and the duration of a request to a route."""
        self._record["requests"](1, route, str(status))
        self._record["request_seconds"](seconds, route)

    def count_embedding(self, tokens: int) -> None:
        """Records the number of tokens in a request for embeddings."""
        self._record["embedding_tokens"](tokens)

    def count_forward_pass(self, texts: int, tokens: int) -> None:
        """Records a forward pass of the encoder. Thread-safe."""
        self._record["encoder_texts"](texts)
        self._record["encoder_tokens"](tokens)

    def count_search(self, answers: list[tuple[QueryAnswer, float]]) -> None:
        """Records the stages and the failed shards of the queries in a request."""
        for answer, waited in answers:
            stages = [("queue", waited), *answer.stage_seconds.items()]
            for stage, seconds in stages:
                self._record["stage_seconds"](seconds, stage)
            if self.on_search is not None:
                self.on_search(stages)
            if answer.shards.failed or answer.shards.timed_out:
                self._record["shard_errors"](answer.shards.failed, "failed")
                self._record["shard_errors"](answer.shards.timed_out, "timed_out")

    async def update_gauges(self) -> None:
        """Sets all gauges to their current values."""
        self._set_gauges()

    def render(self) -> bytes | None:
        """Returns all current metrics in the text format of Prometheus; None if they are exported in another way."""
        self._set_gauges()
        return self._exporter.render()

    def _set_gauges(self) -> None:
        for name, read in self._gauges.items():
            self._record[name](read())
        for caller in self._limited:
            self._record["quota_remaining"](caller.remaining or 0, caller.name)
        similarities = self._stored_similarities()
        for name in self._compared - similarities.keys():
            self._exporter.remove("stored_similarity", name)
        self._compared = set(similarities)
        for name, similarity in similarities.items():
            self._record["stored_similarity"](similarity, name)
        if (certifier := self._certifier) is not None:
            self._record["certification_cpu_seconds"](certifier.cpu_s)
            for outcome, count in certifier.counts.items():
                self._record["sampled_queries"](count, outcome)
            for group in self._groups - certifier.recalls.keys():
                for metric in METRICS:
                    if metric.labels == RECALL:
                        self._exporter.remove(metric.name, *group)
            self._groups = set(certifier.recalls)
            for group, recall in certifier.recalls.items():
                for name, value in zip(("recall", "recall_lower", "recall_upper"), recall.interval, strict=True):
                    self._record[name](value, *group)
                self._record["recall_samples"](recall.samples, *group)
                self._record["recall_below_target"](recall.is_below_target, *group)
            raised = {(*key[:2], key.source.source_text): each.value for key, each in certifier.raised.items()}
            for labels in self._raised - raised.keys():
                self._exporter.remove("raised_setting", *labels)
            self._raised = set(raised)
            for labels, value in raised.items():
                self._record["raised_setting"](value, *labels)
