"""Compares exact search with the flat index of FAISS (IndexFlatIP) in turns: seconds and recall.

    python benchmarks/exact_search.py
    python benchmarks/exact_search.py --vectors corpus.npy --queries queries.npy --num-queries 1024
    python benchmarks/exact_search.py --lists IVF512,RaBitQ --num-vectors 20958 --num-queries 1 8 32 --k 10

FAISS has its float32 vectors in memory before the clock starts, and uses the same number of threads. Riptide starts
from float16 vectors; converting, multiplying, selecting, re-scoring and sorting are within its time. FAISS is loaded by
riptide.indexing.dense.faiss_index, which makes its BLAS use AVX-512: with default settings it uses SSE3 on a Sapphire
Rapids and is four times slower. Synthetic vectors are clustered, normalised and seeded. Recall compares the top k with
the float32 result of FAISS, which is rounded: a recall below 1 means scores that are equal to six digits.

With --lists, riptide also searches vectors that are converted once (`OpenPart`), and inverted lists whose candidates
are scored again; the default parameters are those that `build-index` chose for the 20,958 passages of SQuAD.

Both sides may be restricted to the instructions of an older CPU, for example to AVX2:

    RIPTIDE_ARCHITECTURE=haswell FAISS_SIMD_LEVEL=AVX2 OPENBLAS_CORETYPE=HASWELL python benchmarks/exact_search.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.timing import in_turns
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import faiss
from riptide.indexing.dense.faiss_search import search_shard
from riptide.indexing.dense.recall import recall_at
from riptide.indexing.exact import OpenPart, available_threads, exact_search, rescore_candidates, search_open_parts

System = Callable[[np.ndarray], np.ndarray]
"""Returns the rows of the best k vectors of each query, int64 [q, k]; queries are float32 [q, dim]."""


def make_vectors(num_vectors: int, num_queries: int, dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns normalised vectors from 1,000 clusters of unequal sizes, and queries from the same clusters.

    Returns:
        Vectors, float16 [num_vectors, dim], and queries, float32 [num_queries, dim].
    """
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((1000, dim), dtype=np.float32)
    weights = rng.pareto(1.5, len(centers)) + 0.1
    samples = []
    for count in (num_vectors, num_queries):
        cluster = rng.choice(len(centers), count, p=weights / weights.sum())
        vectors = centers[cluster] + 0.8 * rng.standard_normal((count, dim), dtype=np.float32)
        samples.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return samples[0].astype(np.float16), samples[1]


def open_systems(vectors: np.ndarray, options: argparse.Namespace) -> dict[str, System]:
    """Returns the functions that search float16 vectors [n, dim]."""
    k, threads = options.k, options.threads
    faiss.omp_set_num_threads(threads)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors.astype(np.float32))
    systems: dict[str, System] = {
        "faiss": lambda queries: flat.search(queries, k)[1],
        "riptide": lambda queries: exact_search(queries, [(0, vectors)], k, threads=threads).rows,
    }
    if options.lists:
        quantizer = train_quantizer(vectors.astype(np.float32), options.lists, seed=0)
        index = fill_shard(quantizer, [vectors], 0)
        parts = [OpenPart(vectors[row : row + 2_000], row) for row in range(0, len(vectors), 2_000)]

        def search_lists(queries: np.ndarray) -> np.ndarray:
            candidates = search_shard(index, queries, options.depth, effort=options.nprobe, threads=threads)
            return rescore_candidates(queries, candidates, [(0, vectors)], k, threads=threads).rows

        systems["riptide, converted"] = lambda queries: search_open_parts(queries, parts, k, threads=1).rows
        systems["riptide, lists"] = search_lists
    return systems


def compare(
    name: str, systems: dict[str, System], vectors: np.ndarray, queries: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """Searches float16 vectors [n, dim] for float32 queries [q, dim] with the systems in turns.

    Prints a line, and returns the figures for the JSON file.
    """
    rows = {system: search(queries) for system, search in systems.items()}
    seconds = in_turns({system: partial(search, queries) for system, search in systems.items()}, options.pairs)
    ratios = [faiss_s / our_s for faiss_s, our_s in zip(seconds["faiss"], seconds["riptide"], strict=True)]
    figures = {
        "median_seconds": {system: round(statistics.median(values), 4) for system, values in seconds.items()},
        "median_ratio": round(statistics.median(ratios), 2),
        "least_ratio": round(min(ratios), 2),
        "recall": round(recall_at(rows["riptide"], rows["faiss"], [options.k])[options.k], 6),
    }
    size = f"{len(vectors):,} x {vectors.shape[1]}, {len(queries):,} queries"
    print(f"{name}: {size}, top {options.k}: {figures}", flush=True)
    return {"data": name, "vectors": vectors.shape, "queries": len(queries), **figures, "seconds": seconds}


def main() -> None:
    """Reads the options, compares each data set with each number of queries, and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--vectors", None, "vectors to search, float16 or float32 .npy [n, dim] (default: synthetic)", type=Path)
    parser.add("--queries", None, "queries, float32 .npy [q, dim] (default: some of the vectors)", type=Path)
    parser.add("--dims", [384, 768], "dimensions of synthetic vectors")
    parser.add("--num-vectors", 200_000, "maximum number of vectors")
    parser.add("--num-queries", [1024, 8192], "numbers of queries to compare")
    parser.add("--k", 200, "hits per query")
    parser.add("--lists", None, "FAISS factory of inverted lists, which are searched too (default: none)")
    parser.add("--nprobe", 64, "lists probed per query")
    parser.add("--depth", 200, "candidates of the lists per query that are scored again")
    parser.add("--pairs", 5, "rounds")
    parser.add("--threads", available_threads(), "threads of all systems (default: all available)")
    parser.add("--json", "results/exact_search.json", "output file")
    options = parser.parse_args()
    sets = []
    if options.vectors:
        vectors = np.load(options.vectors, mmap_mode="r")[: options.num_vectors].astype(np.float16)
        rows = np.random.default_rng(0).integers(len(vectors), size=max(options.num_queries))
        queries = np.load(options.queries) if options.queries else vectors[rows]
        sets.append((options.vectors.name, vectors, queries.astype(np.float32)))
    else:
        for dim in options.dims:
            sets.append(("clustered", *make_vectors(options.num_vectors, max(options.num_queries), dim, seed=0)))
    results = []
    for name, vectors, queries in sets:
        systems = open_systems(vectors, options)
        for count in sorted({min(count, len(queries)) for count in options.num_queries}):
            results.append(compare(name, systems, vectors, queries[:count], options))
    write_json(options.json, {"machine": cpu_name(), "faiss": faiss.__version__, "results": results})


if __name__ == "__main__":
    main()
