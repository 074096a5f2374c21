"""Routes with a JSON body, which pydantic parses without FastAPI's steps between a request and its handler; uploads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from serve.http.disconnects import cancelled_on_disconnect

Model = TypeVar("Model", bound=BaseModel)

BOM = b"\xef\xbb\xbf"
SMALL = 4 << 10  # bytes of a body that the event loop parses itself, in less than a millisecond
# Bounds of larger bodies.
MOST_STRUCTURE = 512 << 10  # bytes of JSON outside of strings
MOST_CONTAINERS = 4_096  # lists, objects and fields of objects
MOST_STRING = 12 << 16  # bytes of a string: 65,536 characters fit, each as two escapes
MOST_FILES, MOST_FIELDS = 2, 1  # of an upload
MOST_STEP = 500  # characters of a field's name in an error
PIECE = 64 << 10  # bytes of a string that are read in one call
_CONTENT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # of a string, up to its quote
_QUOTE = ord('"')
_TEXT = TypeAdapter(str)  # has Python keep the UTF-8 form of a string, so that a model with many strings needs no time
_PARSER = ThreadPoolExecutor(1, "parser")  # one thread, as parsing holds Python's lock


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
        return _validated(model.model_validate_json, b"".join(chunks).removeprefix(BOM))
    async with cancelled_on_disconnect(request):  # others wait for the thread
        return await asyncio.get_running_loop().run_in_executor(_PARSER, _parsed, chunks, model)


def _parsed(chunks: Sequence[bytes], model: type[Model]) -> Model:
    """Returns the parsed body, which comes in chunks. Raises RequestValidationError."""
    body, at = bytearray(sum(map(len, chunks))), 0
    for chunk in chunks:
        body[at : at + len(chunk)] = chunk
        at += len(chunk)
    return _validated(model.model_validate, parse_json(body))


def _validated(validate: Callable[[Any], Model], value: Any) -> Model:
    """Returns what a method of a model makes of a value. Raises RequestValidationError."""
    try:
        return validate(value)
    except ValidationError as error:
        problem = closest(error.errors(include_url=False, include_context=False, include_input=False))
        steps = [step[:MOST_STEP] if isinstance(step, str) else step for step in problem["loc"]]
        raise RequestValidationError([{**problem, "loc": ("body", *steps)}]) from None


def closest(problems: Sequence[Any]) -> Any:
    """Returns the error that comes closest to a match: a field with several types has an error for each of them."""
    return max(problems, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))


def parse_json(body: bytearray) -> Any:
    """Returns the value of JSON text, in short calls of the parser.

    The parser holds Python's lock for up to 2 ns per byte of a string and up to 1 us per list, and the event loop
    needs the lock several times to answer a request. So each string is parsed alone, and the rest is bounded.

    Raises:
        RequestValidationError: If the text is no JSON, or exceeds one of the bounds.
    """
    rest, texts = bytearray(), list[str]()  # in the rest, each string is replaced by its number
    size = containers = at = 0
    try:
        while at < len(body):
            quote = body.find(b'"', at)
            end = len(body) if quote < 0 else quote
            size += end - at
            if size > MOST_STRUCTURE:
                raise _invalid("structure", f"expected up to {MOST_STRUCTURE:,} bytes of JSON outside of strings")
            outside = body[at:end]
            containers += sum(map(outside.count, b"[{:"))
            if containers > MOST_CONTAINERS:
                raise _invalid("structure", f"expected up to {MOST_CONTAINERS:,} lists, objects and fields")
            rest += outside
            at = end
            if quote >= 0:
                at = _end_of_string(body, quote)
                size += 2
                rest += b'"%d"' % len(texts)
                texts.append(_TEXT.validate_python(from_json(body[quote:at])))
        return _with_texts(from_json(rest, allow_inf_nan=False), texts)
    except ValueError as error:
        raise _invalid("json_invalid", f"Invalid JSON: {error}") from None


def _end_of_string(body: bytearray, quote: int) -> int:
    """Returns the position after a string that starts at a position, or that of the end of the text."""
    at = quote + 1
    while at < len(body):
        piece = _CONTENT.match(body, at, at + PIECE)
        assert piece is not None
        if piece.end() < len(body) and body[piece.end()] == _QUOTE:
            return piece.end() + 1
        if piece.end() == at:  # a backslash ends the text
            break
        at = piece.end()
        if at - quote > MOST_STRING:
            raise _invalid("structure", f"expected up to {MOST_STRING:,} bytes of a string")
    return len(body)


def _with_texts(value: Any, texts: Sequence[str]) -> Any:
    """Returns a value with strings in place of their numbers."""
    if isinstance(value, str):
        return texts[int(value)]
    if isinstance(value, list):
        return [_with_texts(item, texts) for item in value]
    if isinstance(value, dict):
        return {texts[int(name)]: _with_texts(item, texts) for name, item in value.items()}
    return value


def _invalid(kind: str, message: str) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": ("body",), "msg": message}])
