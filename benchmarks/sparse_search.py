"""Compares search of sparse vectors (SPLADE) with BM25 on the same Lucene: rankings, queries per second, sizes.

    python benchmarks/sparse_search.py --store S --embeddings minilm-seed0 --queries sf --random-store W

The rankings of the index of impacts, with one shard and with several, are compared with a brute-force product of the
same quantised weights, in whole numbers, for all queries of the split: rows, their order and scores. So are those of
random vectors over 30,522 words (--random-store), whose frequencies fall as in texts. Queries per second are those of
search alone, without the encoder, in one process; all systems search the same queries in turns. Ratios are medians over
rounds. Sizes are those of the files. The JSON file is written after each set of vectors.
"""

from __future__ import annotations

import argparse
import base64
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy import sparse

from benchmarks.common.files import write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.program import Parser
from benchmarks.common.tables import markdown_table
from benchmarks.common.timing import in_turns
from riptide import Store
from riptide.indexing.lucene.segment_search import search_undeleted
from riptide.indexing.sparse.csr_file import SUFFIX, save_vectors
from riptide.indexing.sparse.index import ImpactIndex
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.store import generation
from riptide.retriever.encoding.sparse_vectors import SparseVectors, concatenate_sparse_vectors

WORDS = 30_522  # of the vocabulary of random vectors; BERT's
BLOCK = 64  # queries whose products are in memory at a time


def quantised_matrix(vectors: SparseVectors) -> Any:
    """Returns rint(100 v) of all weights as a SciPy matrix, int64 [vectors, words]."""
    weights = np.rint(100 * vectors.values.astype(np.float64)).astype(np.int64)
    return sparse.csr_array((weights, vectors.indices, vectors.offsets), shape=(len(vectors), vectors.width))


def brute_force(queries: SparseVectors, passages: SparseVectors, k: int, deleted: np.ndarray) -> list[np.ndarray]:
    """Returns the best passages of each query by the product of quantised weights, int64 [hits, 2]: row, score.

    Equal scores are ordered by row, and passages of score 0 are no hits.
    """
    rows = quantised_matrix(passages).T.tocsr()
    ranking = []
    for first in range(0, len(queries), BLOCK):
        block = queries.take(np.arange(first, min(first + BLOCK, len(queries))))
        for scores in (quantised_matrix(block) @ rows).toarray():
            scores[deleted] = 0
            order = np.lexsort((np.arange(len(scores)), -scores))[:k]
            order = order[scores[order] > 0]
            ranking.append(np.stack([order, scores[order]], axis=1))
    return ranking


def count_differing(
    index: ImpactIndex, queries: SparseVectors, expected: list[np.ndarray], k: int, deleted: np.ndarray, threads: int
) -> int:
    """Returns the number of queries whose rows, order or scores in an index are not the expected ones."""
    hits = index.search(queries, k, deleted, threads=threads)
    count = 0
    for rows, scores, ranking in zip(hits.rows, hits.scores, expected, strict=True):
        is_hit = rows >= 0
        same_rows = np.array_equal(rows[is_hit], ranking[:, 0])
        count += not (same_rows and np.array_equal(scores[is_hit], ranking[:, 1].astype(np.float32)))
    return count


def random_vectors(count: int, words: int, seed: int) -> SparseVectors:
    """Returns random vectors of about some words each, whose frequencies fall with their number."""
    random = np.random.default_rng(seed)
    shares = 1 / (np.arange(WORDS) + 50.0)
    words_of_rows = [np.unique(random.choice(WORDS, words, p=shares / shares.sum())) for _ in range(count)]
    indices = np.concatenate(words_of_rows).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in words_of_rows])]).astype(np.int64)
    return SparseVectors(indices, (3 * random.random(len(indices)) ** 2 + 0.01).astype(np.float32), offsets, WORDS)


def make_random_store(url: str, passages: int, words: int) -> Store:
    """Returns a store of random sparse embeddings and meaningless passages, which is made unless it is complete."""
    store = Store(url)
    corpus = store.import_corpus({"id": str(number), "text": f"word{number}"} for number in range(passages))
    if not store.names("embeddings"):
        config = {"encoder": {"pooling": "splade", "dim": WORDS}, "limit": None, "numerics": "random"}
        inputs = {"corpus": corpus.generations[-1]}
        with store.create("embeddings", f"random/{generation(0)}", inputs=inputs, config=config) as draft:
            for number, part in enumerate(corpus.parts):
                vectors = random_vectors(part.part.rows, words, seed=number)
                draft.commit(f"part-{number:05d}", SUFFIX, partial(save_vectors, vectors), rows=len(vectors))
            draft.add_notes(encoder="random", options={}, task=None, dim=WORDS, similarity="dot")
    return store


def lucene_bytes(shards: Any) -> int:
    """Returns the size of Lucene's files of an index."""
    small = [content for _, part in shards for content in part.facts["small_files"].values()]
    return sum(part.bytes for _, part in shards) + sum(len(base64.b64decode(content)) for content in small)


