"""Converts runs of passages to runs of documents: a document ranks by its best passage (MaxP)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.wording import Command
from riptide.indexing.corpus.corpus import Corpus


def group_by_document(run: pa.Table, corpus: Corpus, depth: int) -> tuple[pa.Table, int]:
    """Converts a run of passages to a run of documents, in which a document has the score of its best passage.

    Args:
        run: Columns query_id, id and score, and row if it is of the store. Ids are those of passages, some of which may
            be deleted by now. Without rows, ids may be those of documents.
        corpus: A split corpus.
        depth: Number of documents that a query needs.

    Returns:
        Columns query_id, id of the document, score, and passage: its id, null if the run names the document alone. And
        the number of queries with too few documents, because passages of the same ones have taken their ranks.
    """
    encoded = run["id"].combine_chunks().dictionary_encode()
    names, codes = encoded.dictionary.to_numpy(zero_copy_only=False), encoded.indices.to_numpy()
    if "row" in run.column_names:
        rows = np.empty(len(names), np.int64)
        rows[codes] = run["row"].to_numpy()
    else:
        rows = np.where(corpus.rows_of_documents(names)[0] < 0, corpus.rows_of(names, with_deleted=True), -1)
    is_document = rows < 0
    documents = pa.array(np.where(is_document, names, corpus.documents(rows)), pa.string())
    numbers = documents.dictionary_encode().indices.to_numpy()[codes].astype(np.int64)
    queries = run["query_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    order = np.lexsort((-run["score"].to_numpy(), queries))
    pairs = queries * len(names) + numbers
    best = np.sort(order[np.unique(pairs[order], return_index=True)[1]])
    num_passages, num_documents = np.bincount(queries), np.bincount(queries[best])
    is_short = (num_documents < np.minimum(num_passages, depth)) & (num_passages == num_passages.max(initial=0))
    places = pa.array(codes[best])
    columns = {
        "query_id": run["query_id"].take(pa.array(best)),
        "id": documents.take(places),
        "score": run["score"].take(pa.array(best)),
        "passage": pa.array(names, pa.string(), mask=is_document).take(places),
    }
    return pa.table(columns), int(is_short.sum())


def best_passages(run: pa.Table) -> dict[tuple[str, str], str]:
    """Returns the best passage of each (query, document) of a run of documents; of other runs nothing.

    Args:
        run: A table of `read_checked_run`.
    """
    if "passage" not in run.column_names:
        return {}
    columns = (run[name].to_pylist() for name in ("query_id", "id", "passage"))
    return {(query, id): passage for query, id, passage in zip(*columns, strict=True) if passage is not None}


def with_passage_ids(run: pa.Table, measure: str) -> pa.Table:
    """Returns a run whose ids are passages: hits that are documents become their best passages.

    Args:
        run: The run.
        measure: The option that needs passages, for the error.

    Raises:
        InputError: If the run names documents alone.
    """
    if "passage" not in run.column_names:
        return run
    if run["passage"].null_count:
        raise InputError(
            f"{measure}: it is measured on passages, and the run has ids of documents; give a run of the store, or a "
            f"file of {Command('search', by='passage')}"
        )
    return run.set_column(run.column_names.index("id"), "id", run["passage"])
