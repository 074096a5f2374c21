"""Tokens, where a server may listen without any, and the access that routes declare."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from riptide.base.errors import InputError
from riptide.serve.http.guard import (
    LARGE,
    MAX_BODY_BYTES,
    UNKNOWN,
    Access,
    AccessTable,
    Guard,
    Tokens,
    access,
    check_binding,
    is_loopback,
    token_digest,
)

USER, ADMIN = "u" * 16, "a" * 20


def test_an_administrator_is_a_user_and_nobody_else_is() -> None:
    tokens = Tokens(user=frozenset([token_digest(USER)]), admin=frozenset([token_digest(ADMIN)]))
    assert tokens.allows(f"Bearer {USER}", "user")
    assert tokens.allows(f"bearer {ADMIN}", "user")
    assert tokens.allows(f"Bearer {ADMIN}", "admin")
    assert not tokens.allows(f"Bearer {USER}", "admin")
    for header in (None, "", "Bearer", "Bearer ", f"Basic {USER}", USER, f"Bearer {USER[:-1]}", "Bearer \xff\u0100"):
        assert not tokens.allows(header, "user")
        assert not tokens.allows(header, "admin")


def test_without_tokens_everybody_may_all_but_only_on_this_machine() -> None:
    none = Tokens()
    assert none.allows(None, "admin")
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_binding(host, none)
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(InputError, match="there are no tokens"):
            check_binding(host, none)
        check_binding(host, Tokens(admin=frozenset([token_digest(ADMIN)])))


def test_tokens_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"user": [USER], "admin": [ADMIN]}))
    found = Tokens.read(str(file))
    assert found == Tokens(user=frozenset([token_digest(USER)]), admin=frozenset([token_digest(ADMIN)]))
    assert not Tokens.read(None)
    monkeypatch.setenv("RIPTIDE_USER_TOKENS", f" {USER}, {ADMIN},")
    assert Tokens.read(None).user == {token_digest(USER), token_digest(ADMIN)}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected {"),
        ("{}", "expected {"),
        ('{"user": "abc"}', "expected {"),
        ('{"users": ["0123456789abcdef"]}', "expected {"),
        ('{"user": ["secret"]}', "at least 16 ASCII characters"),
    ],
)
def test_a_file_that_is_none_is_refused_without_telling_a_token(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(content)
    with pytest.raises(InputError) as raised:
        Tokens.read(str(file))
    assert told in str(raised.value)
    assert "secret" not in str(raised.value)


def test_the_access_of_a_request_is_the_one_that_its_route_declares() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.get("/things")
    @access("user")
    async def things() -> None: ...

    @app.post("/things")  # a method that only reads by its name
    @access("admin", max_bytes=7)
    async def change() -> None: ...

    @app.get("/things/{name}")
    @access("public")
    async def thing(name: str) -> None: ...

    table = AccessTable(app.routes)
    assert table.find("GET", "/things") == Access("user", MAX_BODY_BYTES)
    assert table.find("POST", "/things") == Access("admin", 7)
    assert table.find("GET", "/things/a") == table.find("GET", "/openapi.json") == Access("public")
    # Starlette matches these paths too, so they are no way around a role.
    assert table.find("POST", "/things\n") == Access("admin", 7)
    assert table.find("GET", "/things/a\n") == Access("public")
    assert [table.find(*each) for each in (("GET", "/things/a/b"), ("PUT", "/things"), ("GET", "/"))] == [UNKNOWN] * 3


def test_a_route_without_a_declared_access_is_refused_at_the_start() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)

    @app.post("/new")
    async def new() -> None: ...

    with pytest.raises(TypeError, match=r"/new: the route does not declare who may call it"):
        AccessTable(app.routes)


@pytest.mark.parametrize(("received", "sent"), [(0, LARGE - 1), (LARGE, 0), (LARGE // 2, LARGE // 2)])
def test_the_end_of_a_request_with_a_large_body_or_response_is_reported(received: int, sent: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(sent)})
        assert not ended

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(received)}

    async def send(message: Any) -> None: ...

    ended = list[bool]()
    guard = Guard(
        app,
        AccessTable([]),
        tokens=Tokens(),
        on_response=lambda *_: None,
        on_large=lambda: ended.append(True),
    )
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"127.0.0.1")]}
    asyncio.run(guard(scope, receive, send))
    assert len(ended) == (received + sent >= LARGE)
