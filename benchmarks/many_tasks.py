"""One encoder, a thousand tasks: its memory, and questions a second as the traffic is of more and more tasks.

    python benchmarks/many_tasks.py --tasks 1000 --length 32 --json results/many_tasks.json

Random prompts over all-MiniLM-L6-v2; batches of 32 questions, each of a task drawn at random from the first 1, 10, 100
and so on, in turns within one process. Ratios are medians of those within each round, to the traffic of one task on the
same path. Mixed batches' vectors are compared with those of single-task calls.
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

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from retriever.attention import PromptShape  # noqa: E402
from retriever.encoder import Encoder, EncoderOptions  # noqa: E402
from retriever.prompts import TaskPrompt, backbone_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--questions", default=str(ROOT / "examples/squad/queries.jsonl.gz"))
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", default="results/many_tasks.json")
    options = parser.parse_args()
    with gzip.open(options.questions, "rt") as file:
        texts = [json.loads(line)["text"] for line in itertools.islice(file, 640)]
    random = np.random.default_rng(0)
    settings = EncoderOptions(compile="never", normalize=True)
    encoder = Encoder(options.model, settings, threads=options.threads, tasks={})
    encoder.encode(texts[:32])
    process = psutil.Process()
    bare = process.memory_info().rss
    assert encoder._shape is not None
    shape: PromptShape = encoder._shape
    backbone = backbone_of(encoder.config)
    begun = time.perf_counter()
    for number in range(options.tasks):
        torch.manual_seed(number)
        matrix = 0.3 * torch.randn(shape.layers, 2, shape.heads, options.length, shape.head_dim)
        encoder.put_task(f"t{number}", TaskPrompt(backbone, settings, matrix, None))
    put = (time.perf_counter() - begun) / options.tasks
    held = process.memory_info().rss - bare
    counts = [count for count in (1, 10, 100, 1_000, 10_000) if count <= options.tasks]
    batches = [texts[at : at + 32] for at in range(0, len(texts), 32)]
    drawn = {count: [[f"t{n}" for n in random.integers(0, count, len(b))] for b in batches] for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(options.rounds + 1):
        for count in counts:
            begun = time.perf_counter()
            for batch, tasks in zip(batches, drawn[count], strict=True):
                encoder.encode(batch, task=tasks)
            if turn:  # the first warms up
                seconds[count].append(time.perf_counter() - begun)
    mixed = encoder.encode(texts[:64], task=drawn[counts[-1]][0] + drawn[counts[-1]][1])
    single = np.concatenate([
        encoder.encode([text], task=task)
        for text, task in zip(texts[:64], drawn[counts[-1]][0] + drawn[counts[-1]][1], strict=True)
    ])  # fmt: skip
    document: dict[str, Any] = {
        "options": vars(options), "numerics": encoder.numerics, "seconds_to_put": put, "bytes": held,
        "bytes_of_the_numbers": options.tasks * 2 * shape.layers * shape.heads * shape.head_dim * options.length
        * encoder.dtype.itemsize,
        "difference_of_mixed_and_single": float(np.abs(mixed - single).max()),
        "seconds": {str(count): values for count, values in seconds.items()},
    }  # fmt: skip
    print(
        f"{options.tasks:,} prompts of {options.length}: {held / 2**20:,.0f} MiB held, {1000 * put:.1f} ms to put one"
    )
    print(f"largest difference of a mixed batch's vectors from single-task calls: {np.abs(mixed - single).max():.2e}")
    for count in counts:
        ratio = statistics.median(a / b for a, b in zip(seconds[1], seconds[count], strict=True))
        rate = len(texts) / statistics.median(seconds[count])
        print(f"{count:6,} tasks in the traffic: {rate:8.0f} questions/s, {ratio:.2f} of one task's")
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
