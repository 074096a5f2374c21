"""Bytes to Arrow: a chunk of a raw corpus, or a file of queries or judgements, checked row by row.

An unfit row is refused with file and line. Text is kept as it is: an empty text is accepted (BEIR's TREC-COVID has
some), and so is every character of UTF-8. An id is a string that is not empty; an integer becomes its decimal string.
Integers beyond 64 bits in metadata become floats. Repeated ids are refused later, when the ids of all parts are merged.

Metadata of Parquet becomes JSON: lists and structs stay what they are, a map is a list of [key, value], a date or a
time is ISO 8601, a timestamp in nanoseconds, a duration or a decimal is text as Python prints it, NaN and infinities
are null. Refused with row and column: bytes at any depth, and dates, timestamps and durations that Python's datetime
cannot hold.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from typing import Any

import orjson
import pyarrow as pa

from indexing.formats import limits
from indexing.formats.parquet import stored_bytes
from indexing.formats.passages import read_passages, wanted_columns
from indexing.formats.raw import Lines, Piece, clip, no_rows, tsv_fields
from indexing.formats.readers import CORPUS_READERS, QUERY_READERS, Row, bad, blocks, place, text_lines
from indexing.formats.sources import Chunk, Format, Source
from retriever.errors import InputError

# metadata is JSON text of all other fields, "" if there are none.
CORPUS_SCHEMA = pa.schema(
    [("id", pa.string()), ("title", pa.large_string()), ("text", pa.large_string()), ("metadata", pa.large_string())]
)
QUERIES_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("metadata", pa.large_string())])
QRELS_SCHEMA = pa.schema(
    [("query_id", pa.string()), ("corpus_id", pa.string()), ("score", pa.int32()), ("line", pa.int64())]
)
FILTER_TYPES = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
QRELS_HEADER = ["query-id", "corpus-id", "score"]
QUERIES_PER_TABLE = 65_536


def parse_corpus(format: Format, chunk: Chunk, filters: Mapping[str, str] | None = None) -> pa.Table:
    """Parses the passages of a chunk.

    Args:
        format: The format of the chunk's source.
        chunk: Rows of it, from `sources.chunks`.
        filters: Metadata field -> type: "int64", "float64" (integers too), "string", "bool", or "timestamp" (ISO 8601,
            UTC if it names no zone; microseconds). Fields of CSV and TSV are converted to the type.

    Returns:
        CORPUS_SCHEMA, then a typed column "filter.NAME" per filter; null where the field is missing or null.

    Raises:
        InputError: With file and line, if a row is unfit.
    """
    filters = filters or {}
    check_filter_types(filters)
    columns = chunk.columns
    table, wanted = (None, None) if columns is None else (columns.table, wanted_columns(columns))
    is_text = table is not None and bool(table.delimiter)
    tables, size = [], 0
    for piece in chunk.pieces:
        for block in blocks(piece, table, wanted):
            rows = CORPUS_READERS[format](block) if columns is None else read_passages(block, columns)
            tables.append(_passages(block, rows, filters, is_text=is_text))
            size += tables[-1].nbytes
            if size > limits.MAX_PART_BYTES:
                _check_growth(chunk, block, size)
    passages = pa.concat_tables(tables)
    if chunk.titles is not None:
        field = CORPUS_SCHEMA.field("title")
        passages = passages.set_column(1, field, pa.array(chunk.titles, field.type))
    return passages


def _passages(block: Piece, rows: Iterable[Row], filters: Mapping[str, str], *, is_text: bool) -> pa.Table:
    """Returns the rows of a block as `parse_corpus` does. is_text: the fields are text, as in CSV."""
    ids, titles, texts, metadata = [], [], [], []
    typed: dict[str, list[Any]] = {name: [] for name in filters}
    for line, id, title, text, fields in rows:
        if is_text and filters:
            fields = {name: _typed_field(value, filters.get(name)) for name, value in fields.items()}
        ids.append(id)
        titles.append(title)
        texts.append(text)
        metadata.append(dump_metadata(block, line, fields) if fields else "")
        for name, kind in filters.items():
            typed[name].append(_filter_value(block, line, name, kind, fields.get(name)))
    table = pa.table([ids, titles, texts, metadata], schema=CORPUS_SCHEMA)
    for name, kind in filters.items():
        table = table.append_column(f"filter.{name}", pa.array(typed[name], FILTER_TYPES[kind]))
    return table


def _check_growth(chunk: Chunk, block: Piece, size: int) -> None:
    """Raises InputError if the passages of a chunk take far more bytes than the rows that they are read from.

    Args:
        chunk: The chunk.
        block: The last block that is parsed.
        size: Bytes of the passages up to there.
    """
    source = sum(stored_bytes(piece) if piece.data is None else len(piece.data) for piece in chunk.pieces)
    if size > limits.MAX_PART_GROWTH * source:
        first = chunk.pieces[0]
        raise InputError(
            f"{place(block, block.first_line)}: found {size:,} bytes of text and metadata in the part that begins in "
            f"{place(first, first.first_line)}, read from {source:,} bytes, expected at most "
            f"{limits.MAX_PART_BYTES >> 20} MiB or {limits.MAX_PART_GROWTH} times as many; lower parameter part_size, "
            "or leave out columns by parameter metadata"
        )


def check_filter_types(filters: Mapping[str, str]) -> None:
    """Raises InputError for a filter (name -> type) of a type that does not exist."""
    for name, kind in filters.items():
        if kind not in FILTER_TYPES:
            raise InputError(
                f"filter {name}: found type {kind!r}, expected one of {', '.join(FILTER_TYPES)}; choose one"
            )


def read_queries(source: Source) -> Iterator[pa.Table]:
    """Yields the queries of a source in tables of QUERIES_SCHEMA, in the order of the files.

    Metadata of DPR queries: {"answers": [...]}, their ids are q0, q1, …; of KILT's: {"answers": [...], "provenance":
    [the page ids of each output that has some]} and the task's other fields. MS MARCO's files overlap (dev.small is
    part of dev): a query that an earlier file has with the same text is left out. Tables with other columns are read
    by `tables.judgements`.

    Raises:
        InputError: With file and line, if a row is unfit.
    """
    if not source.queries:
        raise InputError(f"{source.name}: found no queries, expected a file of them; name the file")
    reader = QUERY_READERS[source.format]
    earlier: dict[str, str] = {}
    for number, file in enumerate(source.queries):
        lines = Lines(file)
        seen: dict[str, str] = {}
        while piece := lines.take(QUERIES_PER_TABLE):
            for block in blocks(piece):
                ids, texts, metadata = [], [], []
                for line, id, _, text, fields in reader(block):
                    if id in earlier:
                        if earlier[id] != text:
                            problem = f"query {clip(id)} with another text"
                            raise bad(block, line, problem, "an earlier file's", "rename it")
                        continue
                    ids.append(id)
                    texts.append(text)
                    metadata.append(dump_metadata(block, line, fields) if fields else "")
                if number + 1 < len(source.queries):
                    seen.update(zip(ids, texts, strict=True))
                if ids:
                    yield pa.table([ids, texts, metadata], schema=QUERIES_SCHEMA)
        if lines.line == 1:
            raise no_rows(file)
        earlier.update(seen)


def read_qrels(file: str) -> pa.Table:
    """Reads judgements: QRELS_SCHEMA, `line` the 1-based line of each.

    Args:
        file: BEIR's three columns (with their header, quoted as by Python's csv module) or TREC's four (query, ignored,
            passage, grade; separated by tabs or spaces), .gz or not.

    Raises:
        InputError: With file and line, if a line is unfit.
    """
    lines = Lines(file)
    query_ids, corpus_ids, scores, numbers = [], [], [], []
    num_fields = 0
    while piece := lines.take(QUERIES_PER_TABLE):
        for line, row in text_lines(piece):
            delimiter = "\t" if "\t" in row else " "
            if len(row) > limits.MAX_COLUMNS:
                limits.check_columns(place(piece, line), row, delimiter)
            if delimiter == " ":
                fields = [field for field in row.split(" ") if field]
            else:
                fields = tsv_fields(place(piece, line), row) if '"' in row else row.split("\t")
            if line == 1:
                num_fields = len(fields)
                if fields == QRELS_HEADER:
                    continue
            if len(fields) != num_fields or num_fields not in (3, 4):
                expected = str(num_fields) if num_fields in (3, 4) else "3 (BEIR) or 4 (TREC)"
                raise bad(piece, line, f"{len(fields)} columns ({clip(row)})", expected, "fix the line")
            if not fields[0] or not fields[-2]:
                raise bad(piece, line, f"an empty id ({clip(row)})", "a query and a passage id", "fix the line")
            if not re.fullmatch(r"-?[0-9]{1,9}", fields[-1]):
                expected = "an integer" if line > 1 else "an integer, or the header query-id<TAB>corpus-id<TAB>score"
                raise bad(piece, line, f"score {clip(fields[-1])}", expected, "fix the line")
            query_ids.append(fields[0])
            corpus_ids.append(fields[-2])
            scores.append(int(fields[-1]))
            numbers.append(line)
    if not query_ids:
        raise no_rows(file)
    return pa.table([query_ids, corpus_ids, scores, numbers], schema=QRELS_SCHEMA)


def _typed_field(value: Any, kind: str | None) -> Any:
    """A field of CSV or TSV in the type of its filter; the unchanged text if it does not fit."""
    if type(value) is not str:
        return value
    if kind == "int64" and re.fullmatch(r"[+-]?[0-9]{1,19}", value):
        return int(value)
    if kind == "float64" and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", value):
        return float(value)
    if kind == "bool":
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _filter_value(piece: Piece, line: int, name: str, kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "timestamp":
        try:
            moment = datetime.fromisoformat(value.isoformat() if isinstance(value, date) else value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (TypeError, ValueError, OverflowError):
            pass
    elif kind == "int64":
        if type(value) is int and -(2**63) <= value < 2**63:
            return value
    elif kind == "float64":
        if type(value) in (int, float):
            return float(value)
    elif type(value) is {"string": str, "bool": bool}[kind]:
        return value
    wanted = "an ISO 8601 timestamp" if kind == "timestamp" else kind
    found = f"{name} {clip(value)} ({type(value).__name__})"
    raise bad(piece, line, found, f"{wanted}, as its filter says", "fix the value or give the filter another type")


def dump_metadata(piece: Piece, line: int, fields: dict[str, Any]) -> str:
    try:
        return orjson.dumps(fields, default=_plain).decode()
    except orjson.JSONEncodeError as error:
        raise bad(piece, line, f"metadata that JSON cannot hold ({error})", "text or numbers", "drop it") from None


def _plain(value: Any) -> Any:
    """Decimals, durations and timestamps in nanoseconds as Python prints them; bytes are refused."""
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)
