"""Measures how well a re-ranker's scores separate mined candidates with an answer of the query from those without.

    python benchmarks/denoising.py --store S --source raw/squad-windows --candidates both-50 --scores NAME

For each threshold: how many candidates score below it, the share of them that hold no answer (precision), and the share
of all candidates without an answer (recall). The answers are read from the raw BEIR files. A passage
holds an answer if it contains the answer's words in a row, as plain lower-case text between word boundaries.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.check_negatives import plain
from benchmarks.common.files import read_documents
from benchmarks.common.program import Parser

THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.01)


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--store", None, "store with the corpus and the candidates", required=True)
    parser.add("--source", None, "the raw files, in BEIR form", type=Path, required=True)
    parser.add("--candidates", None, "candidates/NAME of the store", required=True)
    parser.add("--scores", None, "scores/NAME of the store: its first generation is read", required=True)
    options = parser.parse_args()
    from indexing.corpus.corpus import Corpus
    from indexing.store.store import Store

    store = Store(options.store)
    corpus, pool = Corpus.open(store), store.open("candidates", options.candidates)
    scores = store.generations("scores", options.scores)[0]
    answers = {query["_id"]: query["metadata"]["answers"] for query in read_documents(options.source / "queries.jsonl")}
    texts = {passage["_id"]: plain(passage["text"]) for passage in read_documents(options.source / "corpus.jsonl")}
    probabilities: list[float] = []
    has_answer: list[bool] = []
    for part in pool.numbered_parts("part"):
        table = pq.read_table(pool.local_path(part))
        pairs = zip(table["query"].to_pylist(), table["row"].to_pylist(), strict=True)
        query_ids = dict(zip(pairs, table["query_id"].to_pylist(), strict=True))
        scored = pq.read_table(scores.local_path(part.name)).to_pylist()
        ids = corpus.ids(np.array([pair["row"] for pair in scored], np.int64))
        patterns: dict[str, list[re.Pattern[str]]] = {}
        for pair, id in zip(scored, ids, strict=True):
            query = query_ids.get((pair["query"], pair["row"]))
            if query is None:
                continue  # a positive
            if query not in patterns:
                words = [plain(answer) for answer in answers[query]]
                patterns[query] = [re.compile(rf"(?<!\w){re.escape(each)}(?!\w)") for each in words if each]
            probabilities.append(pair["probability"])
            has_answer.append(any(pattern.search(texts[id]) for pattern in patterns[query]))
    known, holds = np.array(probabilities), np.array(has_answer)
    print(json.dumps({"pairs": len(known), "with_an_answer": int(holds.sum())}))
    for threshold in THRESHOLDS:
        below = known < threshold
        correct = int((below & ~holds).sum())
        print(
            json.dumps(
                {
                    "threshold": threshold,
                    "below": int(below.sum()),
                    "precision": round(correct / max(1, int(below.sum())), 4),
                    "recall": round(correct / max(1, int((~holds).sum())), 4),
                    "answers_above": round(float((~below & holds).sum() / max(1, holds.sum())), 4),
                }
            )
        )


if __name__ == "__main__":
    main()
