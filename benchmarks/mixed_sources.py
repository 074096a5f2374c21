"""Measures one server that answers dense, BM25, SPLADE and fused searches: each kind alone, and all in one batch.

    python benchmarks/mixed_sources.py --store S --embeddings minilm --splade minilm-seed0 --queries sf

The server is one process on loopback, which this program starts and ends. Clients run closed loops on persistent
connections and ask for the 10 best passages. In each round, each kind is asked alone, then all kinds in turn by the
same clients, so that a batch of the server holds all of them; the order is reversed in every second round. If kinds of
one batch did not affect each other, the mixed rate would be the harmonic mean of the rates alone; the ratio to it is
reported, as the median over rounds.

The dense encoder and that of SPLADE are different models. It takes (kinds + 1) x clients x rounds x --seconds. The JSON
file is written after each round.
"""

from __future__ import annotations

import argparse
import os
import statistics

import uvloop

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.server import stopping
from benchmarks.common.tables import markdown_table
from benchmarks.serving import load_requests, measure_load, request, start
from riptide import Store

MIXED = "mixed"
Round = dict[int, dict[str, dict[str, float]]]  # figures by number of clients and kind of search


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


def report(rounds: list[Round], kinds: list[str]) -> None:
    """Prints a table of the medians over rounds."""
    rows = []
    for clients in rounds[0]:
        for kind in [*kinds, MIXED]:
            cells = [figures[clients][kind] for figures in rounds]
            keys = ("qps", "p50_ms", "p95_ms", "p99_ms", "cpu_ms")
            medians = [f"{statistics.median(cell[key] for cell in cells):.1f}" for key in keys]
            rows.append([kind, clients, *medians, ""])
        means = [statistics.harmonic_mean([figures[clients][kind]["qps"] for kind in kinds]) for figures in rounds]
        ratios = [figures[clients][MIXED]["qps"] / mean for figures, mean in zip(rounds, means, strict=True)]
        rows[-1][-1] = f"{statistics.median(ratios):.3f}"
    head = ("searches", "clients", "queries/s", "p50 ms", "p95 ms", "p99 ms", "CPU ms per query", "ratio")
    print(markdown_table(head, rows))


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
    parser.add("--json", "results/mixed_sources.json", "output file")
    options = parser.parse_args()
    options.compile = "never"
    sources = sources_of(options)
    texts = Store(options.store).queries(options.queries).split(options.split).texts
    requests = {kind: [request(text, source=source) for text in texts] for kind, source in sources.items()}
    requests[MIXED] = [request(text, source=source) for text in texts for source in sources.values()]
    arguments = ["--renew", "--tasks", "default", "--embeddings", options.embeddings]
    arguments += ["--index", options.index] if options.index else []
    arguments += ["--bm25", options.bm25, "--sources", f"splade:{options.splade}"]
    process, port = start("riptide", options, arguments=arguments)
    rounds: list[Round] = []
    with stopping({"riptide": (process, port)}):
        for bodies in requests.values():
            uvloop.run(load_requests(port, 8, min(2.0, options.seconds), bodies))
        for number in range(options.rounds):
            figures: Round = {clients: {} for clients in options.clients}
            for clients in options.clients:
                for kind in list(requests) if number % 2 == 0 else reversed(requests):
                    figures[clients][kind] = measure_load(process, port, clients, options.seconds, requests[kind])
            rounds.append(figures)
            write_json(options.json, {"options": vars(options), "sources": sources, "rounds": rounds})
    for kind, source in sources.items():
        print(f"{kind}: {source}")
    report(rounds, list(sources))
    print(f"\nCPU: {cpu_name()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
