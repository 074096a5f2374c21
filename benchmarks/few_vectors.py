"""Compares three ways to search few vectors: inverted lists, exact search, and exact search of converted vectors.

    python benchmarks/few_vectors.py --rows 20958 50000

The three take turns in one process, on the same clustered vectors, for batches of several sizes; medians are reported
in milliseconds. The inverted lists are those that `build_index` chooses for more vectors than these (RaBitQ, with
candidates that are scored again), with the parameters that it chose for the 20,958 passages of SQuAD. Converted vectors
are those of `OpenPart`, which are converted once and searched many times.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from benchmarks.common.timing import in_turns
from benchmarks.exact_search import make_vectors
from indexing.dense.faiss_index import fill_shard, search_shard, train_quantizer
from indexing.exact import OpenPart, available_threads, exact_search, rescore_pieces, search_open_parts


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
        "exact, converted": lambda batch: search_open_parts(batch, parts, 10),
    }
    medians: dict[int, dict[str, float]] = {}
    for count in options.queries:
        batch = queries[:count]
        seconds = in_turns({way: functools.partial(search, batch) for way, search in ways.items()}, options.rounds)
        medians[count] = {way: 1000 * statistics.median(values) for way, values in seconds.items()}
    return medians


def main() -> None:
    """Reads the options, measures each number of vectors, prints and writes the medians."""
    parser = Parser(__doc__)
    parser.add("--rows", [20_958, 50_000], "numbers of vectors")
    parser.add("--dim", 384, "dimension of the vectors")
    parser.add("--queries", [1, 8, 32], "queries per batch")
    parser.add("--factory", "IVF512,RaBitQ", "FAISS factory of the inverted lists")
    parser.add("--nprobe", 64, "lists probed per query")
    parser.add("--depth", 200, "candidates per query that are scored again")
    parser.add("--rounds", 20, "number of rounds")
    parser.add("--json", "results/few_vectors.json", "output file")
    options = parser.parse_args()
    medians = {rows: measure(rows, options) for rows in options.rows}
    for rows, by_count in medians.items():
        for count, by_way in by_count.items():
            cells = "  ".join(f"{way} {value:.1f} ms" for way, value in by_way.items())
            print(f"{rows:7,} vectors, {count:3} queries  {cells}")
    write_json(options.json, {"options": vars(options), "milliseconds": medians})


if __name__ == "__main__":
    main()
