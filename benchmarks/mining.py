"""Measures the mining of negatives for a training split: time, queries/s, and peak memory of all processes.

    python benchmarks/mining.py --store data/squad --sources bm25 exact:minilm [--reranker models/reranker --limit 2000]

The store has the corpus, its query set, and what the sources need. Artifacts that an earlier run of this benchmark left
in the store are removed first. Memory is the sum of the proportional set sizes (PSS) of the job and its descendants.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT))

from import_corpus import tree_pss  # noqa: E402

from indexing.store.store import Store  # noqa: E402

NAME = "benchmark"  # of the candidates, the scores (with a suffix) and the negatives


def remove_earlier_artifacts(store: Store) -> None:
    """Removes the artifacts of an earlier run, complete or not; each before the ones that it was made from."""
    for kind in ("negatives/", "scores/", "candidates/"):
        incomplete = [key for key in store.incomplete() if key.startswith(kind)]
        for key in reversed([*store.keys(kind), *incomplete]):
            if key.split("/")[1].startswith(NAME):
                store.remove(key)


def main() -> None:
    """Reads the options, mines negatives while memory is watched, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="store with the corpus, the queries and the sources")
    parser.add_argument("--split", default="train", help="split whose queries are mined for (default: %(default)s)")
    parser.add_argument(
        "--sources",
        nargs="+",
        default=["bm25", "exact:minilm"],
        help="search sources of the candidates (default: bm25 exact:minilm)",
    )
    parser.add_argument("--depth", type=int, default=200, help="candidates per query and source (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="use the first N queries of the split (default: all)")
    parser.add_argument("--reranker", help="cross-encoder for denoising (default: none)")
    parser.add_argument("--drop-answers", action="store_true", help="drop candidates that contain a known answer")
    parser.add_argument("--json", default="results/mining.json", help="output file (default: %(default)s)")
    options = parser.parse_args()
    store = Store(options.store)
    remove_earlier_artifacts(store)
    command = [sys.executable, "jobs/mine_negatives.py", "--store", options.store, "--split", options.split]
    command += ["--candidates", NAME, "--name", NAME, "--depth", str(options.depth), "--sources", *options.sources]
    command += ["--limit", str(options.limit)] if options.limit else []
    command += ["--reranker", options.reranker] if options.reranker else []
    command += ["--drop-answers"] if options.drop_answers else []
    started = time.perf_counter()
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    peak = 0
    while job.poll() is None:
        peak = max(peak, tree_pss(psutil.Process(job.pid)))
        time.sleep(0.5)
    seconds = time.perf_counter() - started
    output = job.stdout.read() if job.stdout else ""
    if job.returncode:
        sys.exit(job.returncode)
    num_queries = store.open("negatives", NAME).rows
    candidates = store.open("candidates", NAME)
    figures = {
        "queries": num_queries,
        "seconds": round(seconds, 1),
        "queries_per_second": round(num_queries / seconds, 1),
        "peak_pss_bytes_all_processes": peak,
        "candidates": candidates.rows,
        "candidates_bytes": sum(part.bytes for part in candidates.parts),
        "job": output.splitlines(),
    }
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
