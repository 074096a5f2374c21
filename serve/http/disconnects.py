"""Cancels the work of a request whose client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancels the body of the `async with` if the client disconnects; its waiting queries then never run.

    Args:
        request: A request whose body was read.

    Raises:
        ClientDisconnect: If the client has disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    watching = asyncio.create_task(_cancel_on_disconnect(request.receive, task))
    try:
        yield
    except asyncio.CancelledError:
        if not watching.done():
            raise  # the server cancels the request
        task.uncancel()
        raise ClientDisconnect from None
    finally:
        watching.cancel()


async def _cancel_on_disconnect(receive: Callable[[], Awaitable[Any]], task: asyncio.Task[Any]) -> None:
    """Cancels a task once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
