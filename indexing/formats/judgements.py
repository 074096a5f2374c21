"""Queries and judgements from one table: a row per query with its relevant passages, or a row per judgement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa

from indexing.formats import limits
from indexing.formats.columns import QueryColumns, Table, listed
from indexing.formats.delimited import DelimitedRows, read_fields
from indexing.formats.parquet import ParquetRows
from indexing.formats.parse import QRELS_SCHEMA, QUERIES_PER_TABLE, QUERIES_SCHEMA, dump_metadata
from indexing.formats.passages import hash_id
from indexing.formats.raw import Lines, Piece, clip, no_rows
from indexing.formats.readers import bad, blocks, documents, flatten, integer_id, metadata_text, place, wrong_text
from indexing.formats.schema import read_table
from indexing.formats.sources import Source
from retriever.errors import InputError


def read_query_tables(source: Source) -> tuple[pa.Table, dict[str, pa.Table]]:
    """Reads the queries and judgements of tables.

    Rows of the same query are judgements of it. Without a column of judgements, a query may come once only.

    Args:
        source: With `query_columns`.

    Returns:
        The queries, as `parse.read_queries` gives them, in the order of their first rows; and the judgements of each
        split, as `parse.read_qrels` gives them. A judgement that is repeated counts once.

    Raises:
        InputError: With file and line, if a row is unfit, or two rows contradict each other.
    """
    columns = source.query_columns
    assert columns is not None
    split_of = {file: split for split, file in source.qrels.items()}
    known: dict[str, tuple[str, str, str]] = {}  # id -> place, text, metadata
    qrels: dict[str, pa.Table] = {}
    for file in source.queries:
        judged: dict[tuple[str, str], tuple[int, int]] = {}  # query and passage -> score, line
        is_empty = True
        for piece, line, row in _rows(source, file, columns):
            is_empty = False
            id, text, metadata = _query(piece, line, row, columns)
            here = place(piece, line)
            first_place, known_text, known_metadata = known.setdefault(id, (here, text, metadata))
            if first_place != here:
                _check_repeated(piece, line, id, first_place, (text, metadata), (known_text, known_metadata), columns)
            score = _score(piece, line, row, columns)
            passages = _passages(piece, line, row, columns)
            if score is not None and not passages:
                raise bad(piece, line, f"{columns.score} {score} without a passage", "a passage id", "add it")
            for passage in passages:
                pair, grade = (id, passage), 1 if score is None else score
                if columns.score and score is None:
                    raise bad(piece, line, f"no {columns.score}", "an integer", "add it to the row")
                earlier, first = judged.setdefault(pair, (grade, line))
                if earlier != grade:
                    problem = f"the score {grade} of passage {clip(passage)} for query {clip(id)}"
                    raise bad(piece, line, problem, f"{earlier}, its score in line {first}", "remove one of the lines")
        if is_empty:
            raise no_rows(file)
        if columns.relevant:
            pairs, grades = list(judged), list(judged.values())
            qrels[split_of[file]] = pa.table(
                [
                    [query for query, _ in pairs],
                    [passage for _, passage in pairs],
                    [score for score, _ in grades],
                    [line for _, line in grades],
                ],
                schema=QRELS_SCHEMA,
            )
    values = [list(known), [text for _, text, _ in known.values()], [metadata for _, _, metadata in known.values()]]
    return pa.table(values, schema=QUERIES_SCHEMA), qrels


def _rows(source: Source, file: str, columns: QueryColumns) -> Iterator[tuple[Piece, int, dict[str, Any]]]:
    """The file's rows, each with its piece and line; empty fields of CSV and nulls are left out."""
    table = read_table(source.format, file)
    if missing := [name for name in columns.used if name not in table.names]:
        raise InputError(f"{file}: found {listed(table.names)}, expected {missing[0]} as in {source.queries[0]}")
    reader: Lines | ParquetRows
    if table.delimiter:
        reader = DelimitedRows(file, table.delimiter)
        reader.take(1)
    else:
        reader = ParquetRows(file) if source.format == "parquet" else Lines(file)
    while piece := reader.take(QUERIES_PER_TABLE):
        for block in blocks(piece, table):
            yield from _block_rows(block, table, columns)


