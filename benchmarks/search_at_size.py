"""Compares indexes at equal recall: queries per second after exact re-scoring, time to build, and bytes per vector.

    python benchmarks/search_at_size.py --factories IVF4096,RaBitQ HNSW32,SQ8 --folder W
    python benchmarks/search_at_size.py --vectors real.npy --queries q.npy --factories IVF2048,RaBitQ --folder W

Each index is one shard, built with riptide's functions; a folder keeps it for later calls. For each recall@100, the
figures are those of the fastest of the search efforts (nprobe, efSearch) and depths that a build tries. `Flat` is the
exact search of all vectors.
codes and re-scoring.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.tables import markdown_table
from benchmarks.exact_search import make_vectors
from riptide.indexing.dense.factory import candidate_depths, search_efforts, training_size
from riptide.indexing.dense.faiss_index import (
    TRAINING_THREADS,
    faiss,
    fill_shard,
    read_index,
    recall_at,
    search_shard,
    train_quantizer,
    write_index,
)
from riptide.indexing.exact import exact_search, rescore_candidates

K = 100


def build(factory: str, vectors: np.ndarray, folder: Path, threads: int) -> tuple[Any, dict[str, float]]:
    """Returns the index of float16 vectors [n, dim], from the folder if it is there, and the figures of its build."""
    path, times = folder / f"{factory}-{len(vectors)}.faiss", folder / f"{factory}-{len(vectors)}.npy"
    if not path.exists():
        rows = np.random.default_rng(1).choice(len(vectors), training_size(factory, len(vectors)), replace=False)
        started = time.perf_counter()
        sample = vectors[np.sort(rows)].astype(np.float32)
        trained = train_quantizer(sample, factory, seed=0, threads=TRAINING_THREADS)
        middle = time.perf_counter()
        index = fill_shard(trained, [vectors], 0, threads=threads)
        np.save(times, [middle - started, time.perf_counter() - middle])
        write_index(index, path)
    train_s, fill_s = np.load(times).tolist()
    figures = {"train_s": train_s, "fill_s": fill_s, "bytes_per_vector": path.stat().st_size / len(vectors)}
    return read_index(path, mmap=True), figures


def measure(
    factory: str, index: Any, vectors: np.ndarray, queries: np.ndarray, truth: np.ndarray, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields recall and seconds of search efforts and depths, until each depth reaches the highest recall."""
    for effort in search_efforts(factory):
        recalls = []
        for depth in candidate_depths(factory, effort):
            started = time.perf_counter()
            rows = search_shard(index, queries, depth, effort=effort, threads=options.threads)
            found = time.perf_counter()
            hits = rescore_candidates(queries, rows, [(0, vectors)], K, options.threads)
            seconds = found - started, time.perf_counter() - found
            recalls.append(recall_at(hits.rows, truth, [K])[K])
            yield {"effort": effort, "depth": depth, "recall": recalls[-1], "find_s": seconds[0], "score_s": seconds[1]}
            if recalls[-1] >= max(options.recalls) and sum(seconds) > 2 * options.exact_s:
                return
        if min(recalls) >= max(options.recalls) or sum(seconds) > 4 * options.exact_s:
            return


def time_batches(
    factory: str, index: Any, vectors: np.ndarray, queries: np.ndarray, setting: dict[str, Any], options: Any
) -> dict[str, float]:
    """Returns queries per second for each batch size, with the search parameters of a setting."""
    speeds = {}
    for size in options.batches:
        batches = [queries[i : i + size] for i in range(0, min(len(queries), 20 * size), size)]
        started = time.perf_counter()
        for batch in batches:
            rows = search_shard(index, batch, setting["depth"], effort=setting["effort"], threads=options.threads)
            rescore_candidates(batch, rows, [(0, vectors)], K, options.threads)
        speeds[str(size)] = sum(map(len, batches)) / (time.perf_counter() - started)
    return speeds


def main() -> None:
    """Reads the options, measures each factory, prints a table and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--vectors", None, "vectors to search, float16 .npy [n, dim] (default: synthetic)", type=Path)
    parser.add("--queries", None, "queries, float32 .npy [q, dim]; required with --vectors (default: none)", type=Path)
    parser.add("--num-vectors", 1_000_000, "maximum number of vectors")
    parser.add("--num-queries", 2_000, "maximum number of queries")
    parser.add("--dim", 384, "dimension of synthetic vectors")
    parser.add("--factories", ["IVF4096,RaBitQ", "HNSW32,SQ8"], "FAISS factory strings")
    parser.add("--recalls", [0.95, 0.99], "values of recall@100 to reach")
    parser.add("--batches", [32, 256, 2_000], "queries per call")
    parser.add("--threads", 2, "threads of a search")
    parser.add("--folder", "results/indexes", "folder that keeps the indexes")
    parser.add("--json", "results/search_at_size.json", "output file")
    options = parser.parse_args()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if options.vectors:
        vectors = np.load(options.vectors, mmap_mode="r")[: options.num_vectors]
        queries = np.load(options.queries)[: options.num_queries]
    else:
        vectors, queries = make_vectors(options.num_vectors, options.num_queries, options.dim, seed=0)
    started = time.perf_counter()
    truth = exact_search(queries, [(0, vectors)], K, threads=options.threads).rows
    options.exact_s = time.perf_counter() - started
    print(f"exact search: {len(queries) / options.exact_s:.0f} queries/s", flush=True)
    results, lines = [], []
    for factory in options.factories:
        index, figures = build(factory, vectors, folder, options.threads)
        settings = []
        for each in measure(factory, index, vectors, queries, truth, options):
            settings.append(each)
            print(factory, each, flush=True)
        for recall in options.recalls:
            reached = [each for each in settings if each["recall"] >= recall]
            best = min(reached or settings[-1:], key=lambda each: each["find_s"] + each["score_s"])
            speeds = time_batches(factory, index, vectors, queries, best, options)
            results.append({"factory": factory, **figures, "target": recall, **best, "queries_per_s": speeds})
            numbers = [f"{best['recall']:.4f}", best["effort"], best["depth"], *(f"{s:.0f}" for s in speeds.values())]
            built = [f"{figures['train_s']:.0f} + {figures['fill_s']:.0f}", f"{figures['bytes_per_vector']:.0f}"]
            lines.append([factory, recall, *numbers, *built])
            print(lines[-1], flush=True)
        del index
    head = ["index", "target", "recall@100", "effort", "depth", *(f"queries/s, {size}" for size in options.batches)]
    print(markdown_table([*head, "train + fill, s", "bytes per vector"], lines))
    shape = {"vectors": vectors.shape, "queries": len(queries), "exact_queries_per_s": len(queries) / options.exact_s}
    write_json(options.json, {"machine": cpu_name(), "faiss": faiss.__version__, **shape, "results": results})


if __name__ == "__main__":
    main()
