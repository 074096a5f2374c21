"""Compares unpadded (packed) batches with padded ones and with sentence-transformers on this CPU, in ms per batch.

    python benchmarks/packing.py --data examples/squad --json results/packing.json

All use bfloat16 if the CPU supports it, and the same number of threads. They alternate in one process, for one query,
32 queries (a batch of a busy server), and passages. Times are medians over the rounds; ratios are medians of those
within each round.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from benchmarks.common.files import read_texts, write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import Parser
from benchmarks.common.timing import in_turns, ratio


def encode_all(encode: Callable[[list[str]], object], batches: list[list[str]]) -> None:
    """Encodes batches of texts one after the other."""
    for batch in batches:
        encode(batch)


def main() -> None:
    """Reads the options, measures each kind of batch, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--data", "examples/squad", "BEIR folder")
    parser.add("--model", MINILM, "encoder")
    parser.add("--passages", 512, "number of passages")
    parser.add("--rounds", 7, "number of rounds")
    parser.add("--threads", os.cpu_count() or 1, "CPU threads (default: all cores)")
    parser.add("--json", "results/packing.json", "output file")
    options = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    from riptide.retriever.encoding.encoder import Encoder
    from riptide.retriever.forward import packing
    from riptide.retriever.model.model_folder import find_model_folder
    from riptide.retriever.options import EncoderOptions

    settings = EncoderOptions(compile="never")
    packed = Encoder(options.model, settings, threads=options.threads)
    without_kernel = mock.patch.object(packing, "load_kernel", return_value=None)  # an encoder then pads its batches
    with without_kernel:
        padded = Encoder(options.model, settings, threads=options.threads)
    peer = SentenceTransformer(
        str(find_model_folder(options.model)), device="cpu", model_kwargs={"dtype": packed.dtype}
    )
    queries = read_texts(Path(options.data, "queries.jsonl"), 640)
    passages = read_texts(Path(options.data, "corpus.jsonl"), options.passages)
    cases: dict[str, tuple[Literal["query", "passage"], list[list[str]]]] = {
        "1 query": ("query", [[text] for text in queries[:40]]),
        "32 queries": ("query", [queries[start : start + 32] for start in range(0, 640, 32)]),
        f"{options.passages} passages": ("passage", [passages]),
    }
    document: dict[str, Any] = {"options": vars(options), "numerics": [packed.numerics, padded.numerics], "ms": {}}
    print("median ms of a batch, and times that of packed batches")
    for name, (side, batches) in cases.items():
        systems: dict[str, Callable[[list[str]], object]] = {
            "packed": partial(packed.encode, side=side),
            "padded": partial(padded.encode, side=side),
            "sentence-transformers": partial(peer.encode, normalize_embeddings=True, show_progress_bar=False),
        }
        functions = {system: partial(encode_all, encode, batches) for system, encode in systems.items()}
        seconds = in_turns(functions, options.rounds)
        times_ms = {system: [1000 * each / len(batches) for each in values] for system, values in seconds.items()}
        ratios = {system: ratio(seconds, system, "packed") for system in systems}
        document["ms"][name] = {**times_ms, "ratios": ratios}
        cells = (f"{each} {statistics.median(times_ms[each]):.1f} ({ratios[each]:.2f})" for each in systems)
        print(f"{name:16} {'   '.join(cells)}", flush=True)
    write_json(options.json, document)


if __name__ == "__main__":
    main()
