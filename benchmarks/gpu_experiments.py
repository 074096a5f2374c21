"""Trains dual encoders with several kinds of negatives and measures MRR@10, on a machine with torch and transformers.

    python benchmarks/gpu_experiments.py --prepare --source raw/squad --set squad-set
    python benchmarks/gpu_experiments.py --prepare --store S --queries squad --set squad-set
    python benchmarks/gpu_experiments.py --set squad-set --backbones base rip --steps 500 --limit-s 540

The first two forms write a prepared set on a machine with all packages. The third one needs torch, transformers, numpy
and safetensors, no network and no store: it trains an arm for each seed, backbone, kind of negatives and method, and
searches the pool of the set exactly. The output file is written after each arm; the same command resumes with the arms
that are missing or have failed. The exit status is 1 if an arm failed.

Kinds of negatives: "none" has those of the batch alone; "random" adds random passages of the pool; "bm25" adds hits of
BM25; "bm25-filtered" adds such hits without a known answer of the query. If no query has answers, it adds hits below
95% of the positive's score (NV-Retriever), because hits above it are often unjudged positives. A query with too few
negatives gets random passages of the set.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.files import write_json
from benchmarks.common.prepared_set import KINDS, PreparedSet, write_set
from benchmarks.common.program import ROOT, Parser
from benchmarks.gpu import device_name, read

METHODS = ("finetune", "prompt")
MAX_BYTES = 60 * 2**20  # maximum size of a set
BLOCK = 2_048  # texts that are encoded between two looks at the clock
# Options that change the result of an arm, and are the same for all arms of a file
SHAPING = ("steps", "batch", "negatives_per_query", "finetune_lr", "prompt_lr", "length")
TEXTS = ("pooling", "normalize", "query_length", "passage_length")


class OutOfTimeError(Exception):
    """The time limit has passed."""


def prepare(options: argparse.Namespace) -> None:
    """Writes a set from a store, or from a BEIR folder by way of a temporary store."""
    from riptide import Store

    if options.set.exists():
        sys.exit(f"error: {options.set}: already exists; give another --set")
    with tempfile.TemporaryDirectory() as folder:
        store = Store(options.store or folder)
        if options.source:
            store.import_corpus(options.source)
        write_set(store, options)
    size = sum(file.stat().st_size for file in options.set.iterdir())
    if size > MAX_BYTES:
        shutil.rmtree(options.set)
        sys.exit(f"error: the set has {size / 2**20:.0f} MiB, the maximum is 60; lower --train, --pool or --kept")
    print(f"{options.set}: {size / 2**20:.1f} MiB: {(options.set / 'set.json').read_text()}")


def run_arm(
    prepared: PreparedSet, arm: tuple[int, Path, str, str], options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """Trains and measures an arm, and returns its record.

    Args:
        prepared: The set.
        arm: The seed, the folder of the backbone, the kind of negatives and the method.
        options: The options of the command line.
        deadline: Value of time.monotonic() after which no step and no encoding starts.

    Raises:
        OutOfTimeError: If the deadline passes before the end.
    """
    from riptide.retriever.forward.numerics import choose_device, choose_dtype
    from riptide.retriever.objectives.tune_options import TuneOptions
    from riptide.retriever.options import EncoderOptions
    from riptide.retriever.options.loop import LoopOptions
    from riptide.retriever.systems.dual import DualEncoderSystem
    from riptide.retriever.training.loop import Trainer

    def before_deadline(numbers: range) -> Iterator[int]:
        for number in numbers:
            if time.monotonic() > deadline:
                raise OutOfTimeError
            yield number

    device = choose_device(None)
    dtype = choose_dtype("auto", device)
    encoder = EncoderOptions(**{name: getattr(options, name) or None for name in TEXTS})
    seed, backbone, kind, method = arm
    sizes = {"batch": options.batch, "negatives_per_query": 0 if kind == "none" else options.negatives_per_query}
    tuning = TuneOptions(method=method, length=options.length, seed=seed, **sizes)  # type: ignore[arg-type]
    started = time.perf_counter()
    system = DualEncoderSystem(backbone, encoder, tuning, prepared.training_data(kind), device=device, dtype=dtype)
    # As train-retriever does, prompts have no weight decay.
    rates = {"finetune": (options.finetune_lr, 0.01), "prompt": (options.prompt_lr, 0.0)}
    lr, decay = rates[method]
    loop = LoopOptions(steps=options.steps, lr=lr, weight_decay=decay, seed=seed)
    trainer = Trainer(system, loop, device=device, dtype=dtype)
    system.module.train()
    losses = [trainer.step(step) for step in before_deadline(range(options.steps))]
    trained = time.perf_counter()
    size = prepared.about["pool"]
    blocks = before_deadline(range(0, size, BLOCK))
    vectors = [system.encode_passages(np.arange(start, min(start + BLOCK, size))) for start in blocks]
    queries = system.encode([each["text"] for each in prepared.test], "query")
    ranks = reciprocal_ranks(queries, np.concatenate(vectors), [each["positives"] for each in prepared.test], device)
    return {
        "status": "done",
        "mrr@10": float(ranks.mean(dtype=np.float64)),
        "reciprocal_ranks": ranks.tolist(),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "dtype": str(dtype).removeprefix("torch."),
        "train_s": round(trained - started, 2),
        "measure_s": round(time.perf_counter() - trained, 2),
    }


def reciprocal_ranks(
    queries: np.ndarray, passages: np.ndarray, positives: Sequence[Sequence[int]], device: torch.device
) -> np.ndarray:
    """Returns the reciprocal rank of each query's first positive among the 10 best passages, 0 without one.

    Args:
        queries: float32 [q, dim].
        passages: float32 [n, dim].
        positives: Rows of the positives of each query.
        device: Where the products are computed.

    Returns:
        float32 [q].
    """
    pool, result = torch.from_numpy(passages).to(device), np.zeros(len(queries), np.float32)
    products = (block.to(device) @ pool.T for block in torch.from_numpy(queries).split(256))
    best = torch.cat([scores.topk(min(10, len(pool))).indices for scores in products]).cpu().numpy()
    for query, rows in enumerate(best):
        places = np.flatnonzero(np.isin(rows, positives[query]))
        result[query] = 1 / (1 + places[0]) if len(places) else 0
    return result


def run_arms(options: argparse.Namespace) -> int:
    """Runs the arms that the output file lacks until the time is up; returns the exit status."""
    deadline = time.monotonic() + options.limit_s
    prepared = PreparedSet(options.set)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy", "safetensors")}
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    settings = {name: getattr(options, name) for name in SHAPING + TEXTS}
    document = read(options.out, {"device": device, "versions": versions, "set": prepared.about, "options": settings})
    arms, failed = document["measurements"], []
    # Seeds are outermost, so that a file without all arms has whole seeds.
    for arm in itertools.product(options.seeds, options.backbones, options.negatives, options.methods):
        seed, folder, kind, method = arm
        name = f"{folder.name} {method} {kind} seed {seed}"
        if arms.get(name, {}).get("status") == "done":
            print(f"{name}: in the file already", flush=True)
            continue
        try:
            record = run_arm(prepared, arm, options, deadline)
        except OutOfTimeError:
            print(f"{name}: the time is up (--limit-s {options.limit_s:g}); the same command resumes with this arm")
            break
        except Exception as error:
            traceback.print_exc()
            record = {"status": "failed", "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
            failed.append(name)
        arms[name] = record
        write_json(options.out, document, None)
        print(f"{name}: {record.get('error') or 'MRR@10 {:.4f}'.format(record['mrr@10'])}", flush=True)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares a set or runs the arms; returns the exit status.

    Args:
        arguments: The command line; None: that of the process.
    """
    parser = Parser(__doc__)
    parser.add("--set", None, "folder of the prepared set", type=Path, required=True)
    parser.add("--prepare", False, "write the set from --source or --store")
    parser.add("--source", None, "BEIR folder of --prepare")
    parser.add("--store", None, "store of --prepare, which keeps the mined negatives")
    parser.add("--queries", None, "query set of the store (default: the only one)")
    parser.add("--split", "train", "split of the training queries")
    parser.add("--test-split", "test", "split of the test queries")
    parser.add("--train", 20_000, "training queries of the set at most, drawn at random")
    parser.add("--test", 1_000, "test queries of the set at most, drawn at random")
    parser.add("--pool", 20_000, "passages to search: all positives of the test queries, and random ones")
    parser.add("--depth", 50, "hits of BM25 from which negatives are drawn")
    parser.add("--kept", 8, "negatives of each kind that the set keeps per training query")
    parser.add("--backbones", [], "model folders to start from, with different names", type=Path)
    parser.add("--negatives", list(KINDS), "kinds of negatives", choices=KINDS)
    parser.add("--methods", list(METHODS), "what is trained", choices=METHODS)
    parser.add("--seeds", [0, 1, 2], "seeds of the arms")
    parser.add("--steps", 500, "steps of an arm")
    parser.add("--batch", 32, "queries per step")
    parser.add("--negatives-per-query", 1, "negatives per query and step, except with none")
    parser.add("--finetune-lr", 2e-5, "peak learning rate of fine-tuning")
    parser.add("--prompt-lr", 7e-3, "peak learning rate of prompts")
    parser.add("--length", 32, "length of the prompts")
    parser.add("--pooling", None, "pooling of the backbone (default: that of its folder)")
    parser.add("--normalize", False, "scale vectors to length 1 (default: as the folder says)")
    parser.add("--query-length", 32, "maximum tokens of a query")
    parser.add("--passage-length", 128, "maximum tokens of a passage")
    parser.add("--out", ROOT / "results/gpu-experiments.json", "the output file; an existing one is continued")
    parser.add("--limit-s", 540.0, "seconds after which no step and no encoding starts")
    options = parser.parse_args(arguments)
    if options.prepare:
        if bool(options.source) == bool(options.store):
            parser.error("--prepare: expected --source or --store")
        prepare(options)
        return 0
    names = {folder.name for folder in options.backbones if folder.is_dir()}
    if not names or len(names) < len(options.backbones):
        parser.error("--backbones: expected one or more existing folders with different names")
    return run_arms(options)


if __name__ == "__main__":
    sys.exit(main())
