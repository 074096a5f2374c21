"""Prepared sets: training queries with negatives of several kinds, test queries, and the passages of both.

A set is a folder with passages.jsonl, whose first lines are the pool, train.jsonl, test.jsonl, and set.json, which is
written last. Passages are named by their line, from 0. A set is written with all packages, and read without a store.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.files import read_documents, write_documents, write_json

if TYPE_CHECKING:
    from riptide import Store
    from riptide.retriever.training.training_data import TrainingData

KINDS = ("none", "random", "bm25", "bm25-filtered")  # kinds of negatives
MARGIN = 0.05  # relative margin of "bm25-filtered" for queries without answers
BLOCK = 2_048  # passages that are read at a time


def write_set(store: Store, options: argparse.Namespace) -> None:
    """Mines the negatives of all training queries, draws queries and the pool, and writes the set."""
    from riptide.indexing.mining.candidates import read_queries
    from riptide.indexing.mining.negatives import read_training_data

    corpus, queries = store.corpus(), store.queries(options.queries)
    if not store.names("bm25"):
        store.build_bm25()
    has_answers = any(read_queries(corpus, queries, options.split, None, answers=True).answers)
    filters = {"bm25": {}, "bm25-filtered": {"drop_answers": True} if has_answers else {"relative_margin": MARGIN}}
    mined = {}
    for kind, rule in filters.items():
        name = f"gpu-{queries.artifact.name}-{options.split}-{kind}"
        sizes = {"depth": options.depth, "pool_negatives": options.kept, "denoised_negatives": 0}
        names = {"queries": queries.artifact.name, "split": options.split, "name": name, "candidates": name}
        negatives = store.mine_negatives(["bm25"], **names, **sizes, **rule)
        mined[kind] = read_training_data(corpus, queries, options.split, negatives, None)
    random, data = np.random.default_rng(0), mined["bm25"]
    test = read_queries(corpus, queries, options.test_split, None, answers=False)
    answerable = [number for number, rows in enumerate(test.positives) if len(rows)]
    tested = sorted(random.permutation(answerable)[: options.test].tolist())
    judged = np.unique(np.concatenate([test.positives[number] for number in tested]))
    others = np.setdiff1d(np.arange(corpus.num_rows), np.concatenate([judged, corpus.deleted]))
    others = random.permutation(others)[: max(options.pool - len(judged), 0)]
    pool = np.concatenate([judged, others])
    trained = sorted(random.permutation(len(data.queries))[: options.train].tolist())
    records: list[dict[str, Any]] = []
    for number in trained:
        sample = random.choice(others, min(2 * options.kept, len(others)), replace=False)
        rows = {"random": sample[~np.isin(sample, data.relevant_rows(number))][: options.kept]}
        rows |= {kind: each.negatives[number] for kind, each in mined.items()}
        records.append({"text": data.queries[number], "positives": data.positives[number], "negatives": rows})
    lists = [rows for each in records for rows in (each["positives"], *each["negatives"].values())]
    stored = np.concatenate([pool, np.setdiff1d(np.concatenate(lists), pool)])
    places = {row: place for place, row in enumerate(stored.tolist())}

    def lines_of(rows: np.ndarray) -> list[int]:
        return [places[row] for row in rows.tolist() if row in places]

    for number, record in zip(trained, records, strict=True):
        record["positives"] = lines_of(record["positives"])
        record["negatives"] = {kind: lines_of(rows) for kind, rows in record["negatives"].items()}
        record["copies"] = [] if data.copies is None else lines_of(data.copies[number])
    passages = itertools.chain.from_iterable(
        corpus.passages(stored[start : start + BLOCK]) for start in range(0, len(stored), BLOCK)
    )
    write_documents(options.set / "passages.jsonl", ({"title": p.title, "text": p.text} for p in passages))
    write_documents(options.set / "train.jsonl", records)
    tests = ({"text": test.texts[number], "positives": lines_of(test.positives[number])} for number in tested)
    write_documents(options.set / "test.jsonl", tests)
    counts = {"train": len(records), "test": len(tested), "pool": len(pool), "passages": len(stored)}
    means = {kind: round(np.mean([len(each["negatives"][kind]) for each in records]), 2) for kind in KINDS[1:]}
    rule = "answers" if has_answers else "relative margin"
    facts = {"queries": queries.artifact.name, "filter": rule, "depth": options.depth, "mean_negatives": means}
    write_json(options.set / "set.json", {**facts, **counts}, None)


class PreparedSet:
    """A set in memory.

    Args:
        folder: The folder of the set.
        dev: Training queries that are held out, drawn at random: neighbours in a file are of the same subject.

    Attributes:
        about: The content of set.json.
        test: The test queries with their positives.
        dev: The held-out queries with their positives, some of which may not be in the pool.
    """

    def __init__(self, folder: Path, dev: int = 0):
        if not (folder / "set.json").exists():
            sys.exit(f"error: {folder}: expected a set with the file set.json, which --prepare writes last")
        self.about: dict[str, Any] = json.loads((folder / "set.json").read_text(encoding="utf-8"))
        self.test = list(read_documents(folder / "test.jsonl"))
        queries = list(read_documents(folder / "train.jsonl"))
        held_out = set(np.random.default_rng(0).choice(len(queries), dev, replace=False).tolist())
        self._train = [query for number, query in enumerate(queries) if number not in held_out]
        self.dev = [queries[number] for number in sorted(held_out)]
        self._passages = list(read_documents(folder / "passages.jsonl"))

    def passages(self, rows: Iterable[int]) -> tuple[list[str], list[str]]:
        """Returns the titles and the texts of passages."""
        chosen = [self._passages[row] for row in rows]
        return [each["title"] for each in chosen], [each["text"] for each in chosen]

    def training_data(self, kind: str) -> TrainingData:
        """Returns the TrainingData with a kind of negatives."""
        from riptide.retriever.training.training_data import TrainingData

        lists = ([each["positives"], each["negatives"].get(kind, []), each["copies"]] for each in self._train)
        positives, negatives, copies = zip(
            *([np.array(rows, np.int64) for rows in each] for each in lists), strict=True
        )
        texts = [each["text"] for each in self._train]
        return TrainingData(texts, positives, negatives, len(self._passages), self.passages, copies=copies)
