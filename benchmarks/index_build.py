"""Compares index building (training and filling) with plain FAISS: same factory, sample and threads, alternating.

    python benchmarks/index_build.py --vectors 1000000 --dim 384 --rounds 3
    python benchmarks/index_build.py --file vectors.npy

Plain FAISS means `index_factory`, `train` and `add` on float32 arrays, with OpenMP set to the same number of threads.
The vectors are clustered and normalised. The ratio of a round is the time of riptide divided by that of FAISS; the
ratio of CPU time is printed too, as it depends less on other programs. Recall is that of the exact top 100 after
re-scoring, for queries from the same clusters, with the same nprobe and depth for both indexes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.exact_search import make_vectors
from riptide.indexing.dense.factory import choose_factory, training_size
from riptide.indexing.dense.faiss_filling import fill_shard, train_quantizer
from riptide.indexing.dense.faiss_index import faiss
from riptide.indexing.dense.faiss_search import search_shard
from riptide.indexing.dense.recall import recall_at
from riptide.indexing.exact import available_threads, exact_search, rescore_candidates

K = 100


class Times(NamedTuple):
    """Seconds of a build, and the CPU seconds of all its threads."""

    training: float
    filling: float
    training_cpu: float
    filling_cpu: float


def build(sample: np.ndarray, vectors: np.ndarray, factory: str, threads: int) -> Callable[[], Any]:
    """Returns the steps of a build with riptide, as for `build_with_faiss`."""

    def run() -> Any:
        quantizer = train_quantizer(sample, factory, seed=0, threads=threads)
        yield
        yield fill_shard(quantizer, [vectors], 0, threads=threads)

    return run


def build_with_faiss(sample: np.ndarray, vectors: np.ndarray, factory: str, threads: int) -> Callable[[], Any]:
    """Returns the steps of a build with plain FAISS: a generator that yields after training, and then the index.

    Args:
        sample: Vectors to train on, float16 [any, dim].
        vectors: Vectors to add, float16 [n, dim].
        factory: FAISS factory string.
        threads: CPU threads.
    """
    wide = sample.astype(np.float32)

    def run() -> Any:
        faiss.omp_set_num_threads(threads)
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        index.train(wide)
        yield
        for first in range(0, len(vectors), 100_000):
            index.add(vectors[first : first + 100_000].astype(np.float32))
        yield index

    return run


def measure(run: Callable[[], Any]) -> tuple[Times, Any]:
    """Runs the steps of a build; returns its times and the index."""
    steps = run()
    walls, cpus = [time.perf_counter()], [time.process_time()]
    for result in steps:
        walls.append(time.perf_counter())
        cpus.append(time.process_time())
        index = result
    return Times(walls[1] - walls[0], walls[2] - walls[1], cpus[1] - cpus[0], cpus[2] - cpus[1]), index


def main() -> None:
    """Reads the options, runs the rounds, prints the seconds, the median ratios and the recall of both sides."""
    parser = Parser(__doc__)
    parser.add("--file", None, "vectors, float16 .npy [n, dim], of which some are the queries (default: synthetic)")
    parser.add("--vectors", 1_000_000, "number of vectors")
    parser.add("--dim", 384, "dimension of the vectors")
    parser.add("--factory", None, "FAISS factory string (default: that of build_index for a recall of 0.95)")
    parser.add("--threads", available_threads(), "threads of both sides")
    parser.add("--rounds", 3, "number of rounds")
    parser.add("--queries", 1_000, "queries that measure recall")
    parser.add("--nprobe", [8, 16, 32, 64, 128], "numbers of probed lists for which recall is measured")
    parser.add("--depth", 400, "candidates per query that are scored again")
    parser.add("--json", "results/index_build.json", "output file")
    options = parser.parse_args()
    random = np.random.default_rng(1)
    if options.file:
        corpus = np.load(options.file, mmap_mode="r")[: options.vectors + options.queries]
        vectors, queries = np.split(random.permutation(corpus), [-options.queries])
        queries = queries.astype(np.float32)
    else:
        vectors, queries = make_vectors(options.vectors, options.queries, options.dim, seed=0)
    factory = options.factory or choose_factory(*vectors.shape, 0.95)
    rows = random.choice(len(vectors), training_size(factory, len(vectors)), replace=False)
    sample = vectors[np.sort(rows)]
    exact = exact_search(queries, [(0, vectors)], K).rows
    print(f"{factory}, {len(sample):,} vectors to train on, {options.threads} threads, {cpu_name()}")
    sides = {"riptide": build, "faiss": build_with_faiss}
    times: dict[str, list[Times]] = {name: [] for name in sides}
    recalls: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            seconds, index = measure(sides[name](sample, vectors, factory, options.threads))
            times[name].append(seconds)
            print(
                f"{name:8} training {seconds.training:7.2f} s  filling {seconds.filling:7.2f} s  "
                f"CPU {seconds.training_cpu:7.2f} and {seconds.filling_cpu:7.2f} s",
                flush=True,
            )
            if name not in recalls:
                recalls[name] = []
                for nprobe in options.nprobe:
                    candidates = search_shard(index, queries, options.depth, effort=nprobe)
                    best = rescore_candidates(queries, candidates, [(0, vectors)], K).rows
                    recalls[name].append(round(recall_at(best, exact, [K])[K], 4))
    pairs = list(zip(times["riptide"], times["faiss"], strict=True))
    stages: dict[str, Callable[[Times], float]] = {
        "training": lambda one: one.training,
        "filling": lambda one: one.filling,
        "both": lambda one: one.training + one.filling,
        "CPU time of both": lambda one: one.training_cpu + one.filling_cpu,
    }
    ratios = {stage: [total(ours) / total(theirs) for ours, theirs in pairs] for stage, total in stages.items()}
    for stage, values in ratios.items():
        print(f"{stage:16} {statistics.median(values):.3f}  ({', '.join(f'{ratio:.2f}' for ratio in sorted(values))})")
    print(f"recall@{K} at nprobe {options.nprobe} and depth {options.depth}:")
    for name, values in recalls.items():
        print(f"{name:8} {values}")
    figures = {name: [one._asdict() for one in rounds] for name, rounds in times.items()}
    write_json(options.json, {"factory": factory, "seconds": figures, "ratios": ratios, "recall": recalls})


if __name__ == "__main__":
    main()
