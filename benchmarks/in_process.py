"""Measures search in the process of a program: the import, the first queries, and threads against a server.

    python benchmarks/in_process.py --store S --json results/in_process.json

The import and the first two queries of each mode are measured in new processes. Then threads that share one open search
and as many clients of a server of the same store take turns; the server and the load generator are separate processes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import subprocess
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import riptide
from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import ROOT, Parser
from benchmarks.serving import load

START = """
import sys, time
started = time.perf_counter()
import riptide
store = riptide.Store(sys.argv[1])
imported = time.perf_counter()
search = store.search(sys.argv[2])
search("what is a rip current?")
first = time.perf_counter()
search("when did the oil crisis begin?")
print(imported - started, first - imported, time.perf_counter() - first)
"""


def measure_start(store: str, mode: str) -> list[float]:
    """Returns the seconds of the import, of the first query and of the second one, in a new process."""
    command = [sys.executable, "-c", START, store, mode]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [float(word) for word in output.split()]


def search_in_threads(search: Any, texts: list[str], threads: int, seconds: float) -> float:
    """Returns the queries per second of threads that share an open search."""
    started = time.perf_counter()

    def count_searches(number: int) -> int:
        for count, text in enumerate(itertools.cycle(texts[number::threads])):
            if time.perf_counter() - started > seconds:
                return count
            search(text)
        raise AssertionError("the cycle has no end")

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(count_searches, range(threads))) / (time.perf_counter() - started)


def load_server(port: int, clients: int, seconds: float, texts: list[str], mode: str) -> float:
    """Returns the queries per second of clients of a server; runs in a separate process."""
    return float(uvloop.run(load(port, clients, seconds, texts, mode=mode))["qps"])


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "store with embeddings, an index, BM25 and queries", required=True)
    parser.add("--queries", None, "query set (default: the only one)")
    parser.add("--modes", ["bm25", "dense", "hybrid"], "modes of search")
    parser.add("--threads", [1, 2, 4], "numbers of threads, and of clients")
    parser.add("--seconds", 5.0, "seconds of load per number, mode and round")
    parser.add("--rounds", 3, "number of rounds")
    parser.add("--json", ROOT / "results/in_process.json", "output file")
    options = parser.parse_args()
    store = riptide.Store(options.store)
    starts = {mode: [measure_start(options.store, mode) for _ in range(options.rounds)] for mode in options.modes}
    for mode, rounds in starts.items():
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        print("{:8} import {:.2f} s, first query {:.2f} s, second {:.4f} s".format(mode, *medians), flush=True)
    texts, rates = store.queries(options.queries).split("test").texts[:1000], []
    with store.serve() as client, multiprocessing.get_context("spawn").Pool(1) as generator:
        port = urllib.parse.urlsplit(client.url).port
        for mode, threads in itertools.product(options.modes, options.threads):
            with store.search(mode) as search:
                search(texts[0])
                generator.apply(load_server, (port, threads, 1.0, texts, mode))
                pairs = []
                for _ in range(options.rounds):
                    threaded = search_in_threads(search, texts, threads, options.seconds)
                    served = generator.apply(load_server, (port, threads, options.seconds, texts, mode))
                    pairs.append((threaded, served))
            threaded, served = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            print(
                f"{mode:8} {threads} threads {threaded:7.1f}/s, clients {served:7.1f}/s, ratio {ratio:.2f}", flush=True
            )
            rates.append({"mode": mode, "threads": threads, "in_process_and_server": pairs})
    write_json(options.json, {"machine": cpu_name(), "starts": starts, "rates": rates})


if __name__ == "__main__":
    main()
