"""Retrieval quality of exact and dense search on a BEIR folder, through the jobs.

python benchmarks/quality.py --source ../shared/data/scifact --factory IVF64,PQ48
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="examples/squad")
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--factory", default="IVF64,PQ48")
    parser.add_argument("--split", default="test")
    parser.add_argument("--json", default="results/quality.json")
    options = parser.parse_args()

    def job(name: str, *arguments: str) -> None:
        subprocess.run([sys.executable, f"jobs/{name}.py", "--store", store, *arguments], cwd=ROOT, check=True)

    with tempfile.TemporaryDirectory(prefix="riptide-quality-") as store:
        job("import_corpus", "--source", options.source, "--part-size", "3000")
        job("encode_corpus", "--encoder", options.encoder, "--name", "e")
        job("build_index", "--factory", options.factory, "--shards", "4")
        for mode in ("exact", "dense"):
            job("search", "--mode", mode, "--k", "100", "--split", options.split, "--name", mode)
        job("evaluate", "--run", "exact", "dense", "--split", options.split, "--json", options.json, "--overwrite")


if __name__ == "__main__":
    main()
