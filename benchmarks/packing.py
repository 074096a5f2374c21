"""Texts end to end against texts padded, and against sentence-transformers, on this processor.

    python benchmarks/packing.py --data examples/squad --json results/packing.json

All in bfloat16 where the processor has it, with all its threads, in turns within one process: a question, 32 questions
(a batch of a busy server), and passages. Medians of the rounds; ratios are medians of those within each round.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def lines(folder: Path, name: str, count: int) -> list[str]:
    """The texts of the first lines of a BEIR file, compressed or not."""
    path = next(folder.glob(f"{name}.jsonl*"))
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return [json.loads(line)["text"] for line in itertools.islice(file, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="examples/squad", help="a BEIR folder")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--passages", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", default="results/packing.json")
    options = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    from retriever import packing
    from retriever.encoder import Encoder, EncoderOptions, resolve

    settings = EncoderOptions(compile="never")
    packed = Encoder(options.model, settings, threads=options.threads)
    with mock.patch.object(packing, "kernel", return_value=None):
        padded = Encoder(options.model, settings, threads=options.threads)
    peer = SentenceTransformer(str(resolve(options.model)), device="cpu", model_kwargs={"dtype": packed.dtype})
    questions = lines(Path(options.data), "queries", 640)
    cases: dict[str, tuple[str, list[list[str]]]] = {
        "1 question": ("query", [[text] for text in questions[:40]]),
        "32 questions": ("query", [questions[at : at + 32] for at in range(0, 640, 32)]),
        f"{options.passages} passages": ("passage", [lines(Path(options.data), "corpus", options.passages)]),
    }
    document: dict[str, Any] = {"options": vars(options), "numerics": [packed.numerics, padded.numerics], "ms": {}}
    print(
        f"{'texts':16} {'packed ms':>10} {'padded':>8} {'sentence-transformers':>22}   padded / packed, theirs / packed"
    )
    for name, (side, batches) in cases.items():
        runs = {
            "packed": lambda batch, side=side: packed.encode(batch, side=side),
            "padded": lambda batch, side=side: padded.encode(batch, side=side),
            "theirs": lambda batch: peer.encode(batch, normalize_embeddings=True, show_progress_bar=False),
        }
        found: dict[str, list[float]] = {kind: [] for kind in runs}
        for turn in range(options.rounds + 1):
            for kind, run in runs.items():
                begun = time.perf_counter()
                for batch in batches:
                    run(batch)
                if turn:  # the first warms up
                    found[kind].append(1000 * (time.perf_counter() - begun) / len(batches))
        ratios = [
            statistics.median(b / a for a, b in zip(found["packed"], found[kind], strict=True))
            for kind in ("padded", "theirs")
        ]
        document["ms"][name] = {**found, "ratios": ratios}
        middle = {kind: statistics.median(values) for kind, values in found.items()}
        print(f"{name:16} {middle['packed']:10.1f} {middle['padded']:8.1f} {middle['theirs']:22.1f}   "
              f"{ratios[0]:.2f}, {ratios[1]:.2f}", flush=True)  # fmt: skip
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
