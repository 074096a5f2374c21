"""Converts exceptions to HTTP errors in OpenAI's format, with a status and a type for each class."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from riptide.base.errors import InputError
from riptide.base.wording import shorten
from riptide.serve.http.routes import best_matching_error, json_response
from riptide.serve.service_errors import (
    ConflictError,
    EncoderDriftError,
    ExpiredError,
    IncompleteError,
    LostError,
    MemoryShortageError,
    NotReadyError,
    OverloadedError,
    RequestError,
    StoreError,
    UnknownTaskError,
)

log = logging.getLogger("riptide.serve")

ERRORS: dict[type[Exception], tuple[int, str]] = {
    InputError: (400, "invalid_request_error"),
    UnknownTaskError: (404, "not_found_error"),
    ConflictError: (409, "conflict_error"),
    OverloadedError: (429, "overloaded_error"),
    MemoryShortageError: (503, "overloaded_error"),
    ExpiredError: (503, "timeout_error"),
    IncompleteError: (503, "incomplete_error"),
    LostError: (503, "unavailable_error"),
    NotReadyError: (503, "not_ready_error"),
    EncoderDriftError: (409, "conflict_error"),
    StoreError: (503, "store_error"),
}
MESSAGES = {
    InputError: "the service cannot do this with the artifacts of its store; its log says why",
    ExpiredError: "the time of the request (timeout_ms) has passed",
    IncompleteError: "not all shards answered; with allow_partial, the response has the hits of the others",
    LostError: "a part of the service does not answer at the moment",
    NotReadyError: "no release is served at the moment",
}


class NoResponse(Response):
    """A response that sends nothing, for a client that has disconnected."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        pass


def add_errors(app: FastAPI) -> None:
    """Adds handlers to an application that convert every exception to an error in OpenAI's format."""

    async def answer(request: Request, error: Exception) -> Response:
        return response_to(request, error)

    for kind in (*ERRORS, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


def response_to(request: Request, error: Exception) -> Response:
    """Returns the error response for a request that raised an exception.

    Failures of the service, and messages that clients do not see, are logged with all details; clients see no path,
    bucket or fingerprint.
    """
    if isinstance(error, StoreError | LostError):
        detail = error.detail if isinstance(error, StoreError) else error.__cause__
        log.error("request %s: %s (%s)", request_id(request), error, detail)
    elif isinstance(error, InputError) and not isinstance(error, RequestError):
        log.error("request %s: %s", request_id(request), error)
    for kind, (status, name) in ERRORS.items():
        if isinstance(error, kind):
            wait = error.retry_after if isinstance(error, OverloadedError) else 1
            headers = {"Retry-After": str(wait)} if status in (429, 503) else None
            return _error_response(request, status, name, message_of(error), headers)
    if isinstance(error, RequestValidationError):
        problem = best_matching_error(error.errors())
        steps = [str(step) for step in problem["loc"]]
        place = ".".join(
            step for step in steps if not step.startswith(("constrained-", "list["))
        )  # leaves out the steps that pydantic adds
        # Pydantic puts this prefix before the message of a ValueError.
        message = problem["msg"].removeprefix("Value error, ")
        return _error_response(request, 422, "invalid_request_error", f"{place}: {message}")
    if isinstance(error, ClientDisconnect) or isinstance(error.__cause__, ClientDisconnect):
        return NoResponse(status_code=499)
    if isinstance(error, HTTPException):
        return _error_response(request, error.status_code, "invalid_request_error", str(error.detail), error.headers)
    log.error("request %s failed", request_id(request), exc_info=error)
    return _error_response(request, 500, "internal_error", "this is a fault of the server; its log says more")


def message_of(error: Exception) -> str:
    """Returns the message that clients see: the exception's own if its class is meant for clients, or a general one."""
    if isinstance(error, EncoderDriftError):
        return f"the release cannot be served: {error.reason}; the log of the service says more"
    if isinstance(error, StoreError):
        return f"the service cannot read what it serves at the moment ({error})"
    if isinstance(error, InputError) and not isinstance(error, RequestError):
        return MESSAGES[InputError]
    return MESSAGES.get(type(error)) or str(error)


def request_id(request: Request) -> str:
    return str(getattr(request.state, "request_id", None) or uuid.uuid4().hex)


def _error_response(request: Request, status: int, kind: str, message: str, headers: Any = None) -> Response:
    document = {"error": {"message": shorten(message), "type": kind, "request_id": request_id(request)}}
    return json_response(document, status, headers)
