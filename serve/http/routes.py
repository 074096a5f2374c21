"""Routes with a JSON body: parse bodies, write responses, and cancel the work of disconnected clients.

pydantic parses the bodies, and none of FastAPI's layers stands between a request and its function.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, get_type_hints

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from riptide.base.arguments import closest_name
from riptide.serve.service_errors import OverloadedError

Model = TypeVar("Model", bound=BaseModel)

MAX_FIELD_NAME = 50  # characters of an unknown field's name that are compared with the known names
BOM = b"\xef\xbb\xbf"
SMALL = 4 << 10  # maximum bytes of a body that the event loop itself parses, which takes less than a millisecond
# Limits of larger bodies, which a thread parses.
MAX_STRUCTURE = 512 << 10  # maximum bytes of JSON outside strings
MAX_CONTAINERS = 4_096  # maximum number of lists, objects and fields of objects
MAX_STRING = 12 << 16  # maximum bytes of a string: 65,536 characters, each as two escapes
MAX_FILES, MAX_FIELDS = 2, 1  # maximum number of files and of other fields in an upload
MAX_FIELD = 4 << 10  # maximum bytes of a field in an upload that is not a file
MAX_WAITING = 64 << 20  # maximum bytes of larger bodies that are parsed or wait for that; further ones get 429
WHOLE = 64 << 10  # maximum bytes of a response that is sent at once
PIECE = 64 << 10  # bytes of a string that are scanned in one call
_CONTENT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # the content of a JSON string up to its closing quote
_QUOTE = ord('"')
# Validates each string, which caches its UTF-8 form and so makes the validation of the model cheap.
_TEXT = TypeAdapter(str)
_PARSER = ThreadPoolExecutor(1, "parser")  # one thread, as parsing holds the GIL


class JsonRoute(APIRoute):
    """A route whose function takes (request: a model of the body, http: Request) and returns a Response.

    FastAPI parses such a body into dictionaries first and resolves dependencies, which costs up to a tenth of the
    searches per second of a small encoder (docs/lab-notes.md). The OpenAPI document is the same. See "Custom Request
    and APIRoute class" in FastAPI's documentation. `DirectRoutes` also leaves out the layers around the handler.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of a request, which parses the body and calls the function of the route."""
        model = get_type_hints(self.endpoint)["request"]

        async def handle(request: Request) -> Response:
            response: Response = await self.endpoint(await read_body(request, model), request)
            return response

        return handle


