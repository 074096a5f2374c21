"""Routes with a JSON body, which pydantic parses without FastAPI's steps between a request and its handler; uploads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

Model = TypeVar("Model", bound=BaseModel)

SMALL = 4 << 10  # bytes of a body that the event loop parses itself, in less than a millisecond
MOST_STRUCTURE = 128 << 10  # bytes of JSON outside of strings
MOST_FILES, MOST_FIELDS = 2, 1  # of an upload
MOST_STEP = 500  # characters of a field's name in an error
PIECE = 64 << 10  # bytes of a string that are read in one call
_CONTENT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # of a string, up to its quote
_QUOTE = ord('"')
_PARSER = ThreadPoolExecutor(1, "parser")  # one thread: the event loop waits for one text at most


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


class UploadRoute(APIRoute):
    """A route with a multipart body of up to MOST_FILES files and MOST_FIELDS other fields.

    The event loop parses such a body; by default it would take a thousand of each, with their headers.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the function that answers a request."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            await request.form(max_files=MOST_FILES, max_fields=MOST_FIELDS)  # the request keeps it for the handler
            return await answer(request)

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
    chunks = [chunk async for chunk in request.stream()]
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        raise _invalid("content_type", "expected Content-Type: application/json")
    if sum(map(len, chunks)) <= SMALL:
        return _parsed(chunks, model)
    return await asyncio.get_running_loop().run_in_executor(_PARSER, _parsed, chunks, model)


def _parsed(chunks: Sequence[bytes], model: type[Model]) -> Model:
    """Returns the parsed body, which comes in chunks. Raises RequestValidationError."""
    body = bytearray()
    for chunk in chunks:
        body += chunk
    if body.startswith(b"\xef\xbb\xbf"):
        del body[:3]
    check_structure(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = closest(error.errors(include_url=False, include_context=False, include_input=False))
        steps = [step[:MOST_STEP] if isinstance(step, str) else step for step in problem["loc"]]
        raise RequestValidationError([{**problem, "loc": ("body", *steps)}]) from None


def closest(problems: Sequence[Any]) -> Any:
    """Returns the error that comes closest to a match: a field with several types has an error for each of them."""
    return max(problems, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))


def check_structure(body: bytes | bytearray) -> None:
    """Checks that JSON text has at most MOST_STRUCTURE bytes outside of its strings.

    The parser holds Python's lock until it ends. Strings take it about 2 ns per byte, other values up to 0.5 us each,
    and an error message as much.

    Raises:
        RequestValidationError: If the text has more.
    """
    if len(body) <= MOST_STRUCTURE:
        return
    outside = at = 0
    while (quote := body.find(b'"', at)) >= 0:
        outside += quote + 1 - at
        if outside > MOST_STRUCTURE:
            break
        at = _end_of_string(body, quote + 1)
        if at < len(body):
            outside += 1
            at += 1
    if outside + len(body) - at > MOST_STRUCTURE:
        raise _invalid("structure", f"expected up to {MOST_STRUCTURE:,} bytes of JSON outside of strings")


def _end_of_string(body: bytes | bytearray, start: int) -> int:
    """Returns the position of the quote that ends a string, or the length of the text."""
    at = start
    while at < len(body) and body[at] != _QUOTE:
        piece = _CONTENT.match(body, at, at + PIECE)
        assert piece is not None
        if piece.end() == at:  # a backslash ends the text
            return len(body)
        at = piece.end()
    return at


def _invalid(kind: str, message: str) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": ("body",), "msg": message}])
