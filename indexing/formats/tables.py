"""Base class of table formats, whose columns are chosen: passages, or queries with judgements."""

from __future__ import annotations

import copy
import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from riptide.base.errors import InputError, RowError
from riptide.base.wording import Parameter
from riptide.indexing.files.columns import (
    ID_NAMES,
    PassageColumns,
    PassageNames,
    QueryColumns,
    QueryNames,
    TableColumns,
    choose_passage_columns,
    choose_query_columns,
    named_columns,
    remove_values,
    value_at,
)
from riptide.indexing.files.qrels import GRADE, MAX_GRADE, QRELS_SCHEMA
from riptide.indexing.files.raw import FilePiece, no_rows_error, short_repr
from riptide.indexing.files.rows import (
    BadRows,
    Row,
    decode_entities,
    dump_metadata,
    file_and_line,
    integer_id,
    line_blocks,
    merge_metadata_fields,
    parse_valid_rows,
    row_error,
    wrong_text_error,
)
from riptide.indexing.formats.format import QUERIES_AT_ONCE, QUERIES_SCHEMA, CorpusFormat

HASH_DIGITS = 32  # hexadecimal digits of a SHA-256 hash that form an id
QueryRow = tuple[int, dict[str, Any]]  # (line, values by column) of a row in a table of queries


class JudgedQuery(NamedTuple):
    """A parsed row of a table of queries. metadata: JSON text or ""; passages: ids of relevant passages."""

    line: int
    id: str
    text: str
    metadata: str
    score: int | None
    passages: list[str]


class TableFormat(CorpusFormat):
    """Base class of formats whose columns the caller names or the import recognises.

    A table of queries has a row per query with its relevant passages, or a row per judgement.
    """

    judgement_files = "qrels/*.tsv"
    has_columns = True

    @abstractmethod
    def read_table(self, file: str) -> TableColumns:
        """Reads the column names of a file. Raises InputError if it has none."""

    @abstractmethod
    def query_rows(self, block: FilePiece, table: TableColumns, columns: QueryColumns) -> Iterator[QueryRow]:
        """Yields (line, values by column) of each row of a block of queries, without empty values and nulls."""

    def query_blocks(self, piece: FilePiece, table: TableColumns) -> Iterator[FilePiece]:
        """Splits a piece of a table of queries into blocks, as `blocks` does for passages."""
        return line_blocks(piece)

    def choose_columns(self, file: str, names: PassageNames) -> PassageColumns | None:
        return choose_passage_columns(file, self.read_table(file), names)

    def choose_query_columns(self, file: str, names: QueryNames) -> QueryColumns | None:
        return choose_query_columns(file, self.read_table(file), names)

    def shown_query_columns(self, file: str, columns: QueryColumns | None) -> tuple[TableColumns, QueryColumns] | None:
        return None if columns is None else (self.read_table(file), columns)

    def read_query_files(
        self, files: Sequence[str], columns: QueryColumns | None, qrels: Mapping[str, str], bad_rows: BadRows
    ) -> tuple[pa.Table, dict[str, pa.Table]]:
        """Reads tables of queries, and the judgements in them.

        Rows of the same query are judgements of it; one that is repeated counts once. Without a column of relevant
        passages, a query may occur only once.

        Args:
            files: The tables.
            columns: Their columns.
            qrels: Split -> file of judgements, which may be one of `files`.
            bad_rows: Receives the bad rows, which are left out, and rows that contradict an earlier one.

        Returns:
            The queries in the order of their first rows, and the judgements in these files by split.

        Raises:
            InputError: If a file cannot be read, or has no rows.
        """
        assert columns is not None
        split_of = {file: split for split, file in qrels.items()}
        known: dict[str, tuple[str, str, str]] = {}  # id -> (place, text, metadata)
        judgements: dict[str, pa.Table] = {}
        for file in files:
            judged: dict[tuple[str, str], tuple[int, int]] = {}  # (query, passage) -> (score, line)
            is_empty = True
            table = self.read_table(file)
            parse = partial(self._parse_judged, table=table, columns=columns)
            for block in self._read_blocks(file, table, columns, files[0]):
                is_empty = False
                for rows in parse_valid_rows(block, parse, self.halve, bad_rows):
                    for row in rows:
                        try:
                            _add_query(block, row, columns, known, judged)
                        except RowError as error:
                            bad_rows.add(error)
            if is_empty:
                raise no_rows_error(file)
            if columns.relevant:
                pairs, grades = list(judged), list(judged.values())
                judgements[split_of[file]] = pa.table(
                    [
                        [query for query, _ in pairs],
                        [passage for _, passage in pairs],
                        [score for score, _ in grades],
                        [line for _, line in grades],
                    ],
                    schema=QRELS_SCHEMA,
                )
        values = [list(known), [text for _, text, _ in known.values()], [metadata for _, _, metadata in known.values()]]
        return pa.table(values, schema=QUERIES_SCHEMA), judgements

    def _read_blocks(
        self, file: str, table: TableColumns, columns: QueryColumns, first_file: str
    ) -> Iterator[FilePiece]:
        """Yields the blocks of a table of queries. first_file: the file whose columns were chosen, for an error."""
        if missing := table.missing(columns.role_columns):
            raise InputError(f"{file}: found {named_columns(table.shown)}, expected {missing[0]} as in {first_file}")
        rows = self.open_rows(file, table)
        while piece := rows.take(QUERIES_AT_ONCE):
            yield from self.query_blocks(piece, table)

    def _parse_judged(self, block: FilePiece, table: TableColumns, columns: QueryColumns) -> list[JudgedQuery]:
        """Parses the rows of a block of queries. Raises RowError for a bad row."""
        rows = []
        for line, row in self.query_rows(block, table, columns):
            id, text, metadata = _parse_query(block, line, row, columns)
            score, passages = _parse_score(block, line, row, columns), _parse_passage_ids(block, line, row, columns)
            if score is not None and not passages:
                raise row_error(block, line, f"{columns.score} {score} without a passage", "a passage id", "add it")
            if columns.score and passages and score is None:
                raise row_error(block, line, f"no {columns.score}", "an integer", "add it to the row")
            rows.append(JudgedQuery(line, id, text, metadata, score, passages))
        return rows


