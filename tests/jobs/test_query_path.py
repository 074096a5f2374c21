"""The modules of `serve` that one query over HTTP crosses in one process: functions of them run before its answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
import uvicorn

from riptide import serve
from riptide.indexing.store.store import Store
from riptide.serve.app import build_app
from riptide.serve.http.connections import Connections, bounded_protocol
from riptide.serve.http.guard import Tokens
from riptide.serve.http.limits import HttpLimits
from riptide.serve.local import open_local
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.options import ServiceOptions
from riptide.serve.service.service import Service

MAX_FILES = 13
TEXT = "what is a rip current?"
FOLDER = str(Path(serve.__file__).parent) + "/"


@pytest.fixture
def files() -> Iterator[set[str]]:
    """The files of `serve` of which a function was called in a thread that started during the test."""
    called: set[str] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (file := frame.f_code.co_filename).startswith(FOLDER):
            called.add(file.removeprefix(FOLDER))

    threading.setprofile(record)
    yield called
    threading.setprofile(None)


def start_server(service: Service) -> tuple[uvicorn.Server, threading.Thread]:
    """Starts a server as `run_server` does, in a thread of this process."""
    connections = Connections(HttpLimits(), 16)
    app = build_app(ReleaseChanges(service), Tokens(), connections=connections)
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=bounded_protocol(connections), log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    return server, thread


def test_a_dense_query_crosses_at_most_thirteen_files(served: Path, files: set[str]) -> None:
    live = threading.Event()
    service = open_local(Store(str(served / "store")), ServiceOptions(threads=1), device="cpu")
    service.on_live = live.set
    server, thread = start_server(service)
    try:
        assert live.wait(60)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            client.post("/v1/search", json={"query": TEXT}).raise_for_status()  # opens the connection
            queries = []
            for _ in range(50):
                files.clear()
                client.post("/v1/search", json={"query": TEXT}).raise_for_status()
                queries.append(set(files))
            crossed = set.intersection(*queries)  # a loop of the service may run during some of them
    finally:
        server.should_exit = True
        thread.join(60)
    print("crossed:", *sorted(crossed))
    assert len(crossed) <= MAX_FILES, "\n".join(["", *sorted(crossed)])
