"""The records of benchmarks/training_budgets.py: their names, the chosen learning rates, and tables."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from riptide.indexing.measures.metrics import bootstrap_interval
from riptide.jobs.experiments import table_lines

# Learning rates by method. sentence-transformers' default is 5e-5, and its examples have 2e-5.
RATES = {
    "peer": (2e-5, 5e-5, 1e-4, 3e-4),
    "finetune": (2e-5, 5e-5, 1e-4, 3e-4),
    "lora": (3e-4, 1e-3, 3e-3),
    "query-prompt": (3e-3, 1e-2, 3e-2),
}
METHODS = (*RATES, "peer-cached")  # the last one has the learning rate of "peer"
NAMES = {
    "untrained": "untrained",
    "peer": "sentence-transformers",
    "peer-cached": "the same, cached loss",
    "finetune": "riptide, fine-tuning",
    "lora": "riptide, LoRA",
    "query-prompt": "riptide, prompt of queries",
}
RUN = re.compile(r"(?P<set>\S+) (?P<method>\S+) (?P<minutes>\S+) min lr (?P<lr>\S+) seed (?P<seed>\d+)")

Measurements = Mapping[str, Mapping[str, Any]]
"""The records of the runs by name."""


def run_name_of(set_name: str, method: str, minutes: float, lr: float, seed: int) -> str:
    """Returns the name of a run in the output file."""
    return f"{set_name} {method} {minutes:g} min lr {lr:g} seed {seed}"


def rates_of(method: str) -> tuple[float, ...]:
    """Returns the learning rates of a method, rising."""
    return RATES[method.removesuffix("-cached")]


def best_rate(
    measurements: Measurements,
    sets: Sequence[str],
    method: str,
    minutes: float,
    seed: int,
    rates: Sequence[float] | None = None,
) -> float:
    """Returns the rate with the best mean of the sets' dev figures, among the runs of a budget with a seed.

    Only `rates` can be chosen; None: those of the method.

    One set's dev queries are too few: they differ by more than the rates do.
    """

    def dev(lr: float) -> float:
        runs = [measurements.get(run_name_of(name, method, minutes, lr, seed)) for name in sets]
        return statistics.mean(run["dev mrr@10"] if run else -1.0 for run in runs)

    return max(rates or rates_of(method), key=dev)


class Arm(NamedTuple):
    """The runs of a method with its chosen learning rate, by set and seed.

    Attributes:
        lr: The rate; "" if there was no training.
        records: The records of the seeds, for each set.
    """

    lr: str
    records: list[list[Mapping[str, Any]]]

    def ranks(self) -> list[np.ndarray]:
        """Returns the mean reciprocal ranks of the seeds for each set, float64 [test queries]."""
        return [np.mean([record["reciprocal_ranks"] for record in of_set], axis=0) for of_set in self.records]

    def cells(self, peer: Arm | None) -> list[str]:
        """Returns the cells of a row: rate, steps, seeds, quality by set and on the average, difference to `peer`."""
        ranks = self.ranks()
        means = [float(each.mean()) for each in ranks]
        steps = ", ".join(str(of_set[0]["steps"]) for of_set in self.records) if self.lr else ""
        seeds = str(min(map(len, self.records))) if self.lr else ""
        difference = ""
        if peer is not None:
            pairs = zip(ranks, peer.ranks(), strict=True)
            mean, low, high = bootstrap_interval([one - other for one, other in pairs])
            difference = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
        return [self.lr, steps, seeds, *(f"{mean:.4f}" for mean in [*means, statistics.mean(means)]), difference]


def budget_lines(document: Mapping[str, Any]) -> list[str]:
    """Returns the tables of an output file as lines of Markdown: one for each budget, and one of the learning rates.

    They have the methods that were run on all sets. A figure of a budget is the mean test MRR@10 over the seeds of the
    chosen rate, and the interval of a difference (95%) is over the queries. The table of the rates has their means over
    the sets, with the smallest budget and the first seed.
    """
    measurements: Measurements = document["measurements"]
    runs = [match.groupdict() for name in measurements if (match := RUN.fullmatch(name))]
    sets = list(dict.fromkeys(run["set"] for run in runs))
    seeds = sorted({int(run["seed"]) for run in runs})
    lines: list[str] = []
    for minutes in sorted({float(run["minutes"]) for run in runs}):
        arms = {"untrained": Arm("", [[measurements[f"{name} untrained"]] for name in sets])}
        for method in METHODS:
            lr = best_rate(measurements, sets, method, minutes, seeds[0])
            names = [[run_name_of(name, method, minutes, lr, seed) for seed in seeds] for name in sets]
            records = [[measurements[name] for name in of_set if name in measurements] for of_set in names]
            if all(records):
                arms[method] = Arm(f"{lr:g}", records)
        head = [f"{minutes:g} min", "learning rate", "steps", "seeds", *sets, "mean", f"minus {NAMES['peer']}"]
        peers = {method: arms.get("peer") if method in METHODS and method != "peer" else None for method in arms}
        rows = [[NAMES[method], *arm.cells(peers[method])] for method, arm in arms.items()]
        lines += [*table_lines(head, rows), ""]
        if minutes == min(float(run["minutes"]) for run in runs):  # whose runs choose the rates
            lines += [*rate_lines(measurements, sets, minutes, seeds[0]), ""]
    return [*lines, f"Machine: {document['device']}."]


def rate_lines(measurements: Measurements, sets: Sequence[str], minutes: float, seed: int) -> list[str]:
    """Returns a table of the means over the sets for each method and learning rate that was run on all of them."""
    rows = []
    for method in METHODS:
        for lr in rates_of(method):
            runs = [measurements.get(run_name_of(name, method, minutes, lr, seed)) for name in sets]
            if all(runs):
                means = [statistics.mean(run[f"{split} mrr@10"] for run in runs if run) for split in ("dev", "test")]
                rows.append([NAMES[method], f"{lr:g}", *(f"{mean:.4f}" for mean in means)])
    return table_lines([f"{minutes:g} min, seed {seed}", "learning rate", "dev, mean of the sets", "test"], rows)
