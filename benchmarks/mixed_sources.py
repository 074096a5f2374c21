"""Measures one server that answers dense, BM25, SPLADE and fused searches: each kind alone, and all in one batch.

    python benchmarks/mixed_sources.py --store S --embeddings minilm --splade minilm-seed0 --queries sf

The server is one process on loopback, which this program starts and ends. Clients run closed loops on persistent
connections and ask for the 10 best passages. In each round, each kind is asked alone, then all kinds in turn by the
same clients, so that a batch of the server holds all of them; the order is reversed in every second round. If kinds of
one batch did not affect each other, the mixed rate would be the harmonic mean of the rates alone; the ratio to it is
reported, as the median over rounds.

The dense encoder and that of SPLADE are different models. It takes (kinds + 1) x clients x rounds x --seconds. The JSON
file is written after each round, and an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.server import stopping
from benchmarks.serving import cpu_seconds, load_requests, request, start

MIXED = "mixed"


def sources_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the source of each kind of search."""
    dense = f"index:{options.index}" if options.index else f"exact:{options.embeddings}"
    splade = f"splade:{options.splade}"
    return {
        "dense": dense,
        "bm25": f"bm25:{options.bm25}",
        "splade": splade,
        "bm25 + dense + splade": f"bm25:{options.bm25}+{dense}+{splade}",
    }


def stop_requests(sources: dict[str, str], texts: list[str]) -> dict[str, list[bytes]]:
    """Returns the requests of each kind of search, and those of all kinds in turn."""
    requests = {kind: [request(text, source=source) for text in texts] for kind, source in sources.items()}
    requests[MIXED] = [request(text, source=source) for text in texts for source in sources.values()]
    return requests


def measure_round(
    process: subprocess.Popen[str],
    port: int,
    requests: dict[str, list[bytes]],
    options: argparse.Namespace,
    number: int,
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the figures of a round by number of clients and kind of search."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    kinds = list(requests) if number % 2 == 0 else list(reversed(requests))
    for clients in options.clients:
        by_kind = figures.setdefault(str(clients), {})
        for kind in kinds:
            before = cpu_seconds(process)
            measured = uvloop.run(load_requests(port, clients, options.seconds, requests[kind]))
            measured["cpu_ms"] = 1000 * (cpu_seconds(process) - before) / (measured["qps"] * options.seconds)
            by_kind[kind] = measured
    return figures


def report(rounds: list[dict[str, dict[str, dict[str, float]]]], kinds: list[str]) -> None:
    """Prints a Markdown table of the medians over rounds."""
    print("\n| searches | clients | queries/s | p50 ms | p95 ms | p99 ms | CPU ms per query | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for clients in rounds[0]:
        for kind in [*kinds, MIXED]:
            cells = [figures[clients][kind] for figures in rounds]
            qps, *others = (
                statistics.median(cell[key] for cell in cells)
                for key in ("qps", "p50_ms", "p95_ms", "p99_ms", "cpu_ms")
            )
            shown = " | ".join(f"{value:.1f}" for value in others)
            print(f"| {kind} | {clients} | {qps:.1f} | {shown} | {mixed_ratio(rounds, clients, kinds, kind)} |")


def mixed_ratio(rounds: list[Any], clients: str, kinds: list[str], kind: str) -> str:
    """Returns the median ratio of the mixed rate to the harmonic mean of the rates alone; "" for another kind."""
    if kind != MIXED:
        return ""
    means = [statistics.harmonic_mean([figures[clients][alone]["qps"] for alone in kinds]) for figures in rounds]
    ratios = [figures[clients][MIXED]["qps"] / mean for figures, mean in zip(rounds, means, strict=True)]
    return f"{statistics.median(ratios):.3f}"


def main() -> None:
    """Reads the options, starts the server, runs the rounds, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "store with a corpus, queries and what is named here", required=True)
    parser.add("--embeddings", None, "name of dense embeddings", required=True)
    parser.add("--index", None, "name of a FAISS index over them (default: exact search)")
    parser.add("--splade", None, "name of an index of sparse embeddings", required=True)
    parser.add("--bm25", "bm25", "name of a BM25 index")
    parser.add("--queries", None, "name of the query set; may be left out if the store has only one")
    parser.add("--split", "test", "split whose queries are searched")
    parser.add("--clients", [8, 32], "concurrent clients")
    parser.add("--seconds", 5.0, "seconds of each measurement")
    parser.add("--rounds", 5, "number of rounds")
    parser.add("--batch", 32, "maximum queries per batch")
    parser.add("--json", Path("results/mixed_sources.json"), "output file")
    options = parser.parse_args()
    options.compile = "never"
    from indexing.corpus.queries import Queries
    from indexing.store.store import Store

    sources = sources_of(options)
    shown = {key: value for key, value in vars(options).items() if key not in ("json", "rounds")}
    document: dict[str, Any] = {"options": shown, "cpu": cpu_name(), "sources": sources, "rounds": []}
    if options.json.exists():
        document = json.loads(options.json.read_text())
        if document["options"] != shown:
            parser.error(f"--json {options.json}: it has figures of other options; name another file")
    rounds = document["rounds"]
    if len(rounds) < options.rounds:
        texts = Queries.open(Store(options.store), options.queries).split(options.split).texts
        requests = stop_requests(sources, texts)
        arguments = ["--renew", "--tasks", "default", "--embeddings", options.embeddings]
        arguments += ["--index", options.index] if options.index else []
        arguments += ["--bm25", options.bm25, "--sources", f"splade:{options.splade}"]
        process, port = start("riptide", options, arguments=arguments)
        with stopping({"riptide": (process, port)}):
            for bodies in requests.values():
                uvloop.run(load_requests(port, 8, min(2.0, options.seconds), bodies))
            for number in range(len(rounds), options.rounds):
                rounds.append(measure_round(process, port, requests, options, number))
                write_json(options.json, document)
    for kind, source in sources.items():
        print(f"{kind}: {source}")
    report(rounds, list(sources))
    print(f"\nCPU: {document['cpu']}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
