"""Builds and searches an index of many vectors: CPU time and memory of the job, recall and queries per second.

    python benchmarks/index_at_size.py --store W --like vectors.npy --queries queries.npy --passages 21015324 --dim 768

The vectors are drawn around real ones (`draw_like`), so that neighbourhoods have the few directions that they have in
real data; clusters with noise in all dimensions suit no index. More dimensions than the real vectors have are reached
by a rotation, which keeps all scores. Texts are short and random. The store is kept, and a second call continues; its
figures of the build are those of the remaining work. Queries per second are those of all queries in one batch.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.tables import markdown_table
from benchmarks.common.watching import watch_job
from benchmarks.import_corpus import write_rows

NAME = "synthetic"
NEIGHBOURS = 8  # of a real vector, whose differences to it span the directions of the vectors around it
K = 100


def draw_like(real: np.ndarray, count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yields normalised vectors around real ones: each is a real vector plus random shares of the differences to its
    nearest neighbours, so that it is about as far from it as they are.

    Args:
        real: float16 [n, dim], normalised.
        count: Number of vectors.
        seed: Of the generator.

    Yields:
        float32 [at most n, dim]; the real vectors come in a new random order each time.
    """
    from riptide.indexing.exact import exact_search

    rng, vectors = np.random.default_rng(seed), real.astype(np.float32)
    neighbours = exact_search(vectors, [(0, real)], NEIGHBOURS + 1).rows
    starts = np.arange(len(real) + 1) * neighbours.shape[1]
    for first in range(0, count, len(real)):
        shares = rng.standard_normal(neighbours.shape, dtype=np.float32) / np.sqrt(NEIGHBOURS)
        shares[:, 0] = 0
        shares[:, 0] = 1 - shares.sum(axis=1)  # the first neighbour is the vector itself or a copy of it
        samples = scipy.sparse.csr_array((shares.ravel(), neighbours.ravel(), starts), shape=(len(real),) * 2) @ vectors
        samples /= np.linalg.norm(samples, axis=1, keepdims=True)
        yield samples[rng.permutation(len(samples))[: count - first]]


def rotation(dim: int, wider: int) -> np.ndarray:
    """Returns orthonormal rows, float32 [dim, wider]: a product with them keeps all scores."""
    return np.linalg.qr(np.random.default_rng(0).standard_normal((wider, dim)))[0].T.astype(np.float32)


def make_store(url: str, vectors: Iterator[np.ndarray], passages: int, dim: int) -> None:
    """Makes a store with a corpus of short random texts and embeddings of given vectors, unless it is complete."""
    from riptide import Store
    from riptide.indexing.corpus.corpus import save_array
    from riptide.indexing.store.store import generation

    store = Store(url)
    source = Path(f"{url}-source") / "corpus.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        unfinished = source.with_suffix(".unfinished")
        write_rows(unfinished, passages, "beir")
        unfinished.replace(source)
    corpus = store.import_corpus(source.parent, part_size=100_000)
    if corpus.num_rows != passages:
        sys.exit(f"{url} has {corpus.num_rows:,} passages, expected {passages:,}: give another store")
    config = {"encoder": {"dim": dim, "pooling": "mean"}, "limit": None, "numerics": "random"}
    inputs = {"corpus": corpus.generations[-1]}
    with store.create("embeddings", f"{NAME}/{generation(0)}", inputs=inputs, config=config) as draft:
        if draft.is_complete:
            return
        rest = np.empty((0, dim), np.float16)
        for part in corpus.parts:
            while len(rest) < part.end - part.first_row:
                rest = np.concatenate([rest, next(vectors).astype(np.float16)])
            rows, rest = np.split(rest, [part.end - part.first_row])
            draft.commit(part.part.name, ".npy", functools.partial(save_array, rows), rows=len(rows))
        draft.add_notes(encoder="none", options={}, dim=dim, similarity="cosine", task=None)


