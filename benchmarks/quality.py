"""Measures the retrieval quality of exact and dense search on a BEIR folder, through the jobs.

    python benchmarks/quality.py --source ../shared/data/scifact --factory IVF64,PQ48

The jobs are import_corpus, encode_corpus, build_index, search and evaluate, on a temporary store.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Reads the options and runs the jobs; the last one prints and writes the metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="examples/squad", help="BEIR folder (default: %(default)s)")
    parser.add_argument(
        "--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="encoder (default: %(default)s)"
    )
    parser.add_argument("--factory", default="IVF64,PQ48", help="FAISS factory of the index (default: %(default)s)")
    parser.add_argument("--split", default="test", help="split whose queries are measured (default: %(default)s)")
    parser.add_argument("--json", default="results/quality.json", help="output file (default: %(default)s)")
    options = parser.parse_args()

    def run_job(name: str, *arguments: str) -> None:
        subprocess.run([sys.executable, f"jobs/{name}.py", "--store", store, *arguments], cwd=ROOT, check=True)

    with tempfile.TemporaryDirectory(prefix="riptide-quality-") as store:
        run_job("import_corpus", "--source", options.source, "--part-size", "3000")
        run_job("encode_corpus", "--encoder", options.encoder, "--name", "e")
        run_job("build_index", "--factory", options.factory, "--shards", "4")
        for mode in ("exact", "dense"):
            run_job("search", "--mode", mode, "--k", "100", "--split", options.split, "--name", mode)
        run_job("evaluate", "--run", "exact", "dense", "--split", options.split, "--json", options.json, "--overwrite")


if __name__ == "__main__":
    main()
