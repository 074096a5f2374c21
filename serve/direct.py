"""Routes that are asked often, read, checked and answered without what FastAPI does around a handler.

FastAPI keeps the routes of the same paths: they are what the OpenAPI document is made of, and answer what is asked of
them by other methods. The errors raised here are told as the application's own are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from serve.errors import told

M = TypeVar("M", bound=BaseModel)
Handle = Callable[[Any, Request], Awaitable[Response]]


class Direct:
    """ASGI: POST requests of the paths that were added; all others go on to `app`. Who may ask is known by then.

    A request whose asker goes away is given up, and what of it still waits never runs.
    """

    app: Any

    def __init__(self) -> None:
        self._routes: dict[str, DirectRoute] = {}

    def add(self, path: str, model: type[M], handle: Callable[[M, Request], Awaitable[Response]]) -> None:
        """Answer POST `path`, a JSON body of `model`."""
        self._routes[path] = DirectRoute(path, model, handle)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        route = None
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(scope["path"].removeprefix(scope.get("root_path", "")))
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        watching: asyncio.Task[None] | None = None
        try:
            body = await _body(request, route.model)
            watching = asyncio.create_task(_watch(receive, asyncio.current_task()))
            response = await route.handle(body, request)
        except asyncio.CancelledError:
            if watching is None or not watching.done():
                raise
            return
        except Exception as error:
            response = told(request, error)
        finally:
            if watching is not None:
                watching.cancel()
        await response(scope, receive, send)


class DirectRoute:
    """A path, by which requests are counted, the model of its body, and what answers."""

    def __init__(self, path: str, model: type[BaseModel], handle: Handle):
        self.path, self.model, self.handle = path, model, handle


async def _watch(receive: Any, asking: asyncio.Task[Any] | None) -> None:
    """Give a request up once its asker has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if asking is not None:
        asking.cancel()


async def _body(request: Request, model: type[M]) -> M:
    """Raises RequestValidationError, the field named, as FastAPI does."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        wrong = {"type": "content_type", "loc": ("body",), "msg": "expected Content-Type: application/json"}
        raise RequestValidationError([wrong])
    try:
        return model.model_validate_json(body.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from None
