"""Measures the memory of a server of 32 tasks after one request of each kind, and after many more of it.

    python benchmarks/server_memory.py --json results/server_memory.json

The kinds are searches of each mode and with ever new filters, embeddings, uploads and removals of prompts, switches of
the release, and the worst known requests (benchmarks/hostile). For each kind the first request is sent alone, then
--requests more of it by --clients clients, within --seconds. The figures are the anonymous memory of the server, and
Java's heap in it. They are taken --pause seconds after the last answer, as the server returns freed memory every 10
seconds. The program exits with 1 if any exceeds the bound of docs/serving.md (Memory of a server). The store has the
passages of examples/squad; the server is stopped by its process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.files import read_texts, write_json
from benchmarks.common.program import ROOT, Parser
from benchmarks.hostile.measurement import Server, send
from benchmarks.hostile.requests import REQUESTS, Hostile
from benchmarks.hostile.store import BACKBONE, LENGTH, make_store, prompt_folder
from benchmarks.hostile.uploads import prompt_uploads
from benchmarks.leaf_memory import memory
from benchmarks.query_prompts import computed_prompt, fixed_prompt
from riptide import Client
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions
from riptide.serve.client import ServerError

MODES = ("exact", "bm25", "hybrid")
ROOM_MIB = 256  # what the C library and Python keep of memory that requests have freed
PAGES = ("/v1/info", "/v1/tasks", "/metrics", "/healthz")

Kind = Callable[[int], object]  # sends the request with a number


def make_prompts(folder: Path, count: int) -> list[Path]:
    """Writes prompts, of which every fourth is computed from each query; returns their folders."""
    encoder = Encoder(BACKBONE, EncoderOptions(dtype="float32", compile="never"), threads=1, tasks={})
    folders = []
    for number in range(count):
        is_computed = number % 4 == 0
        prompt = computed_prompt(encoder, LENGTH, "after", number) if is_computed else None
        folders.append(folder / f"t{number:02}")
        folders[-1].mkdir(parents=True)
        (prompt or fixed_prompt(encoder, LENGTH, number)).save(folders[-1])
    return folders


def kinds_of_requests(client: Client, port: int, prompts: list[Path], uploads: dict[str, Any]) -> dict[str, Kind]:
    """Returns functions that send a request of each kind, by name."""
    queries, releases = read_texts(ROOT / "examples/squad/queries.jsonl", 64), list[str]()

    def search(mode: str, number: int, **fields: object) -> None:
        query, task = queries[number % len(queries)], prompts[number % len(prompts)].name
        client.search_response({"query": query, "task": task, "mode": mode, "timeout_ms": 60_000, **fields})

    def replace(number: int) -> None:
        client.put_task(prompts[number % len(prompts)].name, prompts[(number + number // len(prompts)) % len(prompts)])

    def remove(number: int) -> None:
        folder = prompts[number % len(prompts)]
        client.drop_task(folder.name)
        client.put_task(folder.name, folder)

    def switch(number: int) -> None:
        releases.append(client.info()["release"])
        client.switch(releases[0] if number % 2 else None)

    def read_page(number: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{PAGES[number % len(PAGES)]}", timeout=300) as response:
            response.read()

    def hostile(make: Callable[[], Hostile], number: int) -> None:
        asyncio.run(send(port, make()))

    return {
        **{f"search, {mode}": partial(search, mode) for mode in MODES},
        "search, new filters": lambda number: search("exact", number, filter={"number": {"gte": number}}),
        "embeddings": lambda number: client.embed(queries[:32], task=prompts[number % len(prompts)].name),
        "information": read_page,
        "prompts replaced": replace,
        "prompts removed": remove,
        "releases switched": switch,
        **{name: partial(hostile, make) for name, make in (REQUESTS | uploads).items()},
    }


def repeat(send_one: Kind, count: int, clients: int, seconds: float) -> Counter[str]:
    """Sends requests 1 to `count` of a kind, none after the time limit; returns the numbers of the statuses."""
    end = time.monotonic() + seconds

    def run(number: int) -> str:
        if time.monotonic() > end:
            return "not sent"
        try:
            send_one(number)
        except ServerError as error:
            return str(error.status)
        except (OSError, EOFError) as error:  # the server closes the connection of a refused body
            return type(error).__name__
        return "answered"

    with ThreadPoolExecutor(clients) as pool:
        return Counter(pool.map(run, range(1, count + 1)))


def main() -> None:
    """Reads the options, runs the server, sends all kinds of requests, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--tasks", 32, "number of tasks")
    parser.add("--store", None, "store of benchmarks/hostile to use; default: make one")
    parser.add("--only", [""], "kinds whose names start with one of these")
    parser.add("--requests", 200, "number of requests of each kind after the first")
    parser.add("--seconds", 30.0, "time in which the requests of a kind begin")
    parser.add("--clients", 4, "number of clients")
    parser.add("--pause", 12.0, "seconds between the last answer and the measurement")
    parser.add("--json", Path("results/server_memory.json"), "output file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def record(kind: str, **more: Any) -> None:
        time.sleep(options.pause)
        figures = memory(Path(store), server.process)
        row = {"kind": kind, **{name: figures.get(name, 0) >> 20 for name in ("anonymous", "java_heap")}, **more}
        rows.append(row)
        print(f"{row['anonymous']:6} {row['java_heap']:6} MiB  {kind:36} {more or ''}", flush=True)

    with tempfile.TemporaryDirectory(prefix="riptide-memory-") as folder:
        store = options.store or make_store(Path(folder, "store"))
        uploads = prompt_uploads(prompt_folder(store))
        prompts = make_prompts(Path(folder, "prompts"), options.tasks - 3)  # without those of the store
        server = Server(ROOT, store)
        try:
            port = server.start()
            record("start")
            client = Client(f"http://127.0.0.1:{port}", timeout=300)
            for prompt in prompts:
                client.put_task(prompt.name, prompt)
            record(f"{len(client.tasks())} tasks")
            prompt_bytes, filter_bytes = client.info()["prompt_bytes"], client.info()["filter_cache"]["max_bytes"]
            for name, kind in kinds_of_requests(client, port, prompts, uploads).items():
                if name.startswith(tuple(options.only)):
                    with contextlib.suppress(ServerError, OSError, EOFError):
                        kind(0)
                    record(f"{name}: once")
                    start = time.monotonic()
                    statuses = repeat(kind, options.requests, options.clients, options.seconds)
                    record(f"{name}: more", statuses=dict(statuses), seconds=round(time.monotonic() - start))
        finally:
            server.stop()
    start_mib, *others = (row["anonymous"] - row["java_heap"] for row in rows)
    bound = start_mib + ((prompt_bytes + filter_bytes) >> 20) + ROOM_MIB
    java_heap = max(row["java_heap"] for row in rows)
    print(f"without Java's heap at most {max(others)} MiB of {bound}; Java's heap at most {java_heap} MiB of 2048")
    write_json(options.json, {"options": vars(options), "rows": rows, "bound_mib": bound})
    if max(others) > bound or java_heap > 2048:
        sys.exit(1)


if __name__ == "__main__":
    main()
