"""Draws the parts of five sets that arms/hyper-transfer.yaml uses, each as a BEIR folder.

    python benchmarks/transfer_sets.py --data ../shared/data --folder S/raw --size 1000 --measured 500 --passages 6000

A part has at most --size training queries, --measured queries of a dev or test split, and --passages passages, among
them all judged ones. SciFact has no dev split: 200 of its training queries are held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.common.files import Judgement, judgements_of, read_documents, read_qrels, write_data_set
from benchmarks.common.program import Parser

SETS = ("squad", "scifact", "medquad", "climate-fever-sent", "inscit")
HELD_OUT = {"scifact": 200}  # training queries that are the dev split


def draw_judgements(data: Path, options: argparse.Namespace) -> dict[str, list[Judgement]]:
    """Returns the judgements of the queries of a part of a set by split."""
    whole = {file.stem: read_qrels(file) for file in sorted((data / "qrels").glob("*.tsv"))}
    train = sorted({judgement.query for judgement in whole["train"] if int(judgement.score) > 0})
    order = [train[place] for place in np.random.default_rng(0).permutation(len(train))]
    held_out = HELD_OUT.get(data.name, 0)
    measured = {split: of_split for split, of_split in whole.items() if split != "train"}
    if held_out:
        measured["dev"] = judgements_of(order[:held_out], whole["train"])
    parts = {"train": judgements_of(order[held_out : held_out + options.size], whole["train"])}
    for split, of_split in measured.items():
        parts[split] = judgements_of(draw((judgement.query for judgement in of_split), options.measured), of_split)
    return parts


def draw(ids: Iterable[str], count: int) -> set[str]:
    """Returns at most `count` of some ids, drawn at random."""
    ordered = sorted(set(ids))
    return {ordered[place] for place in np.random.default_rng(0).permutation(len(ordered))[:count]}


def write_part(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Writes a part of a set, unless it is written."""
    if folder.exists():
        return
    parts = draw_judgements(data, options)
    queries = {judgement.query for of_split in parts.values() for judgement in of_split}
    passages = {judgement.passage for of_split in parts.values() for judgement in of_split}
    others = {document["_id"] for document in read_documents(data / "corpus.jsonl")} - passages
    passages |= draw(others, max(options.passages - len(passages), 0))
    corpus = read_documents(data / "corpus.jsonl", passages)
    write_data_set(folder, read_documents(data / "queries.jsonl", queries), parts, corpus)


def main() -> None:
    """Reads the options and writes the parts."""
    parser = Parser(__doc__)
    parser.add("--data", None, "folder with the BEIR folders of all sets", type=Path, required=True)
    parser.add("--folder", None, "folder to write to", type=Path, required=True)
    parser.add("--size", None, "training queries of a set at most", type=int, required=True)
    parser.add("--measured", None, "queries of a dev or test split at most", type=int, required=True)
    parser.add("--passages", None, "passages of a set at most", type=int, required=True)
    options = parser.parse_args()
    for name in SETS:
        write_part(options.data / name, options.folder / name, options)


if __name__ == "__main__":
    main()
