"""Exact search side by side with FAISS' flat index, everything included, in alternating pairs.

    python benchmarks/exact_search.py
    python benchmarks/exact_search.py --vectors corpus.npy --queries queries.npy --num-queries 1024

FAISS (IndexFlatIP) gets its float32 vectors ready-made and as many threads; ours starts from float16 vectors, converts,
multiplies, selects, scores again and sorts. FAISS is loaded by indexing.faiss_index, which has its BLAS use AVX-512: as
it comes it takes SSE3 on a Sapphire Rapids and is four times slower. Synthetic vectors are clustered, normalised and
seeded. Recall is that of the top k against FAISS' float32 result, which rounds: below 1 means scores that are equal to
six digits.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from indexing.exact import available_threads, exact_search
from indexing.faiss_index import faiss, recall_at


def clustered(num_vectors: int, num_queries: int, dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Normalised (float16 [num_vectors, dim], float32 [num_queries, dim]) from 1,000 clusters of unequal sizes."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((1000, dim), dtype=np.float32)
    weights = rng.pareto(1.5, len(centers)) + 0.1
    drawn = []
    for count in (num_vectors, num_queries):
        cluster = rng.choice(len(centers), count, p=weights / weights.sum())
        vectors = centers[cluster] + 0.8 * rng.standard_normal((count, dim), dtype=np.float32)
        drawn.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return drawn[0].astype(np.float16), drawn[1]


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def compare(name: str, vectors: np.ndarray, queries: np.ndarray, k: int, pairs: int, threads: int) -> dict[str, Any]:
    """Time both, alternating, after one unmeasured pair."""
    faiss.omp_set_num_threads(threads)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors.astype(np.float32))
    times = []
    for i in range(pairs + 1):
        theirs, (_, faiss_rows) = seconds(lambda: flat.search(queries, k))
        ours, hits = seconds(lambda: exact_search(queries, [(0, vectors)], k, threads=threads))
        if i:
            times.append((theirs, ours))
    ratios = [theirs / ours for theirs, ours in times]
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
        f"ratio {result['median_ratio']} (least {result['least_ratio']}), recall@{k} {result['recall']}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path, help="float16 or float32 .npy [n, dim] (default: synthetic)")
    parser.add_argument("--queries", type=Path, help="float32 .npy [q, dim] (default: vectors of the corpus)")
    parser.add_argument("--dims", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--num-vectors", type=int, default=200_000)
    parser.add_argument("--num-queries", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--k", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--out", type=Path, default=Path("results/exact_search.json"))
    options = parser.parse_args()
    sets = []
    if options.vectors:
        vectors = np.load(options.vectors, mmap_mode="r")[: options.num_vectors].astype(np.float16)
        rows = np.random.default_rng(0).integers(len(vectors), size=max(options.num_queries))
        queries = np.load(options.queries) if options.queries else vectors[rows]
        sets.append((options.vectors.name, vectors, queries.astype(np.float32)))
    else:
        for dim in options.dims:
            sets.append(("clustered", *clustered(options.num_vectors, max(options.num_queries), dim, seed=0)))
    results = [
        compare(name, vectors, queries[:count], options.k, options.pairs, options.threads)
        for name, vectors, queries in sets
        for count in sorted({min(count, len(queries)) for count in options.num_queries})
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": platform.processor() or platform.machine(), "faiss": faiss.__version__, "results": results}
    options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
