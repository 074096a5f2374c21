"""Metrics of one server process, in the format of Prometheus."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.engine import Answer
from serve.http.connections import Connections
from serve.service import Service

SIZES = (1, 2, 4, 8, 16, 32, 64)
TOKENS = tuple(8 * 4**n for n in range(8))  # up to 64 texts of 2,048 tokens
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Metrics of one process, in a separate registry.

    Args:
        service: The service, whose queues and encoder passes are counted.
        connections: Connections of its HTTP server; None: another server, such as Ray's, answers HTTP.
    """

    def __init__(self, service: Service, connections: Connections | None = None):
        self.registry = registry = CollectorRegistry()
        self._known: dict[Any, Any] = {}
        common: dict[str, Any] = {"namespace": "riptide", "registry": registry}
        self.requests = Counter("requests", "Requests, by route and status.", ["route", "status"], **common)
        self.seconds = Histogram(
            "request_seconds", "Seconds of a request, by route.", ["route"], buckets=SECONDS, **common
        )
        self.stage = Histogram("stage_seconds", "Seconds of a stage of a search.", ["stage"], buckets=SECONDS, **common)
        self.tokens = Counter(
            "embedding_tokens", "Tokens of texts that were encoded for requests for embeddings.", **common
        )
        self.shard_errors = Counter("shard_errors", "Searchers that failed or timed out.", ["how"], **common)
        for how in ("failed", "timed_out"):
            self.shard_errors.labels(how)
        self.pass_texts = Histogram(
            "encoder_texts", "Texts of one forward pass of the encoder.", buckets=SIZES, **common
        )
        self.pass_tokens = Histogram(
            "encoder_tokens", "Tokens of one forward pass of the encoder, without padding.", buckets=TOKENS, **common
        )
        service.engine.encoded = self.encoded
        for name, queue in service.queues.items():
            for what, read in (("queue_length", len), ("batches", _batches), ("batched_items", _items)):
                gauge = Gauge(f"{name}_{what}", f"Of the queue of {name}.", **common)
                gauge.set_function(lambda queue=queue, read=read: float(read(queue)))  # type: ignore[misc]
        Gauge("tasks", "Tasks of the live release.", **common).set_function(
            lambda: float(len(service.live.tasks) if service.live else 0)
        )
        Gauge("newer_artifacts", "Artifacts of the store that are newer than the live release.", **common).set_function(
            lambda: math.nan if (newer := service.newer) is None else float(len(newer))
        )
        if connections is not None:
            Gauge("connections", "Open connections.", **common).set_function(lambda: float(len(connections)))
            connections.refused = lambda status: self.answered("other", status, 0.0)
            closed = Counter("connections_closed", "Connections closed by the server, by reason.", ["why"], **common)
            connections.closed = lambda why: closed.labels(why).inc()

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts a request."""
        self._labelled(self.requests, route, str(status)).inc()
        self._labelled(self.seconds, route).observe(seconds)

    def encoded(self, texts: int, tokens: int) -> None:
        """Counts a forward pass of the encoder. Thread-safe."""
        self.pass_texts.observe(texts)
        self.pass_tokens.observe(tokens)

    def searched(self, answers: list[tuple[Answer, float]]) -> None:
        """Counts the stages and the shards of a request's queries."""
        for answer, waited in answers:
            self._labelled(self.stage, "queue").observe(waited)
            for stage, seconds in answer.took.items():
                self._labelled(self.stage, stage).observe(seconds)
            if answer.shards.successful < answer.shards.total:
                self.shard_errors.labels("failed").inc(answer.shards.failed)
                self.shard_errors.labels("timed_out").inc(answer.shards.timed_out)

    def _labelled(self, metric: Any, *values: str) -> Any:
        """Returns the metric with these labels, from a cache: a look-up in the library takes longer than counting."""
        key = (metric, *values)
        labelled = self._known.get(key)
        if labelled is None:
            labelled = self._known[key] = metric.labels(*values)
        return labelled

    def text(self) -> bytes:
        """Returns all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


def _batches(queue: Any) -> float:
    return float(queue.batches)


def _items(queue: Any) -> float:
    return float(queue.items)
