"""What stands before every request: its size, its name, who it may come from, and how it is counted."""

from __future__ import annotations

import time
import uuid
from typing import Any

import orjson

from serve.metrics import Metrics
from serve.security import Tokens, is_loopback

MOST_BYTES = 24 << 20  # of a request: 256 texts of 65,536 characters fit
MOST_PROMPT_BYTES = 256 << 20  # of a prompt that is put


class Guard:
    """ASGI, before all else. Without tokens only names of this machine are answered: a page in a browser, led here by a
    name of its own, is not a user of this machine."""

    def __init__(self, app: Any, *, tokens: Tokens, metrics: Metrics):
        self.app, self.tokens, self.metrics = app, tokens, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        headers = dict(scope["headers"])
        scope.setdefault("state", {})["request_id"] = name = uuid.uuid4().hex
        most = MOST_PROMPT_BYTES if scope["method"] == "PUT" else MOST_BYTES
        status, too_large = 500, False

        async def answer(message: Any) -> None:
            nonlocal status
            if too_large and not message.get("refusal"):
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        received = 0

        async def take() -> Any:
            nonlocal received, too_large
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                too_large = True
                return {"type": "http.disconnect"}
            return message

        try:
            host = _without_port(headers.get(b"host", b"").decode("latin-1"))
            length = headers.get(b"content-length", b"0")
            if not self.tokens and not is_loopback(host):
                await _refuse(answer, 403, f"host {host[:100]!r}: without tokens only this machine is answered", name)
            elif length.isdigit() and int(length) > most:
                await _refuse(answer, 413, f"expected up to {most} bytes", name)
            else:
                await self.app(scope, take, answer)
                if too_large:
                    await _refuse(answer, 413, f"expected up to {most} bytes", name)
        finally:
            self.metrics.answered(getattr(scope.get("route"), "path", "other"), status, time.perf_counter() - begun)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host


async def _refuse(send: Any, status: int, message: str, request_id: str) -> None:
    body = orjson.dumps({"error": {"message": message, "type": "invalid_request_error", "request_id": request_id}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers, "refusal": True})
    await send({"type": "http.response.body", "body": body, "refusal": True})
