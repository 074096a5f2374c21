"""Starts a server in a separate process and stops it."""

from __future__ import annotations

from riptide.jobs.commands.cli import KEEP_MARKS_VARIABLE

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO

from riptide.base.errors import InputError
from riptide.jobs.common.printing import WARNING
from riptide.jobs.common.starting import RIPTIDE
from riptide.serve.client import Client
from riptide.serve.http.guard import token_from_environment
from riptide.telemetry.logs import FORMAT_VARIABLE

HOST = "127.0.0.1"
SERVING = "serving "  # prefix of the line that a server prints when it is ready
END_S = 30.0  # seconds that a server has to finish its requests
KEPT_LINES = 50  # last lines of stderr that are kept


@contextlib.contextmanager
def start_server(arguments: Sequence[str], *, verbose: bool) -> Iterator[Client]:
    """Starts a server on this machine and yields a client; tokens come from the environment. The block's end stops it.

    The server has a separate process group, so Ctrl-C of this process does not reach it. It ends when its stdin is
    closed, as the system does if this process is killed.

    Args:
        arguments: The command line of `riptide serve-search`.
        verbose: Print the lines of the server; otherwise warnings only.

    Raises:
        InputError: If the server does not start; with the line of its error.
    """
    command = [sys.executable, RIPTIDE, "serve-search", *arguments, "--host", HOST, "--end-with-stdin"]
    process = subprocess.Popen(
        command,
        env=os.environ | {KEEP_MARKS_VARIABLE: "1", FORMAT_VARIABLE: "text"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
        encoding="utf-8",
        errors="backslashreplace",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    addresses: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    errors: deque[str] = deque(maxlen=KEPT_LINES)
    readers = [
        threading.Thread(target=_read_output, args=(process.stdout, addresses, verbose), daemon=True),
        threading.Thread(target=_read_errors, args=(process.stderr, errors, verbose), daemon=True),
    ]
    try:
        for reader in readers:
            reader.start()
        if (address := addresses.get()) is None:
            process.wait()
            readers[1].join()
            raise InputError(_startup_problem(errors, process.returncode))
        yield Client(address, token=token_from_environment())
    finally:
        _end_server(process)
        for reader in readers:
            reader.join()
        for stream in (process.stdout, process.stderr):
            stream.close()


def _end_server(process: subprocess.Popen[str]) -> None:
    """Stops a server: SIGTERM lets it finish its requests, and SIGKILL follows after END_S seconds."""
    process.terminate()
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
    try:
        process.wait(END_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def _read_output(stream: IO[str], addresses: queue.SimpleQueue[str | None], verbose: bool) -> None:
    """Reads the stdout of a server. Puts the server's address into the queue, then None at the end of the output."""
    for line in stream:
        if line.startswith(SERVING):
            addresses.put(line.split()[1])
        if verbose:
            print(line, end="", flush=True)
        elif line.startswith(WARNING):
            print(line, end="", file=sys.stderr, flush=True)
    addresses.put(None)


def _read_errors(stream: IO[str], errors: deque[str], verbose: bool) -> None:
    """Reads the stderr of a server and keeps the last lines."""
    for line in stream:
        errors.append(line.rstrip("\n"))
        if verbose or line.startswith(WARNING):
            print(line, end="", file=sys.stderr, flush=True)


def _startup_problem(errors: Sequence[str], status: int) -> str:
    """Returns an error message for a server that did not start, from its last lines and its exit status."""
    lines = [line.strip() for line in errors if line.strip()]
    messages = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = (messages or lines or ["it printed nothing"])[-1]
    return last if messages else f"the server ended with status {status}: {last}"
