"""Parses chunks of a corpus and files of queries to Arrow tables, and checks every row.

A bad row is refused with file and line. Text is kept as it is: an empty text is accepted (BEIR's TREC-COVID has
some), and so is every character of UTF-8. An id is a string that is not empty; an integer becomes its decimal string.
An integer of any length keeps its digits as an id; in metadata, one beyond 64 bits is refused. Repeated ids are refused
later, when the ids of all parts are merged.

Metadata of Parquet becomes JSON: lists and structs stay what they are, a map is a list of [key, value], a date or a
time is ISO 8601, a timestamp in nanoseconds, a duration or a decimal is text as Python prints it, NaN and infinities
are null. Refused with row and column: bytes at any depth, and dates, timestamps and durations that Python's datetime
cannot hold.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from functools import partial
from typing import Any

import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.files import limits
from riptide.indexing.files.columns import value_at
from riptide.indexing.files.raw import FilePiece, short_repr
from riptide.indexing.files.rows import BadRows, Row, dump_metadata, file_and_line, parse_valid_rows, row_error
from riptide.indexing.files.splitting import DocumentSplit, document_spans, passages_size, take_passages
from riptide.indexing.formats.chunking import CorpusChunk
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.formats.sources import ImportSource

# The column metadata is JSON text of all other fields; "" if there are none.
CORPUS_SCHEMA = pa.schema(
    [("id", pa.string()), ("title", pa.large_string()), ("text", pa.large_string()), ("metadata", pa.large_string())]
)
_SCALARS = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
FILTER_TYPES = _SCALARS | {f"list[{name}]": pa.list_(kind) for name, kind in _SCALARS.items()}


def parse_corpus(
    format: CorpusFormat,
    chunk: CorpusChunk,
    filters: Mapping[str, str] | None = None,
    split: DocumentSplit | None = None,
    bad_rows: BadRows | None = None,
) -> pa.Table:
    """Parses a chunk of a corpus into a table of passages.

    Args:
        format: The format of the chunk's source.
        chunk: Rows of it, from `chunking.cut_into_chunks`.
        filters: Metadata field -> type: "int64", "float64" (integers too), "string", "bool", or "timestamp" (ISO 8601,
            UTC if it names no zone; cut to microseconds). "list[int64]" and so on: a list of such values, or one value.
            Fields of CSV and TSV are converted to the type.
        split: How the documents of the chunk are split into passages; None: each is one passage.
        bad_rows: Receives the bad rows, which are left out; None: they are refused.

    Returns:
        CORPUS_SCHEMA, then with a split the columns that `take_passages` adds, then a typed column "filter.NAME" per
        filter; null where the field is missing, null, or a list without values. Nulls in a list are left out.

    Raises:
        InputError: With files and lines, for bad rows; and if the chunk becomes too large.
    """
    filters = filters or {}
    check_filter_types(filters)
    bad = BadRows() if bad_rows is None else bad_rows

    def parse(block: FilePiece) -> pa.Table:
        if split is None:
            rows = format.read_passages(block, chunk.columns)
        else:
            rows = _require_text(block, format.read_documents(block, chunk.columns))
        return _parse_rows(block, rows, filters, is_text=format.has_text_values)

    tables, size, position = [], 0, 0
    first_bad = len(bad.positions)
    for piece in chunk.pieces:
        for block in format.blocks(piece, chunk.columns):
            for table in parse_valid_rows(block, parse, format.halve, bad, position):
                tables.append(table)
                size += table.nbytes
            _check_growth(format, chunk, block, size, "part_size")
            position += block.rows
    if bad_rows is None:
        bad.refuse()
    passages = pa.concat_tables(tables) if tables else _parse_rows(chunk.pieces[0], (), filters, is_text=False)
    if chunk.titles is not None:
        field, positions = CORPUS_SCHEMA.field("title"), set(bad.positions[first_bad:])
        titles = [title for number, title in enumerate(chunk.titles) if number not in positions]
        passages = passages.set_column(1, field, pa.array(titles, field.type))
    if split is not None:
        spans = document_spans(passages["text"].to_pylist(), split)
        repeated = ("id", "title") if format.describes_passages else ("id", "title", "metadata")
        size = passages_size(passages, spans, repeated)
        _check_growth(format, chunk, chunk.pieces[-1], size, "overlap", "shorten the titles, ")
        passages = take_passages(passages, spans, format.passage_metadata if format.describes_passages else None)
    return passages


def _require_text(block: FilePiece, rows: Iterable[Row]) -> Iterator[Row]:
    """Yields the documents of a block. Raises RowError for a document with neither title nor text."""
    for row in rows:
        line, id, title, text, _ = row
        if not title.strip() and not text.strip():
            actual = f"document {short_repr(id)} without text"
            raise row_error(block, line, actual, "a text to split, or a title", "add it or leave the document out")
        yield row


def _parse_rows(block: FilePiece, rows: Iterable[Row], filters: Mapping[str, str], *, is_text: bool) -> pa.Table:
    """Builds the table of a block's rows, with filters. is_text: all values are text. Raises RowError for a bad row."""
    ids, titles, texts, metadata = [], [], [], []
    typed: dict[str, list[Any]] = {name: [] for name in filters}
    for line, id, title, text, fields in rows:
        if is_text and filters:
            fields = {name: convert_field(value, filters.get(name)) for name, value in fields.items()}
        ids.append(id)
        titles.append(title)
        texts.append(text)
        metadata.append(dump_metadata(block, line, fields) if fields else "")
        for name, kind in filters.items():
            typed[name].append(
                convert_filter_value(partial(row_error, block, line), name, kind, value_at(fields, name))
            )
    table = pa.table([ids, titles, texts, metadata], schema=CORPUS_SCHEMA)
    for name, kind in filters.items():
        table = table.append_column(f"filter.{name}", pa.array(typed[name], FILTER_TYPES[kind]))
    return table


