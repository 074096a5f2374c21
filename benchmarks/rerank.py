"""Compares re-ranking with sentence-transformers: pairs/s and CPU time, in rounds that take turns.

    python benchmarks/rerank.py --pairs 400 --rounds 5

riptide (with default settings, in float32 and in int8) and sentence-transformers' CrossEncoder (in float32 and
bfloat16) score the same pairs of a query and a passage, each round other ones. The model is the backbone of --model
with a random classification head: the weights of the head do not change the time. The largest difference is that of a
probability from sentence-transformers' in float32.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.files import read_documents, write_json
from benchmarks.common.machine import cpu_name
from benchmarks.common.models import MINILM
from benchmarks.common.program import ROOT, Parser
from riptide.retriever.encoding.reranker import Reranker
from riptide.retriever.model.model_folder import find_model_folder, tokenizer_files
from riptide.retriever.options import RerankerOptions

DTYPES = ("auto", "float32", "int8")
PEER_DTYPES = ("float32", "bfloat16")
System = Callable[[Sequence[str], Sequence[str]], np.ndarray]


def save_classifier(model: str, folder: Path) -> None:
    """Saves a cross-encoder: the backbone of a model with a random head for one label."""
    from transformers import AutoModelForSequenceClassification

    source = find_model_folder(model)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(folder)
    for file in tokenizer_files(source):
        (folder / file.name).write_bytes(file.read_bytes())


def main() -> None:
    """Reads the options, runs the rounds, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--data", ROOT / "examples/squad", "data set in BEIR form, compressed")
    parser.add("--pairs", 400, "pairs per round")
    parser.add("--per-query", 20, "passages per query")
    parser.add("--model", MINILM, "backbone")
    parser.add("--threads", os.cpu_count(), "CPU threads (default: all cores)")
    parser.add("--rounds", 5, "number of rounds")
    parser.add("--json", "results/rerank.json", "output file")
    options = parser.parse_args()

    from sentence_transformers import CrossEncoder

    torch.set_num_threads(options.threads)
    passages = [row["text"] for row in read_documents(options.data / "corpus.jsonl.gz")]
    queries = [row["text"] for row in read_documents(options.data / "queries.jsonl.gz")]
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        save_classifier(options.model, Path(folder))
        rerankers = {
            dtype: Reranker(folder, RerankerOptions(dtype=dtype), device="cpu", threads=options.threads)
            for dtype in DTYPES
        }
        systems: dict[str, System] = {f"riptide {dtype}": model.score for dtype, model in rerankers.items()}
        for dtype in PEER_DTYPES:
            peer = CrossEncoder(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
            systems[f"sentence-transformers {dtype}"] = lambda first, second, peer=peer: peer.predict(
                list(zip(first, second, strict=True))
            )
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    cpu: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(options.rounds + 1):
        sample = draw.choice(queries, -(-options.pairs // options.per_query))
        pair_queries = [str(sample[pair // options.per_query]) for pair in range(options.pairs)]
        texts = [str(one) for one in draw.choice(passages, options.pairs)]
        scores = {}
        for name in list(systems)[:: 1 if number % 2 else -1]:
            started, started_cpu = time.perf_counter(), time.process_time()
            scores[name] = np.asarray(systems[name](pair_queries, texts), np.float32)
            if number:
                seconds[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - started_cpu)
    reference = scores["sentence-transformers float32"]
    print(f"{options.pairs} pairs per round, {options.threads} threads; {cpu_name()}; {rerankers['auto'].numerics}")
    for name in systems:
        rate = statistics.median(options.pairs / one for one in seconds[name])
        ms = statistics.median(1000 * one / options.pairs for one in cpu[name])
        off = np.abs(scores[name] - reference).max()
        print(f"{name:32} {rate:8,.1f} pairs/s  {ms:6.2f} CPU ms a pair  differs by at most {off:.5f}")
    write_json(options.json, {"options": vars(options), "cpu": cpu_name(), "seconds": seconds, "cpu_seconds": cpu})


if __name__ == "__main__":
    main()
