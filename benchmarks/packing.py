"""Compares unpadded (packed) batches with padded ones and with sentence-transformers on this CPU, in ms per batch.

    python benchmarks/packing.py --data examples/squad --json results/packing.json

All use bfloat16 if the CPU supports it, and the same number of threads. They alternate in one process, for one query,
32 queries (a batch of a busy server), and passages. Times are medians over the rounds; ratios are medians of those
within each round.
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


def read_texts(folder: Path, name: str, count: int) -> list[str]:
    """Returns the first texts of a BEIR file, compressed or not.

    Args:
        folder: The BEIR folder.
        name: "queries" or "corpus".
        count: Number of texts.
    """
    path = next(folder.glob(f"{name}.jsonl*"))
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return [json.loads(line)["text"] for line in itertools.islice(file, count)]


def main() -> None:
    """Reads the options, measures each kind of batch, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="examples/squad", help="BEIR folder (default: %(default)s)")
    parser.add_argument(
        "--model", default="sentence-transformers/all-MiniLM-L6-v2", help="encoder (default: %(default)s)"
    )
    parser.add_argument("--passages", type=int, default=512, help="number of passages (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all cores)")
    parser.add_argument("--json", default="results/packing.json", help="output file (default: %(default)s)")
    options = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    from retriever.encoding.encoder import Encoder
    from retriever.forward import packing
    from retriever.model.files import resolve
    from retriever.options import EncoderOptions

    settings = EncoderOptions(compile="never")
    packed = Encoder(options.model, settings, threads=options.threads)
    with mock.patch.object(packing, "kernel", return_value=None):  # without the kernel, an encoder pads its batches
        padded = Encoder(options.model, settings, threads=options.threads)
    peer = SentenceTransformer(str(resolve(options.model)), device="cpu", model_kwargs={"dtype": packed.dtype})
    queries = read_texts(Path(options.data), "queries", 640)
    passages = read_texts(Path(options.data), "corpus", options.passages)
    cases: dict[str, tuple[str, list[list[str]]]] = {
        "1 query": ("query", [[text] for text in queries[:40]]),
        "32 queries": ("query", [queries[start : start + 32] for start in range(0, 640, 32)]),
        f"{options.passages} passages": ("passage", [passages]),
    }
    document: dict[str, Any] = {"options": vars(options), "numerics": [packed.numerics, padded.numerics], "ms": {}}
    print(
        f"{'batch':16} {'packed ms':>10} {'padded':>8} {'sentence-transformers':>22}   padded / packed, peer / packed"
    )
    for name, (side, batches) in cases.items():
        systems = {
            "packed": lambda batch, side=side: packed.encode(batch, side=side),
            "padded": lambda batch, side=side: padded.encode(batch, side=side),
            "theirs": lambda batch: peer.encode(batch, normalize_embeddings=True, show_progress_bar=False),
        }
        times_ms: dict[str, list[float]] = {system: [] for system in systems}
        for number in range(options.rounds + 1):
            for system, encode in systems.items():
                started = time.perf_counter()
                for batch in batches:
                    encode(batch)
                if number:  # the first round is a warm-up
                    times_ms[system].append(1000 * (time.perf_counter() - started) / len(batches))
        ratios = [
            statistics.median(b / a for a, b in zip(times_ms["packed"], times_ms[system], strict=True))
            for system in ("padded", "theirs")
        ]
        document["ms"][name] = {**times_ms, "ratios": ratios}
        medians = {system: statistics.median(values) for system, values in times_ms.items()}
        print(
            f"{name:16} {medians['packed']:10.1f} {medians['padded']:8.1f} {medians['theirs']:22.1f}   "
            f"{ratios[0]:.2f}, {ratios[1]:.2f}",
            flush=True,
        )
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
