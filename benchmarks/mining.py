"""Mine negatives for a training split: time, questions/s, and the peak memory of all processes together.

    python benchmarks/mining.py --store data/squad --sources bm25 exact:minilm [--reranker models/reranker --limit 2000]

The store has the corpus, its question set, and what the sources need. What an earlier run left under the names that
this one takes is removed first. Memory is the sum of the proportional set sizes (PSS) of the job and its descendants.
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

from import_corpus import tree_pss  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--split", default="train")
    parser.add_argument("--sources", nargs="+", default=["bm25", "exact:minilm"])
    parser.add_argument("--depth", type=int, default=200)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--reranker")
    parser.add_argument("--drop-answers", action="store_true")
    parser.add_argument("--json", default="results/mining.json")
    options = parser.parse_args()
    name = "benchmark"
    sys.path.insert(0, str(ROOT))
    from indexing.store import Store

    store = Store(options.store)
    for kind in ("negatives/", "scores/", "candidates/"):
        for key in reversed([*store.keys(kind), *(k for k in store.incomplete() if k.startswith(kind))]):
            if key.split("/")[1].startswith(name):
                store.remove(key)
    command = [sys.executable, "jobs/mine_negatives.py", "--store", options.store, "--split", options.split]
    command += ["--candidates", name, "--name", name, "--depth", str(options.depth), "--sources", *options.sources]
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
    told = job.stdout.read() if job.stdout else ""
    if job.returncode:
        sys.exit(job.returncode)
    questions = store.open("negatives", name).rows
    pool = store.open("candidates", name)
    found = {
        "questions": questions,
        "seconds": round(seconds, 1),
        "questions_per_second": round(questions / seconds, 1),
        "peak_pss_bytes_all_processes": peak,
        "candidates": pool.rows,
        "candidates_bytes": sum(part.bytes for part in pool.parts),
        "job": told.splitlines(),
    }
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
