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

import platform
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from benchmarks.common.timing import in_turns
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
    systems = {
        "faiss": lambda: flat.search(queries, k)[1],
        "riptide": lambda: exact_search(queries, [(0, vectors)], k, threads=threads).rows,
    }
    rows = {name: search() for name, search in systems.items()}
    seconds = in_turns(systems, pairs)
    ratios = [faiss_s / our_s for faiss_s, our_s in zip(seconds["faiss"], seconds["riptide"], strict=True)]
    result = {
        "data": name,
        "vectors": len(vectors),
        "dim": vectors.shape[1],
        "queries": len(queries),
        "k": k,
        "threads": threads,
        "faiss_seconds": [round(each, 4) for each in seconds["faiss"]],
        "our_seconds": [round(each, 4) for each in seconds["riptide"]],
        "median_ratio": round(float(np.median(ratios)), 2),
        "least_ratio": round(min(ratios), 2),
        "recall": round(recall_at(rows["riptide"], rows["faiss"], [k])[k], 6),
    }
    print(
        f"{name}: {len(vectors):,} x {vectors.shape[1]}, {len(queries):,} queries, top {k}: "
        f"FAISS {np.median(seconds['faiss']):.3f} s, ours {np.median(seconds['riptide']):.3f} s, "
        f"ratio {result['median_ratio']} (lowest {result['least_ratio']}), recall@{k} {result['recall']}",
        flush=True,
    )
    return result


def main() -> None:
    """Reads the options, compares each data set with each number of queries, and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--vectors", None, "vectors to search, float16 or float32 .npy [n, dim] (default: synthetic)", type=Path)
    parser.add("--queries", None, "queries, float32 .npy [q, dim] (default: some of the vectors)", type=Path)
    parser.add("--dims", [384, 768], "dimensions of synthetic vectors")
    parser.add("--num-vectors", 200_000, "maximum number of vectors")
    parser.add("--num-queries", [1024, 8192], "numbers of queries to compare")
    parser.add("--k", 200, "hits per query")
    parser.add("--pairs", 5, "pairs of runs")
    parser.add("--threads", available_threads(), "threads of both (default: all available)")
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
    results = [
        compare(name, vectors, queries[:count], options.k, options.pairs, options.threads)
        for name, vectors, queries in sets
        for count in sorted({min(count, len(queries)) for count in options.num_queries})
    ]
    document = {"machine": platform.processor() or platform.machine(), "faiss": faiss.__version__, "results": results}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
