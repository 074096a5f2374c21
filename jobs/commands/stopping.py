"""SIGINT and SIGTERM while a job runs: they end the job; a training run ends after its step, with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from riptide.jobs.common.starting import runs_one_job
from riptide.retriever.training.hooks import Stopped
from riptide.telemetry.logs import format_line, is_json

STDERR = 2  # file descriptor of stderr
NOTICE = "stopping: a checkpoint is saved after this step; a second signal ends the job at once"


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which ends a job as Ctrl-C does: temporary files are removed and workers end."""


def raise_terminated(*_: object) -> None:
    """Signal handler of SIGTERM: raises Terminated. A second SIGTERM ends the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Context in which SIGTERM raises Terminated in the main thread; a second SIGTERM ends the process.

    A program that calls a job and handles SIGTERM itself keeps its handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], bool]]:
    """Defers SIGINT and SIGTERM to the end of the block; yields a function that returns whether one has arrived.

    The block may end early by Stopped. Then, or at its end, the handler of the signal runs, which raises
    KeyboardInterrupt or Terminated. After the first signal, the second one ends the process at once; in a program that
    calls jobs, its handler runs at once.

    Signals that a program handles itself, or that its shell ignores, are not deferred.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if is_main and (handler := signal.getsignal(number)) in (signal.default_int_handler, raise_terminated)
    }
    arrived: list[int] = []

    def defer(number: int, frame: object) -> None:
        arrived.append(number)
        for each, handler in handlers.items():
            signal.signal(each, signal.SIG_DFL if runs_one_job() else handler)
        with contextlib.suppress(OSError):  # not print: it is not re-entrant, and the signal may have interrupted one
            line = format_line(NOTICE) if is_json() else ("\n" if os.isatty(STDERR) else "") + NOTICE
            os.write(STDERR, f"{line}\n".encode())

    for number in handlers:
        signal.signal(number, defer)
    try:
        yield lambda: bool(arrived)
    except Stopped:
        if not arrived:
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])
