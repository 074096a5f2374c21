"""Measures the mining of negatives for a training split: time, queries/s, and peak memory of all processes.

    python benchmarks/mining.py --store data/squad --sources bm25 exact:minilm [--reranker models/reranker --limit 2000]

The store has the corpus, its query set, and what the sources need. Artifacts that an earlier run of this benchmark left
in the store are removed first. Memory is the sum of the proportional set sizes (PSS) of the job and its descendants.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from benchmarks.common.watching import watch_job
from indexing.store.store import Store

NAME = "benchmark"  # of the candidates, the scores (with a suffix) and the negatives


def remove_earlier_artifacts(store: Store) -> None:
    """Removes the artifacts of an earlier run, complete or not; each before the ones that it was made from."""
    for kind in ("negatives/", "scores/", "candidates/"):
        incomplete = [key for key in store.incomplete_keys() if key.startswith(kind)]
        for key in reversed([*store.keys(kind), *incomplete]):
            if key.split("/")[1].startswith(NAME):
                store.remove(key)


def main() -> None:
    """Reads the options, mines negatives while memory is watched, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--store", None, "store with the corpus, the queries and the sources", required=True)
    parser.add("--split", "train", "split whose queries are mined for")
    parser.add("--sources", ["bm25", "exact:minilm"], "search sources of the candidates")
    parser.add("--depth", 200, "candidates per query and source")
    parser.add("--limit", None, "use the first N queries of the split (default: all)", type=int)
    parser.add("--reranker", None, "cross-encoder for denoising (default: none)")
    parser.add("--drop-answers", False, "drop candidates that contain a known answer")
    parser.add("--json", "results/mining.json", "output file")
    options = parser.parse_args()
    store = Store(options.store)
    remove_earlier_artifacts(store)
    arguments = ["--split", options.split, "--candidates", NAME, "--name", NAME, "--depth", options.depth]
    arguments += ["--limit", options.limit] if options.limit else []
    arguments += ["--reranker", options.reranker] if options.reranker else []
    arguments += ["--drop-answers"] if options.drop_answers else []
    job = watch_job(options.store, "mine_negatives", *arguments, "--sources", *options.sources)
    num_queries = store.open("negatives", NAME).rows
    candidates = store.open("candidates", NAME)
    figures = {
        "queries": num_queries,
        "seconds": round(job.seconds, 1),
        "queries_per_second": round(num_queries / job.seconds, 1),
        "peak_pss_bytes_all_processes": job.pss_bytes,
        "candidates": candidates.rows,
        "candidates_bytes": sum(part.bytes for part in candidates.parts),
        "job": job.output.splitlines(),
    }
    write_json(options.json, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
