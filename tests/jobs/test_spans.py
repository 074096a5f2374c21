"""Spans of jobs and of requests reach a server by OTLP over HTTP; without an endpoint, no part of its SDK is loaded."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from ready_client import serving
from samples import make_passages, write_beir

from riptide.indexing.store.store import Store
from riptide.jobs.commands import cli
from riptide.serve.one_process import open_local
from riptide.serve.service.service_options import ServiceOptions
from riptide.telemetry import spans

PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # trace and span id of a client


class Receiver(ThreadingHTTPServer):
    """A server that takes spans by OTLP over HTTP.

    Attributes:
        services: Names of the services that sent spans.
        spans: The spans, in the order in which they ended.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.services: set[str] = set()
        self.spans: list[Any] = []

    def add(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(attributes_of(resource.resource)["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_compressed = self.headers.get("Content-Encoding") == "gzip"
        assert self.path == "/v1/traces"
        self.server.add(gzip.decompress(body) if is_compressed else body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Prints nothing."""


def attributes_of(message: Any) -> dict[str, Any]:
    """Returns the attributes of a span or a resource: texts and integers."""
    return {each.key: each.value.string_value or each.value.int_value for each in message.attributes}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
    spans.open_tracer.cache_clear()
    try:
        yield receiver
    finally:
        spans.open_tracer.cache_clear()
        receiver.shutdown()
        receiver.server_close()
        thread.join()


def test_a_job_sends_its_span_and_those_of_its_stages(
    tmp_path: Path, receiver: Receiver, call_job: Callable[..., int]
) -> None:
    store, source = tmp_path / "store", write_beir(tmp_path / "raw", make_passages(60))
    assert call_job("import_corpus", "--store", store, "--source", source) == 0
    [stage] = receiver.named("import")
    job = receiver.spans[-1]
    assert stage.parent_span_id == job.span_id
    assert attributes_of(stage) == {"riptide.artifact": "corpus/g0000"}
    assert attributes_of(job)["riptide.store"] == str(store)
    assert job.start_time_unix_nano <= stage.start_time_unix_nano < stage.end_time_unix_nano <= job.end_time_unix_nano
    assert receiver.services == {"riptide"}


def test_the_span_of_a_failed_job_has_the_error(
    tmp_path: Path, receiver: Receiver, call_job: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent before the process ends, also at once, without waiting for its threads."""
    sent: list[int] = []

    def exit_at_once(status: int) -> None:
        sent.append(len(receiver.spans))
        sys.exit(status)

    for name in ("has_unfinished_threads", "runs_one_job"):
        monkeypatch.setattr(cli, name, lambda: True)
    monkeypatch.setattr(os, "_exit", exit_at_once)
    assert call_job("import_corpus", "--store", tmp_path / "store", "--source", tmp_path / "none") == 1
    assert sent == [1]
    [job] = receiver.spans
    assert job.status.code == job.status.STATUS_CODE_ERROR
    [event] = job.events
    assert "found nothing" in attributes_of(event)["exception.message"]


def test_a_search_sends_the_spans_of_its_stages_below_that_of_the_client(
    served: Path, model: str, receiver: Receiver
) -> None:
    service = open_local(Store(str(served / "store")), ServiceOptions(threads=2), device="cpu")
    with serving(service) as client:
        headers = {"traceparent": f"00-{PARENT[0]}-{PARENT[1]}-01"}
        body = {"queries": ["bafa"], "k": 3}
        reply = client.post("/v1/search", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        refused = client.post("/v1/search", json={}, headers=headers)
        assert refused.status_code == 422
    spans.flush_spans()
    answered, failed = receiver.named("POST /v1/search")
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == PARENT
    assert attributes_of(answered) == {
        "http.request.method": "POST",
        "http.route": "/v1/search",
        "http.response.status_code": 200,
        "riptide.request_id": reply.headers["x-request-id"],
    }
    assert attributes_of(failed)["http.response.status_code"] == 422
    stages = [span for span in receiver.spans if span.parent_span_id == answered.span_id]
    assert [stage.name for stage in stages] == ["queue", "encode", "search", "passages", "rerank"]
    starts = [stage.start_time_unix_nano for stage in stages]
    assert starts == sorted(starts)
    assert starts[0] >= answered.start_time_unix_nano
    assert stages[-1].end_time_unix_nano <= answered.end_time_unix_nano


def test_without_an_endpoint_the_sdk_is_not_loaded_and_no_application_wraps_the_guard(
    served: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in spans.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    spans.open_tracer.cache_clear()
    service = open_local(Store(str(served / "store")), ServiceOptions(threads=2), device="cpu")
    with serving(service) as client:
        assert type(client.app.middleware_stack).__name__ == "Guard"  # type: ignore[attr-defined]
    program = (
        "import sys, riptide.jobs.import_corpus as job, riptide.jobs.commands.cli as cli; import riptide.serve.app; "
        "from riptide.telemetry.spans import span\n"
        "with span('x'): pass\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_environment_switches_tracing_off(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert spans.open_tracer() is None
