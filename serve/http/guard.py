"""The first layer of every request: tokens, size and rate of the body, its request id, and its metrics."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, NamedTuple

import orjson

from serve.http.tokens import Role, Tokens, is_loopback
from serve.metrics import Metrics

MOST_BYTES = 24 << 20  # bytes of a request's body: 256 texts of 65,536 characters fit
MOST_PROMPT_BYTES = 256 << 20  # bytes of a PUT request with a prompt
PUBLIC = {"/", "/healthz", "/readyz", "/docs", "/openapi.json"}  # paths that need no token, as do the page's files
MOST_RECEIVED = 1 << 30  # bytes of all requests' bodies together that are in memory
BODY_S = 30.0  # maximum seconds between two pieces of a request's body
BODY_RATE = 16 << 10  # minimum bytes per second of a body after BODY_S
GONE = 499  # status that is counted if the client has disconnected
_ids = random.Random()  # names requests; a name is no secret, and random.Random costs a tenth of uuid4's system call


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
        metrics: Counts every request.
    """

    def __init__(self, app: Any, *, tokens: Tokens, metrics: Metrics):
        self.app, self.tokens, self.metrics = app, tokens, metrics
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
            self.metrics.answered(getattr(scope.get("route"), "path", "other"), status, time.perf_counter() - start)

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
