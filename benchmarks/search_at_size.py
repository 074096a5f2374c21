"""Compares indexes at equal recall: queries per second after exact re-scoring, time to build, and bytes per vector.

    python benchmarks/search_at_size.py --factories IVF4096,RaBitQ HNSW32,SQ8 --folder W
    python benchmarks/search_at_size.py --vectors real.npy --queries q.npy --factories IVF2048,RaBitQ --folder W

Each index is one shard, built with riptide's functions; a folder keeps it for later calls. For each recall@100, the
figures are those of the fastest of the search efforts (nprobe, efSearch) and depths that a build tries. Times are
those of the CPU in one thread, since wall time on a shared machine measures the other programs too: two idle cores
answer about twice as many queries per second.
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
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import faiss, read_index, write_index
from riptide.indexing.dense.faiss_search import search_shard
from riptide.indexing.dense.recall import recall_at
from riptide.indexing.exact import exact_search, rescore_candidates

K = 100


def build(factory: str, vectors: np.ndarray, folder: Path, threads: int) -> tuple[Any, dict[str, float]]:
    """Returns the index of float16 vectors [n, dim], from the folder if it is there, and the figures of its build."""
    path, times = folder / f"{factory}-{len(vectors)}.faiss", folder / f"{factory}-{len(vectors)}.npy"
    if not path.exists():
        rows = np.random.default_rng(1).choice(len(vectors), training_size(factory, len(vectors)), replace=False)
        started = time.perf_counter()
        sample = vectors[np.sort(rows)].astype(np.float32)
        trained = train_quantizer(sample, factory, seed=0, threads=threads)
        middle = time.perf_counter()
        index = fill_shard(trained, [vectors], 0, threads=threads)
        np.save(times, [middle - started, time.perf_counter() - middle])
        write_index(index, path)
    train_s, fill_s = np.load(times).tolist()
    figures = {"train_s": train_s, "fill_s": fill_s, "bytes_per_vector": path.stat().st_size / len(vectors)}
    return read_index(path, mmap=True), figures


def measure_recall(
    factory: str, index: Any, vectors: np.ndarray, queries: np.ndarray, truth: np.ndarray, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yields the recall of search efforts and depths, until all depths reach the highest recall or gain nothing."""
    before = 0.0
    for effort in search_efforts(factory):
        depths = candidate_depths(factory, effort)
        rows = search_shard(index, queries, depths[-1], effort=effort, threads=options.threads)
        recalls = []
        for depth in depths:
            hits = rescore_candidates(queries, rows[:, :depth], [(0, vectors)], K, options.threads)
            recalls.append(recall_at(hits.rows, truth, [K])[K])
            yield {"effort": effort, "depth": depth, "recall": round(recalls[-1], 4)}
        if min(recalls) >= max(options.recalls) or (sum(recalls) < before + 0.002 and max(recalls) > 0.7):
            return
        before = sum(recalls)


def time_search(
    index: Any, vectors: np.ndarray, queries: np.ndarray, effort: int, depth: int, batch: int
) -> tuple[float, float]:
    """Returns the microseconds of CPU time per query, in one thread, of finding candidates and of re-scoring them."""
    find_s, score_s = [], []
    for _ in range(3):
        times = np.zeros(2)
        for i in range(0, len(queries), batch):
            started = time.thread_time()
            rows = search_shard(index, queries[i : i + batch], depth, effort=effort, threads=1)
            middle = time.thread_time()
            rescore_candidates(queries[i : i + batch], rows, [(0, vectors)], K, 1)
            times += (middle - started, time.thread_time() - middle)
        find_s.append(times[0])
        score_s.append(times[1])
    return min(find_s) / len(queries) * 1e6, min(score_s) / len(queries) * 1e6


def fastest(
    settings: list[dict[str, Any]], recall: float, index: Any, vectors: np.ndarray, queries: np.ndarray
) -> dict[str, Any]:
    """Returns the fastest setting that reaches a recall, with its times; if none does, the one with the best recall."""
    reaching: dict[int, dict[str, Any]] = {}
    for setting in settings:
        if setting["recall"] >= recall:
            reaching.setdefault(setting["depth"], setting)
    candidates = list(reaching.values()) or [max(settings, key=lambda setting: setting["recall"])]
    timed = [(one, time_search(index, vectors, queries, one["effort"], one["depth"], 256)) for one in candidates]
    best, (find_us, score_us) = min(timed, key=lambda setting_and_times: sum(setting_and_times[1]))
    return {**best, "find_us": round(find_us), "score_us": round(score_us)}


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
    parser.add("--timed-queries", 512, "queries whose time is measured to choose a setting")
    parser.add("--threads", 2, "threads of builds and of searches that measure recall")
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
    exact_s = time.perf_counter() - started
    print(f"exact search with {options.threads} threads: {len(queries) / exact_s:.0f} queries/s", flush=True)
    results, lines = [], []
    for factory in options.factories:
        index, figures = build(factory, vectors, folder, options.threads)
        settings = list(measure_recall(factory, index, vectors, queries, truth, options))
        for recall in options.recalls:
            best = fastest(settings, recall, index, vectors, queries[: options.timed_queries])
            speeds = {}
            for size in options.batches:
                block = queries[: min(len(queries), 20 * size)]
                speeds[str(size)] = 1e6 / sum(time_search(index, vectors, block, best["effort"], best["depth"], size))
            results.append({"factory": factory, **figures, "target": recall, **best, "queries_per_cpu_s": speeds})
            lines.append([factory, recall, *best.values(), *(f"{speed:.0f}" for speed in speeds.values())])
            lines[-1] += [f"{figures['train_s']:.0f} + {figures['fill_s']:.0f}", f"{figures['bytes_per_vector']:.0f}"]
            print(lines[-1], flush=True)
        del index
    head = ["index", "target", "effort", "depth", "recall@100", "find, us", "re-score, us"]
    head += [*(f"batch {size}" for size in options.batches), "train + fill, s", "bytes per vector"]
    print(markdown_table(head, lines))
    shape = {"vectors": vectors.shape, "queries": len(queries), "exact_queries_per_s": len(queries) / exact_s}
    write_json(options.json, {"machine": cpu_name(), "faiss": faiss.__version__, **shape, "results": results})


if __name__ == "__main__":
    main()