def measure_search(url: str, queries: np.ndarray, settings: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Returns recall@100, queries per second and CPU milliseconds per query for search efforts and depths."""
    from riptide.indexing.corpus.corpus import Corpus
    from riptide.indexing.dense.dense_search import search_dense, search_exact
    from riptide.indexing.dense.index import Index
    from riptide.indexing.dense.recall import recall_at
    from riptide.indexing.dense.shard import OpenShards
    from riptide.indexing.embeddings.dense_embeddings import Embeddings
    from riptide.indexing.store.store import Store
    from riptide.indexing.work.local_runner import LocalRunner

    store, runner = Store(url), LocalRunner()
    embeddings = Embeddings.open(store, NAME, Corpus.open(store))
    index, shards = Index.open(store, NAME, embeddings), OpenShards(embeddings, stays_open=True)
    truth = search_exact(shards, queries, K, runner).rows
    print(f"{index.factory}: the build chose {index.effort}, {index.depth}", flush=True)
    figures = []
    for effort, depth in settings or [(index.effort, index.depth)]:
        times = []
        for _ in range(3):  # the first time reads the files
            started, cpu = time.perf_counter(), time.process_time()
            hits = search_dense(index, shards, queries, K, runner, effort=effort, depth=depth)
            times.append((time.perf_counter() - started, time.process_time() - cpu))
        wall, cpu_s = np.min(times, axis=0)
        recall = recall_at(hits.rows, truth, [K])[K]
        figures.append({"effort": effort, "depth": depth, "recall@100": recall})
        figures[-1] |= {"queries/s": float(len(queries) / wall), "CPU ms": float(1000 * cpu_s / len(queries))}
        print(figures[-1], flush=True)
    return figures


def main() -> None:
    """Reads the options, makes the store, builds the index, searches it, and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "store that is made or continued", required=True)
    parser.add("--like", None, "real vectors, float16 .npy [n, dim]", required=True, type=Path)
    parser.add("--queries", None, "queries, float16 or float32 .npy [q, dim]", required=True, type=Path)
    parser.add("--passages", 1_000_000, "number of vectors")
    parser.add("--num-queries", 1_000, "maximum number of queries")
    parser.add("--dim", 384, "dimensions of the vectors, at least those of the real ones")
    parser.add("--shards", 8, "shards of the index")
    parser.add("--factory", "auto", "FAISS factory string")
    parser.add("--settings", [], "efforts and depths to measure, as 128:400; default: those that the build chose")
    parser.add("--json", "results/index_at_size.json", "output file")
    options = parser.parse_args()
    real = np.load(options.like)
    if options.dim < real.shape[1]:
        parser.error(f"--dim {options.dim}: the vectors of {options.like} have {real.shape[1]} dimensions")
    queries = np.load(options.queries).astype(np.float32)
    queries = queries[np.random.default_rng(0).permutation(len(queries))[: options.num_queries]]
    vectors = draw_like(real, options.passages)
    if options.dim > real.shape[1]:
        rows = rotation(real.shape[1], options.dim)
        vectors, queries = (block @ rows for block in vectors), queries @ rows
    make_store(options.store, vectors, options.passages, options.dim)
    job = watch_job(
        options.store, "build_index", "--embeddings", NAME, "--shards", options.shards, "--factory", options.factory
    )
    print(job.output, end="")
    print(f"{job.seconds:.0f} s, {job.cpu_seconds:.0f} CPU s, {job.anonymous_bytes / 1e9:.2f} GB anonymous", flush=True)
    settings = [tuple(map(int, setting.split(":"))) for setting in options.settings]
    figures = measure_search(options.store, np.ascontiguousarray(queries), settings)
    print(markdown_table([*figures[0]], [[f"{value:.4g}" for value in each.values()] for each in figures]))
    build = {**job._asdict(), "output": job.output.splitlines()}
    write_json(
        options.json,
        {"machine": cpu_name(), "passages": options.passages, "dim": options.dim, "build": build, "search": figures},
    )


if __name__ == "__main__":
    main()
