"""A test client that waits until its server is ready."""

from __future__ import annotations

import threading

from fastapi.testclient import TestClient


class ReadyClient(TestClient):
    """A client of an application in this process; as a context, it starts once /readyz answers 200."""

    def __enter__(self) -> ReadyClient:
        super().__enter__()
        for _ in range(600):
            if self.get("/readyz").status_code == 200:
                return self
            threading.Event().wait(0.05)
        raise AssertionError("the server did not become ready")
