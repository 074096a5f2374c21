"""Compares a sync of a corpus in which some passages have changed with a store that is built from scratch.

    python benchmarks/sync.py --source ../shared/data/squad --shares 0.01 0.1

For each share, the text of as many passages changes, a tenth as many are removed, and as many added. Both stores are
searched exactly. Encoding is in float32, so that a difference of the hits comes from riptide and not from the rounding
of a batch.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.files import read_documents, write_data_set, write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import Parser
from riptide import Store

Passages = Sequence[Mapping[str, Any]]


def changed_passages(passages: Passages, share: float) -> Passages:
    """Returns the passages after a change of a share of them, in another order."""
    random = np.random.default_rng(0)
    order = random.permutation(len(passages)).tolist()
    count = round(share * len(passages))
    changed = [{**passages[row], "text": f"{passages[row]['text']} Changed."} for row in order[:count]]
    added = [
        {**passages[row], "_id": f"added-{row}", "text": f"Added. {passages[row]['text']}"}
        for row in order[: count // 10]
    ]
    return [*added, *changed, *(passages[row] for row in order[count + count // 10 :])]


def main() -> None:
    """Reads the options, makes the stores, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--source", None, "BEIR folder", type=Path, required=True)
    parser.add("--shares", [0.01, 0.1], "shares of the passages that change")
    parser.add("--queries", 500, "queries that are searched")
    parser.add("--encoder", MINILM, "encoder")
    parser.add("--json", "results/sync.json", "output file")
    options = parser.parse_args()

    passages = list(read_documents(options.source / "corpus.jsonl"))
    queries = list(read_documents(options.source / "queries.jsonl"))[: options.queries]

    def build(store: Store, source: Path, *, sync: bool) -> dict[str, float]:
        """Imports and encodes, and returns the seconds of both."""
        started = time.perf_counter()
        store.import_corpus(source, sync=sync)
        imported = time.perf_counter()
        store.encode_corpus(options.encoder, name="e", dtype="float32", compile="never")
        return {"import_s": round(imported - started, 2), "encode_s": round(time.perf_counter() - imported, 2)}

    figures: dict[str, Any] = {"passages": len(passages)}
    with tempfile.TemporaryDirectory(prefix="riptide-sync-") as folder:
        root = Path(folder)
        write_data_set(root / "first/raw", queries, {}, passages)
        for share in options.shares:
            write_data_set(root / f"{share}/raw", queries, {}, changed_passages(passages, share))
            synced, fresh = Store(root / f"synced-{share}"), Store(root / f"fresh-{share}")
            build(synced, root / "first/raw", sync=False)
            times = build(synced, root / f"{share}/raw", sync=True)
            whole = build(fresh, root / f"{share}/raw", sync=False)
            hits = [store.search_queries("exact:e", split="all", k=10).table().to_pylist() for store in (synced, fresh)]
            pairs = list(zip(*hits, strict=True))
            figures[f"{share}"] = {
                "encoded": synced.open("embeddings", "e/g0001").rows,
                "sync": times,
                "built_from_scratch": whole,
                "hits": len(pairs),
                "hits_in_another_place": sum(one["id"] != other["id"] for one, other in pairs),
                "largest_difference_of_a_score": max(abs(one["score"] - other["score"]) for one, other in pairs),
            }
    print(json.dumps(figures, indent=1))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
