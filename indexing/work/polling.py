"""Calls a function at regular intervals in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def call_repeatedly(function: Callable[[], object], every_s: float) -> Iterator[None]:
    """Calls a function every `every_s` seconds in a thread within the block."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(every_s):
            function()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
