"""A test client that waits until its server is ready, and one of a service in this process."""

from __future__ import annotations

import threading

from fastapi.testclient import TestClient

from riptide.serve.app import build_app
from riptide.serve.http.guard import Tokens
from riptide.serve.service.changes import ReleaseChanges
from riptide.serve.service.service import Service


class ReadyClient(TestClient):
    """A client of an application in this process; as a context, it starts once /readyz answers 200."""

    def __enter__(self) -> ReadyClient:
        super().__enter__()
        for _ in range(600):
            if self.get("/readyz").status_code == 200:
                return self
            threading.Event().wait(0.05)
        raise AssertionError("the server did not become ready")


def serving(
    service: Service, tokens: Tokens | None = None, root_path: str = "", changes: ReleaseChanges | None = None
) -> ReadyClient:
    """Returns a client of a service, as a context; without tokens, everyone may do everything."""
    app = build_app(changes or ReleaseChanges(service), tokens or Tokens())
    return ReadyClient(app, base_url="http://127.0.0.1", root_path=root_path)
