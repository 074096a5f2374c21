"""Compares BM25 with Pyserini on the same passages: hits against its command line, queries/s against batch_search.

    python benchmarks/bm25.py --source ../shared/data/squad --split test

Pyserini indexes and searches through its own command line. Its JVM is started in the same way as riptide's, because the
Java that is installed from PyPI lacks a module that Pyserini requests. Throughput is measured in one process, in rounds
of Pyserini with one segment, riptide with one shard, and riptide with 4 shards. All of them return the hits as lists.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common.files import write_documents, write_json
from benchmarks.common.program import ROOT, Parser
from benchmarks.common.timing import in_turns, ratio
from riptide import Store
from riptide.indexing.corpus.corpus import passage_contents
from riptide.indexing.lucene.bm25_index import Bm25
from riptide.indexing.lucene.java import jvm

SHARDS = {"one": 1, "bm25": 4}  # of the indexes of riptide
Run = dict[str, list[tuple[str, float]]]
"""Hits of each query id, best first: passage id and score."""


def run_pyserini(*arguments: str) -> None:
    """Runs `python -m ARGUMENTS…` in a separate process that starts riptide's JVM first."""
    subprocess.run([sys.executable, __file__, "--module", *arguments], cwd=ROOT, check=True, capture_output=True)


def prepare(source: str, split: str, folder: Path, k: int) -> tuple[list[str], list[str]]:
    """Indexes and searches with both systems; returns the ids and the texts of the queries.

    The folder gets store/ and pyserini/ (the indexes), and one.trec, bm25.trec and pyserini.trec (the runs).
    """
    store = Store(folder / "store")
    corpus = store.import_corpus(source)
    for name, shards in SHARDS.items():
        store.build_bm25(name=name, shards=shards)
        store.search_queries(f"bm25:{name}", split=split, k=k).write_trec(str(folder / f"{name}.trec"))
    contents = zip(
        corpus.ids(np.arange(corpus.num_rows)), passage_contents(corpus.parts, 0, corpus.num_rows), strict=True
    )
    write_documents(folder / "json" / "passages.jsonl", ({"id": id, "contents": text} for id, text in contents))
    queries = store.queries().split(split)
    with open(folder / "topics.tsv", "w", encoding="utf-8") as file:
        file.writelines(f"{id}\t{' '.join(text.split())}\n" for id, text in zip(*queries, strict=True))
    index = str(folder / "pyserini")
    index_options = ["--collection", "JsonCollection", "--generator", "DefaultLuceneDocumentGenerator"]
    index_options += ["--input", str(folder / "json"), "--index", index, "--threads", "1", "--optimize"]
    run_pyserini("pyserini.index.lucene", *index_options)
    topics = ["--index", index, "--topics", str(folder / "topics.tsv"), "--output", str(folder / "pyserini.trec")]
    bm25 = ["--bm25", "--k1", "0.9", "--b", "0.4", "--hits", str(k)]
    run_pyserini("pyserini.search.lucene", *topics, *bm25)
    return queries.ids, queries.texts


def read_run(path: Path) -> Run:
    """Reads a run from a TREC file."""
    run: Run = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        query, _, id, _, score, _ = line.split()
        run.setdefault(query, []).append((id, float(score)))
    return run


def count_differences(our_run: Run, peer_run: Run, k: int) -> int:
    """Returns the number of queries whose hits differ in more than the order of equal scores.

    Which of several passages with the lowest score are among the k hits may differ too.
    """
    count = 0
    for query in {*our_run, *peer_run}:
        ours, theirs = our_run.get(query, []), peer_run.get(query, [])
        # Both files write repeated scores with the smallest possible decrease, so scores are compared to 1e-3.
        same_scores = len(ours) == len(theirs) and np.allclose(
            [score for _, score in ours], [score for _, score in theirs], rtol=0, atol=1e-3
        )
        lowest = theirs[-1][1] + 2e-3 if len(theirs) == k else -1.0
        our_certain_ids = {id for id, score in ours if score > lowest}
        peer_certain_ids = {id for id, score in theirs if score > lowest}
        same_ids = our_certain_ids <= {id for id, _ in theirs} and peer_certain_ids <= {id for id, _ in ours}
        count += not (same_scores and same_ids)
    return count


def measure_throughput(
    folder: Path, ids: list[str], texts: list[str], k: int, threads: int, rounds: int
) -> dict[str, object]:
    """Measures queries/s of Pyserini and of riptide with one shard and four, in turns.

    Returns:
        "rates": queries/s of each round by system; "ratios": median ratio to Pyserini by index of riptide.
    """
    store = Store(folder / "store")
    searchers = {name: Bm25.open(store, name, store.corpus()).searcher() for name in SHARDS}  # starts riptide's JVM
    from pyserini.search.lucene import LuceneSearcher

    pyserini_searcher = LuceneSearcher(str(folder / "pyserini"))
    pyserini_searcher.set_bm25(0.9, 0.4)

    def search_pyserini() -> None:
        hits_by_query = pyserini_searcher.batch_search(texts, ids, k=k, threads=threads)
        assert sum(len([(hit.docid, hit.score) for hit in hits]) for hits in hits_by_query.values())

    systems: dict[str, Callable[[], object]] = {"pyserini": search_pyserini}
    systems |= {name: partial(each.search, texts, k, threads=threads) for name, each in searchers.items()}
    seconds = in_turns(systems, rounds)
    rates = {name: [len(texts) / each for each in values] for name, values in seconds.items()}
    return {"rates": rates, "ratios": {name: ratio(seconds, "pyserini", name) for name in searchers}}


def main() -> None:
    """Reads the options, compares the hits, measures throughput, prints and writes the figures."""
    if sys.argv[1:2] == ["--module"]:
        jvm()
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    parser = Parser(__doc__)
    parser.add("--source", "examples/squad", "BEIR folder")
    parser.add("--split", "test", "split whose queries are searched")
    parser.add("--k", 200, "hits per query")
    parser.add("--threads", 2, "threads of each system")
    parser.add("--pairs", 5, "rounds that measure throughput")
    parser.add("--json", "results/bm25.json", "output file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="riptide-bm25-") as name:
        folder = Path(name)
        ids, texts = prepare(options.source, options.split, folder, options.k)
        peer_run = read_run(folder / "pyserini.trec")
        figures: dict[str, object] = {"queries": len(ids)}
        for index in SHARDS:
            our_run = read_run(folder / f"{index}.trec")
            figures[f"differing_{index}"] = count_differences(our_run, peer_run, options.k)
        figures["same_in_4_shards"] = read_run(folder / "one.trec") == read_run(folder / "bm25.trec")
        figures |= measure_throughput(folder, ids, texts, options.k, options.threads, options.pairs)
    write_json(options.json, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
