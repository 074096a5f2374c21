"""Measures syncs of a corpus: their encoding beside that of a full run, and their comparison in two orders.

    python benchmarks/sync.py --source ../shared/data/squad --shares 0.01 0.1
    python benchmarks/sync.py --sizes 100000 400000

Each kind of edit concerns a share of the documents. `changed`: the text of as many changes, a tenth as many are
removed, and as many added. `moved`: as many get another id. `split`: the corpus is split into passages, and as many
documents get another word at the end. The source gets another order. Seconds are CPU seconds of the process and its
children; tokens are those that the encoder reads. --hits searches a store that is built from scratch too. Encoding is
in float32, so that a difference of the hits comes from riptide and not from the rounding of a batch.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import read_documents, write_data_set, write_documents, write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import Parser
from riptide import Store
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.copied_vectors import COPIES
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.options import EncoderOptions

Passages = Sequence[dict[str, Any]]
WORDS = [f"word{number}" for number in range(997)]
PART_SIZE = 1_000
SPLIT = {"split_words": 60}  # options of the imports of a split corpus


def change(passages: Passages, count: int) -> Passages:
    """Changes `count` passages, adds and removes a tenth as many."""
    changed = [{**passage, "text": f"{passage['text']} Changed."} for passage in passages[:count]]
    added = [
        {**passage, "_id": f"added-{passage['_id']}", "text": f"Added. {passage['text']}"}
        for passage in passages[: count // 10]
    ]
    return [*added, *changed, *passages[count + count // 10 :]]


def move(passages: Passages, count: int) -> Passages:
    """Gives `count` passages another id."""
    return [
        {**passage, "_id": f"moved-{passage['_id']}"} if row < count else passage
        for row, passage in enumerate(passages)
    ]


def change_ends(passages: Passages, count: int) -> Passages:
    """Adds a word to `count` passages, at the end."""
    return [
        {**passage, "text": f"{passage['text']} Changed."} if row < count else passage
        for row, passage in enumerate(passages)
    ]


EDITS: Mapping[str, tuple[Callable[[Passages, int], Passages], dict[str, Any]]] = {
    "changed": (change, {}),
    "moved": (move, {}),
    "split": (change_ends, SPLIT),
}


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measured(function: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """Calls a function and returns the CPU seconds that it took."""
    started = cpu_seconds()
    function(*arguments, **options)
    return round(cpu_seconds() - started, 2)


def build(store: Store, source: Path, encoder: str, **options: Any) -> dict[str, Any]:
    """Imports and encodes, and returns the seconds of both, with the passages and tokens that were encoded."""
    seconds = {
        "import_s": measured(store.import_corpus, source, **options),
        "encode_s": measured(store.encode_corpus, encoder, name="e", dtype="float32", compile="never"),
    }
    corpus, generation = Corpus.open(store), store.generations("embeddings", "e")[-1]
    rows = np.arange(corpus.num_rows - generation.rows, corpus.num_rows)
    copied = np.load(generation.local_path(COPIES))[0] if generation.find_part(COPIES) else rows[:0]
    passages = corpus.passages(np.setdiff1d(rows, copied))
    text_encoder = Encoder(encoder, EncoderOptions(dtype="float32", compile="never"))
    texts = text_encoder.compose([each.title for each in passages], [each.text for each in passages])
    tokens = int(text_encoder.tokenize(texts, side="passage").lengths.sum())
    return {**seconds, "encoded": len(passages), "copied": len(copied), "tokens": tokens}


def compare_hits(synced: Store, fresh: Store) -> dict[str, Any]:
    """Searches two stores exactly and returns how their hits differ."""
    hits = [store.search_queries("exact:e", split="all", k=10).table().to_pylist() for store in (synced, fresh)]
    pairs = list(zip(*hits, strict=True))
    return {
        "hits": len(pairs),
        "hits_in_another_place": sum(one["id"] != other["id"] for one, other in pairs),
        "largest_difference_of_a_score": max(abs(one["score"] - other["score"]) for one, other in pairs),
    }


def measure_encoding(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Returns the figures of each edit and share, and of a first build."""
    passages = list(read_documents(options.source / "corpus.jsonl"))
    random.Random(0).shuffle(passages)
    passages = passages[: options.passages or None]
    queries = list(read_documents(options.source / "queries.jsonl"))[: options.queries]
    figures: dict[str, Any] = {"documents": len(passages)}
    write_data_set(root / "first/raw", queries, {}, sorted(passages, key=lambda passage: str(passage["_id"])))
    for edit in options.edits:
        function, split = EDITS[edit]
        first = root / ("first-split" if split else "first-whole")
        if not first.exists():
            figures[first.name] = build(Store(first), root / "first/raw", options.encoder, **split)
        for share in options.shares:
            name = f"{edit} {share}"
            edited = list(function(passages, round(share * len(passages))))
            random.Random(1).shuffle(edited)
            write_data_set(source := root / name / "raw", queries, {}, edited)
            synced = Store(shutil.copytree(first, root / name / "synced"))
            figures[name] = build(synced, source, options.encoder, sync=True, **split)
            if options.hits:
                fresh = Store(root / name / "fresh")
                figures[name]["from_scratch"] = build(fresh, source, options.encoder, **split)
                figures[name] |= compare_hits(synced, fresh)
            print(name, figures[name], flush=True)
    return figures


