"""Routes that are asked often, read, checked and answered without what FastAPI does around a handler.

FastAPI keeps the routes of the same paths: they are what the OpenAPI document is made of. Requests never reach them, as
these stand before them; the errors raised here are told by the application's own handlers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from serve.security import Role, Tokens

M = TypeVar("M", bound=BaseModel)


def add_direct(
    app: FastAPI, path: str, model: type[M], tokens: Tokens, handle: Callable[[M, Request], Awaitable[Response]]
) -> None:
    """Answer POST `path`, a JSON body of `model`, for users."""

    class Direct:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            request = Request(scope, receive, send)
            check_token(request, tokens, "user")
            response = await handle(await _body(request, model), request)
            await response(scope, receive, send)

    app.router.routes.insert(0, _Counted(path, Direct(), methods=["POST"]))


class _Counted(Route):
    """A route that requests are counted by, as FastAPI's are, those of other methods too."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        match, child = super().matches(scope)
        return match, child if match == Match.NONE else {**child, "route": self}


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