def named_passages(
    block: FilePiece, documents: Iterable[tuple[int, dict[str, Any]]], columns: PassageColumns
) -> Iterator[Row]:
    """Yields passages from objects with a field per column.

    Args:
        block: The block that holds the rows.
        documents: Its rows as objects, each with its line or row number.
        columns: The columns.

    Raises:
        InputError: With the file and line of a bad row.
    """
    used, metadata = columns.role_columns, columns.metadata
    get: Callable[[dict[str, Any], str], Any] = value_at if any("." in name for name in used) else dict.get
    expects_no_id = columns.id is None
    for line, document in documents:
        if expects_no_id and any(name.lower() in ID_NAMES for name in document):
            name = next(name for name in document if name.lower() in ID_NAMES)
            raise row_error(
                block, line, f"a field {name!r}", "none, as in the first lines", f"name the id by {Parameter('id')}"
            )
        text = get(document, columns.text)
        if type(text) is not str:
            raise wrong_text_error(block, line, columns.text, text)
        title = get(document, columns.title) if columns.title else ""
        if type(title) is not str:
            if title is not None:
                raise wrong_text_error(block, line, columns.title or "title", title)
            title = ""
        if columns.decode_entities:
            title, text = decode_entities(title), decode_entities(text)
        if columns.id:
            id = get(document, columns.id)
            if type(id) is not str or not id:
                id = integer_id(block, line, id, columns.id)
        else:
            id = id_from_content(text, title)
        if metadata is None:
            remove_values(document, used)
            fields = merge_metadata_fields(block, line, document) if document else document
        else:
            nested = document.get("metadata")
            named = {**nested, **document} if type(nested) is dict else document
            fields = merge_metadata_fields(block, line, {name: value_at(named, name) for name in metadata})
        yield line, id, title, text, {name: value for name, value in fields.items() if value is not None}


def id_from_content(text: str, title: str = "") -> str:
    """Computes an id for a passage or query without one: 32 hexadecimal digits of the SHA-256 of its text.

    A title, if there is one, comes first, with a NUL between the two.
    """
    content = f"{title}\0{text}" if title else text
    return hashlib.sha256(content.encode()).hexdigest()[:HASH_DIGITS]


