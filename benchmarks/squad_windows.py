"""Cuts a BEIR folder's passages into overlapping windows, one of which is judged for each query: real false negatives.

    python benchmarks/squad_windows.py --source ../shared/data/squad --out W --train 3000 --dev 500 --test 3000

A passage is cut into windows of 60 words; each starts 30 words after the one before. The judged window of a query is a
random one of those of its passage that contain one of its answers. The others with an answer are unjudged positives, as
in MS MARCO, but they can be counted. Queries are sampled by the seed; one whose answer is in no window is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.files import Judgement, read_documents, read_qrels, write_qrels
from benchmarks.common.program import Parser


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


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--source", None, "a BEIR folder whose queries have metadata.answers", required=True)
    parser.add("--out", None, "the BEIR folder to write", required=True)
    parser.add("--size", 60, "words of a window")
    parser.add("--stride", 30, "words between the starts of two windows")
    parser.add("--train", 3_000, "queries of the training split")
    parser.add("--dev", 500, "queries of the dev split")
    parser.add("--test", 3_000, "queries of the test split")
    parser.add("--seed", 0, "seed of the draw")
    options = parser.parse_args()
    source, out = Path(options.source), Path(options.out)
    (out / "qrels").mkdir(parents=True, exist_ok=True)
    cut: dict[str, list[tuple[str, str]]] = {}
    with open(out / "corpus.jsonl", "w", encoding="utf-8") as file:
        for passage in read_documents(source / "corpus.jsonl.gz"):
            texts = windows(passage["text"].split(), options.size, options.stride)
            cut[passage["_id"]] = [(f"{passage['_id']}-{place}", text) for place, text in enumerate(texts)]
            for id, text in cut[passage["_id"]]:
                file.write(json.dumps({"_id": id, "title": passage["title"], "text": text}) + "\n")
    queries = {query["_id"]: query for query in read_documents(source / "queries.jsonl.gz")}
    random = np.random.default_rng(options.seed)
    unjudged: list[int] = []  # the number of unjudged positives of each query
    with open(out / "queries.jsonl", "w", encoding="utf-8") as file:
        for split in ("train", "dev", "test"):
            pairs = [(query, passage) for query, passage, _ in read_qrels(source / f"qrels/{split}.tsv")]
            wanted = getattr(options, split)
            judged: list[tuple[str, str]] = []
            for place in random.permutation(len(pairs)):
                query, passage = pairs[place]
                answers = queries[query]["metadata"]["answers"]
                positives = [id for id, text in cut[passage] if holds(text, answers)]
                if positives and len(judged) < wanted:
                    judged.append((query, positives[random.integers(len(positives))]))
                    unjudged.append(len(positives) - 1)
                    file.write(json.dumps(queries[query]) + "\n")
            write_qrels(out / f"qrels/{split}.tsv", (Judgement(query, window) for query, window in sorted(judged)))
    count = sum(len(texts) for texts in cut.values())
    print(
        f"{count:,} windows of {len(cut):,} passages, {len(unjudged):,} queries, each with "
        f"{np.mean(unjudged):.2f} unjudged positives"
    )


if __name__ == "__main__":
    main()
