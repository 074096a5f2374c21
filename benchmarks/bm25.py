"""BM25 against Pyserini on the same passages: the same hits as its command line, and queries/s against batch_search.

    python benchmarks/bm25.py --source ../shared/data/squad --split test

Pyserini indexes and searches by its own command line (its JVM is started as riptide's, for the Java that comes with pip
lacks a module which Pyserini asks for). Throughput: pairs of the two in one process, one index of one segment each,
then riptide's over 4 shards; hits as plain lists on both sides.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def pyserini(*arguments: str) -> None:
    """`python -m ARGUMENTS…` with the JVM started first; in a process of its own."""
    run(__file__, "--module", *arguments)


def prepare(source: str, split: str, folder: Path, k: int) -> tuple[list[str], list[str]]:
    """Import and index with both; riptide's run and Pyserini's are written to folder."""
    from indexing.bm25 import contents
    from indexing.corpus import Corpus
    from indexing.queries import Queries
    from indexing.store import Store

    store = str(folder / "store")
    run("jobs/import_corpus.py", "--store", store, "--source", source)
    run("jobs/build_bm25.py", "--store", store, "--shards", "4")
    run("jobs/build_bm25.py", "--store", store, "--shards", "1", "--name", "one")
    for name in ("bm25", "one"):
        told = ("--k", str(k), "--split", split, "--run", str(folder / f"{name}.trec"))
        run("jobs/search.py", "--store", store, "--source", f"bm25:{name}", *told)
    corpus = Corpus.open(Store(store))
    ids = corpus.ids(np.arange(corpus.num_rows))
    (folder / "json").mkdir()
    with open(folder / "json" / "passages.jsonl", "w") as file:
        for id, text in zip(ids, contents(corpus.parts, 0, corpus.num_rows), strict=True):
            file.write(json.dumps({"id": id, "contents": text}) + "\n")
    asked = Queries.open(Store(store)).split(split)
    with open(folder / "topics.tsv", "w") as file:
        file.writelines(f"{id}\t{' '.join(text.split())}\n" for id, text in zip(*asked, strict=True))
    index = str(folder / "pyserini")
    pyserini("pyserini.index.lucene", "--collection", "JsonCollection", "--input", str(folder / "json"),
             "--index", index, "--generator", "DefaultLuceneDocumentGenerator", "--threads", "1",
             "--optimize")  # fmt: skip
    pyserini("pyserini.search.lucene", "--index", index, "--topics", str(folder / "topics.tsv"), "--output",
             str(folder / "pyserini.trec"), "--bm25", "--k1", "0.9", "--b", "0.4", "--hits", str(k))  # fmt: skip
    return asked.ids, asked.texts


def read(path: Path) -> dict[str, list[tuple[str, float]]]:
    found: dict[str, list[tuple[str, float]]] = {}
    for line in path.read_text().splitlines():
        query, _, id, _, score, _ = line.split()
        found.setdefault(query, []).append((id, float(score)))
    return found


def differing(ours: dict, theirs: dict, k: int) -> int:
    """Queries whose hits differ by more than the order (and choice at the end) of equal scores."""
    count = 0
    for query in {*ours, *theirs}:
        a, b = ours.get(query, []), theirs.get(query, [])
        # Both files lower the later ones of equal scores by the least they can print: compare to 1e-3.
        same = len(a) == len(b) and np.allclose([s for _, s in a], [s for _, s in b], rtol=0, atol=1e-3)
        last = b[-1][1] + 2e-3 if len(b) == k else -1.0
        surely = {id for id, score in a if score > last}, {id for id, score in b if score > last}
        count += not (same and surely[0] <= {id for id, _ in b} and surely[1] <= {id for id, _ in a})
    return count


def throughput(folder: Path, ids: list[str], texts: list[str], k: int, threads: int, pairs: int) -> dict[str, object]:
    from indexing.bm25 import Bm25
    from indexing.corpus import Corpus
    from indexing.store import Store

    store = Store(str(folder / "store"))
    searchers = {name: Bm25.open(store, name, Corpus.open(store)).searcher() for name in ("one", "bm25")}
    from pyserini.search.lucene import LuceneSearcher

    theirs = LuceneSearcher(str(folder / "pyserini"))
    theirs.set_bm25(0.9, 0.4)

    def peer() -> None:
        found = theirs.batch_search(texts, ids, k=k, threads=threads)
        assert sum(len([(hit.docid, hit.score) for hit in hits]) for hits in found.values())

    ways = {"pyserini": peer}
    ways |= {name: lambda s=s: s.search(texts, k, threads=threads) for name, s in searchers.items()}
    for way in ways.values():
        way()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(pairs):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            rates[name].append(len(texts) / (time.perf_counter() - started))
    ratios = {
        name: statistics.median(a / b for a, b in zip(rates[name], rates["pyserini"], strict=True))
        for name in searchers
    }
    return {"rates": rates, "ratios": ratios}


def main() -> None:
    if sys.argv[1:2] == ["--module"]:
        from indexing.java import jvm

        jvm()
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="examples/squad")
    parser.add_argument("--split", default="test")
    parser.add_argument("--k", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", default="results/bm25.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="riptide-bm25-") as name:
        folder = Path(name)
        ids, texts = prepare(options.source, options.split, folder, options.k)
        theirs = read(folder / "pyserini.trec")
        found: dict[str, object] = {"queries": len(ids)}
        for ours in ("one", "bm25"):
            found[f"differing_{ours}"] = differing(read(folder / f"{ours}.trec"), theirs, options.k)
        found["same_in_4_shards"] = read(folder / "one.trec") == read(folder / "bm25.trec")
        found |= throughput(folder, ids, texts, options.k, options.threads, options.pairs)
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
