"""Exports mined negatives as training files: JSON Lines for Tevatron, Parquet for sentence-transformers.

Both exports read the tables that `sample_negatives` makes, part by part, and hold one block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, Passage
from riptide.indexing.store.result_files import atomic_files

BLOCK_QUERIES = 128  # queries per block in memory: some 8,000 passages with 60 negatives per query


class ExportResult(NamedTuple):
    """The result of an export: the number of lines or rows written, and the ids of the omitted queries, in order."""

    rows: int
    left_out: list[str]


class _Group(NamedTuple):
    """A query with its positives and its negatives, each in the order of the table."""

    query_id: str
    positives: list[Passage]
    negatives: list[Passage]


def export_tevatron(
    tables: Iterable[pa.Table], texts: Mapping[str, str], corpus: Corpus, path: str, *, overwrite: bool = False
) -> ExportResult:
    """Writes JSON Lines for Tevatron's trainer (--dataset_name json --dataset_path PATH), a line per query:

        {"query_id", "query", "positive_passages": [{"docid", "title", "text"}, …], "negative_passages": [the same]}

    The file appears when it is complete. A query without a positive or without a negative is left out, because
    Tevatron's trainer stops at one.

    Args:
        tables: Tables of negatives from `sample_negatives`.
        texts: The text of each query by id.
        corpus: The corpus of the passages.
        path: The file.
        overwrite: Replace a file that has other content; see `atomic_files`.

    Returns:
        The number of lines, and the ids of the queries that are left out.

    Raises:
        InputError: If a query has no text, or if all queries are left out.
    """
    rows, left_out = 0, []
    with atomic_files([path], overwrite=overwrite) as [temporary], open(temporary, "wb") as file:
        for block in _read_groups(tables, corpus):
            for group in block:
                if not group.positives or not group.negatives:
                    left_out.append(group.query_id)
                    continue
                line = {
                    "query_id": group.query_id,
                    "query": _query_text(texts, group.query_id),
                    "positive_passages": [_tevatron_passage(passage) for passage in group.positives],
                    "negative_passages": [_tevatron_passage(passage) for passage in group.negatives],
                }
                file.write(orjson.dumps(line) + b"\n")
                rows += 1
        if not rows:
            raise InputError(
                f"{path}: none of {len(left_out):,} queries has a positive and a negative: nothing to export"
            )
    return ExportResult(rows, left_out)


def export_sentence_transformers(
    tables: Iterable[pa.Table],
    texts: Mapping[str, str],
    corpus: Corpus,
    path: str,
    *,
    num_negatives: int,
    overwrite: bool = False,
) -> ExportResult:
    """Writes Parquet for sentence-transformers' losses on n-tuples (MultipleNegativesRankingLoss): columns of strings

        query, positive, negative_1, … negative_N       N = num_negatives

    with one row per query and positive; a passage is its title, a space and its text. The losses require the same
    number of negatives in every row and no nulls, and a repeated negative would count twice. So, as in that library's
    mining, a query with fewer than N negatives is left out; so is a query without a positive. If a query has more than
    N, the first N are taken (the denoised ones come first). The file appears when it is complete.

    Args:
        tables: Tables of negatives from `sample_negatives`.
        texts: The text of each query by id.
        corpus: The corpus of the passages.
        path: The file.
        num_negatives: Negatives per row, at least 1.
        overwrite: Replace a file that has other content; see `atomic_files`.

    Returns:
        The number of rows, and the ids of the queries that are left out.

    Raises:
        InputError: If num_negatives is below 1, if a query has no text, or if all queries are left out.
    """
    if num_negatives < 1:
        raise InputError(f"{num_negatives} negatives in a row: expected at least 1")
    names = ["query", "positive", *(f"negative_{number}" for number in range(1, num_negatives + 1))]
    schema = pa.schema([(name, pa.string()) for name in names])
    rows, most, left_out = 0, 0, []
    with atomic_files([path], overwrite=overwrite) as [temporary]:
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for block in _read_groups(tables, corpus):
                tuples = []
                for group in block:
                    if group.positives:
                        most = max(most, len(group.negatives))
                    if not group.positives or len(group.negatives) < num_negatives:
                        left_out.append(group.query_id)
                        continue
                    query = _query_text(texts, group.query_id)
                    negatives = [_passage_text(passage) for passage in group.negatives[:num_negatives]]
                    tuples += [(query, _passage_text(positive), *negatives) for positive in group.positives]
                if tuples:
                    columns = [pa.array(column, pa.string()) for column in zip(*tuples, strict=True)]
                    writer.write_table(pa.table(columns, schema=schema))
                    rows += len(tuples)
        if not rows:
            raise InputError(
                f"{path}: none of {len(left_out):,} queries has a positive and {num_negatives} "
                f"negatives, the most that one has is {most}: ask for fewer"
            )
    return ExportResult(rows, left_out)


def _read_groups(tables: Iterable[pa.Table], corpus: Corpus) -> Iterator[list[_Group]]:
    """Yields blocks of queries with their positives and negatives, whose passages are read from the corpus."""
    for table in tables:
        for first in range(0, len(table), BLOCK_QUERIES):
            columns = table.select(["query_id", "positives", "negatives"]).slice(first, BLOCK_QUERIES).to_pydict()
            lists = columns["positives"] + columns["negatives"]
            rows = np.unique(np.array([row for rows in lists for row in rows], np.int64))
            passages = dict(zip(rows.tolist(), corpus.passages(rows), strict=True))
            yield [
                _Group(query_id, [passages[row] for row in positives], [passages[row] for row in negatives])
                for query_id, positives, negatives in zip(*columns.values(), strict=True)
            ]


def _query_text(texts: Mapping[str, str], query_id: str) -> str:
    if query_id not in texts:
        raise InputError(f"the question {query_id!r} has negatives but no text: give the queries that were mined for")
    return texts[query_id]


def _tevatron_passage(passage: Passage) -> dict[str, Any]:
    return {"docid": passage.id, "title": passage.title, "text": passage.text}


def _passage_text(passage: Passage) -> str:
    """Joins title and text of a passage as BM25 indexes them."""
    return f"{passage.title} {passage.text}" if passage.title else passage.text
