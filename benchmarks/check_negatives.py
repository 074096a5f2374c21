"""Counts the mined negatives that are positives or hold an answer, by a plain loop without any code of the mining.

    python benchmarks/check_negatives.py --store S --source ../shared/data/squad --negatives hard --count 2000

The answers are read from the raw BEIR files. A passage holds an answer if it contains the answer's words in a row, as
plain lower-case text between word boundaries.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import read_documents, read_qrels
from benchmarks.common.program import Parser


def plain(text: str) -> str:
    """Returns a text in lower case, in Unicode's form NFKC, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--store", None, "store with the corpus and the negatives", required=True)
    parser.add("--source", None, "the raw files, in BEIR form", type=Path, required=True)
    parser.add("--negatives", None, "negatives/NAME of the store", required=True)
    parser.add("--split", "train", "split of the queries")
    parser.add("--count", 2_000, "number of queries, drawn at random")
    options = parser.parse_args()
    from indexing.corpus.corpus import Corpus
    from indexing.store.store import Store

    texts = {passage["_id"]: plain(passage["text"]) for passage in read_documents(options.source / "corpus.jsonl")}
    answers = {query["_id"]: query["metadata"]["answers"] for query in read_documents(options.source / "queries.jsonl")}
    relevant: dict[str, set[str]] = {}
    for query, passage, score in read_qrels(options.source / f"qrels/{options.split}.tsv"):
        if int(score) > 0:
            relevant.setdefault(query, set()).add(passage)
    store = Store(options.store)
    corpus, artifact = Corpus.open(store), store.open("negatives", options.negatives)
    rows = [
        row for part in artifact.numbered_parts("part") for row in pq.read_table(artifact.local_path(part)).to_pylist()
    ]
    draw = np.random.default_rng(0).choice(len(rows), min(options.count, len(rows)), replace=False)
    counts = {"queries": len(draw), "negatives": 0, "positives_among_them": 0, "with_an_answer": 0}
    for row in (rows[number] for number in draw):
        wanted = [
            re.compile(rf"(?<!\w){re.escape(plain(answer))}(?!\w)")
            for answer in answers[row["query_id"]]
            if plain(answer)
        ]
        for id in corpus.ids(np.array(row["negatives"], np.int64)):
            counts["negatives"] += 1
            counts["positives_among_them"] += id in relevant[row["query_id"]]
            counts["with_an_answer"] += any(answer.search(texts[id]) for answer in wanted)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
