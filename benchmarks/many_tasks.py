"""Measures an encoder with a thousand task prompts: its memory, and queries/s by the number of tasks in the traffic.

    python benchmarks/many_tasks.py --tasks 1000 --length 32 --json results/many_tasks.json

The prompts are random, and the backbone is all-MiniLM-L6-v2. Batches have 32 queries, each of a random task among the
first 1, 10, 100 and so on; the numbers of tasks alternate in one process. Ratios compare with the traffic of one task
in the same round; their medians are reported. The vectors of mixed batches are compared with those of single-task
calls.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import read_texts, write_json
from benchmarks.common.program import Parser
from benchmarks.common.timing import ratio
from benchmarks.query_prompts import add_inputs, fixed_prompt, largest_difference, time_traffic
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.forward.prompt_rows import PromptShape
from riptide.retriever.options import EncoderOptions


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Reads the options, adds the tasks, measures each number of tasks, prints and writes the figures."""
    parser = Parser(__doc__)
    add_inputs(parser)
    parser.add("--tasks", 1000, "number of tasks")
    parser.add("--length", 32, "tokens of each prompt")
    parser.add("--rounds", 7, "number of rounds")
    parser.add("--threads", os.cpu_count() or 1, "CPU threads (default: all cores)")
    parser.add("--json", "results/many_tasks.json", "output file")
    options = parser.parse_args()
    texts = read_texts(options.queries, 640)
    settings = EncoderOptions(compile="never", normalize=True)
    encoder = Encoder(options.model, settings, threads=options.threads, tasks={})
    encoder.encode(texts[:32])
    rss_before = resident_bytes()
    assert encoder._shape is not None
    shape: PromptShape = encoder._shape
    started = time.perf_counter()
    for number in range(options.tasks):
        encoder.put_task(f"t{number}", fixed_prompt(encoder, options.length, number))
    seconds_per_task = (time.perf_counter() - started) / options.tasks
    memory_bytes = resident_bytes() - rss_before
    counts = [count for count in (1, 10, 100, 1_000, 10_000) if count <= options.tasks]
    batches = [texts[start : start + 32] for start in range(0, len(texts), 32)]
    names = [f"t{number}" for number in range(options.tasks)]
    seconds = time_traffic(encoder, batches, {str(count): names[:count] for count in counts}, rounds=options.rounds)
    mixed_tasks = [names[number] for number in np.random.default_rng(0).integers(0, len(names), 64)]
    difference = largest_difference(encoder, texts[:64], mixed_tasks)
    numbers_per_task = 2 * shape.layers * shape.heads * shape.head_dim * options.length
    document: dict[str, Any] = {
        "options": vars(options),
        "numerics": encoder.numerics,
        "seconds_to_put": seconds_per_task,
        "bytes": memory_bytes,
        "bytes_of_the_numbers": options.tasks * numbers_per_task * encoder.dtype.itemsize,
        "difference_of_mixed_and_single": difference,
        "seconds": seconds,
    }
    print(
        f"{options.tasks:,} prompts of {options.length} tokens: {memory_bytes / 2**20:,.0f} MiB, "
        f"{1000 * seconds_per_task:.1f} ms to add one"
    )
    print(f"largest difference between vectors of a mixed batch and of single-task calls: {difference:.2e}")
    for count, of_rounds in seconds.items():
        rate = len(texts) / statistics.median(of_rounds)
        share = ratio(seconds, "1", count)
        print(f"{int(count):6,} tasks in the traffic: {rate:8.0f} queries/s, {share:.2f} of the rate of one task")
    write_json(options.json, document)


if __name__ == "__main__":
    main()