def measure_comparison(sizes: Sequence[int], root: Path) -> dict[str, Any]:
    """Returns the CPU seconds of a sync that finds one changed passage, in the order of the corpus and in another.

    Parts are small, as a time that grows with the number of pairs of parts would show.
    """
    figures = {}
    for size in sizes:
        texts = (" ".join(WORDS[(31 * row + 7 * place) % len(WORDS)] for place in range(30)) for row in range(size))
        passages = [{"_id": f"id-{row}", "title": "", "text": text} for row, text in enumerate(texts)]
        write_documents(root / f"{size}/raw/corpus.jsonl", passages)
        first = Store(root / f"{size}/first")
        figures[f"{size} import"] = measured(first.import_corpus, root / f"{size}/raw", part_size=PART_SIZE)
        passages[size // 2]["text"] += " changed"
        for order in ("same", "shuffled"):
            if order == "shuffled":
                random.Random(0).shuffle(passages)
            write_documents((source := root / f"{size}/{order}") / "corpus.jsonl", passages)
            synced = Store(shutil.copytree(root / f"{size}/first", root / f"{size}/synced-{order}"))
            figures[f"{size} {order}"] = measured(synced.import_corpus, source, sync=True, part_size=PART_SIZE)
            print(f"{size} {order}", figures[f"{size} {order}"], flush=True)
    return figures


def main() -> None:
    """Reads the options, makes the stores, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--source", None, "BEIR folder, to measure encoding", type=Path)
    parser.add("--passages", 0, "documents of the source that are used; 0: all")
    parser.add("--edits", list(EDITS), "kinds of edits", choices=EDITS)
    parser.add("--shares", [0.01, 0.1], "shares of the documents that are edited")
    parser.add("--queries", 500, "queries that are searched with --hits")
    parser.add("--hits", False, "compare the hits with those of a store that is built from scratch")
    parser.add("--encoder", MINILM, "encoder")
    parser.add("--sizes", None, "passages of the corpora whose comparison is measured", nargs="+", type=int)
    parser.add("--json", "results/sync.json", "output file")
    options = parser.parse_args()
    if not options.source and not options.sizes:
        parser.error("expected --source FOLDER or --sizes")
    with tempfile.TemporaryDirectory(prefix="riptide-sync-") as folder:
        figures = measure_comparison(options.sizes or [], Path(folder))
        if options.source:
            figures |= measure_encoding(options, Path(folder))
    print(json.dumps(figures, indent=1))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
