"""OpenTelemetry spans of jobs and of requests, sent by OTLP over HTTP if the environment names an endpoint.

The variables are those of OpenTelemetry: OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT switches
tracing on; OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and others apply too. Without an endpoint
nothing is imported, and no object is made for a span.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from riptide.process.extras import find_missing_package

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@functools.cache
def open_tracer() -> Tracer | None:
    """Returns the tracer of this process; None if the environment names no endpoint, or switches tracing off.

    Raises:
        InputError: If an endpoint is named, and the packages of the extra `tracing` are not installed.
    """
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(os.environ.get, ENDPOINTS)):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise (find_missing_package(error) or error) from error
    return Tracer(BatchSpanProcessor(OTLPSpanExporter()))


@contextlib.contextmanager
def span(name: str, **attributes: str) -> Iterator[None]:
    """Context of a span with attributes `riptide.NAME`, a child of the current one; does nothing without a tracer."""
    tracer = open_tracer()
    if tracer is None:
        yield
        return
    with tracer.start(name, {f"riptide.{key}": value for key, value in attributes.items() if value}):
        yield


def flush_spans() -> None:
    """Sends the spans of this process that have ended, if there is a tracer."""
    if open_tracer.cache_info().currsize and (tracer := open_tracer()) is not None:
        tracer.flush()


class Tracer:
    """Makes spans. Its provider is separate, so other users of OpenTelemetry in the process are not affected.

    Args:
        processor: A SpanProcessor of OpenTelemetry, which receives the spans that have ended.
    """

    def __init__(self, processor: Any):
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # no variable gives a name
            resource = Resource.create({SERVICE_NAME: "riptide"})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("riptide")

    def start(self, name: str, attributes: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which a new span is the current one; an exception in the block is an event of it."""
        manager: contextlib.AbstractContextManager[Any] = self._tracer.start_as_current_span(
            name, attributes=dict(attributes)
        )
        return manager

    def start_request(self, headers: Mapping[str, str]) -> contextlib.AbstractContextManager[Any]:
        """As `start`, for a request of a client, whose span, if its headers name one, is the parent.

        Args:
            headers: The headers, with names in lower case; `traceparent` is that of W3C Trace Context.
        """
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        manager: contextlib.AbstractContextManager[Any] = self._tracer.start_as_current_span(
            "request", context=extract(headers), kind=SpanKind.SERVER
        )
        return manager

    def add_stages(self, stages: Sequence[tuple[str, float]]) -> None:
        """Adds spans of stages that followed each other and have just ended, as children of the current span.

        Args:
            stages: (name, seconds) of each stage in their order.
        """
        start_ns = time.time_ns() - int(1e9 * sum(seconds for _, seconds in stages))
        for name, seconds in stages:
            child = self._tracer.start_span(name, start_time=start_ns)
            start_ns += int(1e9 * seconds)
            child.end(start_ns)

    def flush(self) -> None:
        """Sends the spans that have ended."""
        self._provider.force_flush()
