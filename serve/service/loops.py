"""Background loops of a service that continue after an error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from riptide.base.errors import InputError
from riptide.serve.service_errors import StoreError

log = logging.getLogger("riptide.serve")

REPEAT_S = 60.0  # seconds after which a repeated error is logged again


async def repeat_forever(step: Callable[[], Awaitable[object]], pause_s: float, failure: str) -> None:
    """Runs a step again and again. An error is logged, and the step runs again after the pause.

    Args:
        step: The step.
        pause_s: Seconds between two runs.
        failure: What fails, at the start of the line in the log.
    """
    last, logged_s = "", 0.0
    while True:
        try:
            await step()
            last = ""
        except Exception as error:
            detail = error.detail if isinstance(error, StoreError) else str(error) or type(error).__name__
            if detail != last or time.monotonic() > logged_s + REPEAT_S:
                is_known = isinstance(error, StoreError | InputError)
                log.error("%s: %s", failure, detail, exc_info=None if is_known else error)
                last, logged_s = detail, time.monotonic()
        await asyncio.sleep(pause_s)
