"""Compares a corpus that grew by 10% and lost 1% with a store that is built from scratch from the same final corpus.

    python benchmarks/growth.py --source ../shared/data/scifact

Both are searched exactly. By default, encoding is eager and in float32, so that a difference comes from riptide and not
from the rounding of a batch. The figures also say how many passages were encoded and indexed for the second generation.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common.files import read_documents, write_data_set, write_json
from benchmarks.common.models import MINILM
from benchmarks.common.program import Parser
from riptide import Store


def main() -> None:
    """Reads the options, builds and searches both stores, prints and writes the figures."""
    parser = Parser(__doc__)
    parser.add("--source", None, "BEIR folder", type=Path, required=True)
    parser.add("--encoder", MINILM, "encoder")
    parser.add("--dtype", "float32", "bfloat16 also shows differences by rounding", choices=["float32", "bfloat16"])
    parser.add("--json", "results/growth.json", "output file")
    options = parser.parse_args()

    def encode_and_index(store: Store) -> None:
        """Makes the vectors and the index of passages that have none yet."""
        store.encode_corpus(options.encoder, name="e", dtype=options.dtype, compile="never")
        store.build_index("e", factory="IVF64,PQ48", shards=2)

    passages = list(read_documents(options.source / "corpus.jsonl"))
    queries = list(read_documents(options.source / "queries.jsonl"))
    first = len(passages) - len(passages) // 11  # the appended passages are 10% of these
    deleted = set(np.random.default_rng(0).choice(first, first // 100, replace=False).tolist())
    final = [passage for number, passage in enumerate(passages) if number not in deleted]
    with tempfile.TemporaryDirectory(prefix="riptide-growth-") as folder:
        root = Path(folder)
        grown, rebuilt = Store(root / "grown"), Store(root / "rebuilt")
        for store, corpus in ((grown, passages[:first]), (rebuilt, final)):
            write_data_set(root / "raw" / Path(store.url).name, queries, {}, corpus)
            store.import_corpus(root / "raw" / Path(store.url).name, part_size=1000)
            encode_and_index(store)
        deleted_ids = root / "deleted"
        deleted_ids.write_text("".join(f"{passages[number]['_id']}\n" for number in sorted(deleted)))
        grown.import_corpus(passages[first:], append=True, delete=str(deleted_ids))
        encode_and_index(grown)
        hits = [store.search_queries("exact:e", split="all", k=100).table().to_pylist() for store in (grown, rebuilt)]
        pairs = list(zip(*hits, strict=True))
        figures = {
            "passages": first,
            "appended": len(passages) - first,
            "deleted": len(deleted),
            "encoded_for_the_second_generation": grown.open("embeddings", "e/g0001").rows,
            "indexed_for_it": grown.open("index", "e/g0001").rows,
            "hits": len(pairs),
            "hits_in_another_place": sum(
                (one["query_id"], one["id"]) != (other["query_id"], other["id"]) for one, other in pairs
            ),
            "largest_difference_of_a_score": max(abs(one["score"] - other["score"]) for one, other in pairs),
        }
    print(json.dumps(figures, indent=1))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
