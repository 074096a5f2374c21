"""Cuts a BEIR folder's passages into overlapping windows, one of which is judged for each query: real false negatives.

    python benchmarks/squad_windows.py --source ../shared/data/squad --out W --train 3000 --dev 500 --test 3000
    python benchmarks/squad_windows.py --source ../shared/data/squad --out W --train 3000 --unjudged 1 --store S

A passage is cut into windows of 60 words; each starts 30 words after the one before. The judged window of a query is a
random one of those of its passage that contain one of its answers. The others with an answer are unjudged positives, as
in MS MARCO, but they can be counted: the split "unjudged" names those of the training queries. Queries are sampled by
the seed; one whose answer is in no window is left out.

The second form also imports the folder, an existing one too, and writes negatives/unjudged: the unjudged positives of
each training query.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common.files import Judgement, read_documents, read_qrels, write_data_set
from benchmarks.common.program import Parser
from riptide import Store
from riptide.indexing.mining.candidates import read_queries


def windows(words: list[str], size: int, stride: int) -> list[str]:
    """Returns overlapping stretches of words; the last one ends with the text and is not shorter than the others."""
    starts = list(range(0, max(1, len(words) - size), stride))
    if len(words) > size and starts[-1] + size < len(words):
        starts.append(len(words) - size)
    return [" ".join(words[start : start + size]) for start in starts]


def holds(text: str, answers: list[str]) -> bool:
    """Returns whether a text holds one of the answers, without regard to case and spacing."""
    lowered = " ".join(text.lower().split())
    return any(" ".join(answer.lower().split()) in lowered for answer in answers)


def write_windows(options: argparse.Namespace) -> None:
    """Writes the BEIR folder."""
    cut: dict[str, list[dict[str, str]]] = {}
    for passage in read_documents(options.source / "corpus.jsonl.gz"):
        id, title, texts = passage["_id"], passage["title"], passage["text"].split()
        texts = windows(texts, options.size, options.stride)
        cut[id] = [{"_id": f"{id}-{place}", "title": title, "text": text} for place, text in enumerate(texts)]
    queries = {query["_id"]: query for query in read_documents(options.source / "queries.jsonl.gz")}
    random = np.random.default_rng(options.seed)
    judged: dict[str, list[Judgement]] = {}
    unjudged: dict[str, list[Judgement]] = {}
    for split in ("train", "dev", "test"):
        of_split = judged[split] = []
        others = unjudged[split] = []
        least = options.unjudged if split == "train" else 0
        pairs = read_qrels(options.source / f"qrels/{split}.tsv")
        for query, passage_id, _ in (pairs[place] for place in random.permutation(len(pairs))):
            answers = queries[query]["metadata"]["answers"]
            positives = [window["_id"] for window in cut[passage_id] if holds(window["text"], answers)]
            if len(positives) > least and len(of_split) < getattr(options, split):
                place = int(random.integers(len(positives)))
                of_split.append(Judgement(query, positives[place]))
                others += [Judgement(query, each) for each in positives[:place] + positives[place + 1 :]]
    sample = [queries[each.query] for of_split in judged.values() for each in of_split]
    corpus = [window for of_passage in cut.values() for window in of_passage]
    qrels = {**judged, "unjudged": unjudged["train"]}
    write_data_set(options.out, sample, {split: sorted(of_split) for split, of_split in qrels.items()}, corpus)
    counts = {split: len(unjudged[split]) / max(1, len(of_split)) for split, of_split in judged.items()}
    print(
        f"{len(corpus):,} windows of {len(cut):,} passages, {len(sample):,} queries; unjudged positives of a query: "
        + ", ".join(f"{split} {count:.2f}" for split, count in counts.items())
    )


def write_negatives(store: Store) -> None:
    """Writes negatives/unjudged, unless it is complete."""
    corpus, queries = store.corpus(), store.queries()
    judged, unjudged = (read_queries(corpus, queries, split, None, answers=False) for split in ("train", "unjudged"))
    rows = dict(zip(unjudged.ids, unjudged.positives, strict=True))
    negatives = [rows.get(id, np.zeros(0, np.int64)) for id in judged.ids]
    kind = pa.large_list(pa.int64())
    columns = {"positives": pa.array(judged.positives, kind), "negatives": pa.array(negatives, kind)}
    table = pa.table({"query_id": judged.ids, **columns})
    inputs = {"corpus": corpus.generations[-1], "queries": queries.artifact}
    with store.create("negatives", "unjudged", inputs=inputs, config={"negatives": "unjudged positives"}) as draft:
        if not draft.is_complete:
            draft.commit("part-00000", ".parquet", lambda path: pq.write_table(table, path), rows=len(table))
    print(f"{store.url}/negatives/unjudged: {sum(map(len, negatives)):,} of {len(negatives):,} queries")


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--source", None, "a BEIR folder whose queries have metadata.answers", type=Path, required=True)
    parser.add("--out", None, "the BEIR folder to write", type=Path, required=True)
    parser.add("--store", None, "the store that imports it")
    parser.add("--size", 60, "words of a window")
    parser.add("--stride", 30, "words between the starts of two windows")
    parser.add("--train", 3_000, "queries of the training split")
    parser.add("--unjudged", 0, "least number of unjudged positives of a training query")
    parser.add("--dev", 500, "queries of the dev split")
    parser.add("--test", 3_000, "queries of the test split")
    parser.add("--seed", 0, "seed of the draw")
    options = parser.parse_args()
    if not options.store or not options.out.exists():
        write_windows(options)
    if options.store:
        store = Store(options.store)
        store.import_corpus(options.out)
        write_negatives(store)


if __name__ == "__main__":
    main()
