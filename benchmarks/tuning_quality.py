"""Compares the quality of a task with the backbone alone, prompt tuning and fine-tuning, over several seeds.

    python benchmarks/tuning_quality.py --store S --backbone B --negatives N --label L --json results/tuning.json

All steps run through the jobs. For each method, the learning rate is chosen by MRR@10 on the dev split, among the same
number of candidates and with the same number of steps. The method is then trained with each seed and measured once on
the test split, among all passages of the corpus. Existing artifacts are not made again, so an interrupted run resumes.
Intervals are 95% intervals by a bootstrap over queries, of each query's mean over the seeds. If several sets of
negatives are given, each with a label, all of them are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.bootstrap import interval
from benchmarks.common.files import write_json

METRICS = ["RR@10", "R@5", "R@20", "R@100", "Answer@5", "Answer@20", "Answer@100"]
METHODS = ("prompt", "finetune")


def tune(
    store: str, task: str, options: argparse.Namespace, negatives: str, method: str, lr: float, seed: int
) -> float:
    """Trains a task unless the store has it.

    Args:
        store: The store.
        task: Name of the task.
        options: The options of the benchmark.
        negatives: Name of the mined negatives.
        method: "prompt" or "finetune".
        lr: Peak learning rate.
        seed: Seed of the training run.

    Returns:
        The best MRR@10 on the dev split.
    """
    from jobs import tune_prompts
    from jobs.common.options import build
    from jobs.training.options import TunePrompts

    from indexing.store.store import Store

    tune_prompts.main(
        build(
            TunePrompts,
            {
                "store": store,
                "task": task,
                "backbone": options.backbone,
                "method": method,
                "queries": options.queries,
                "negatives": negatives,
                "length": options.length,
                "prompt_dropout": 0.1,
                "steps": options.steps,
                "batch": options.batch,
                "negatives_per_query": 1,
                "lr": lr,
                "seed": seed,
                "dev_split": options.dev_split,
                "evaluate_every": max(1, options.steps // 2),
                "checkpoint_every": options.steps,
                "normalize": True,
                "query_length": options.query_length,
                "passage_length": options.passage_length,
                "cpus": options.cpus,
            },
        )
    )
    return float(Store(store).open("models" if method == "finetune" else "prompts", task).notes["best"])


def measure(
    store_url: str, name: str, options: argparse.Namespace, *, encoder: str | None = None, task: str | None = None
) -> dict[str, np.ndarray]:
    """Encodes the corpus and searches the test split.

    Args:
        store_url: The store.
        name: Name of the embeddings; the run is NAME-test.
        options: The options of the benchmark.
        encoder: The encoder; None: that of the task.
        task: A trained prompt; None: no prompt.

    Returns:
        Values by metric, float64 [queries].
    """
    from jobs import encode_corpus, evaluate, search
    from jobs.evaluation.measures import measure_of

    from indexing.corpus.queries import Queries
    from indexing.store.store import Store

    shape: dict[str, Any] = {}
    if encoder:
        shape = {"query_length": options.query_length, "passage_length": options.passage_length, "normalize": True}
    encode_corpus.main(encode_corpus.EncodeCorpus(store=store_url, encoder=encoder, task=task, name=name, **shape))
    run = f"{name}-test"
    search.main(
        search.Search(
            store=store_url, source=f"exact:{name}", queries=options.queries, split=options.split, k=100, name=run
        )
    )
    store = Store(store_url)
    queries = Queries.open(store, options.queries)
    metrics = [metric for metric in METRICS if options.answers or not metric.startswith("Answer")]
    ids = queries.split(options.split).ids
    metrics_of = measure_of(store, queries, queries.qrels(options.split), ids, metrics)
    return metrics_of(evaluate.load(store, run, queries, options.split))


def main() -> None:
    """Reads the options, trains and measures all methods, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="store with the corpus, the queries and the negatives")
    parser.add_argument("--backbone", required=True, help="backbone of all methods")
    parser.add_argument("--negatives", nargs="+", required=True, help="names of the mined negatives to compare")
    parser.add_argument("--queries", help="name of the query set; may be left out if the store has only one")
    parser.add_argument(
        "--label", nargs="+", required=True, help="for each of --negatives, the prefix of the names of its artifacts"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        choices=METHODS,
        help=f"methods to compare (default: {' '.join(METHODS)})",
    )
    parser.add_argument(
        "--prompt-lrs",
        type=float,
        nargs="+",
        default=[3e-3, 1e-2, 3e-2],
        help="learning rates to try for prompts (default: 3e-3 1e-2 3e-2)",
    )
    parser.add_argument(
        "--finetune-lrs",
        type=float,
        nargs="+",
        default=[2e-5, 1e-4, 5e-4],
        help="learning rates to try for fine-tuning (default: 2e-5 1e-4 5e-4)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="seeds to train with; the first one is used to choose the learning rate (default: 0 1 2)",
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of each training run (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="queries per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--query-length", type=int, default=32, help="maximum number of tokens per query (default: %(default)s)"
    )
    parser.add_argument(
        "--passage-length", type=int, default=128, help="maximum number of tokens per passage (default: %(default)s)"
    )
    parser.add_argument(
        "--dev-split", default="dev", help="split that chooses the learning rate (default: %(default)s)"
    )
    parser.add_argument("--split", default="test", help="split that is measured (default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=2, help="threads of training (default: %(default)s)")
    parser.add_argument(
        "--answers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure Answer@K, which needs queries with answers (default: yes)",
    )
    parser.add_argument(
        "--zero-shot",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure the backbone without tuning (default: yes)",
    )
    parser.add_argument("--json", default="results/tuning_quality.json", help="output file (default: %(default)s)")
    options = parser.parse_args()
    if len(options.label) != len(options.negatives):
        parser.error(
            f"{len(options.label)} --label for {len(options.negatives)} --negatives: expected one label for each"
        )
    store = options.store
    document: dict[str, Any] = {"options": vars(options), "dev": {}, "lr": {}, "test": {}, "by_seed": {}}
    means: dict[str, dict[str, np.ndarray]] = {}
    if options.zero_shot:
        means["zero-shot"] = measure(store, f"{options.label[0]}-zero", options, encoder=options.backbone)
    sets = list(zip(options.label, options.negatives, strict=True))
    for method, (label, negatives) in itertools.product(options.methods, sets):
        name = method if len(sets) == 1 else f"{method} {negatives}"
        rates = options.prompt_lrs if method == "prompt" else options.finetune_lrs
        first = options.seeds[0]
        dev = {}
        for lr in rates:
            task = f"{label}-{method}-{lr:g}-s{first}"
            dev[lr] = tune(store, task, options, negatives, method, lr, first)
        document["dev"][name] = {f"{lr:g}": value for lr, value in dev.items()}
        lr = document["lr"][name] = max(dev, key=lambda rate: dev[rate])
        by_seed = []
        for seed in options.seeds:
            task = f"{label}-{method}-{lr:g}-s{seed}"
            tune(store, task, options, negatives, method, lr, seed)
            model = {"encoder": f"models/{task}"} if method == "finetune" else {"task": task}
            by_seed.append(measure(store, task, options, **model))
        document["by_seed"][name] = [{m: float(v.mean()) for m, v in values.items()} for values in by_seed]
        means[name] = {metric: np.mean([values[metric] for values in by_seed], axis=0) for metric in by_seed[0]}
    document["test"] = {name: {m: interval(v) for m, v in values.items()} for name, values in means.items()}
    document["differences"] = {
        f"{second} - {first}": {m: interval(means[second][m] - means[first][m]) for m in means[first]}
        for first, second in itertools.combinations(means, 2)
    }
    write_json(Path(options.json), document)
    print(json.dumps({"dev": document["dev"], "lr": document["lr"]}))
    for kind in ("test", "differences"):
        for name, intervals in document[kind].items():
            cells = (f"{m} {mean:.4f} [{low:.4f}, {high:.4f}]" for m, (mean, low, high) in intervals.items())
            print(f"{name:40} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
