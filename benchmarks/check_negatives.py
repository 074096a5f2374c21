"""Counts the mined passages that are positives or hold an answer, by a plain loop without any code of the mining.

    python benchmarks/check_negatives.py --store S --source ../shared/data/squad --negatives hard --count 2000
    python benchmarks/check_negatives.py --store S --source raw/squad-windows --candidates both-50 --scores NAME

The first form counts them among mined negatives. The second one measures how well a re-ranker's scores separate mined
candidates with an answer from those without. For each threshold: how many candidates score below it, the share of them
that hold no answer (precision), and the share of all candidates without an answer (recall).

The answers are read from the raw BEIR files. A passage holds an answer if it contains the answer's words in a row, as
plain lower-case text between word boundaries.
"""

from __future__ import annotations

import argparse
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.common.files import read_documents, read_qrels
from benchmarks.common.program import Parser
from riptide import Store

THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.01)


def plain(text: str) -> str:
    """Returns a text in lower case, in Unicode's form NFKC, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


class Answers:
    """The texts of the passages and the answers of the queries in a BEIR folder."""

    def __init__(self, source: Path):
        self._texts = {passage["_id"]: plain(passage["text"]) for passage in read_documents(source / "corpus.jsonl")}
        self._patterns: dict[str, list[re.Pattern[str]]] = {}
        for query in read_documents(source / "queries.jsonl"):
            answers = filter(None, map(plain, query["metadata"]["answers"]))
            self._patterns[query["_id"]] = [re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)") for answer in answers]

    def are_in(self, passage: str, query: str) -> bool:
        """Returns whether a passage holds an answer of a query, both by id."""
        return any(pattern.search(self._texts[passage]) for pattern in self._patterns[query])


def check_negatives(store: Store, answers: Answers, options: argparse.Namespace) -> None:
    """Prints the numbers of positives and of passages with an answer among the negatives of random queries."""
    qrels = read_qrels(options.source / f"qrels/{options.split}.tsv")
    relevant = {(each.query, each.passage) for each in qrels if int(each.score) > 0}
    corpus, artifact = store.corpus(), store.open("negatives", options.negatives)
    rows = [
        row for part in artifact.numbered_parts("part") for row in pq.read_table(artifact.local_path(part)).to_pylist()
    ]
    draw = np.random.default_rng(0).choice(len(rows), min(options.count, len(rows)), replace=False)
    counts = {"queries": len(draw), "negatives": 0, "positives_among_them": 0, "with_an_answer": 0}
    for row in (rows[number] for number in draw):
        for id in corpus.ids(np.array(row["negatives"], np.int64)):
            counts["negatives"] += 1
            counts["positives_among_them"] += (row["query_id"], id) in relevant
            counts["with_an_answer"] += answers.are_in(id, row["query_id"])
    print(json.dumps(counts))


def check_scores(store: Store, answers: Answers, options: argparse.Namespace) -> None:
    """Prints how well the scores of candidates separate those with an answer from those without, by threshold."""
    corpus, pool = store.corpus(), store.open("candidates", options.candidates)
    scores = store.generations("scores", options.scores)[0]
    probabilities, is_answer = list[float](), list[bool]()
    for part in pool.numbered_parts("part"):
        candidates = pq.read_table(pool.local_path(part)).to_pylist()
        queries = {(row["query"], row["row"]): row["query_id"] for row in candidates}
        pairs = pq.read_table(scores.local_path(part.name)).to_pylist()
        pairs = [pair for pair in pairs if (pair["query"], pair["row"]) in queries]  # the others are positives
        ids = corpus.ids(np.array([pair["row"] for pair in pairs], np.int64))
        probabilities += [pair["probability"] for pair in pairs]
        is_answer += [
            answers.are_in(id, queries[pair["query"], pair["row"]]) for pair, id in zip(pairs, ids, strict=True)
        ]
    known, holds = np.array(probabilities), np.array(is_answer, bool)
    print(json.dumps({"pairs": len(known), "with_an_answer": int(holds.sum())}))
    for threshold in THRESHOLDS:
        below = known < threshold
        correct = int((below & ~holds).sum())
        figures = {
            "threshold": threshold,
            "below": int(below.sum()),
            "precision": round(correct / max(1, int(below.sum())), 4),
            "recall": round(correct / max(1, int((~holds).sum())), 4),
            "answers_above": round(float((~below & holds).sum() / max(1, holds.sum())), 4),
        }
        print(json.dumps(figures))


def main() -> None:
    """Reads the options, and prints the figures of the negatives or of the scored candidates."""
    parser = Parser(__doc__)
    parser.add("--store", None, "store with the corpus and the negatives", required=True)
    parser.add("--source", None, "the raw files, in BEIR form", type=Path, required=True)
    parser.add("--negatives", None, "negatives/NAME of the store")
    parser.add("--split", "train", "split of the queries of --negatives")
    parser.add("--count", 2_000, "number of queries of --negatives, drawn at random")
    parser.add("--candidates", None, "candidates/NAME of the store")
    parser.add("--scores", None, "scores/NAME of the store for --candidates: its first generation is read")
    options = parser.parse_args()
    if bool(options.negatives) == bool(options.candidates) or bool(options.scores) != bool(options.candidates):
        parser.error("expected --negatives, or --candidates with --scores")
    check = check_scores if options.candidates else check_negatives
    check(Store(options.store), Answers(options.source), options)


if __name__ == "__main__":
    main()
