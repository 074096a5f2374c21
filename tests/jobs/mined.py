"""Negatives by hand, and the bytes of trained models."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store


def mine(
    store: Store, name: str = "hand", *, rows: dict | None = None, query_set: str | None = None, **inputs: Artifact
) -> Artifact:
    """Commits negatives/NAME in two parts: the relevant passages of every query of a query set, and random others.

    Args:
        store: The store.
        name: The name of the negatives.
        rows: Values of columns that replace those of a column, or add one.
        query_set: The name of the query set; None: the only one of the store.
        **inputs: Inputs other than the corpus and the queries.

    Returns:
        The negatives.
    """
    queries = Queries.open(store, query_set)
    corpus = Corpus.open(store)
    selected = queries.split("all")
    judged = pa.concat_tables(queries.qrels(split) for split in queries.splits).to_pylist()
    positives: dict[str, list[int]] = {}
    for line in judged:
        positives.setdefault(line["query_id"], []).append(int(corpus.rows_of([line["corpus_id"]])[0]))
    draw = np.random.default_rng(0)
    mined = {
        q: [int(row) for row in draw.choice(corpus.num_rows, 6, replace=False) if row not in positives[q]]
        for q in selected.ids
    }
    table = pa.table(
        {
            "query_id": pa.array(selected.ids, pa.string()),
            "positives": pa.array([positives[q] for q in selected.ids], pa.list_(pa.int64())),
            "negatives": pa.array([mined[q] for q in selected.ids], pa.list_(pa.int64())),
            "more": pa.array([0.5] * len(selected.ids)),
        }
    )
    for column, values in (rows or {}).items():
        if column in table.column_names:
            table = table.set_column(table.column_names.index(column), column, values)
        else:
            table = table.append_column(column, values)
    of = {"corpus": corpus.generations[-1], "queries": queries.artifact, **inputs}
    with store.create("negatives", name, inputs=of, config={"by": "hand"}) as draft:
        for number, piece in enumerate((table.slice(0, 25), table.slice(25))):
            draft.commit(
                f"part-{number:05d}", ".parquet", lambda path, piece=piece: pq.write_table(piece, path), rows=len(piece)
            )
    return store.open("negatives", name)


def weights(store: Store, key: str) -> dict[str, bytes]:
    """Returns the files of models/NAME or prompts/NAME by path."""
    folder = model_folder(store.open(*key.split("/")))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