def _block_rows(block: Piece, table: Table, columns: QueryColumns) -> Iterator[tuple[Piece, int, dict[str, Any]]]:
    if not table.delimiter:
        for line, row in documents(block):
            yield block, line, {name: value for name, value in row.items() if value is not None}
        return
    lines, values = read_fields(block, table, range(len(table.names)))
    for line, *fields in zip(lines, *values, strict=True):
        row = {name: value for name, value in zip(table.names, fields, strict=True) if value}
        row.setdefault(columns.text, "")
        if columns.relevant in row:
            row[columns.relevant] = _split_ids(block, line, row[columns.relevant], columns.relevant)
        if "metadata" in row:
            row["metadata"] = metadata_text(block, line, row["metadata"])
        yield block, line, row


def _query(piece: Piece, line: int, row: dict[str, Any], columns: QueryColumns) -> tuple[str, str, str]:
    """A row's query id, text and metadata (JSON text)."""
    text = row.get(columns.text)
    if type(text) is not str:
        raise wrong_text(piece, line, columns.text, text)
    if columns.id:
        id = row.get(columns.id)
        if type(id) is not str:
            id = integer_id(piece, line, id, columns.id)
    else:
        id = hash_id(text)
    used = columns.used
    rest = {name: value for name, value in row.items() if name not in used}
    fields = flatten(piece, line, rest)
    if columns.metadata is not None:
        fields = {name: fields[name] for name in columns.metadata if name in fields}
    return id, text, dump_metadata(piece, line, fields) if fields else ""


def _check_repeated(
    piece: Piece,
    line: int,
    id: str,
    first: str,
    actual: tuple[str, str],
    expected: tuple[str, str],
    columns: QueryColumns,
) -> None:
    if not columns.relevant:
        what = f"query id {clip(id)}" if columns.id else f"the query {clip(actual[0])}"
        raise bad(piece, line, f"{what} a second time", f"it once (first in {first})", "remove or rename one")
    if actual[0] != expected[0]:
        problem = f"query {clip(id)} with the text {clip(actual[0])}"
        raise bad(piece, line, problem, f"the text of {first}", "rename one of the queries")
    if actual[1] != expected[1]:
        problem = f"query {clip(id)} with the metadata {clip(actual[1])}"
        remedy = "name the columns that belong to the query by parameter metadata"
        raise bad(piece, line, problem, f"{clip(expected[1])} as in {first}", remedy)


def _passages(piece: Piece, line: int, row: dict[str, Any], columns: QueryColumns) -> list[str]:
    """The ids of the relevant passages of a row."""
    value = row.get(columns.relevant) if columns.relevant else None
    if value is None:
        return []
    ids = value if type(value) is list else [value]
    return [id if type(id) is str and id else integer_id(piece, line, id, columns.relevant or "relevant") for id in ids]


def _split_ids(piece: Piece, line: int, text: str, name: str) -> list[Any]:
    """The ids in a field of CSV or TSV: separated by spaces, or a JSON list, which allows spaces in them."""
    if not text.startswith("["):
        ids = text.split(maxsplit=limits.MAX_VALUES)
        if len(ids) > limits.MAX_VALUES:
            actual = f"more than {limits.MAX_VALUES:,} ids in {name}"
            raise bad(piece, line, actual, "fewer", "write a row per judgement")
        return ids
    limits.check_values(place(piece, line), text)
    try:
        return list(orjson.loads(text))
    except orjson.JSONDecodeError:
        raise bad(piece, line, f"{name} {clip(text)}", "ids separated by spaces, or a JSON list", "fix it") from None


def _score(piece: Piece, line: int, row: dict[str, Any], columns: QueryColumns) -> int | None:
    score = row.get(columns.score) if columns.score else None
    if type(score) is str and re.fullmatch(r"-?[0-9]{1,9}", score):
        score = int(score)
    if score is not None and (type(score) is not int or abs(score) >= 10**9):
        raise bad(piece, line, f"{columns.score} {clip(score)}", "an integer", "fix the row")
    return score
