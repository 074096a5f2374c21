"""Quality of a tuned task, through the jobs: the backbone as it is, prompt-tuned, fine-tuned; over several seeds.

    python benchmarks/tuning_quality.py --store S --backbone B --negatives N --label L --json results/tuning.json

For each method the learning rate is chosen by MRR@10 on the dev split, of as many as for the other, with the same
steps; then it is trained with each seed and measured once on the test split, among all passages of the corpus. What is
in the store already is not made again: a run that was interrupted goes on. Intervals are of 95%, by a bootstrap over
questions of each question's mean over the seeds. Of several sets of negatives, each with a label, all are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

METRICS = ["RR@10", "R@5", "R@20", "R@100", "Answer@5", "Answer@20", "Answer@100"]
METHODS = ("prompt", "finetune")


def tune(
    store: str, task: str, options: argparse.Namespace, negatives: str, method: str, lr: float, seed: int
) -> float:
    """Train the task, unless it is there; its best MRR@10 on the dev split."""
    from jobs import tune_prompts

    from indexing.store import Store

    tune_prompts.main(
        tune_prompts.TunePrompts(
            store=store, task=task, backbone=options.backbone, method=method,  # type: ignore[arg-type]
            queries=options.queries, negatives=negatives, length=options.length, prompt_dropout=0.1,
            steps=options.steps,
            batch=options.batch, negatives_per_query=1, lr=lr, seed=seed, dev_split=options.dev_split,
            evaluate_every=max(1, options.steps // 2), checkpoint_every=options.steps, normalize=True,
            query_length=options.query_length, passage_length=options.passage_length,
            cpus=options.cpus,
        )
    )  # fmt: skip
    return float(Store(store).open("models" if method == "finetune" else "prompts", task).notes["best"])


def measure(store: str, name: str, *, encoder: str | None, task: str | None, options: argparse.Namespace) -> Any:
    """Encode the corpus and search the test split: each metric's values, {metric: float64 [questions]}."""
    from jobs import encode_corpus, evaluate, search

    from indexing.queries import Queries
    from indexing.store import Store

    lengths = {"query_length": options.query_length, "passage_length": options.passage_length, "normalize": True}
    encode_corpus.main(
        encode_corpus.EncodeCorpus(store=store, encoder=encoder, task=task, name=name, **lengths if encoder else {})
    )
    asked = {"queries": options.queries, "split": options.split}
    search.main(search.Search(store=store, source=f"exact:{name}", k=100, name=f"{name}-test", **asked))
    opened = Store(store)
    queries = Queries.open(opened, options.queries)
    metrics = [m for m in METRICS if options.answers or not m.startswith("Answer")]
    ids = queries.split(options.split).ids
    found = evaluate.measure_of(opened, queries, queries.qrels(options.split), ids, metrics)
    return found(evaluate.load(opened, f"{name}-test", queries, options.split))


def interval(values: np.ndarray, draws: int = 2_000) -> list[float]:
    """[mean, low, high] over questions, float64 [questions]."""
    random = np.random.default_rng(0)
    means = [values[random.integers(0, len(values), len(values))].mean() for _ in range(draws)]
    return [float(values.mean()), *map(float, np.percentile(means, [2.5, 97.5]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--negatives", nargs="+", required=True)
    parser.add_argument("--queries", help="may be left out where the store has one set only")
    parser.add_argument("--label", nargs="+", required=True, help="for each: what its artifacts' names begin with")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--prompt-lrs", type=float, nargs="+", default=[3e-3, 1e-2, 3e-2])
    parser.add_argument("--finetune-lrs", type=float, nargs="+", default=[2e-5, 1e-4, 5e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--query-length", type=int, default=32)
    parser.add_argument("--passage-length", type=int, default=128)
    parser.add_argument("--dev-split", default="dev")
    parser.add_argument("--split", default="test")
    parser.add_argument("--cpus", type=int, default=2, help="threads of training")
    parser.add_argument("--answers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--zero-shot", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", default="results/tuning_quality.json")
    options = parser.parse_args()
    if len(options.label) != len(options.negatives):
        parser.error("expected a --label for each of the --negatives")
    store = options.store
    document: dict[str, Any] = {"options": vars(options), "dev": {}, "lr": {}, "test": {}, "by_seed": {}}
    means: dict[str, dict[str, np.ndarray]] = {}
    if options.zero_shot:
        means["zero-shot"] = measure(
            store, f"{options.label[0]}-zero", encoder=options.backbone, task=None, options=options
        )
    for method, (label, negatives) in itertools.product(
        options.methods, zip(options.label, options.negatives, strict=True)
    ):
        name = method if len(options.label) == 1 else f"{method} {negatives}"
        rates = options.prompt_lrs if method == "prompt" else options.finetune_lrs
        first = options.seeds[0]
        dev = {lr: tune(store, f"{label}-{method}-{lr:g}-s{first}", options, negatives, method, lr, first)
               for lr in rates}  # fmt: skip
        document["dev"][name] = {f"{lr:g}": value for lr, value in dev.items()}
        lr = document["lr"][name] = max(dev, key=lambda rate: dev[rate])
        found = []
        for seed in options.seeds:
            task = f"{label}-{method}-{lr:g}-s{seed}"
            tune(store, task, options, negatives, method, lr, seed)
            place = (
                {"encoder": f"models/{task}", "task": None} if method == "finetune" else {"encoder": None, "task": task}
            )
            found.append(measure(store, task, options=options, **place))
        document["by_seed"][name] = [{m: float(v.mean()) for m, v in one.items()} for one in found]
        means[name] = {metric: np.mean([one[metric] for one in found], axis=0) for metric in found[0]}
    document["test"] = {name: {m: interval(v) for m, v in found.items()} for name, found in means.items()}
    names = list(means)
    document["differences"] = {
        f"{other} - {one}": {m: interval(means[other][m] - means[one][m]) for m in means[one]}
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    }
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"dev": document["dev"], "lr": document["lr"]}))
    for kind in ("test", "differences"):
        for name, found in document[kind].items():
            cells = (f"{m} {mean:.4f} [{low:.4f}, {high:.4f}]" for m, (mean, low, high) in found.items())
            print(f"{name:40} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
