"""Checks uploads in threads, a limited number at once and each with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from riptide.serve.service.prompt_uploads import CHECKS, CheckedPrompt
from riptide.serve.service_errors import ExpiredError, OverloadedError, UploadExpiredError

MAX_UPLOADS = 8  # maximum uploads that are checked, or wait for a check or a change; each holds the data of its request
UPLOAD_S = 20.0  # seconds for the check of an upload, including the wait; less than `riptide.serve.one_process.GRACE`


class PromptUploads:
    """Limits the uploads of a service and runs their checks."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_UPLOADS)
        self._threads = ThreadPoolExecutor(CHECKS, thread_name_prefix="uploads")

    @contextlib.asynccontextmanager
    async def check(self, run_check: Callable[[float], CheckedPrompt]) -> AsyncIterator[CheckedPrompt]:
        """Checks an upload in a thread. The end of the context removes the uploaded files.

        A check whose time is over before it began never runs. Otherwise its thread continues until its next step,
        counts as an upload until then, and removes the files, also if the event loop is closed by then.

        Args:
            run_check: Gets the time of `time.monotonic()` at which the check must end; raises ExpiredError after that.

        Raises:
            OverloadedError: If too many uploads are in progress.
            UploadExpiredError: If the check took too long.
        """
        if not self._slots.acquire(blocking=False):
            raise OverloadedError(5)
        running = self._threads.submit(partial(run_check, time.monotonic() + UPLOAD_S))
        waiting = asyncio.wrap_future(running)
        try:
            await asyncio.wait([waiting], timeout=UPLOAD_S)
            try:
                if not waiting.done():
                    raise ExpiredError
                checked = waiting.result()
            except ExpiredError as error:
                problem = f"the prompt was not checked within {UPLOAD_S:g} s; try again later"
                raise UploadExpiredError(problem) from error
            yield checked
        finally:
            waiting.cancel()
            running.cancel()
            await asyncio.to_thread(running.add_done_callback, self._remove_files)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _remove_files(self, check: Future[CheckedPrompt]) -> None:
        """Removes the files of an upload when its check has ended. Blocks."""
        if not check.cancelled() and check.exception() is None:
            check.result().close()
        self._slots.release()
