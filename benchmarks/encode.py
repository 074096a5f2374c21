"""Compares encoding speed with sentence-transformers in the same process, in tokens/s; also measures start-up.

    python benchmarks/encode.py --data examples/squad/corpus.jsonl.gz --count 512 --threads 2

Rounds alternate riptide and sentence-transformers in float32 and in bfloat16; the medians are compared. Each round has
different passages, because batches of lengths that occurred before are faster. All systems get the same strings (title
and text joined by a space) and tokenise them within the measured time, and their tokens/s count the tokens of the texts
without padding. Start-up is the time from a fresh process to the first vector, once with an empty compiler cache and
once with a filled one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.common.files import read_documents, write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from benchmarks.common.timing import ratio
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.options import EncoderOptions, Precision
from riptide.retriever.options.encoding import Compile

START = """
import sys, time
started = time.perf_counter()
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions, Precision
from riptide.retriever.options.encoding import Compile
encoder = Encoder(sys.argv[1], EncoderOptions(compile=sys.argv[2]), threads=int(sys.argv[3]))
encoder.encode(["a query"])
print(time.perf_counter() - started)
"""


START_UPS = {"not compiled": "never", "compiled, empty cache": "always", "compiled, filled cache": "always"}


def read_passages(path: Path, count: int, rounds: int) -> list[tuple[list[str], list[str]]]:
    """Returns the titles and the texts of each round: different passages, spread evenly over a BEIR corpus.

    A round has `count` passages; fewer if the corpus is small.
    """
    rows = list(read_documents(path))
    rows = rows[:: max(1, len(rows) // (count * rounds))]
    rows_by_round = [rows[number::rounds][: min(count, len(rows) // rounds)] for number in range(rounds)]
    return [([row.get("title") or "" for row in part], [row["text"] for row in part]) for part in rows_by_round]


def measure_start_up(model: str, compile: str, threads: int, cache: str) -> float:
    """Returns the seconds from a fresh process, before any import, to its first vector. cache: that of the compiler."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-c", START, model, compile, str(threads)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1])


def main() -> None:
    """Reads the options, runs the rounds, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--data", ROOT / "examples/squad/corpus.jsonl.gz", "BEIR corpus, compressed or not")
    parser.add("--count", 512, "passages per round")
    parser.add("--model", MINILM, "encoder")
    parser.add("--threads", os.cpu_count(), "CPU threads (default: all cores)")
    parser.add("--rounds", 5, "number of rounds")
    parser.add("--batch", 32, "texts per batch of sentence-transformers")
    parser.add("--dtype", "auto", "dtype of riptide's encoder", choices=get_args(Precision))
    parser.add("--compile", "auto", "whether riptide's encoder is compiled", choices=get_args(Compile))
    parser.add("--no-start-up", False, "do not measure start-up times")
    parser.add("--json", "results/encode.json", "output file")
    options = parser.parse_args()

    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    encoder = Encoder(
        options.model, EncoderOptions(dtype=options.dtype, compile=options.compile), threads=options.threads
    )
    first, *others = [encoder.compose(*part) for part in read_passages(options.data, options.count, 1 + options.rounds)]
    num_tokens = [int(encoder.tokenize(passages, side="passage").lengths.sum()) for passages in others]
    folder, device = str(find_model_folder(options.model)), encoder.device.type
    float32_model = SentenceTransformer(folder, device=device, model_kwargs={"dtype": torch.float32})
    bfloat16_model = SentenceTransformer(folder, device=device, model_kwargs={"dtype": torch.bfloat16})
    systems: dict[str, Callable[[list[str]], Any]] = {
        "riptide": lambda passages: encoder.encode(passages, side="passage"),
        "sentence-transformers float32": lambda passages: float32_model.encode(passages, batch_size=options.batch),
        "sentence-transformers bfloat16": lambda passages: bfloat16_model.encode(passages, batch_size=options.batch),
    }
    print(f"{len(first)} passages per round, {sum(num_tokens)} tokens, {options.threads} threads; {encoder.numerics}")
    # This also warms up the systems.
    vectors = {name: np.asarray(encode(first), dtype=np.float32) for name, encode in systems.items()}
    reference = vectors["sentence-transformers float32"]
    cosine = {
        name: float(((v * reference).sum(1) / np.linalg.norm(v, axis=1) / np.linalg.norm(reference, axis=1)).min())
        for name, v in vectors.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for passages in others:
        for name, encode in systems.items():
            started = time.perf_counter()
            encode(passages)
            seconds[name].append(time.perf_counter() - started)
    rates = {
        name: statistics.median(tokens / time_s for tokens, time_s in zip(num_tokens, times_s, strict=True))
        for name, times_s in seconds.items()
    }
    ratios = {name: ratio(seconds, name, "riptide") for name in list(systems)[1:]}
    for name, rate in rates.items():
        print(f"{name:32} {rate:10,.0f} tokens/s   smallest cosine to float32 {cosine[name]:.5f}")
    for name, times in ratios.items():
        print(f"riptide is {times:.2f} times as fast as {name} (median of {options.rounds} pairs)")
    figures: dict[str, Any] = {
        "options": vars(options),
        "num_passages": len(first),
        "num_tokens": num_tokens,
        "numerics": encoder.numerics,
        "seconds": seconds,
        "smallest_cosine_to_float32": cosine,
        "tokens_per_second": rates,
        "times_as_fast_as": ratios,
    }
    if not options.no_start_up:
        with tempfile.TemporaryDirectory() as cache:
            figures["start_up_seconds"] = {
                name: measure_start_up(options.model, compile, options.threads, cache)
                for name, compile in START_UPS.items()
            }
        print("start-up:", ", ".join(f"{name} {time_s:.1f} s" for name, time_s in figures["start_up_seconds"].items()))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
