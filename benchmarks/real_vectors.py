"""Makes files of real vectors and queries for the benchmarks of search and of indexes, from sets in BEIR form.

    python benchmarks/real_vectors.py --data ../shared/data --folder V

Writes two files, both float16 [n, dim]: vectors.npy, the embeddings of pieces of passages and of queries in a random
order, and queries.npy, those of other queries, which search them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.common.files import read_documents
from benchmarks.common.program import Parser
from riptide.indexing.files.splitting import DocumentSplit, passage_spans
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

SETS = ("arxiv", "climate-fever-sent", "inscit", "medquad", "pubmedqa", "reuters", "scifact", "squad")


def main() -> None:
    """Reads the options, and writes the files that are missing."""
    parser = Parser(__doc__)
    parser.add("--data", "../shared/data", "folder with the sets")
    parser.add("--sets", SETS, "names of the sets", nargs="+")
    parser.add("--folder", None, "where the files are written", required=True, type=Path)
    parser.add("--words", 40, "maximum number of words of a piece")
    parser.add("--num-vectors", 200_000, "maximum number of vectors")
    parser.add("--num-queries", 2_000, "number of queries that search")
    parser.add("--model", "all-MiniLM-L6-v2", "encoder")
    parser.add("--dtype", "int8", "numerics class of the encoder")
    options = parser.parse_args()
    pieces, queries = list[str](), list[str]()
    split = DocumentSplit(options.words)
    for folder in (Path(options.data) / name for name in options.sets):
        for text in (document["text"] for document in read_documents(folder / "corpus.jsonl")):
            pieces += [text[start:end] for start, end in passage_spans(text, split)]
        queries += [query["text"] for query in read_documents(folder / "queries.jsonl")]
    rng = np.random.default_rng(0)
    queries = [queries[row] for row in rng.permutation(len(queries))]
    texts = pieces + queries[options.num_queries :]
    rows = rng.permutation(len(texts))[: options.num_vectors]
    print(f"{len(rows):,} of {len(texts):,} texts, {options.num_queries:,} queries", flush=True)
    encoder = Encoder(options.model, EncoderOptions(dtype=options.dtype))
    options.folder.mkdir(parents=True, exist_ok=True)
    files = {"queries.npy": queries[: options.num_queries], "vectors.npy": [texts[row] for row in rows]}
    for name, texts_of_file in files.items():
        if not (options.folder / name).exists():
            vectors = encoder.encode(texts_of_file, side="query" if name == "queries.npy" else "passage")
            np.save(options.folder / name, vectors.astype(np.float16))


if __name__ == "__main__":
    main()