def compare(
    store: Store, name: str, queries: SparseVectors, texts: list[str] | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Returns the figures of the indexes of some embeddings beside a brute-force product.

    Without texts of the queries, they are not compared with BM25.
    """
    corpus = store.corpus()
    embeddings = SparseEmbeddings.open(store, name, corpus)
    pieces = [vectors for _, vectors in embeddings.read_range(0, corpus.num_rows)]
    passages = concatenate_sparse_vectors(pieces, embeddings.dim)
    expected = brute_force(queries, passages, options.depth, corpus.deleted)
    threads = max(options.threads)
    differing, sizes = {}, {"embeddings": sum(part.part.bytes for part in embeddings.parts)}
    systems: dict[str, Callable[..., Any]] = {}
    for shards in options.shards:
        index = store.build_index(name, name=f"{name}-{shards}-shards", shards=shards)
        assert isinstance(index, ImpactIndex)
        differing[shards] = count_differing(index, queries, expected, options.depth, corpus.deleted, threads)
        sizes[f"splade, {shards}"] = lucene_bytes(index.shards)
        searcher = index.searcher()  # the index itself keeps few shards open
        systems[f"splade, {shards}"] = partial(index.search, queries, options.k, corpus.deleted, searcher=searcher)
        if texts is not None:
            bm25 = store.build_bm25(name=f"bm25-{shards}-shards", shards=shards)
            sizes[f"bm25, {shards}"] = lucene_bytes(bm25.shards)
            systems[f"bm25, {shards}"] = partial(search_undeleted, bm25.searcher(), texts, options.k, corpus.deleted)
    rates: dict[str, dict[str, list[float]]] = {}
    for count in options.threads:
        seconds = in_turns({system: partial(call, threads=count) for system, call in systems.items()}, options.rounds)
        rates[str(count)] = {system: [len(queries) / each for each in values] for system, values in seconds.items()}
    return {
        "passages": corpus.num_rows,
        "queries": len(queries),
        "words of a passage": float(passages.counts.mean()),
        "words of a query": float(queries.counts.mean()),
        "hits": int(sum(map(len, expected))),
        "differing": differing,
        "bytes": sizes,
        "queries per second": rates,
    }


def encode_queries(store: Store, name: str, texts: list[str]) -> tuple[SparseVectors, float]:
    """Returns the vectors of queries by the encoder of embeddings, and the queries per second of the encoder."""
    encoder = store.embeddings(name).encoder()
    encoder.encode(texts[:8], side="query")
    started = time.perf_counter()
    vectors: SparseVectors = encoder.encode(texts, side="query")
    return vectors, len(texts) / (time.perf_counter() - started)


def report(cells: dict[str, dict[str, Any]]) -> None:
    """Prints tables of rankings, sizes and queries per second."""
    rankings, sizes, speeds = [], [], []
    for name, cell in cells.items():
        words = f"{cell['words of a passage']:,.1f}", f"{cell['words of a query']:,.1f}"
        for shards, count in cell["differing"].items():
            rankings.append((name, cell["passages"], words[0], cell["queries"], words[1], cell["hits"], shards, count))
        for system, size in cell["bytes"].items():
            sizes.append((name, system, f"{size / 1e6:,.2f}", f"{size / cell['passages']:,.0f}"))
        for threads, rates in cell["queries per second"].items():
            for system, by_round in rates.items():
                peer = rates.get(system.replace("splade", "bm25"))
                ratios = [a / b for a, b in zip(by_round, peer, strict=True)] if peer else []
                ratio = f"{statistics.median(ratios):.3f}" if ratios else ""
                speeds.append((name, system, threads, f"{statistics.median(by_round):,.0f}", ratio))
        if speed := cell.get("encoder, queries per second"):
            speeds.append((name, "encoder", os.cpu_count(), f"{speed:,.0f}", ""))
    head = ("vectors", "passages", "words", "queries", "words", "hits", "shards", "rankings that differ")
    print(markdown_table(head, rankings), end="\n\n")
    print(markdown_table(("vectors", "system, shards", "MB", "bytes per passage"), sizes), end="\n\n")
    print(markdown_table(("vectors", "system, shards", "threads", "queries/s", "ratio to BM25"), speeds))


def main() -> None:
    """Reads the options, compares each set of vectors, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "folder of a store with sparse embeddings and queries")
    parser.add("--embeddings", [], "names of sparse embeddings of the store")
    parser.add("--queries", None, "name of the query set; may be left out if the store has only one")
    parser.add("--split", "test", "split whose queries are searched")
    parser.add("--random-store", None, "folder of a store of random vectors, which is made; default: none")
    parser.add("--passages", 20_000, "random passages")
    parser.add("--words", [200, 40], "words drawn for a random passage, query", nargs=2)
    parser.add("--num-queries", 300, "random queries")
    parser.add("--shards", [1, 4], "numbers of shards")
    parser.add("--depth", 1000, "hits whose ranking is compared")
    parser.add("--k", 100, "hits of a query in the timed search")
    parser.add("--threads", [1, 2], "threads of each system")
    parser.add("--rounds", 7, "rounds that are timed")
    parser.add("--json", "results/sparse_search.json", "output file")
    options = parser.parse_args()
    if bool(options.store) != bool(options.embeddings) or not (options.store or options.random_store):
        parser.error("expected --store with --embeddings, --random-store, or both")
    cells: dict[str, dict[str, Any]] = {}
    document = {"options": vars(options), "cpu": cpu_name(), "cells": cells}
    for name in options.embeddings:
        store = Store(options.store)
        texts = store.queries(options.queries).split(options.split).texts
        queries, speed = encode_queries(store, name, texts)
        cells[name] = compare(store, name, queries, texts, options) | {"encoder, queries per second": speed}
        write_json(options.json, document)
    if options.random_store:
        store = make_random_store(options.random_store, options.passages, options.words[0])
        queries = random_vectors(options.num_queries, options.words[1], seed=1_000_000)
        cells["random"] = compare(store, "random", queries, None, options)
        write_json(options.json, document)
    report(cells)
    print(f"\nCPU: {document['cpu']}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
