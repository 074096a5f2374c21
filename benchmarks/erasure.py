"""Measures the erasure of passages from a corpus with embeddings, and the import of the same corpus.

    python benchmarks/erasure.py --passages 200000

The vectors are random and are stored without an encoder, as an erasure does not read them.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import write_json
from benchmarks.common.program import Parser
from riptide import Corpus, Store
from riptide.indexing.corpus.corpus import save_array


def write_corpus(path: Path, count: int, words: int, random: np.random.Generator) -> None:
    """Writes JSON lines of passages of random numbers."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = " ".join(map(str, random.integers(0, 50_000, words).tolist()))
            file.write(json.dumps({"id": f"p{number}", "text": text}) + "\n")


def main() -> None:
    """Reads the options, makes the store, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--passages", 200_000, "passages of the corpus")
    parser.add("--words", 60, "words of a passage")
    parser.add("--dim", 384, "dimension of the vectors")
    parser.add("--erased", [1, 1000], "numbers of passages that are erased, one after the other")
    parser.add("--json", "results/erasure.json", "output file")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="riptide-erasure-") as folder:
        root, store = Path(folder), Store(f"{folder}/store")
        write_corpus(root / "corpus.jsonl", options.passages, options.words, random)
        started = time.perf_counter()
        corpus = store.import_corpus(root / "corpus.jsonl")
        figures: dict[str, Any] = {"import_s": round(time.perf_counter() - started, 2)}
        with store.create("embeddings", "e/g0000", inputs={"corpus": corpus.generations[0]}) as draft:
            for part in corpus.parts:
                vectors = random.standard_normal((part.part.rows, options.dim), np.float32).astype(np.float16)
                draft.commit(part.part.name, ".npy", functools.partial(save_array, vectors), rows=len(vectors))
        for count in options.erased:
            rows = random.choice(np.setdiff1d(np.arange(options.passages), Corpus.open(store).deleted), count, False)
            (root / "ids.txt").write_text("".join(f"p{row}\n" for row in rows), encoding="utf-8")
            started = time.perf_counter()
            store.import_corpus(erase=root / "ids.txt")
            seconds = round(time.perf_counter() - started, 2)
            receipt = json.loads(max((root / "store/erasures").glob("e*.json")).read_bytes())
            figures[f"{count}"] = {
                "erase_s": seconds,
                "parts": sum(entry["parts"] for entry in receipt["artifacts"]),
                "megabytes": round(sum(entry["bytes"] for entry in receipt["artifacts"]) / 1e6, 1),
            }
    print(json.dumps(figures, indent=1))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
