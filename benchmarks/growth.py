"""Compares a corpus that grew by 10% and lost 1% with a store that is built from scratch from the same final corpus.

    python benchmarks/growth.py --source ../shared/data/scifact

Both are searched exactly. By default, encoding is eager and in float32, so that a difference comes from riptide and not
from the rounding of a batch. The figures also say how many passages were encoded and indexed for the second generation.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import Parser, run_job


def main() -> None:
    """Reads the options, builds and searches both stores, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--source", None, "BEIR folder with compressed files", type=Path, required=True)
    parser.add("--encoder", MINILM, "encoder")
    parser.add("--dtype", "float32", "bfloat16 also shows differences by rounding", choices=["float32", "bfloat16"])
    parser.add("--json", "results/growth.json", "output file")
    options = parser.parse_args()

    def encode_and_index(store: Path) -> None:
        """Makes the vectors and the index of passages that have none yet."""
        encoder = ("--encoder", options.encoder, "--name", "e", "--dtype", options.dtype, "--compile", "never")
        run_job(store, "encode_corpus", *encoder)
        run_job(store, "build_index", "--factory", "IVF64,PQ48", "--shards", 2)

    with tempfile.TemporaryDirectory(prefix="riptide-growth-") as folder:
        root = Path(folder)
        with gzip.open(options.source / "corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
            passages = lines.readlines()
        first = len(passages) - len(passages) // 11  # the appended passages are 10% of these
        deleted = set(np.random.default_rng(0).choice(first, first // 100, replace=False).tolist())
        final = [line for number, line in enumerate(passages) if number not in deleted]
        for name, corpus in {"first": passages[:first], "more": passages[first:], "final": final}.items():
            (root / name).mkdir()
            (root / name / "corpus.jsonl").write_text("".join(corpus), encoding="utf-8")
            if name != "more":
                shutil.copy(options.source / "queries.jsonl.gz", root / name)
        deleted_ids = [json.loads(passages[number])["_id"] for number in sorted(deleted)]
        (root / "deleted").write_text("".join(f"{id}\n" for id in deleted_ids))
        grown, rebuilt = root / "grown", root / "rebuilt"
        run_job(grown, "import_corpus", "--source", root / "first", "--part-size", 1000)
        encode_and_index(grown)
        run_job(grown, "import_corpus", "--source", root / "more", "--append", "--delete", root / "deleted")
        encode_and_index(grown)
        run_job(rebuilt, "import_corpus", "--source", root / "final", "--part-size", 1000)
        encode_and_index(rebuilt)

        from indexing.search.runs import read_run
        from indexing.store.store import Store

        hits: dict[str, list[tuple[str, str, float]]] = {}
        for store in (grown, rebuilt):
            run_job(store, "search", "--mode", "exact", "--split", "all", "--k", 100, "--name", "run")
            rows = [row for table in read_run(Store(str(store)).open("runs", "run")) for row in table.to_pylist()]
            hits[store.name] = [(row["query_id"], row["id"], row["score"]) for row in rows]
        pairs = list(zip(hits["grown"], hits["rebuilt"], strict=True))
        figures = {
            "passages": first,
            "appended": len(passages) - first,
            "deleted": len(deleted),
            "encoded_for_the_second_generation": Store(str(grown)).open("embeddings", "e/g0001").rows,
            "indexed_for_it": Store(str(grown)).open("index", "e/g0001").rows,
            "hits": len(pairs),
            "hits_in_another_place": sum(one[:2] != other[:2] for one, other in pairs),
            "largest_difference_of_a_score": max(abs(one[2] - other[2]) for one, other in pairs),
        }
    print(json.dumps(figures, indent=1))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
