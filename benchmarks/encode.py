"""How fast passages are encoded, side by side with sentence-transformers in the same process.

    python benchmarks/encode.py --data examples/squad/corpus.jsonl.gz --count 512 --threads 2

Rounds alternate riptide, sentence-transformers as it comes (float32, batches of 32) and sentence-transformers in
bfloat16; the medians are compared. Each round has passages of its own: batches of lengths that were met before are
faster. All are given the same strings (title and text joined by a space), tokenise them within the time taken, and are
credited with the same tokens: those of the texts, without padding. Start-up is the
time from a fresh process to the first vectors, once with an empty compiler cache and once with a filled one.
Writes results/encode.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from retriever.encoder import Encoder, EncoderOptions, resolve  # noqa: E402

START = """
import sys, time
begun = time.perf_counter()
from retriever.encoder import Encoder, EncoderOptions
encoder = Encoder(sys.argv[1], EncoderOptions(compile=sys.argv[2]), threads=int(sys.argv[3]))
encoder.encode(["a question"])
print(time.perf_counter() - begun)
"""


def read_passages(path: Path, count: int, rounds: int) -> list[tuple[list[str], list[str]]]:
    """Titles and texts of `count` passages for each round, no passage twice, each round's spread evenly over a BEIR
    corpus (jsonl, gzipped or not); fewer where it is small."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rows = rows[:: max(1, len(rows) // (count * rounds))]
    each = [rows[number::rounds][: min(count, len(rows) // rounds)] for number in range(rounds)]
    return [([row.get("title") or "" for row in part], [row["text"] for row in part]) for part in each]


def start_up(model: str, compile: str, threads: int, cache: str) -> float:
    """Seconds from a fresh process (Python running, nothing imported) to the first vector."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", START, model, compile, str(threads)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Reads the options, runs the rounds, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "examples/squad/corpus.jsonl.gz")
    parser.add_argument("--count", type=int, default=512, help="passages")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--compile", default="auto", choices=["auto", "never", "always"])
    parser.add_argument("--no-start-up", action="store_true", help="leave the start-up times out")
    parser.add_argument("--out", type=Path, default=ROOT / "results/encode.json")
    options = parser.parse_args()

    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    encoder = Encoder(
        options.model, EncoderOptions(dtype=options.dtype, compile=options.compile), threads=options.threads
    )
    first, *others = [encoder.compose(*part) for part in read_passages(options.data, options.count, 1 + options.rounds)]
    num_tokens = [int(encoder.tokenize(passages, side="passage").lengths.sum()) for passages in others]
    folder, device = str(resolve(options.model)), encoder.device.type
    plain = SentenceTransformer(folder, device=device, model_kwargs={"dtype": torch.float32})
    half = SentenceTransformer(folder, device=device, model_kwargs={"dtype": torch.bfloat16})
    sides: dict[str, Callable[[list[str]], Any]] = {
        "riptide": lambda passages: encoder.encode(passages, side="passage"),
        "sentence-transformers float32": lambda passages: plain.encode(passages, batch_size=32),
        "sentence-transformers bfloat16": lambda passages: half.encode(passages, batch_size=32),
    }
    print(f"{len(first)} passages a round, {sum(num_tokens)} tokens, {options.threads} threads; {encoder.numerics}")
    vectors = {name: np.asarray(run(first), dtype=np.float32) for name, run in sides.items()}  # warms up, too
    reference = vectors["sentence-transformers float32"]
    cosine = {
        name: float(((v * reference).sum(1) / np.linalg.norm(v, axis=1) / np.linalg.norm(reference, axis=1)).min())
        for name, v in vectors.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for passages in others:
        for name, run in sides.items():
            begun = time.perf_counter()
            run(passages)
            seconds[name].append(time.perf_counter() - begun)
    figures: dict[str, Any] = {
        "model": options.model,
        "corpus": options.data.name,
        "num_passages": len(first),
        "num_tokens": num_tokens,
        "threads": options.threads,
        "numerics": encoder.numerics,
        "seconds": seconds,
        "smallest_cosine_to_float32": cosine,
    }
    figures["tokens_per_second"] = {
        name: statistics.median(tokens / took for tokens, took in zip(num_tokens, taken, strict=True))
        for name, taken in seconds.items()
    }
    figures["times_as_fast_as"] = {
        name: statistics.median(b / a for a, b in zip(seconds["riptide"], seconds[name], strict=True))
        for name in list(sides)[1:]
    }
    for name, rate in figures["tokens_per_second"].items():
        print(f"{name:32} {rate:10,.0f} tokens/s   smallest cosine to float32 {cosine[name]:.5f}")
    for name, ratio in figures["times_as_fast_as"].items():
        print(f"riptide is {ratio:.2f} times as fast as {name} (median of {options.rounds} pairs)")
    if not options.no_start_up:
        with tempfile.TemporaryDirectory() as cache:
            figures["start_up_seconds"] = {
                "not compiled": start_up(options.model, "never", options.threads, cache),
                "compiled, empty cache": start_up(options.model, "always", options.threads, cache),
                "compiled, filled cache": start_up(options.model, "always", options.threads, cache),
            }
        print("start-up:", ", ".join(f"{name} {took:.1f} s" for name, took in figures["start_up_seconds"].items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
