"""Measures the retrieval quality of exact and dense search on a BEIR folder, through the jobs.

    python benchmarks/quality.py --source ../shared/data/scifact --factory IVF64,PQ48

The jobs are import_corpus, encode_corpus, build_index, search and evaluate, on a temporary store.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.models import MINILM
from benchmarks.common.program import Parser, run_job


def main() -> None:
    """Reads the options and runs the jobs; the last one prints and writes the metrics."""
    parser = Parser(__doc__)
    parser.add("--source", "examples/squad", "BEIR folder")
    parser.add("--encoder", MINILM, "encoder")
    parser.add("--factory", "IVF64,PQ48", "FAISS factory of the index")
    parser.add("--split", "test", "split whose queries are measured")
    parser.add("--json", "results/quality.json", "output file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="riptide-quality-") as store:
        run_job(store, "import_corpus", "--source", options.source, "--part-size", "3000")
        run_job(store, "encode_corpus", "--encoder", options.encoder, "--name", "e")
        run_job(store, "build_index", "--factory", options.factory, "--shards", "4")
        for mode in ("exact", "dense"):
            run_job(store, "search", "--mode", mode, "--k", "100", "--split", options.split, "--name", mode)
        run_job(
            store,
            "evaluate",
            "--run",
            "exact",
            "dense",
            "--split",
            options.split,
            "--json",
            options.json,
            "--overwrite",
        )


if __name__ == "__main__":
    main()
