"""Routes that are asked often, read, checked and answered without what FastAPI does around a handler.

FastAPI keeps the routes of the same paths: they are what the OpenAPI document is made of, and answer what is asked of
them by other methods. The errors raised here are told as the application's own are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from serve.errors import told
from serve.security import Role, Tokens

M = TypeVar("M", bound=BaseModel)
Handle = Callable[[Any, Request], Awaitable[Response]]


class Direct:
    """ASGI: POST requests, for users, of the paths that were added; all others go on to `app`."""

    app: Any

    def __init__(self, tokens: Tokens):
        self.tokens = tokens
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
        try:
            check_token(request, self.tokens, "user")
            response = await route.handle(await _body(request, route.model), request)
        except Exception as error:
            response = told(request, error)
        await response(scope, receive, send)


class DirectRoute:
    """A path, by which requests are counted, the model of its body, and what answers."""

    def __init__(self, path: str, model: type[BaseModel], handle: Handle):
        self.path, self.model, self.handle = path, model, handle


def check_token(request: Request, tokens: Tokens, role: Role) -> None:
    """Raises HTTPException unless the request's token lets its sender act in a role."""
    header = request.headers.get("authorization")
    if not tokens.allow(header, role):
        if tokens.allow(header, "user"):
            raise HTTPException(403, "an administrator's token is needed")
        raise HTTPException(401, "no token, or an unknown one", {"WWW-Authenticate": "Bearer"})


async def _body(request: Request, model: type[M]) -> M:
    """Raises RequestValidationError, the field named, as FastAPI does."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestValidationError([{"loc": ("body",), "msg": "expected Content-Type: application/json"}])
    try:
        return model.model_validate_json(body.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from None
