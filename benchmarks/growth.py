"""A corpus that grows by 10% and loses 1%, against a store built anew from the same final corpus.

    python benchmarks/growth.py --source ../shared/data/scifact

Both are searched exactly; float32 and eager by default, so that what may differ is riptide's own doing and not the
last bits of a batch. Says how many passages were encoded and indexed for the second generation.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a folder in BEIR form")
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", default="results/growth.json")
    options = parser.parse_args()

    def job(store: Path, name: str, *arguments: object) -> None:
        command = [sys.executable, f"jobs/{name}.py", "--store", str(store), *map(str, arguments)]
        subprocess.run(command, cwd=ROOT, check=True)

    def make(store: Path) -> None:
        """Vectors and an index of whatever the corpus has and they lack."""
        encoder = ("--encoder", options.encoder, "--name", "e", "--dtype", options.dtype, "--compile", "never")
        job(store, "encode_corpus", *encoder)
        job(store, "build_index", "--factory", "IVF64,PQ48", "--shards", 2)

    with tempfile.TemporaryDirectory(prefix="riptide-growth-") as folder:
        root = Path(folder)
        with gzip.open(options.source / "corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
            passages = lines.readlines()
        first = len(passages) - len(passages) // 11  # what is appended is 10% of what was there
        gone = set(np.random.default_rng(0).choice(first, first // 100, replace=False).tolist())
        kept = [line for number, line in enumerate(passages) if number not in gone]
        for name, own in {"first": passages[:first], "more": passages[first:], "anew": kept}.items():
            (root / name).mkdir()
            (root / name / "corpus.jsonl").write_text("".join(own), encoding="utf-8")
            if name != "more":
                shutil.copy(options.source / "queries.jsonl.gz", root / name)
        (root / "gone").write_text("".join(json.loads(passages[number])["_id"] + "\n" for number in sorted(gone)))
        grown, anew = root / "grown", root / "built"
        job(grown, "import_corpus", "--source", root / "first", "--part-size", 1000)
        make(grown)
        job(grown, "import_corpus", "--source", root / "more", "--append", "--delete", root / "gone")
        make(grown)
        job(anew, "import_corpus", "--source", root / "anew", "--part-size", 1000)
        make(anew)

        from indexing.runs import read_run
        from indexing.store import Store

        hits: dict[str, list[tuple[str, str, float]]] = {}
        for store in (grown, anew):
            job(store, "search", "--mode", "exact", "--split", "all", "--k", 100, "--name", "run")
            rows = [row for table in read_run(Store(str(store)).open("runs", "run")) for row in table.to_pylist()]
            hits[store.name] = [(row["query_id"], row["id"], row["score"]) for row in rows]
        pairs = list(zip(hits["grown"], hits["built"], strict=True))
        found = {
            "passages": first, "appended": len(passages) - first, "deleted": len(gone),
            "encoded_for_the_second_generation": Store(str(grown)).open("embeddings", "e/g0001").rows,
            "indexed_for_it": Store(str(grown)).open("index", "e/g0001").rows,
            "hits": len(pairs),
            "hits_in_another_place": sum(one[:2] != other[:2] for one, other in pairs),
            "largest_difference_of_a_score": max(abs(one[2] - other[2]) for one, other in pairs),
        }  # fmt: skip
    print(json.dumps(found, indent=1))
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
