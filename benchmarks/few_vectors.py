"""Few vectors, a batch of questions: inverted lists, all scored, and all scored from what was converted before.

    python benchmarks/few_vectors.py --rows 20958 50000

Clustered vectors, one file, the three in turns within one process; medians in milliseconds. The lists are those that
`build_index` takes for more vectors than these (RaBitQ, with candidates scored again), with the dials it chose for
SQuAD's 20,958. Writes results/few_vectors.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from exact_search import clustered

from indexing.exact import OpenPart, available_threads, exact_search, rescore, search_open
from indexing.faiss_index import fill_shard, search_shard, train_quantizer


def measure(rows: int, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Questions of a batch -> how it is searched -> milliseconds."""
    threads = available_threads()
    vectors, asked = clustered(rows, max(options.queries), options.dim, 0)
    stored = vectors.astype(np.float16)
    trained = train_quantizer(vectors.astype(np.float32), options.factory, seed=0)
    index = fill_shard(trained, [stored], 0)
    parts = [OpenPart(stored[row : row + 2_000], row) for row in range(0, rows, 2_000)]  # as a corpus' parts lie

    def lists(queries: np.ndarray) -> Any:
        found = search_shard(index, queries, options.depth, nprobe=options.nprobe, threads=threads)
        return rescore(queries, found, stored, 0, 10, threads=threads)

    ways: dict[str, Callable[[np.ndarray], Any]] = {
        "lists": lists,
        "all": lambda queries: exact_search(queries, [(0, stored)], 10, threads=threads),
        "all, converted before": lambda queries: search_open(queries, parts, 10),
    }
    found: dict[int, dict[str, float]] = {}
    for count in options.queries:
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, search in ways.items():
                begun = time.perf_counter()
                search(asked[:count])
                taken[way].append(1000 * (time.perf_counter() - begun))
        found[count] = {way: statistics.median(times) for way, times in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_958, 50_000])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--factory", default="IVF512,RaBitQ")
    parser.add_argument("--nprobe", type=int, default=64)
    parser.add_argument("--depth", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", default="results/few_vectors.json")
    options = parser.parse_args()
    found = {rows: measure(rows, options) for rows in options.rows}
    for rows, by_count in found.items():
        for count, by_way in by_count.items():
            print(
                f"{rows:7,} vectors, {count:3} questions  {'  '.join(f'{w} {ms:.1f} ms' for w, ms in by_way.items())}"
            )
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps({"options": vars(options), "milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
