"""CSV and TSV with any columns: a header names them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import orjson

from indexing.files import limits
from indexing.files.columns import PassageColumns, QueryColumns, Table
from indexing.files.delimited import DelimitedRows, delimited_blocks, read_fields, read_header
from indexing.files.raw import Piece, clip
from indexing.files.rows import Row, RowReader, bad, flatten, integer_id, metadata_text, place
from indexing.formats.tables import QueryRow, TableFormat, hash_id


class DelimitedText(TableFormat):
    """Text whose fields are separated by a delimiter and quoted by RFC 4180.

    Attributes:
        delimiter: The delimiter; "": the one that the header has most often.
    """

    delimiter: ClassVar[str]
    is_generic = True
    has_text_values = True

    def read_table(self, file: str) -> Table:
        return read_header(file, self.delimiter)

    def open_rows(self, file: str, table: Table | None = None) -> RowReader:
        assert table is not None
        rows = DelimitedRows(file, table.delimiter)
        rows.take(1)
        return rows

    def blocks(self, piece: Piece, columns: PassageColumns | None = None) -> Iterator[Piece]:
        assert columns is not None
        return delimited_blocks(piece, columns.table)

    def query_blocks(self, piece: Piece, table: Table) -> Iterator[Piece]:
        return delimited_blocks(piece, table)

    def read_passages(self, block: Piece, columns: PassageColumns | None) -> Iterator[Row]:
        assert columns is not None
        number_of = {name: number for number, name in enumerate(columns.table.names)}
        used = columns.used
        rest = list(dict.fromkeys(columns.metadata or ()))
        if columns.metadata is None:
            rest = [name for name in number_of if name not in used]
        text, title, id = columns.text, columns.title or columns.text, columns.id or columns.text
        lines, values = read_fields(block, columns.table, [number_of[name] for name in (id, title, text, *rest)])
        ids, titles, texts = values[:3]
        if not columns.title:
            titles = [""] * len(texts)
        if not columns.id:
            ids = [hash_id(text, title) for title, text in zip(titles, texts, strict=True)]
        elif "" in ids:
            integer_id(block, lines[ids.index("")], "", columns.id)
        if not rest:
            for line, id, title, text in zip(lines, ids, titles, texts, strict=True):
                yield line, id, title, text, {}
            return
        for line, id, title, text, *others in zip(lines, ids, titles, texts, *values[3:], strict=True):
            fields: dict[str, Any] = {name: value for name, value in zip(rest, others, strict=True) if value}
            if "metadata" in fields:
                fields["metadata"] = metadata_text(block, line, fields["metadata"])
                fields = flatten(block, line, fields)
            yield line, id, title, text, fields

    def query_rows(self, block: Piece, table: Table, columns: QueryColumns) -> Iterator[QueryRow]:
        lines, values = read_fields(block, table, range(len(table.names)))
        for line, *fields in zip(lines, *values, strict=True):
            row: dict[str, Any] = {name: value for name, value in zip(table.names, fields, strict=True) if value}
            row.setdefault(columns.text, "")
            if columns.relevant in row:
                row[columns.relevant] = _split_ids(block, line, row[columns.relevant], columns.relevant)
            if "metadata" in row:
                row["metadata"] = metadata_text(block, line, row["metadata"])
            yield line, row


class Csv(DelimitedText):
    """CSV."""

    name = "csv"
    title = "CSV"
    delimiter = ""
    endings = ("csv",)
    corpus_files = ("corpus.csv", "passages.csv", "documents.csv")
    query_files = ("queries.csv", "queries.*.csv")
    section = r"""SECTION"""


class Tsv(DelimitedText):
    """TSV."""

    name = "tsv"
    title = "TSV"
    delimiter = "\t"
    endings = ("tsv",)
    corpus_files = ("corpus.tsv", "passages.tsv", "documents.tsv")
    query_files = ("queries.tsv", "queries.*.tsv")
    section = r"""SECTION"""


CSV, TSV = Csv(), Tsv()


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
