"""End-to-end demo on 1,995 real SQuAD passages: import, encode, index, search, measure. `make demo` runs it.

    python examples/demo.py [STORE]

Every step is a job that you can run yourself; the demo prints the command of each step.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
MODES = ("exact", "dense", "bm25", "hybrid")
QUESTIONS_SHOWN = 3


def job(name: str, *arguments: str) -> None:
    """Runs a job as a user would, and exits if it fails."""
    print(f"\n$ riptide {name} {' '.join(arguments)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "riptide", name, *arguments], cwd=ROOT).returncode
    if status:
        sys.exit(status)


def show(store_url: str, run: str) -> None:
    """Prints some queries with their best passages."""
    from indexing.search.runs import read_run
    from riptide import Corpus, Queries, Store

    store = Store(store_url)
    corpus, queries = Corpus.open(store), Queries.open(store)
    hits = next(iter(read_run(store.open("runs", run))))
    relevant = dict(zip(*(queries.qrels("test")[c].to_pylist() for c in ("query_id", "corpus_id")), strict=True))
    texts = dict(zip(*queries.split("test"), strict=True))
    query_ids = hits["query_id"].to_pylist()
    step = len(texts) // QUESTIONS_SHOWN
    for query in list(texts)[:: max(1, step)][:QUESTIONS_SHOWN]:
        print(f"\n{texts[query]}")
        first = query_ids.index(query)
        best = hits.slice(first, 3)
        for passage, score in zip(corpus.passages(best["row"].to_numpy()), best["score"].to_pylist(), strict=True):
            mark = "*" if passage.id == relevant[query] else " "
            print(f" {mark} {score:.3f}  {passage.title}: {passage.text[:90]}…")
    print("\n(* the passage that the question was written on)")


def main() -> None:
    started = time.monotonic()
    store = sys.argv[1] if len(sys.argv) > 1 else "data/demo"
    at = ("--store", store)
    job("import-corpus", *at, "--source", "examples/squad", "--part-size", "500")
    job("encode-corpus", *at, "--encoder", MODEL, "--name", "minilm")
    job("build-index", *at, "--embeddings", "minilm", "--factory", "IVF32,PQ48x4fs", "--shards", "4")
    job("build-bm25", *at)
    for mode in MODES:
        files = ("--run", f"results/demo-{mode}.trec", "--overwrite")
        job("search", *at, "--mode", mode, "--k", "100", "--name", f"demo-{mode}", *files)
    job("evaluate", *at, "--run", *(f"demo-{mode}" for mode in MODES), "--json", "results/demo.json", "--overwrite")
    show(store, "demo-hybrid")
    print(f"\nThe store is {store} (riptide store list --store {store}), the runs are results/demo-*.trec, the")
    print(f"figures results/demo.json. It took {time.monotonic() - started:.0f} s; a second run has nothing to make.")
    print(f"\nTo search it in a browser:  riptide serve-search --store {store}")


if __name__ == "__main__":
    main()
