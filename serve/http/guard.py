"""The first layer of every request: its tokens, its Host, the size and rate of its body, and its request id."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from retriever.errors import InputError

Role = Literal["user", "admin"]
VARIABLES = {"user": "RIPTIDE_USER_TOKENS", "admin": "RIPTIDE_ADMIN_TOKENS"}
LEAST_CHARACTERS = 16  # characters of a token
MOST_BYTES = 24 << 20  # bytes of a request's body: 256 texts of 65,536 characters fit
MOST_PROMPT_BYTES = 256 << 20  # bytes of a PUT request with a prompt
PUBLIC = {"/", "/healthz", "/readyz", "/docs", "/openapi.json"}  # paths that need no token, as do the page's files
MOST_RECEIVED = 1 << 30  # bytes of all requests' bodies together that are in memory
BODY_S = 30.0  # maximum seconds between two pieces of a request's body
BODY_RATE = 16 << 10  # minimum bytes per second of a body after BODY_S
GONE = 499  # status that is counted if the client has disconnected
_ids = random.Random()  # names requests; a name is no secret, and random.Random costs a tenth of uuid4's system call


@dataclass(frozen=True)
class Tokens:
    """SHA-256 digests of the tokens of each role. Administrators are users too. Without tokens, everyone is both."""

    user: frozenset[bytes] = frozenset()
    admin: frozenset[bytes] = frozenset()

    @classmethod
    def read(cls, file: str | None) -> Tokens:
        """Returns the tokens of a JSON file {"user": […], "admin": […]}; None: of VARIABLES, separated by commas.

        Raises InputError, whose message shows no token.
        """
        if file is None:
            roles: dict[str, list[str]] = {
                role: [token.strip() for token in os.environ.get(name, "").split(",") if token.strip()]
                for role, name in VARIABLES.items()
            }
            origin = " and ".join(VARIABLES.values())
        else:
            origin = f"parameter tokens {file}"
            try:
                document = json.loads(Path(file).read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise InputError(f"{origin}: no such file") from None
            except (OSError, ValueError):
                raise InputError(f"{origin}: cannot be read as JSON") from None
            lists = (
                isinstance(document, dict)
                and set(document) <= set(VARIABLES)
                and all(
                    isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
                    for tokens in document.values()
                )
            )
            if not lists or not any(document.values()):
                raise InputError(f'{origin}: expected {{"user": ["…"], "admin": ["…"]}}')
            roles = document
        if any(len(token) < LEAST_CHARACTERS or not token.isascii() for tokens in roles.values() for token in tokens):
            raise InputError(f"{origin}: expected tokens of at least {LEAST_CHARACTERS} ASCII characters")
        return cls(**{role: frozenset(map(digest, tokens)) for role, tokens in roles.items()})

    def __bool__(self) -> bool:
        return bool(self.user or self.admin)

    def allow(self, header: str | None, role: Role) -> bool:
        """Returns whether an Authorization header allows a role, in constant time: no comparison is left out."""
        if not self:
            return True
        scheme, _, token = (header or "").partition(" ")
        shown = digest(token.strip()) if scheme.lower() == "bearer" else b""
        is_admin, is_user = (sum(hmac.compare_digest(shown, one) for one in known) for known in (self.admin, self.user))
        return bool(is_admin or (role == "user" and is_user))


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def check_binding(host: str, tokens: Tokens) -> None:
    """Raises InputError for an address that other machines reach, if there are no tokens."""
    if not is_loopback(host) and not tokens:
        raise InputError(
            f"parameter host {host}: other machines reach it, and there are no tokens: set parameter tokens, or use "
            "127.0.0.1"
        )


@functools.lru_cache(256)
def is_loopback(host: str) -> bool:
    """Returns whether a host, a name or an address without a port, is this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Refusal(NamedTuple):
    """An error that is sent instead of a request's response."""

    status: int
    message: str


class Guard:
    """The outermost ASGI application: checks tokens and sizes. A refused request costs little: its body is not read.

    Without tokens only the names of this machine are accepted as Host. This keeps out web pages whose host name
    resolves to this machine (DNS rebinding).

    Args:
        app: The inner application.
        tokens: Tokens of users and administrators.
        answered: Called with the route, the status and the seconds of every request.
    """

    def __init__(self, app: Any, *, tokens: Tokens, answered: Callable[[str, int, float], object]):
        self.app, self.tokens, self.answered = app, tokens, answered
        self.received = 0  # bytes of all bodies that are in memory now

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = dict(scope["headers"])
        scope.setdefault("state", {})["request_id"] = name = f"{_ids.getrandbits(128):032x}"
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        prompt = scope["method"] == "PUT" and path.startswith("/v1/tasks/")
        most = MOST_PROMPT_BYTES if prompt else MOST_BYTES
        status, received, whole = GONE, 0, False
        refusal = self._refusal(scope["method"], path, headers, most)

        async def answer(message: Any) -> None:
            nonlocal status
            if refusal is not None and not message.get("refusal"):
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        async def receive_body() -> Any:
            nonlocal received, refusal, whole
            # Without this limit a slow sender could hold the body's memory and its connection for any time.
            remaining_s = start + BODY_S + received / BODY_RATE - time.perf_counter()
            try:
                async with asyncio.timeout(None if whole else min(BODY_S, max(0.0, remaining_s))):
                    message = await receive()
            except TimeoutError:
                refusal = Refusal(408, f"expected the body's next bytes within {BODY_S:g} s, at {BODY_RATE:,} bytes/s")
                return {"type": "http.disconnect"}
            whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            received += size
            self.received += size
            if received > most:
                refusal = _too_large(most)
                return {"type": "http.disconnect"}
            if self.received > MOST_RECEIVED:
                refusal = Refusal(503, "too many large requests at once; try again in a moment")
                return {"type": "http.disconnect"}
            return message

        try:
            if refusal is None:
                await self.app(scope, receive_body, answer)
            if refusal is not None:
                await _refuse(answer, refusal, name)
        except BaseException:
            status = 500
            raise
        finally:
            self.received -= received
            self.answered(getattr(scope.get("route"), "path", "other"), status, time.perf_counter() - start)

    def _refusal(self, method: str, path: str, headers: dict[bytes, bytes], most: int) -> Refusal | None:
        """Returns the reason to refuse a request before its body is read; None if it is accepted."""
        host = _without_port(headers.get(b"host", b"").decode("latin-1"))
        if not self.tokens and not is_loopback(host):
            return Refusal(403, f"host {host[:100]!r}: without tokens only this machine is answered")
        if path not in PUBLIC and not path.startswith("/page/"):
            role: Role = "admin" if method in ("PUT", "DELETE") else "user"
            header = headers.get(b"authorization", b"").decode("latin-1")
            if not self.tokens.allow(header, role):
                known = self.tokens.allow(header, "user")
                return (
                    Refusal(403, "an administrator's token is needed")
                    if known
                    else Refusal(401, "no token, or an unknown one")
                )
        length = headers.get(b"content-length", b"0")
        return _too_large(most) if length.isdigit() and int(length) > most else None


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"expected up to {most} bytes")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host


async def _refuse(send: Any, refusal: Refusal, request_id: str) -> None:
    kind = {408: "timeout_error", 503: "overloaded_error"}.get(refusal.status, "invalid_request_error")
    body = orjson.dumps({"error": {"message": refusal.message, "type": kind, "request_id": request_id}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status == 503:
        headers.append((b"retry-after", b"1"))
    if refusal.status in (408, 413, 503):  # the rest of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers, "refusal": True})
    await send({"type": "http.response.body", "body": body, "refusal": True})
