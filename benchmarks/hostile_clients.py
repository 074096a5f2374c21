"""Measures a server under incomplete request heads and idle connections while good clients search.

    python benchmarks/hostile_clients.py --store S --queries squad

Starts `jobs/serve_search.py` on loopback with a connection limit, and opens more connections than the limit, which send
half of a head or nothing. While they are open, it measures the slowest response of /healthz, the growth of the server's
memory (RSS), and the statuses that good clients get on connections opened before the attack and on new ones. The attack
is bounded in count and time; the server is stopped by its process id.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.program import ROOT, Parser
from benchmarks.common.server import start_server, stopping

HALF_HEAD = b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


def search_request(text: str, close: bool = False) -> bytes:
    """Returns a search request."""
    body = json.dumps({"query": text, "k": 10}).encode()
    end = b"Connection: close\r\n" if close else b""
    head = b"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n"
    return head % (end, len(body)) + b"\r\n" + body


async def fetch_status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """Sends a request, reads the response and returns its status."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = re.findall(rb"(?i)content-length: (\d+)", head)
    await reader.readexactly(int(length))
    return int(head[9:12])


class Attack:
    """Connections that send half of a head or nothing. They are opened again when the server closes them."""

    def __init__(self, port: int, count: int):
        self.port, self.count = port, count
        self.closed = 0
        self._tasks = [asyncio.create_task(self._hold(number)) for number in range(count)]

    async def _hold(self, number: int) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                if number % 2:
                    writer.write(HALF_HEAD)
                while await reader.read(4096):
                    pass
                writer.close()
            except OSError:
                pass
            self.closed += 1
            await asyncio.sleep(0.5)

    async def close(self) -> None:
        """Closes all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def probe_health(port: int, seconds: list[float], failures: Counter[str]) -> None:
    """Requests /healthz on new connections until it is cancelled."""
    while True:
        started = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            status = await fetch_status(reader, writer, HEALTH)
            writer.close()
            if status != 200:
                failures[str(status)] += 1
        except (OSError, asyncio.IncompleteReadError) as error:
            failures[type(error).__name__] += 1
        seconds.append(time.perf_counter() - started)
        await asyncio.sleep(0.05)


async def good_client(
    port: int, texts: list[str], statuses: Counter[str], is_new: bool, answered: asyncio.Event | None = None
) -> None:
    """Searches until it is cancelled, on one connection or on a new one per search.

    Args:
        port: Port of the server.
        texts: Texts of the queries.
        statuses: Counts the statuses and the errors.
        is_new: Opens a new connection for each search.
        answered: Set after the first search.
    """
    reader = writer = None
    for number in range(1_000_000):
        try:
            if writer is None or is_new:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert reader is not None
            statuses[
                str(await fetch_status(reader, writer, search_request(texts[number % len(texts)], close=is_new)))
            ] += 1
            if is_new:
                writer.close()
        except (OSError, asyncio.IncompleteReadError) as error:
            statuses[type(error).__name__] += 1
            writer = None
        if answered is not None:
            answered.set()
        await asyncio.sleep(0.02)


async def measure(process: subprocess.Popen[str], port: int, options: argparse.Namespace, texts: list[str]) -> dict:
    """Runs the attack while good clients search.

    Args:
        process: The server.
        port: Port of the server.
        options: The options of the benchmark.
        texts: Texts of the queries of the good clients.

    Returns:
        The figures by the name that is printed.
    """
    server = psutil.Process(process.pid)
    old_statuses: Counter[str] = Counter()
    new_statuses: Counter[str] = Counter()
    health: list[float] = []
    failures: Counter[str] = Counter()
    events = [asyncio.Event() for _ in range(options.clients)]
    good = [asyncio.create_task(good_client(port, texts, old_statuses, False, event)) for event in events]
    await asyncio.gather(*(event.wait() for event in events))
    await asyncio.sleep(2)
    rss_before = server.memory_info().rss
    attack = Attack(port, options.limit + options.beyond)
    others = [asyncio.create_task(probe_health(port, health, failures))]
    await asyncio.sleep(3)  # during the first two seconds of the attack, new clients may get 503
    others += [asyncio.create_task(good_client(port, texts, new_statuses, True)) for _ in range(options.clients)]
    largest_rss, end = rss_before, time.monotonic() + options.seconds
    open_files = 0
    while time.monotonic() < end:
        await asyncio.sleep(0.2)
        largest_rss = max(largest_rss, server.memory_info().rss)
        open_files = max(open_files, server.num_fds())
    for task in [*good, *others]:
        task.cancel()
    await asyncio.gather(*good, *others, return_exceptions=True)
    await attack.close()
    return {
        "attackers": attack.count,
        "closed by the server": attack.closed,
        "open files of the server": open_files,
        "healthz, slowest (ms)": round(1000 * max(health)),
        "healthz, responses": len(health),
        "healthz, failures": dict(failures),
        "memory growth (MiB)": round((largest_rss - rss_before) / (1 << 20), 1),
        "statuses on old connections": dict(old_statuses),
        "statuses on new connections": dict(new_statuses),
    }


def main() -> None:
    """Reads the options, starts the server, runs the attack and prints the figures."""
    parser = Parser(__doc__.partition("\n")[0])
    parser.add("--store", None, "Store with a live release, or from which one can be made.", required=True)
    parser.add("--queries", None, "Query set of the store for the good clients; default: one fixed query.")
    parser.add("--limit", 1024, "Value of --max-connections of the server.")
    parser.add("--beyond", 2000, "Number of attackers above that limit.")
    parser.add("--clients", 4, "Number of good clients of each kind.")
    parser.add("--seconds", 15, "Duration of the measurement in seconds.", type=float)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = options.limit + options.beyond + 200
    if soft < needed:
        if needed > hard:
            raise SystemExit(f"this process may open {hard} files, {needed} are needed: ulimit -n {needed}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    texts = ["what is a rip current?"]
    if options.queries:
        from indexing.corpus.queries import Queries
        from indexing.store.store import Store

        texts = Queries.open(Store(options.store), options.queries).split("test").texts[:200]
    command = [
        str(ROOT / "jobs/serve_search.py"),
        "--store",
        options.store,
        "--port",
        "0",
        "--max-connections",
        str(options.limit),
    ]
    process, port = start_server(ROOT, command)
    with stopping({"server": (process, port)}):
        figures = uvloop.run(measure(process, port, options, texts))
    for name, value in figures.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