class DirectRoutes:
    """An ASGI application that answers the requests of JSON routes, and gives all others to FastAPI.

    FastAPI's nine layers between the server and a route's handler (middleware, routers, exit stacks) take about a tenth
    of the server's CPU time for a search.

    Args:
        app: Answers the other requests.
        routes: All routes. Those of JsonRoute have no parameters in their paths.
        answer_error: Returns the response to a request whose function has raised an exception.
    """

    def __init__(self, app: Any, routes: Iterable[Any], answer_error: Callable[[Request, Exception], Response]):
        self._app, self._answer_error = app, answer_error
        self._routes = {
            (method, route.path): (route, route.get_route_handler())
            for route in routes
            if isinstance(route, JsonRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        direct = scope["type"] == "http" and self._routes.get(
            (scope["method"], scope["path"].removeprefix(scope.get("root_path", "")))
        )
        if not direct:
            await self._app(scope, receive, send)
            return
        scope["route"], answer = direct
        request = Request(scope, receive, send)
        try:
            response = await answer(request)
        except Exception as error:
            response = self._answer_error(request, error)
        await response(scope, receive, send)


class UploadRoute(APIRoute):
    """A route with a multipart body of at most MAX_FILES files and MAX_FIELDS other fields.

    The event loop parses such a body; by default it would take a thousand of each, with their headers.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of a request, which parses the form with the limits of the route."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            _check_type(request, "multipart/form-data")
            # The parser would decode fields by any codec of Python, of which some raise errors or give surrogates.
            _, parameters = parse_options_header(request.headers["content-type"])  # as the parser of forms reads them
            if parameters.get(b"charset", b"utf-8").lower() != b"utf-8":
                raise _validation_error("content_type", "expected multipart/form-data in UTF-8, not another charset")
            # The request keeps the parsed form for FastAPI's handler.
            await request.form(max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD)
            return await answer(request)

        return handle


async def read_body(request: Request, model: type[Model]) -> Model:
    """Reads, parses and validates the body of a request.

    Args:
        request: The request.
        model: The model of its body.

    Raises:
        RequestValidationError: If the content type is not JSON, or if the body does not match the model.
        ClientDisconnect: If the client has disconnected.
    """
    chunks = [chunk async for chunk in request.stream()]
    request.state.received_s = time.monotonic()
    _check_type(request, "application/json", "+json")
    if sum(map(len, chunks)) <= SMALL:
        body = b"".join(chunks).removeprefix(BOM)
        value = _validate(model, model.model_validate_json, body)
        if _has_repeated_names_or_constants(body):
            # Raises the error with its place in the body, which Python's parser does not know.
            parse_json(bytearray(body))
        return value
    with _parser_queue.count(sum(map(len, chunks))):
        async with cancel_on_disconnect(request):  # other bodies may wait for the parser thread
            return await asyncio.get_running_loop().run_in_executor(_PARSER, _parse_body, chunks, model)


class _ParserQueue:
    """Limits the total size of bodies that are parsed or wait for it. Belongs to one event loop."""

    def __init__(self) -> None:
        self.waiting = 0

    @contextlib.contextmanager
    def count(self, size: int) -> Iterator[None]:
        """Counts a body of `size` bytes within the block. Raises OverloadedError if the total would be too large."""
        if self.waiting + size > MAX_WAITING:
            raise OverloadedError(1)
        self.waiting += size
        try:
            yield
        finally:
            self.waiting -= size


_parser_queue = _ParserQueue()


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Converts pairs of names and values to a dict. Raises KeyError if a name occurs twice."""
    document = dict(pairs)
    if len(document) < len(pairs):
        raise KeyError
    return document


def _refuse_constant(name: str) -> None:
    """Raises KeyError for NaN, Infinity and -Infinity, which Python and pydantic take for JSON."""
    raise KeyError(name)


# Takes 2 us for an ordinary search request.
_STRICT = json.JSONDecoder(object_pairs_hook=_object_of, parse_constant=_refuse_constant)


def _has_repeated_names_or_constants(body: bytes) -> bool:
    """Returns whether a text that pydantic takes for JSON has a name twice in an object, NaN or an infinity."""
    try:
        _STRICT.decode(body.decode())
    except KeyError:
        return True
    return False


def remaining_s(request: Request, timeout_ms: float) -> float:
    """Returns the seconds that remain of a request's time, which begins when its body is complete."""
    return request.state.received_s + timeout_ms / 1000 - time.monotonic()


def _check_type(request: Request, expected: str, suffix: str | None = None) -> None:
    """Raises RequestValidationError unless a request has the expected content type or one with the suffix."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    has_suffix = suffix is not None and content_type.startswith("application/") and content_type.endswith(suffix)
    if content_type != expected and not has_suffix:
        raise _validation_error("content_type", f"expected Content-Type: {expected}")


def _parse_body(chunks: Sequence[bytes], model: type[Model]) -> Model:
    """Joins the chunks of a body, parses and validates it. Raises RequestValidationError."""
    body, at = bytearray(sum(map(len, chunks))), 0
    for chunk in chunks:
        body[at : at + len(chunk)] = chunk
        at += len(chunk)
    if body.startswith(BOM):
        del body[: len(BOM)]
    return _validate(model, model.model_validate, parse_json(body))


def _validate(model: type[Model], validate: Callable[[Any], Model], value: Any) -> Model:
    """Validates a value with a method of a model. Raises RequestValidationError."""
    try:
        return validate(value)
    except ValidationError as error:
        problem = best_matching_error(error.errors(include_url=False, include_context=False, include_input=False))
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            problem = {**problem, "msg": _unknown_field(str(problem["loc"][0]), list(model.model_fields))}
        raise RequestValidationError([{**problem, "loc": ("body", *problem["loc"])}]) from None


def _unknown_field(name: str, fields: Sequence[str]) -> str:
    """Returns the error message for an unknown field of a model."""
    close = closest_name(name[:MAX_FIELD_NAME], fields)
    return f"unknown field; did you mean {close}?" if close else f"unknown field; expected {', '.join(fields)}"


def best_matching_error(problems: Sequence[Any]) -> Any:
    """Returns the error of the best matching alternative: a field with several types has an error for each of them."""
    return max(problems, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))


def parse_json(body: bytearray) -> Any:
    """Parses JSON text in pieces of bounded size, so that no call holds the GIL for long.

    The parser holds the GIL for up to 2 ns per byte of a string and up to 1 us per list, and the event loop needs the
    GIL several times to answer a request. So each string is parsed alone, and the rest is bounded.

    Raises:
        RequestValidationError: If the text is no JSON, has a name twice in one object, or exceeds one of the bounds.
    """
    rest, texts = bytearray(), list[str]()  # in `rest`, each string is replaced by its number
    size = containers = at = 0
    try:
        while at < len(body):
            quote = body.find(b'"', at)
            end = len(body) if quote < 0 else quote
            size += end - at
            if size > MAX_STRUCTURE:
                raise _validation_error(
                    "structure", f"expected up to {MAX_STRUCTURE:,} bytes of JSON outside of strings"
                )
            outside = body[at:end]
            containers += sum(map(outside.count, b"[{:"))
            if containers > MAX_CONTAINERS:
                raise _validation_error("structure", f"expected up to {MAX_CONTAINERS:,} lists, objects and fields")
            rest += outside
            at = end
            if quote >= 0:
                at = _end_of_string(body, quote)
                size += 2
                rest += b'"%d"' % len(texts)
                texts.append(_TEXT.validate_python(from_json(body[quote:at])))
        return _restore_strings(from_json(rest, allow_inf_nan=False), texts)
    except ValueError as error:  # the position in the message refers to `rest`, not to the body
        raise _validation_error("json_invalid", f"Invalid JSON: {str(error).partition(' at line ')[0]}") from None


def _end_of_string(body: bytearray, quote: int) -> int:
    """Returns the position after the string that starts at `quote`, or the end of the text if it is not closed."""
    at = quote + 1
    while at < len(body):
        piece = _CONTENT.match(body, at, at + PIECE)
        assert piece is not None
        if piece.end() < len(body) and body[piece.end()] == _QUOTE:
            return piece.end() + 1
        if piece.end() == at:  # a backslash ends the text
            break
        at = piece.end()
        if at - quote > MAX_STRING:
            raise _validation_error("structure", f"expected up to {MAX_STRING:,} bytes of a string")
    return len(body)


def _restore_strings(value: Any, texts: Sequence[str], place: tuple[str | int, ...] = ("body",)) -> Any:
    """Replaces the numbers in a parsed value by the strings that they stand for.

    Raises:
        RequestValidationError: If a name comes twice in one object. `place` is that of the value.
    """
    if isinstance(value, str):
        return texts[int(value)]
    if isinstance(value, list):
        return [_restore_strings(item, texts, (*place, number)) for number, item in enumerate(value)]
    if isinstance(value, dict):
        document: dict[str, Any] = {}
        for number, item in value.items():
            name = texts[int(number)]
            if name in document:
                raise _validation_error("repeated_name", _repeated_name(name, is_filter="filter" in place), place)
            document[name] = _restore_strings(item, texts, (*place, name))
        return document
    return value


def _repeated_name(name: str, *, is_filter: bool) -> str:
    """Returns the error message for a name that occurs twice in an object."""
    message = f"found {name[:MAX_FIELD_NAME]!r} twice in one object, expected distinct names"
    return f'{message}; combine the conditions by {{"and": [{{...}}, {{...}}]}}' if is_filter else message


def _validation_error(kind: str, message: str, place: tuple[str | int, ...] = ("body",)) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": place, "msg": message}])


def json_response(document: Any, status: int = 200, headers: Any = None) -> Response:
    content = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, status, headers, media_type="application/json")


def json_list_response(document: dict[str, Any], name: str, items: Sequence[bytes]) -> Response:
    """Returns a response: a JSON document with an additional list of JSON texts. A large response is sent in pieces."""
    pieces = [orjson.dumps(document)[:-1], f',"{name}":['.encode()]
    for number, item in enumerate(items):
        pieces += [b",", item] if number else [item]
    pieces.append(b"]}")
    if sum(map(len, pieces)) <= WHOLE:
        return Response(b"".join(pieces), media_type="application/json")
    return StreamedJsonResponse(pieces)


class StreamedJsonResponse(Response):
    """A response that sends JSON piece by piece, so that the event loop never copies all of it at once."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes]):
        super().__init__(headers={"content-length": str(sum(map(len, pieces)))})
        self.pieces = pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self.pieces:
            for start in range(0, len(piece), WHOLE):
                await send({"type": "http.response.body", "body": piece[start : start + WHOLE], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancels the body of the `async with` if the client disconnects, so that its waiting queries never run.

    Args:
        request: A request whose body was read.

    Raises:
        ClientDisconnect: If the client has disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    watching = asyncio.create_task(_cancel_when_disconnected(request.receive, task))
    try:
        yield
    except asyncio.CancelledError:
        if not watching.done():
            raise  # the server itself cancels the request
        task.uncancel()
        raise ClientDisconnect from None
    finally:
        watching.cancel()


async def _cancel_when_disconnected(receive: Callable[[], Awaitable[Any]], task: asyncio.Task[Any]) -> None:
    """Cancels a task when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