def _check_growth(
    format: CorpusFormat, chunk: CorpusChunk, block: FilePiece, size: int, parameter: str, remedy: str = ""
) -> None:
    """Raises InputError if the passages of a chunk take far more bytes than the source rows.

    Args:
        format: The format of the chunk's source.
        chunk: The chunk.
        block: The last block that is parsed.
        size: Bytes of the passages up to there.
        parameter: The parameter to lower, for the message.
        remedy: What else to do.
    """
    if size <= limits.MAX_PART_BYTES:
        return
    source = sum(format.source_bytes(piece) for piece in chunk.pieces)
    if size > limits.MAX_PART_GROWTH * source:
        first = chunk.pieces[0]
        raise InputError(
            f"{file_and_line(block, block.first_line)}: found {size:,} bytes of text and metadata in the part that "
            f"begins in {file_and_line(first, first.first_line)}, read from {source:,} bytes, expected at most "
            f"{limits.MAX_PART_BYTES >> 20} MiB or {limits.MAX_PART_GROWTH} times as many; {remedy}lower "
            f"{Parameter(parameter)}, or leave out columns by {Parameter('metadata')}"
        )


def check_filter_types(filters: Mapping[str, str]) -> None:
    """Raises InputError for a filter (name -> type) whose type does not exist."""
    for name, kind in filters.items():
        if kind not in FILTER_TYPES:
            raise InputError(
                f"filter {name}: found type {kind!r}, expected one of {', '.join(FILTER_TYPES)}; choose one"
            )


def read_queries(source: ImportSource, bad_rows: BadRows | None = None) -> tuple[pa.Table, dict[str, pa.Table]]:
    """Reads the queries of a source, and judgements in the same files, as `CorpusFormat.read_query_files` does.

    Args:
        source: The source.
        bad_rows: Receives the bad rows, which are left out; None: they are refused.

    Raises:
        InputError: With files and lines, for bad rows. Also if the source has no queries.
    """
    if not source.queries:
        raise InputError(f"{source.name}: found no queries, expected a file of them; name the file")
    bad = BadRows() if bad_rows is None else bad_rows
    result = source.format.read_query_files(source.queries, source.query_columns, source.qrels, bad)
    if bad_rows is None:
        bad.refuse()
    return result


def convert_field(value: Any, filter_type: str | None) -> Any:
    """Converts a field of CSV or TSV to the type of its filter; returns text that does not fit unchanged."""
    if type(value) is not str or filter_type is None:
        return value
    filter_type = _element_type(filter_type)
    if filter_type == "int64" and re.fullmatch(r"[+-]?[0-9]{1,19}", value):
        return int(value)
    if filter_type == "float64" and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", value):
        return number if math.isfinite(number := float(value)) else value
    if filter_type == "bool":
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _element_type(filter_type: str) -> str:
    """Returns the element type of a list type ("int64" for "list[int64]"), and other types unchanged."""
    return filter_type.removeprefix("list[").removesuffix("]")


def convert_filter_value(refuse: Callable[[str, str, str], InputError], name: str, filter_type: str, value: Any) -> Any:
    """Converts the value of a metadata field to the type of its filter column; NaN and infinities become None.

    Args:
        refuse: Returns the error for a bad value, from the actual value, the expected one and a remedy.
        name: The metadata field.
        filter_type: The type of the filter.
        value: The value of the field.

    Raises:
        InputError: If the value is of another type.
    """
    if value is None:
        return None
    if (element_type := _element_type(filter_type)) != filter_type:
        values = value if isinstance(value, list) else [value]
        converted = [convert_filter_value(refuse, name, element_type, each) for each in values]
        return [each for each in converted if each is not None] or None
    if filter_type == "timestamp":
        try:
            moment = datetime.fromisoformat(value.isoformat() if isinstance(value, date) else value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (TypeError, ValueError, OverflowError):
            pass
    elif filter_type == "int64":
        # pandas stores integers as floats if values are missing.
        number = int(value) if type(value) is float and value.is_integer() else value
        if type(number) is int and -(2**63) <= number < 2**63:
            return number
    elif filter_type == "float64":
        if type(value) in (int, float):
            return float(value) if math.isfinite(value) else None
    elif type(value) is {"string": str, "bool": bool}[filter_type]:
        return value
    remedy = "fix the value or give the filter another type"
    if filter_type == "timestamp":
        remedy = "write it like 2024-05-31 or 2024-05-31T12:00:00Z, or give the filter the type string"
    expected = "an ISO 8601 timestamp" if filter_type == "timestamp" else filter_type
    actual = f"{name} {short_repr(value)} ({type(value).__name__})"
    raise refuse(actual, f"{expected}, as its filter says", remedy)
