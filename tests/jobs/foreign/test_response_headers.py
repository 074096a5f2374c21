"""Headers of responses, by rules like those of redbot: a length, a type, and what each status needs beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from ready_client import serving

from riptide.indexing.store.store import Store
from riptide.serve.http.guard import Tokens, token_digest
from riptide.serve.service.service import Service

USER = "user-0123456789abcdef"
NEEDED = {401: "www-authenticate", 405: "allow", 429: "retry-after", 503: "retry-after"}  # by the status


@pytest.fixture(scope="module")
def store(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(str(shutil.copytree(served / "store", tmp_path_factory.mktemp("served") / "store")))


def test_each_route_answers_with_the_headers_that_its_status_needs(service: Service) -> None:
    statuses = set[int]()
    with serving(service, Tokens(user=frozenset([token_digest(USER)]))) as client:
        routes = [path for path in client.app.openapi()["paths"] if "{" not in path]
        token = {"Authorization": f"Bearer {USER}"}
        for path in [*routes, "/", "/docs", "/page/page.js", "/missing", "/v1/tasks/none", "/v1/models/none"]:
            for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
                for headers in ({}, token):
                    statuses.add(check(client, method, path, headers))
        assert check(client, "POST", "/v1/search", token, b"{}" + b" " * (32 << 20)) == 413
    assert statuses >= {200, 401, 403, 404, 405, 422}


def check(client: TestClient, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> int:
    """Sends a request, checks the headers of the response, and returns its status."""
    response = client.request(method, path, headers=headers, content=body)
    case = f"{method} {path} {response.status_code} {dict(response.headers)}"
    names = [name for name, _ in response.headers.multi_items()]
    assert len(names) == len(set(names)), case
    assert NEEDED.get(response.status_code, "content-type") in names, case
    if method != "HEAD" and "content-length" in names:
        assert int(response.headers["content-length"]) == len(response.content), case
    if response.content:
        kind = response.headers["content-type"]
        assert kind == "application/json" or kind.startswith("text/"), case
        assert not kind.startswith("text/") or "charset=utf-8" in kind, case
    if response.status_code >= 400 and method != "HEAD":
        assert response.json()["error"]["message"], case
    return response.status_code
