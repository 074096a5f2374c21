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
import contextlib
import itertools
import re
import resource
import subprocess
import time
from collections import Counter
from typing import Any

import psutil
import uvloop

from benchmarks.common.program import ROOT, Parser
from benchmarks.common.server import start_server, stopping
from benchmarks.hostile.measurement import Probe
from benchmarks.serving import request
from riptide import Store

HALF_HEAD = b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
PATIENCE_S = 20.0  # time limit of a response of /healthz


async def hold(port: int, start: bytes, closed: Counter[str]) -> None:
    """Opens a connection, sends the start of a head, and waits; again when the server closes it, until cancelled."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            while await reader.read(4096):
                pass
            writer.close()
        closed["by the server"] += 1
        await asyncio.sleep(0.5)


async def search_until_cancelled(port: int, requests: list[bytes], statuses: Counter[str], *, is_new: bool) -> None:
    """Searches on one connection, or on a new one per search (is_new), and counts the statuses and the errors."""
    writer = None
    if is_new:
        requests = [each.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) for each in requests]
    for message in itertools.cycle(requests):
        try:
            if writer is None or is_new:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = re.findall(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length))
            statuses[head[9:12].decode()] += 1
            if is_new:
                writer.close()
        except (OSError, asyncio.IncompleteReadError) as error:
            statuses[type(error).__name__] += 1
            writer = None
        await asyncio.sleep(0.02)


async def measure(
    process: subprocess.Popen[str], port: int, options: argparse.Namespace, requests: list[bytes]
) -> dict[str, Any]:
    """Runs the attack while good clients send the requests, and returns the figures by the name that is printed."""

    server, tasks = psutil.Process(process.pid), list[asyncio.Task[None]]()
    old_statuses, new_statuses, closed = Counter[str](), Counter[str](), Counter[str]()

    def start_clients(statuses: Counter[str], *, is_new: bool) -> None:
        for _ in range(options.clients):
            tasks.append(asyncio.create_task(search_until_cancelled(port, requests, statuses, is_new=is_new)))

    start_clients(old_statuses, is_new=False)
    while old_statuses.total() < 10 * options.clients:
        await asyncio.sleep(0.2)
    await asyncio.sleep(2)
    rss_before = server.memory_info().rss
    probe, num_attackers = Probe(port, PATIENCE_S), options.limit + options.beyond
    for number in range(num_attackers):
        tasks.append(asyncio.create_task(hold(port, HALF_HEAD if number % 2 else b"", closed)))
    await asyncio.sleep(3)  # during the first two seconds of the attack, new clients may get 503
    start_clients(new_statuses, is_new=True)
    end, largest_rss, open_files = time.monotonic() + options.seconds, rss_before, 0
    while time.monotonic() < end:
        await asyncio.sleep(0.2)
        largest_rss = max(largest_rss, server.memory_info().rss)
        open_files = max(open_files, server.num_fds())
    health_s, health_statuses = probe.stop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "attackers": num_attackers,
        "closed by the server": closed.total(),
        "open files of the server": open_files,
        "healthz, slowest (ms)": round(1000 * max(health_s)),
        "healthz, statuses": dict(health_statuses),
        "memory growth (MiB)": round((largest_rss - rss_before) / (1 << 20), 1),
        "statuses on old connections": dict(old_statuses),
        "statuses on new connections": dict(new_statuses),
    }


def main() -> None:
    """Reads the options, starts the server, runs the attack and prints the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "Store with a live release, or from which one can be made.", required=True)
    parser.add("--queries", None, "Query set of the store for the good clients; default: one fixed query.")
    parser.add("--limit", 1024, "Value of --max-connections of the server.")
    parser.add("--beyond", 2000, "Number of attackers above that limit.")
    parser.add("--clients", 4, "Number of good clients of each kind.")
    parser.add("--seconds", 15, "Duration of the measurement in seconds.", type=float)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = options.limit + options.beyond + 200
    if needed > hard:
        raise SystemExit(f"this process may open {hard} files, {needed} are needed: ulimit -n {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    texts = ["what is a rip current?"]
    if options.queries:
        texts = Store(options.store).queries(options.queries).split("test").texts[:200]
    command = [str(ROOT / "jobs/serve_search.py"), "--store", options.store, "--port", "0"]
    process, port = start_server(ROOT, [*command, "--max-connections", str(options.limit)])
    with stopping({"server": (process, port)}):
        figures = uvloop.run(measure(process, port, options, [request(text) for text in texts]))
    for name, value in figures.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
