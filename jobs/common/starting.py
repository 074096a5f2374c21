"""Ends a job with one line if a signal arrives while it starts: while modules are imported and options are read."""

from __future__ import annotations

import os
import signal
import sys


def is_program() -> bool:
    """Whether this process runs one job, and is not a program that calls jobs."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    jobs = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    return file is not None and os.path.dirname(os.path.realpath(file)) == jobs


def handle_signals() -> None:
    """Lets SIGINT and SIGTERM end a job that starts, if this process runs one; ignored signals stay ignored."""
    if is_program():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _end)


def finish() -> None:
    """Restores the default handlers: the job has started."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, _: object) -> None:
    """Prints one line and ends the process at once.

    An exception could be lost in an import, or abort the process in a C++ library. Nothing is open yet that needs to be
    closed, and libraries may have started threads that an ordinary end would wait for.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    name = "interrupted" if number == signal.SIGINT else "terminated"
    try:
        os.write(2, f"error: {name} while it started; nothing was written\n".encode())
    finally:
        os._exit(128 + number)
