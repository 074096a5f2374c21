"""Errors over HTTP: what each is called, in the form that OpenAI's clients read."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from retriever.errors import InputError
from serve.batching import OverloadedError
from serve.engine import IncompleteError
from serve.parts import ExpiredError
from serve.places import LostError
from serve.service import ConflictError, NotReadyError, UnknownTaskError

log = logging.getLogger("riptide.serve")

ERRORS: dict[type[Exception], tuple[int, str]] = {
    InputError: (400, "invalid_request_error"),
    UnknownTaskError: (404, "not_found_error"),
    ConflictError: (409, "conflict_error"),
    OverloadedError: (429, "overloaded_error"),
    ExpiredError: (503, "timeout_error"),
    IncompleteError: (503, "incomplete_error"),
    LostError: (503, "unavailable_error"),
    NotReadyError: (503, "not_ready_error"),
}
SAID = {
    ExpiredError: "the time that the request was given has passed",
    IncompleteError: "not every shard answered; allow_partial takes what there is",
    LostError: "a part of the service does not answer at the moment",
    NotReadyError: "no release is being served at the moment",
}


def add_errors(app: FastAPI) -> None:
    """Answer every exception in that form."""

    async def answer(request: Request, error: Exception) -> Response:
        return told(request, error)

    for kind in (*ERRORS, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def told(request: Request, error: Exception) -> Response:
    """What a request is told of an exception. One that was not foreseen is logged, and 500."""
    for kind, (status, name) in ERRORS.items():
        if isinstance(error, kind):
            wait = error.retry_after if isinstance(error, OverloadedError) else 1
            headers = {"Retry-After": str(wait)} if status in (429, 503) else None
            return _error(request, status, name, SAID.get(type(error), str(error)), headers)
    if isinstance(error, RequestValidationError):
        # Where a field may be this or that, of both ways in which it is neither, the one that comes closest.
        closest = max(error.errors(), key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
        steps = [str(step) for step in closest["loc"]]
        place = ".".join(
            step for step in steps if not step.startswith(("constrained-", "list["))
        )  # pydantic's own names
        return _error(request, 422, "invalid_request_error", f"{place}: {closest['msg']}"[:500])
    if isinstance(error, HTTPException):
        return _error(request, error.status_code, "invalid_request_error", str(error.detail), error.headers)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody is left to be told
    log.error("request %s failed", request_id(request), exc_info=error)
    return _error(request, 500, "internal_error", "this is a fault of the server; its log says more")


def request_id(request: Request) -> str:
    return str(getattr(request.state, "request_id", None) or uuid.uuid4().hex)


def _error(request: Request, status: int, kind: str, message: str, headers: Any = None) -> Response:
    document = {"error": {"message": message, "type": kind, "request_id": request_id(request)}}
    return as_json(document, status, headers)


def as_json(document: Any, status: int = 200, headers: Any = None) -> Response:
    content = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, status, headers, media_type="application/json")
