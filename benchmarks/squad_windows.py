"""Cuts a BEIR folder's passages into overlapping windows, one of which is judged for each query: real false negatives.

    python benchmarks/squad_windows.py --source ../shared/data/squad --out W --train 3000 --dev 500 --test 3000

A passage is cut into windows of 60 words; each starts 30 words after the one before. The judged window of a query is a
random one of those of its passage that contain one of its answers. The others with an answer are unjudged positives, as
in MS MARCO, but they can be counted. Queries are sampled by the seed; one whose answer is in no window is left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.common.files import Judgement, read_documents, read_qrels, write_data_set
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
    parser.add("--source", None, "a BEIR folder whose queries have metadata.answers", type=Path, required=True)
    parser.add("--out", None, "the BEIR folder to write", type=Path, required=True)
    parser.add("--size", 60, "words of a window")
    parser.add("--stride", 30, "words between the starts of two windows")
    parser.add("--train", 3_000, "queries of the training split")
    parser.add("--dev", 500, "queries of the dev split")
    parser.add("--test", 3_000, "queries of the test split")
    parser.add("--seed", 0, "seed of the draw")
    options = parser.parse_args()
    cut: dict[str, list[dict[str, str]]] = {}
    for passage in read_documents(options.source / "corpus.jsonl.gz"):
        id, title, texts = passage["_id"], passage["title"], passage["text"].split()
        texts = windows(texts, options.size, options.stride)
        cut[id] = [{"_id": f"{id}-{place}", "title": title, "text": text} for place, text in enumerate(texts)]
    queries = {query["_id"]: query for query in read_documents(options.source / "queries.jsonl.gz")}
    random = np.random.default_rng(options.seed)
    unjudged: list[int] = []  # the number of unjudged positives of each query
    judged: dict[str, list[Judgement]] = {}
    for split in ("train", "dev", "test"):
        of_split = judged[split] = []
        pairs = read_qrels(options.source / f"qrels/{split}.tsv")
        for query, passage_id, _ in (pairs[place] for place in random.permutation(len(pairs))):
            answers = queries[query]["metadata"]["answers"]
            positives = [window["_id"] for window in cut[passage_id] if holds(window["text"], answers)]
            if positives and len(of_split) < getattr(options, split):
                of_split.append(Judgement(query, positives[random.integers(len(positives))]))
                unjudged.append(len(positives) - 1)
    sample = [queries[each.query] for of_split in judged.values() for each in of_split]
    corpus = [window for of_passage in cut.values() for window in of_passage]
    write_data_set(options.out, sample, {split: sorted(of_split) for split, of_split in judged.items()}, corpus)
    print(
        f"{len(corpus):,} windows of {len(cut):,} passages, {len(unjudged):,} queries, each with "
        f"{np.mean(unjudged):.2f} unjudged positives"
    )


if __name__ == "__main__":
    main()
