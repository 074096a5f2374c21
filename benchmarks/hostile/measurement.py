"""A server of a checkout, hostile clients, and a process that requests /healthz meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common.server import start_server
from benchmarks.hostile.requests import Hostile

PIECE = 256 << 10  # bytes of a body per write
PROBE = """
import socket, sys, time
port, patience = int(sys.argv[1]), float(sys.argv[2])
print("ready", flush=True)
while True:
    start = time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n\\r\\n")
            status = connection.recv(12)[9:].decode() or "closed"
    except OSError as error:
        status = type(error).__name__
    print(status, time.perf_counter() - start, flush=True)
    time.sleep(0.02)
"""


class Server:
    """A server of one checkout, which is started on demand."""

    def __init__(self, checkout: Path, store: str):
        self.checkout, self.store = checkout, store
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> int:
        """Starts the server if it does not run, waits until it is ready, and returns its port."""
        if self._process is None:
            command = [str(self.checkout / "jobs/serve_search.py"), "--store", self.store, "--port", "0"]
            command += ["--renew", "--embeddings", "base", "--warm-up-s", "0"]
            self._process, self.port = start_server(self.checkout, command)
        return self.port

    @property
    def process(self) -> psutil.Process:
        """The process of the server, which runs."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def rss(self) -> int:
        """Returns the bytes of memory of the server."""
        return int(self.process.memory_info().rss)

    def stop(self) -> None:
        """Ends the server."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


class Probe:
    """A process that requests /healthz again and again."""

    def __init__(self, port: int, patience: float):
        self._patience = patience
        command = [sys.executable, "-c", PROBE, str(port), str(patience)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def stop(self) -> tuple[list[float], Counter[str]]:
        """Ends the process; returns the seconds of each response, and the numbers of statuses."""
        self._process.terminate()
        assert self._process.stdout is not None
        rows = [line.split() for line in self._process.stdout.read().splitlines()]
        self._process.wait()
        rows = [row for row in rows if len(row) == 2]
        return [float(seconds) for _, seconds in rows], Counter(status for status, _ in rows)


async def send_all(port: int, request: Hostile, options: argparse.Namespace) -> Counter[str]:
    """Has all clients send a request; returns the numbers of statuses and errors."""
    statuses: Counter[str] = Counter()
    end = time.monotonic() + options.seconds

    async def run() -> None:
        for _ in range(options.most):
            if time.monotonic() > end:
                return
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + options.patience):
                    statuses[await send(port, request)] += 1
            except (OSError, EOFError, TimeoutError) as error:
                statuses[type(error).__name__] += 1

    await asyncio.gather(*(run() for _ in range(options.clients)))
    return statuses


async def send(port: int, request: Hostile) -> str:
    """Sends a request and returns the status of the response."""
    head, body = request.message()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head)
        for start in range(0, len(body), PIECE):
            writer.write(body[start : start + PIECE])
            await writer.drain()
        status = (await reader.readuntil(b"\r\n\r\n"))[9:12].decode()
        while await reader.read(1 << 20):
            pass
        return status
    finally:
        writer.transport.abort()


def measure(server: Server, request: Hostile | None, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one request; None: of no hostile client."""
    port = server.start()
    before, probe = server.rss(), Probe(port, options.patience)
    start = time.monotonic()
    statuses: Counter[str] = Counter()
    if request is None:
        time.sleep(options.seconds)
    else:
        statuses = asyncio.run(send_all(port, request, options))
    time.sleep(1)
    seconds, health = probe.stop()
    figures = {
        "slowest_ms": round(1000 * max(seconds, default=options.patience), 1),
        "p99_ms": round(1000 * float(np.quantile(seconds or [options.patience], 0.99)), 1),
        "health": dict(health),
        "statuses": dict(statuses),
        "seconds": round(time.monotonic() - start, 1),
        "memory_growth_mib": round((server.rss() - before) / (1 << 20)),
    }
    if set(health) != {"200"}:
        server.stop()
    return figures
