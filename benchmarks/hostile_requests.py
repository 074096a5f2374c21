"""Measures how long /healthz takes beside clients that send the worst known requests, for one or several checkouts.

    git worktree add ../before COMMIT
    python benchmarks/hostile_requests.py --checkouts ../before . --json results/hostile_requests.json

For each request of benchmarks/hostile/requests.py, each checkout serves a copy of one store on loopback. 32 clients
send the request in a closed loop for a few seconds, and each sends it a few times at most. Another process requests
/healthz on new connections until all clients have ended, and for a second more. The slowest response and the 99th
percentile are reported, beside those without any client. The target is below 100 ms on an idle machine of two cores. A
response that does not come within --patience seconds counts with that time. The server is started again where it does
not answer after a request, and stopped by its process id at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import write_json
from benchmarks.hostile.requests import REQUESTS, Hostile
from benchmarks.hostile.store import make_store

ROOT = Path(__file__).resolve().parents[1]
IDLE = "no hostile client"
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
            command = [sys.executable, str(self.checkout / "jobs/serve_search.py"), "--store", self.store]
            environment = {**os.environ, "PYTHONPATH": str(self.checkout)}
            self._process = subprocess.Popen(
                [*command, "--renew", "--embeddings", "base", "--port", "0", "--warm-up-s", "0"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=self.checkout,
                env=environment,
            )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                    self.port = int(match.group(1))
                    break
            else:
                raise SystemExit(f"{self.checkout}: the server did not start")
        return self.port

    def rss(self) -> int:
        """Returns the bytes of memory of the server."""
        assert self._process is not None
        return int(psutil.Process(self._process.pid).memory_info().rss)

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


def main() -> None:
    """Reads the options, makes the store, measures all requests for each checkout, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[ROOT], help="checkouts to compare")
    parser.add_argument("--store", help="store of an earlier run (--keep) to copy; default: make one")
    parser.add_argument("--keep", type=Path, help="empty folder in which the store is made and kept")
    parser.add_argument("--only", nargs="+", default=[""], help="requests whose names start with one of these")
    parser.add_argument("--clients", type=int, default=32, help="number of hostile clients (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="time in which requests begin (default: %(default)s)")
    parser.add_argument("--most", type=int, default=20, help="requests per client at most (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=20, help="time limit of a response (default: %(default)s s)")
    parser.add_argument("--json", type=Path, default=Path("results/hostile_requests.json"), help="output file")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="riptide-hostile-") as folder:
        store = options.store or make_store(options.keep or Path(folder, "store"))
        servers = {}
        for number, checkout in enumerate(options.checkouts):
            copy = shutil.copytree(store, Path(folder, f"copy{number}"))
            servers[str(checkout)] = Server(checkout.resolve(), str(copy))
        try:
            for name in [IDLE, *(name for name in REQUESTS if name.startswith(tuple(options.only)))]:
                request = None if name == IDLE else REQUESTS[name]()
                figures[name] = {}
                for checkout, server in servers.items():
                    measured = figures[name][checkout] = measure(server, request, options)
                    times = f"slowest {measured['slowest_ms']:9,.1f} ms, p99 {measured['p99_ms']:9,.1f} ms"
                    rest = (
                        f"{measured['seconds']:5.1f} s, {measured['memory_growth_mib']:5} MiB, {measured['statuses']}"
                    )
                    print(f"{name:30} {checkout:20} {times}, {rest}", flush=True)
        finally:
            for server in servers.values():
                server.stop()
    write_json(options.json, {"cpus": os.cpu_count(), "load": os.getloadavg(), "requests": figures})


if __name__ == "__main__":
    main()