def _parse_query(piece: FilePiece, line: int, row: dict[str, Any], columns: QueryColumns) -> tuple[str, str, str]:
    """Returns the id, the text and the metadata (JSON text) of the query in a row."""
    text = value_at(row, columns.text)
    if type(text) is not str:
        raise wrong_text_error(piece, line, columns.text, text)
    if columns.decode_entities:
        text = decode_entities(text)
    if columns.id:
        id = value_at(row, columns.id)
        if type(id) is not str:
            id = integer_id(piece, line, id, columns.id)
    else:
        id = id_from_content(text)
    rest = copy.deepcopy(row) if any("." in name for name in columns.role_columns) else dict(row)
    remove_values(rest, columns.role_columns)
    fields = merge_metadata_fields(piece, line, rest)
    if columns.metadata is not None:
        named = {name: value_at(fields, name) for name in columns.metadata}
        fields = {name: value for name, value in named.items() if value is not None}
    return id, text, dump_metadata(piece, line, fields) if fields else ""


def _add_query(
    piece: FilePiece,
    row: JudgedQuery,
    columns: QueryColumns,
    known: dict[str, tuple[str, str, str]],
    judged: dict[tuple[str, str], tuple[int, int]],
) -> None:
    """Adds a row to the queries and to the judgements of its file. Raises RowError if it contradicts an earlier row.

    Args:
        piece: The piece that holds the row.
        row: The row.
        columns: The columns of the table.
        known: Id of each query -> place of its first row, text and metadata.
        judged: Query and passage -> score and line.
    """
    here = file_and_line(piece, row.line)
    first_place, *content = known.setdefault(row.id, (here, row.text, row.metadata))
    if first_place != here:
        _check_repeated_query(
            piece, row.line, row.id, first_place, (row.text, row.metadata), (content[0], content[1]), columns
        )
    grade = 1 if row.score is None else row.score
    for passage in row.passages:
        earlier, first = judged.get((row.id, passage), (grade, row.line))
        if earlier != grade:
            problem = f"the score {grade} of passage {short_repr(passage)} for query {short_repr(row.id)}"
            expected = f"{earlier}, its score in line {first}"
            raise row_error(piece, row.line, problem, expected, "remove one of the lines")
    for passage in row.passages:
        judged.setdefault((row.id, passage), (grade, row.line))


def _check_repeated_query(
    piece: FilePiece,
    line: int,
    id: str,
    first_place: str,
    actual: tuple[str, str],
    expected: tuple[str, str],
    columns: QueryColumns,
) -> None:
    """Raises RowError if a repeated query has another text or metadata, or if the table has no judgements.

    Args:
        piece: The piece that holds the row.
        line: The line of the row.
        id: Id of the query.
        first_place: The file and line of its first row.
        actual: Text and metadata of this row.
        expected: Text and metadata of the first row.
        columns: The columns of the table.
    """
    if not columns.relevant:
        what = f"query id {short_repr(id)}" if columns.id else f"the query {short_repr(actual[0])}"
        raise row_error(
            piece, line, f"{what} a second time", f"it once (first in {first_place})", "remove or rename one"
        )
    if actual[0] != expected[0]:
        problem = f"query {short_repr(id)} with the text {short_repr(actual[0])}"
        raise row_error(piece, line, problem, f"the text of {first_place}", "rename one of the queries")
    if actual[1] != expected[1]:
        problem = f"query {short_repr(id)} with the metadata {short_repr(actual[1])}"
        remedy = "name the columns that belong to the query as its metadata"
        raise row_error(piece, line, problem, f"{short_repr(expected[1])} as in {first_place}", remedy)


def _parse_passage_ids(piece: FilePiece, line: int, row: dict[str, Any], columns: QueryColumns) -> list[str]:
    """Returns the ids of relevant passages in a row of a table of queries."""
    value = value_at(row, columns.relevant) if columns.relevant else None
    if value is None:
        return []
    ids = value if type(value) is list else [value]
    return [id if type(id) is str and id else integer_id(piece, line, id, columns.relevant or "relevant") for id in ids]


def _parse_score(piece: FilePiece, line: int, row: dict[str, Any], columns: QueryColumns) -> int | None:
    """Returns the score of a row; None if it has none. Raises RowError unless it is an integer within MAX_GRADE."""
    score = value_at(row, columns.score) if columns.score else None
    if (type(score) is str and re.fullmatch(r"-?[0-9]{1,9}", score)) or (type(score) is float and score.is_integer()):
        score = int(score)
    if score is not None and (type(score) is not int or abs(score) > MAX_GRADE):
        raise row_error(piece, line, f"{columns.score} {short_repr(score)}", GRADE, "fix the row")
    return score
