"""Starts and stops servers on loopback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


def start_server(
    checkout: Path, command: list[str], environment: Mapping[str, str] = {}, python: str = sys.executable
) -> tuple[subprocess.Popen[str], int]:
    """Starts a server and waits until it prints its address; returns its process and port.

    Args:
        checkout: The checkout whose modules it imports.
        command: The script and its arguments.
        environment: Further variables of its environment.
        python: The interpreter.

    Raises:
        SystemExit: If it ends before that.
    """
    variables = {**os.environ, "PYTHONPATH": str(checkout), **environment}
    process = subprocess.Popen([python, *command], stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            return process, int(match.group(1))
    raise SystemExit(f"the server did not start: {' '.join(command)}")


@contextlib.contextmanager
def stopping(processes: Mapping[str, tuple[subprocess.Popen[str], int]]) -> Iterator[None]:
    """Ends the servers that the mapping has when the context ends."""
    try:
        yield
    finally:
        for process, _ in processes.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
