"""Routes with a JSON body, which pydantic parses without FastAPI's steps between a request and its handler."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

Model = TypeVar("Model", bound=BaseModel)


class JsonRoute(APIRoute):
    """A route whose function takes (request: a model of the body, http: Request) and returns a Response.

    FastAPI parses such a body into dictionaries first and resolves dependencies, which costs up to a tenth of the
    searches per second of a small encoder (docs/lab-notes.md). The OpenAPI document is the same. See "Custom Request
    and APIRoute class" in FastAPI's documentation.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the function that answers a request."""
        model = get_type_hints(self.endpoint)["request"]

        async def handle(request: Request) -> Response:
            response: Response = await self.endpoint(await read_body(request, model), request)
            return response

        return handle


async def read_body(request: Request, model: type[Model]) -> Model:
    """Returns the body of a request.

    Args:
        request: The request.
        model: The model of its body.

    Raises:
        RequestValidationError: If the content type is not JSON, or if the body does not match the model.
        ClientDisconnect: If the client has disconnected.
    """
    body = await request.body()
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        problem = {"type": "content_type", "loc": ("body",), "msg": "expected Content-Type: application/json"}
        raise RequestValidationError([problem])
    try:
        return model.model_validate_json(body.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in problems]) from None
