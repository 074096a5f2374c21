"""Compares exact search with the flat index of FAISS (IndexFlatIP) in alternating pairs: seconds and recall.

    python benchmarks/exact_search.py
    python benchmarks/exact_search.py --vectors corpus.npy --queries queries.npy --num-queries 1024

FAISS has its float32 vectors in memory before the clock starts, and uses the same number of threads. Riptide starts
from float16 vectors; converting, multiplying, selecting, re-scoring and sorting are within its time. FAISS is loaded by
indexing.dense.faiss_index, which makes its BLAS use AVX-512: with default settings it uses SSE3 on a Sapphire Rapids
and is four times slower. Synthetic vectors are clustered, normalised and seeded. Recall compares the top k with the
float32 result of FAISS, which is rounded: a recall below 1 means scores that are equal to six digits.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from indexing.dense.faiss_index import faiss, recall_at
from indexing.exact import available_threads, exact_search


def make_vectors(num_vectors: int, num_queries: int, dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns normalised vectors from 1,000 clusters of unequal sizes.

    Args:
        num_vectors: Number of vectors to search.
        num_queries: Number of queries.
        dim: Dimension of both.
        seed: Seed of the random numbers.

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


def measure_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def compare(name: str, vectors: np.ndarray, queries: np.ndarray, k: int, pairs: int, threads: int) -> dict[str, Any]:
    """Searches with FAISS and with riptide in alternation, and prints a line.

    Args:
        name: Name of the data.
        vectors: float16 [n, dim].
        queries: float32 [q, dim].
        k: Hits per query.
        pairs: Number of pairs of runs, after one that is not counted.
        threads: Threads of both.

    Returns:
        The figures for the JSON file.
    """
    faiss.omp_set_num_threads(threads)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors.astype(np.float32))
    times = []
    for number in range(pairs + 1):
        faiss_s, (_, faiss_rows) = measure_seconds(lambda: flat.search(queries, k))
        our_s, hits = measure_seconds(lambda: exact_search(queries, [(0, vectors)], k, threads=threads))
        if number:
            times.append((faiss_s, our_s))
    ratios = [faiss_s / our_s for faiss_s, our_s in times]
    result = {
        "data": name,
        "vectors": len(vectors),
        "dim": vectors.shape[1],
        "queries": len(queries),
        "k": k,
        "threads": threads,
        "faiss_seconds": [round(t, 4) for t, _ in times],
        "our_seconds": [round(t, 4) for _, t in times],
        "median_ratio": round(float(np.median(ratios)), 2),
        "least_ratio": round(min(ratios), 2),
        "recall": round(recall_at(hits.rows, faiss_rows, [k])[k], 6),
    }
    print(
        f"{name}: {len(vectors):,} x {vectors.shape[1]}, {len(queries):,} queries, top {k}: "
        f"FAISS {np.median([t for t, _ in times]):.3f} s, ours {np.median([t for _, t in times]):.3f} s, "
        f"ratio {result['median_ratio']} (lowest {result['least_ratio']}), recall@{k} {result['recall']}",
        flush=True,
    )
    return result


def main() -> None:
    """Reads the options, compares each data set with each number of queries, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vectors", type=Path, help="vectors to search, float16 or float32 .npy [n, dim] (default: synthetic)"
    )
    parser.add_argument(
        "--queries", type=Path, help="queries, float32 .npy [q, dim], for --vectors (default: random vectors of it)"
    )
    parser.add_argument(
        "--dims", type=int, nargs="+", default=[384, 768], help="dimensions of synthetic vectors (default: 384 768)"
    )
    parser.add_argument(
        "--num-vectors", type=int, default=200_000, help="maximum number of vectors (default: %(default)s)"
    )
    parser.add_argument(
        "--num-queries",
        type=int,
        nargs="+",
        default=[1024, 8192],
        help="numbers of queries to compare (default: 1024 8192)",
    )
    parser.add_argument("--k", type=int, default=200, help="hits per query (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=available_threads(), help="threads of both (default: all available)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/exact_search.json"), help="output file (default: %(default)s)"
    )
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
    results = [
        compare(name, vectors, queries[:count], options.k, options.pairs, options.threads)
        for name, vectors, queries in sets
        for count in sorted({min(count, len(queries)) for count in options.num_queries})
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": platform.processor() or platform.machine(), "faiss": faiss.__version__, "results": results}
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
