"""Compares three ways to search few vectors: inverted lists, exact search, and exact search of converted vectors.

    python benchmarks/few_vectors.py --rows 20958 50000

The three take turns in one process, on the same clustered vectors, for batches of several sizes; medians are reported
in milliseconds. The inverted lists are those that `build_index` chooses for more vectors than these (RaBitQ, with
candidates that are scored again), with the parameters that it chose for the 20,958 passages of SQuAD. Converted vectors
are those of `OpenPart`, which are converted once and searched many times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from exact_search import make_vectors

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from indexing.dense.faiss_index import fill_shard, search_shard, train_quantizer
from indexing.exact import OpenPart, available_threads, exact_search, rescore_pieces, search_open


def measure(rows: int, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Measures the three ways on a given number of vectors.

    Args:
        rows: Number of vectors.
        options: The options of the benchmark.

    Returns:
        Median milliseconds by number of queries in a batch and way of searching.
    """
    threads = available_threads()
    vectors, queries = make_vectors(rows, max(options.queries), options.dim, 0)
    trained = train_quantizer(vectors.astype(np.float32), options.factory, seed=0)
    index = fill_shard(trained, [vectors], 0)
    parts = [OpenPart(vectors[row : row + 2_000], row) for row in range(0, rows, 2_000)]  # a corpus has parts too

    def search_lists(batch: np.ndarray) -> Any:
        candidates = search_shard(index, batch, options.depth, nprobe=options.nprobe, threads=threads)
        return rescore_pieces(batch, candidates, [(0, vectors)], 10, threads=threads)

    ways: dict[str, Callable[[np.ndarray], Any]] = {
        "lists": search_lists,
        "exact": lambda batch: exact_search(batch, [(0, vectors)], 10, threads=threads),
        "exact, converted": lambda batch: search_open(batch, parts, 10),
    }
    medians: dict[int, dict[str, float]] = {}
    for count in options.queries:
        times_ms: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, search in ways.items():
                started = time.perf_counter()
                search(queries[:count])
                times_ms[way].append(1000 * (time.perf_counter() - started))
        medians[count] = {way: statistics.median(values) for way, values in times_ms.items()}
    return medians


def main() -> None:
    """Reads the options, measures each number of vectors, prints and writes the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[20_958, 50_000], help="numbers of vectors (default: 20958 50000)"
    )
    parser.add_argument("--dim", type=int, default=384, help="dimension of the vectors (default: %(default)s)")
    parser.add_argument(
        "--queries", type=int, nargs="+", default=[1, 8, 32], help="queries per batch (default: 1 8 32)"
    )
    parser.add_argument(
        "--factory", default="IVF512,RaBitQ", help="FAISS factory of the inverted lists (default: %(default)s)"
    )
    parser.add_argument("--nprobe", type=int, default=64, help="lists probed per query (default: %(default)s)")
    parser.add_argument(
        "--depth", type=int, default=200, help="candidates per query that are scored again (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds (default: %(default)s)")
    parser.add_argument("--json", default="results/few_vectors.json", help="output file (default: %(default)s)")
    options = parser.parse_args()
    medians = {rows: measure(rows, options) for rows in options.rows}
    for rows, by_count in medians.items():
        for count, by_way in by_count.items():
            cells = "  ".join(f"{way} {value:.1f} ms" for way, value in by_way.items())
            print(f"{rows:7,} vectors, {count:3} queries  {cells}")
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps({"options": vars(options), "milliseconds": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
