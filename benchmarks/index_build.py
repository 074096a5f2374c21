"""Compares index building (training and filling) with plain FAISS: same factory, sample and threads, alternating.

    python benchmarks/index_build.py --vectors 1000000 --dim 384 --rounds 3

Plain FAISS means `index_factory`, `train` and `add` on float32 arrays, with OpenMP set to the same number of threads.
The vectors are clustered and normalised. The ratio of a round is the time of riptide divided by that of FAISS.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from benchmarks.exact_search import make_vectors
from riptide.indexing.dense.factory import choose_factory, training_size
from riptide.indexing.dense.faiss_index import TRAINING_THREADS, faiss, fill_shard, train_quantizer


def build(sample: np.ndarray, vectors: np.ndarray, factory: str, threads: int) -> tuple[float, float]:
    """Returns the seconds of training and of filling with riptide.

    Args:
        sample: Vectors to train on, float32 [any, dim].
        vectors: Vectors to add, float16 [n, dim].
        factory: FAISS factory string.
        threads: CPU threads.
    """
    started = time.perf_counter()
    quantizer = train_quantizer(sample, factory, seed=0, threads=threads)
    trained = time.perf_counter()
    fill_shard(quantizer, [vectors], 0, threads=threads)
    return trained - started, time.perf_counter() - trained


def build_with_faiss(sample: np.ndarray, vectors: np.ndarray, factory: str, threads: int) -> tuple[float, float]:
    """Returns the seconds of training and of filling with plain FAISS; arguments as for `build`."""
    faiss.omp_set_num_threads(threads)
    index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    started = time.perf_counter()
    index.train(sample)
    trained = time.perf_counter()
    for first in range(0, len(vectors), 100_000):
        index.add(vectors[first : first + 100_000].astype(np.float32))
    return trained - started, time.perf_counter() - trained


def main() -> None:
    """Reads the options, runs the rounds, prints the seconds and the median ratios."""
    parser = Parser(__doc__)
    parser.add("--vectors", 1_000_000, "number of vectors")
    parser.add("--dim", 384, "dimension of the vectors")
    parser.add("--factory", None, "FAISS factory string (default: that of build_index for a recall of 0.95)")
    parser.add("--threads", TRAINING_THREADS, "threads of both sides")
    parser.add("--rounds", 3, "number of rounds")
    parser.add("--json", "results/index_build.json", "output file")
    options = parser.parse_args()
    vectors, _ = make_vectors(options.vectors, 0, options.dim, seed=0)
    factory = options.factory or choose_factory(options.vectors, options.dim, 0.95)
    rows = np.random.default_rng(1).choice(options.vectors, training_size(factory, options.vectors), replace=False)
    sample = vectors[np.sort(rows)].astype(np.float32)
    print(f"{factory}, {len(sample):,} vectors to train on, {options.threads} threads")
    sides = {"riptide": build, "faiss": build_with_faiss}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            seconds[name].append(sides[name](sample, vectors, factory, options.threads))
            print(f"{name:8} training {seconds[name][-1][0]:7.2f} s  filling {seconds[name][-1][1]:7.2f} s", flush=True)
    for place, stage in enumerate(("training", "filling")):
        ratios = [
            ours[place] / theirs[place] for ours, theirs in zip(seconds["riptide"], seconds["faiss"], strict=True)
        ]
        print(f"{stage:8} {statistics.median(ratios):.3f}  ({', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))})")
    write_json(options.json, {"factory": factory, "seconds": seconds})


if __name__ == "__main__":
    main()
