"""The spans of requests: an ASGI application around the others, which exists only if the process has a tracer."""

from __future__ import annotations

from typing import Any

from riptide.telemetry.spans import Tracer


class TracedApp:
    """Runs each request in a span with its method, route and status. Stages of a search are children of it.

    Args:
        app: The inner application.
        tracer: Makes the spans.
    """

    def __init__(self, app: Any, tracer: Tracer):
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracer.start_request(headers) as span:

            async def send_with_status(message: Any) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            try:
                await self._app(scope, receive, send_with_status)
            finally:
                route = getattr(scope.get("route"), "path", "other")
                span.update_name(f"{scope['method']} {route}")
                span.set_attributes({"http.request.method": scope["method"], "http.route": route})
                if request_id := scope.get("state", {}).get("request_id"):
                    span.set_attribute("riptide.request_id", request_id)
