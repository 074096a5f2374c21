"""Measure runs against qrels, side by side, with a paired test of each against the first.

python jobs/evaluate.py --store data/squad --run minilm-exact minilm-dense other.trec --split test
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jobs.cli import Common, run, say

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indexing.answers import answer_ranks, answers_of
from indexing.corpus import Corpus
from indexing.metrics import holm, paired_test, per_query
from indexing.queries import ALL, Queries
from indexing.runs import falling, read_run, read_trec, result_path
from indexing.store import Store
from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Evaluate(Common):
    run: tuple[str, ...]
    """Names of runs in the store, or TREC files."""
    split: str = "test"
    queries: str | None = None
    """The question set; may be left out where the store has one only."""
    metrics: tuple[str, ...] = ("nDCG@10", "R@100", "RR@10")
    """As ir-measures names them; also Answer@20: one of the first 20 hits contains an answer of the question (DPR's
    top-20 accuracy). --limit N measures the split's first N queries."""
    json: str = "results/evaluation.json"
    """Where the figures go, those of each query too."""


def main(options: Evaluate) -> None:
    store = Store(options.store).require()
    queries = Queries.open(store, options.queries)
    qrels = queries.qrels(options.split)
    metrics = [metric for word in options.metrics for metric in word.split()]
    ids = queries.split(options.split, options.limit).ids
    qrels = qrels.filter(pc.is_in(qrels["query_id"], pa.array(ids, pa.string())))
    if options.plan:
        say(f"{len(options.run)} runs x {len(ids):,} queries, {len(qrels):,} judgements: {', '.join(metrics)}")
        return
    measure = measure_of(store, queries, qrels, metrics)
    values = {name: measure(load(store, name, queries, options.split)) for name in options.run}
    tests = {m: {n: paired_test(values[options.run[0]][m], values[n][m]) for n in options.run[1:]} for m in metrics}
    p_values = {metric: holm(found) for metric, found in tests.items()}
    say(table(values, p_values, metrics))
    document = {
        "queries": queries.artifact.key,
        "split": options.split,
        "num_queries": len(set(ids)),
        "mean": {name: {m: float(v.mean()) for m, v in found.items()} for name, found in values.items()},
        "p_against_first": p_values,
        "query_ids": sorted(set(qrels["query_id"].to_pylist())),
        "per_query": {name: {m: v.tolist() for m, v in found.items()} for name, found in values.items()},
    }
    path = result_path(options.json)
    path.write_text(json.dumps(document, indent=1) + "\n")
    say(f"{len(set(ids)):,} queries of {queries.artifact.key} {options.split}; figures in {path}")


def measure_of(
    store: Store, queries: Queries, qrels: pa.Table, metrics: list[str]
) -> Callable[[pa.Table], dict[str, np.ndarray]]:
    """What gives a run's values of each metric, as per_query does. Raises InputError where no question has answers."""
    depths = {name: int(found.group(1)) for name in metrics if (found := re.fullmatch(r"Answer@([1-9]\d*)", name))}
    others = [name for name in metrics if name not in depths]
    judged = sorted(set(qrels["query_id"].to_pylist()))
    answers: dict[str, list[str]] = {}
    if depths:
        metadata = dict(zip(*(queries.table[column].to_pylist() for column in ("id", "metadata")), strict=True))
        answers = {id: answers_of(metadata[id]) for id in judged}
        if not any(answers.values()):
            raise InputError(f"--metrics {next(iter(depths))}: no question of {queries.artifact.key} has answers: they "
                             'are its metadata, {"answers": ["a", "b"]}')  # fmt: skip
        corpus = Corpus.open(store)

    def measure(run: pa.Table) -> dict[str, np.ndarray]:
        values = per_query(qrels, run, others) if others else {}
        if depths:
            ranks = answer_ranks(run, answers, corpus, max(depths.values()))
            found = np.array([ranks[id] for id in judged])
            values |= {name: ((found > 0) & (found <= depth)).astype(float) for name, depth in depths.items()}
        return {name: values[name] for name in metrics}

    return measure


def load(store: Store, name: str, queries: Queries, split: str) -> pa.Table:
    """A run of the store, or a TREC file, as query_id, id, score. Raises InputError for a run of other queries."""
    if Path(name).is_file():
        return read_trec(name)
    artifact = store.open("runs", store.only("runs", name))
    of = artifact.inputs["queries"]
    if of["fingerprint"] != queries.artifact.fingerprint or artifact.config["split"] not in (split, ALL):
        raise InputError(
            f"{artifact.url} is a run of {of['artifact']} {artifact.config['split']}, not of {queries.artifact.key} "
            f"{split}: name those with --queries and --split, or search these"
        )
    blocks = []
    for block in read_run(artifact):
        # The order of ranks is the run's; equal scores are made to fall, or the measures would order them their way.
        same = np.concatenate([[False], pc.equal(block["query_id"][1:], block["query_id"][:-1]).to_numpy()])
        blocks.append(block.set_column(3, "score", pa.array(falling(block["score"].to_numpy(), same.astype(np.int8)))))
    return pa.concat_tables(blocks)


def table(values: dict, p_values: dict, metrics: list[str]) -> str:
    """Runs below one another, metrics side by side; behind a figure the p-value against the first run."""
    width = max(len("run"), *(len(name) for name in values))
    lines = ["run".ljust(width) + "".join(f"  {metric:>18}" for metric in metrics)]
    for name, found in values.items():
        cells = []
        for metric in metrics:
            p = p_values[metric].get(name)
            cells.append(f"{found[metric].mean():.4f}" + (f" (p={p:.4f})" if p is not None else ""))
        lines.append(name.ljust(width) + "".join(f"  {cell:>18}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    run(main, Evaluate)
