"""What stands before every request: who may ask it, how large it may be, its name, and how it is counted."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, NamedTuple

import orjson

from serve.metrics import Metrics
from serve.security import Role, Tokens, is_loopback

MOST_BYTES = 24 << 20  # of a request: 256 texts of 65,536 characters fit
MOST_PROMPT_BYTES = 256 << 20  # of a prompt that is put
PUBLIC = {"/", "/healthz", "/readyz", "/docs", "/openapi.json"}  # and the page's files
BODY_S = 30  # seconds between two pieces of a request's body


GONE = 499  # is counted where nobody was left to be answered


class Refusal(NamedTuple):
    """What is answered instead of what was asked."""

    status: int
    message: str


class Guard:
    """ASGI, before all else: what is refused here has cost nothing, its body is not read. Without tokens only names of
    this machine are answered: a page in a browser, led here by a name of its own, is not a user of this machine."""

    def __init__(self, app: Any, *, tokens: Tokens, metrics: Metrics):
        self.app, self.tokens, self.metrics = app, tokens, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        headers = dict(scope["headers"])
        scope.setdefault("state", {})["request_id"] = name = uuid.uuid4().hex
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

        async def take() -> Any:
            nonlocal received, refusal, whole
            try:
                async with asyncio.timeout(None if whole else BODY_S):
                    message = await receive()
            except TimeoutError:
                refusal = Refusal(408, f"expected the body's next bytes within {BODY_S} s")
                return {"type": "http.disconnect"}
            whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > most:
                refusal = _too_large(most)
                return {"type": "http.disconnect"}
            return message

        try:
            if refusal is None:
                await self.app(scope, take, answer)
            if refusal is not None:
                await _refuse(answer, refusal, name)
        except BaseException:
            status = 500
            raise
        finally:
            self.metrics.answered(getattr(scope.get("route"), "path", "other"), status, time.perf_counter() - begun)

    def _refusal(self, method: str, path: str, headers: dict[bytes, bytes], most: int) -> Refusal | None:
        """Why a request is not even read."""
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
    told = {"message": refusal.message, "type": "invalid_request_error", "request_id": request_id}
    body = orjson.dumps({"error": told})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers, "refusal": True})
    await send({"type": "http.response.body", "body": body, "refusal": True})
