"""Measures the memory of leaves, which search ranges of rows: of each of 1, 2 and 4 leaves after some queries.

    python benchmarks/leaf_memory.py --store S
    python benchmarks/leaf_memory.py --store M --make 1000000

Each leaf runs in a separate process, one after the other, and gets dense, BM25 and hybrid queries and fetches the
passages of the hits. The figures are its anonymous memory and Java's heap in it (garbage of Lucene's searches for the
most part), the bytes of the store's files that it maps, and those of them that are in memory after the queries. The
baseline is a process that has opened nothing. With --make, a store of clustered vectors and short random texts is made
first, without an encoder.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from riptide import Store

K = 10
QUERIES = 32  # of a batch
WORDS = 8  # of a query, from the text of a passage
KINDS = ("corpus", "embeddings", "index", "bm25")
JAVA_HEAP = (0x8000_0000, 0x1_0000_0000)  # addresses where OpenJDK puts a heap of at most 2 GiB


def make_store(store_url: str, passages: int, dim: int, shards: int) -> None:
    """Makes a store with a live release of clustered vectors and short texts, unless it is complete."""
    from benchmarks.exact_search import make_vectors
    from benchmarks.import_corpus import write_rows
    from riptide.indexing.corpus.corpus import save_array
    from riptide.indexing.store.store import generation
    from riptide.retriever.options import EncoderOptions
    from riptide.serve.release.live import save_as_live
    from riptide.serve.release.release import Release, fingerprints_of
    from riptide.serve.release.release_tasks import ServedTask

    store = Store(store_url)
    source = Path(f"{store_url}-source") / "corpus.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        write_rows(source, passages, "beir")
    corpus = store.import_corpus(source.parent)
    config = {"encoder": {"dim": dim, "pooling": "mean"}, "limit": None, "numerics": "random"}
    inputs = {"corpus": corpus.generations[-1]}
    with store.create("embeddings", f"random/{generation(0)}", inputs=inputs, config=config) as draft:
        if not draft.is_complete:
            vectors, _ = make_vectors(passages, 0, dim, seed=0)
            for part in corpus.parts:
                rows = vectors[part.first_row : part.end]
                draft.commit(part.part.name, ".npy", functools.partial(save_array, rows), rows=len(rows))
            draft.add_notes(encoder="none", options={}, dim=dim, similarity="cosine", task=None)
    store.build_index("random", name="random", shards=shards)
    store.build_bm25(shards=shards)
    parts = [*corpus.generations]
    for kind, name in (("embeddings", "random"), ("index", "random"), ("bm25", "bm25")):
        parts += store.generations(kind, name)
    task = ServedTask("default", None, "random", "random", "bm25")
    release = Release("none", EncoderOptions().__dict__, (task,), fingerprints_of(parts))
    release.save(store)
    save_as_live(store, release, None)


def open_live(store_url: str) -> tuple[Any, Any]:
    """Returns a store and its live release."""
    from riptide.indexing.store.store import Store
    from riptide.serve.release.live import read_live_release

    store = Store(store_url)
    return store, read_live_release(store)[0]


class Batch(NamedTuple):
    """Queries of a leaf: float32 [QUERIES, dim], and texts."""

    vectors: np.ndarray
    texts: list[str]


def make_batches(store_url: str, count: int) -> list[Batch]:
    """Returns batches of queries, made of the vectors and the first words of random passages."""
    from riptide.indexing.embeddings.dense_embeddings import Embeddings
    from riptide.serve.release.artifacts import ReleaseArtifacts

    store, release = open_live(store_url)
    corpus = ReleaseArtifacts(store, release).corpus
    embeddings, random = Embeddings.open(store, release.tasks[0].embeddings, corpus), np.random.default_rng(0)
    batches = []
    for _ in range(count):
        rows = random.integers(0, corpus.num_rows, QUERIES)
        texts = [" ".join(passage.text.split()[:WORDS]) for passage in corpus.passages(rows)]
        batches.append(Batch(embeddings.take(rows).astype(np.float32), texts))
    return batches


def memory(folder: Path, process: psutil.Process) -> dict[str, Any]:
    """Returns the memory of a process in bytes.

    Args:
        folder: Folder of the store.
        process: The process.

    Returns:
        "anonymous"; "java_heap", the part of it that is Java's heap; "mapped" and "resident", by kind of artifact: the
        bytes of the store's files that are mapped, and those of them that are in memory.
    """
    mapped, resident, totals = Counter[str](), Counter[str](), Counter[str]()
    for entry in process.memory_maps(grouped=False):
        totals["anonymous"] += entry.anonymous
        if JAVA_HEAP[0] <= int(entry.addr.partition("-")[0], 16) < JAVA_HEAP[1]:
            totals["java_heap"] += entry.anonymous
        file = Path(entry.path)
        if file.is_relative_to(folder):
            kind = file.relative_to(folder).parts[0]
            mapped[kind] += entry.size
            resident[kind] += entry.rss
    return {**totals, "mapped": dict(mapped), "resident": dict(resident)}


def open_and_query(store_url: str, number: int, leaves: int, batches: list[Batch]) -> dict[str, Any]:
    """Opens a leaf, runs queries, and returns its figures; it is called in a new process.

    Without leaves it opens nothing, for the baseline.
    """
    from riptide.serve.parts.leaf import HitsRequest, Leaf, PassagesRequest, SourceQueries

    store, release = open_live(store_url)
    if leaves:
        leaf = Leaf(store, number, leaves, threads=1)
        for part in leaf.parts.values():
            part.open_release(release.id)
        served = release.tasks[0].served_sources()
        lexical = next(source for source in served if source.kind.queries == "texts")
        for batch in batches:
            queries = {served[0]: batch.vectors, lexical: batch.texts}
            for sources in ((served[0],), (lexical,), (served[0], lexical)):
                requests = [SourceQueries(one.kind.name, one.target, queries[one], K) for one in sources]
                for found in leaf.search(HitsRequest(release.id, time.monotonic() + 600, requests)):
                    if isinstance(found, Exception):
                        raise found
                    rows = np.unique(found.hits.rows[found.hits.rows >= 0])
                    leaf.fetch(PassagesRequest(release.id, time.monotonic() + 600, rows))
    return {"leaves": leaves, "leaf": number, **memory(Path(store_url).resolve(), psutil.Process())}


def main() -> None:
    """Reads the options, makes the store, runs the leaves, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "folder of a store with a live release, or for --make", required=True)
    parser.add("--make", None, "make a store with this number of passages first", type=int, metavar="PASSAGES")
    parser.add("--dim", 384, "dimension of vectors of --make")
    parser.add("--leaves", [1, 2, 4], "numbers of leaves to compare")
    parser.add("--rounds", 20, f"batches of {QUERIES} queries of each kind per leaf")
    parser.add("--json", "results/leaf_memory.json", "output file")
    options = parser.parse_args()
    if options.make:
        make_store(options.store, options.make, options.dim, shards=max(options.leaves))
    spawn, results = multiprocessing.get_context("spawn"), []
    with spawn.Pool(1) as process:
        batches = process.apply(make_batches, (options.store, options.rounds))
    print("MiB                              of the store's files, mapped and (in memory)")
    print(f"leaves leaf anonymous Java's heap {' '.join(f'{kind:>12}' for kind in (*KINDS, 'all'))}")
    for leaves in (0, *options.leaves):
        for number in range(max(1, leaves)):
            with spawn.Pool(1) as process:
                figures = process.apply(open_and_query, (options.store, number, leaves, batches))
            results.append(figures)
            mapped, resident = ([figures[name].get(kind, 0) for kind in KINDS] for name in ("mapped", "resident"))
            files = list(zip([*mapped, sum(mapped)], [*resident, sum(resident)], strict=True))
            cells = [f"{f'{size >> 20} ({part >> 20})':>12}" for size, part in files]
            heap = figures.get("java_heap", 0) >> 20
            print(
                f"{leaves or 'none':>6} {number:4} {figures['anonymous'] >> 20:9} {heap:11} {' '.join(cells)}",
                flush=True,
            )
    write_json(options.json, {"options": vars(options), "leaves": results})


if __name__ == "__main__":
    main()
