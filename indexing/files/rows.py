"""Parses blocks of raw text and of Parquet into rows, and refuses a bad row with its file and line."""

import csv
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import orjson

from indexing.files import limits
from indexing.files.raw import FilePiece, allow_long_fields, short_repr
from retriever.errors import InputError

# A passage or a query: its line, id, title ("" for a query), text and metadata fields. A named tuple would take twice
# as long to create.
Row = tuple[int, str, str, str, dict[str, Any]]


class RowReader(Protocol):
    """Reads the rows of a file in pieces."""

    def take(self, num_rows: int, max_bytes: int = ..., /) -> FilePiece | None:
        """Returns the next rows as `Lines.take` does; None at the end of the file."""


def line_blocks(piece: FilePiece) -> Iterator[FilePiece]:
    """Yields the lines of a piece in blocks of about BLOCK_BYTES, which are small enough for Python objects."""
    data = piece.data or b""
    if len(data) <= limits.BLOCK_BYTES:
        yield piece
        return
    start, line = 0, piece.first_line
    while start <= len(data):
        end = data.find(b"\n", start + limits.BLOCK_BYTES)
        end = len(data) if end < 0 else end
        rows = data.count(b"\n", start, end) + 1
        yield FilePiece(piece.file, line, rows, end - start, data[start:end])
        start, line = end + 1, line + rows


def read_document(piece: FilePiece, line: int, doc: dict[str, Any], id_name: str, *, has_title: bool = True) -> Row:
    """Returns a passage or a query with the fields of BEIR: an id, `text`, `title` and metadata.

    Args:
        piece: The piece that holds the row.
        line: The line of the row.
        doc: The fields of the row. Those that are no metadata are removed from it.
        id_name: Name of the field with the id.
        has_title: Whether `title` is the title; otherwise it is metadata.

    Raises:
        InputError: If the id, the text or the title has another type.
    """
    id, text, title = doc.pop(id_name, None), doc.pop("text", None), doc.pop("title", "") if has_title else ""
    if type(id) is not str or not id:
        id = integer_id(piece, line, id, id_name)
    if type(text) is not str:
        raise wrong_text_error(piece, line, "text", text)
    if type(title) is not str:
        if title is not None:
            raise wrong_text_error(piece, line, "title", title)
        title = ""
    return line, id, title, text, merge_metadata_fields(piece, line, doc) if doc else doc


def merge_metadata_fields(piece: FilePiece, line: int, doc: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `metadata` and of the top level as one object; removes `metadata` from `doc`."""
    nested = doc.pop("metadata", None)
    if nested is None:
        return doc
    if type(nested) is not dict:
        raise row_error(
            piece, line, f"metadata {short_repr(nested)}", "an object", "put it into one, or rename the field"
        )
    if len(nested) + len(doc) > limits.MAX_COLUMNS:
        raise limits.too_many_columns_error(file_and_line(piece, line), len(nested) + len(doc))
    for name in nested.keys() & doc.keys():
        if nested[name] != doc[name]:
            raise row_error(
                piece, line, f"field {name!r} inside and outside of metadata", "one of them", "rename the other"
            )
    return nested | doc


def metadata_text(piece: FilePiece, line: int, text: str) -> Any:
    """Returns the metadata in a string column: a JSON object, or None if the string is empty."""
    try:
        if len(text) > limits.MAX_VALUES:
            limits.check_values(file_and_line(piece, line), text)
        return orjson.loads(text) if text else None
    except orjson.JSONDecodeError as error:
        raise row_error(
            piece, line, f"metadata {short_repr(text)} ({error.msg})", "a JSON object", "rename the column"
        ) from None


def json_objects(piece: FilePiece) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the lines of a piece as JSON objects, each with its line number. Raises InputError for other lines."""
    most = limits.MAX_COLUMNS
    for line, data in enumerate((piece.data or b"").split(b"\n"), piece.first_line):
        try:
            doc = orjson.loads(data) if len(data) <= most else _long_object(piece, line, data)
        except orjson.JSONDecodeError as error:
            raise _not_json_error(piece, line, data, error) from None
        if type(doc) is not dict:
            raise row_error(
                piece, line, f"JSON {short_repr(data.rstrip())}", "a JSON object", "write one document per line"
            )
        yield line, doc


def _long_object(piece: FilePiece, line: int, data: bytes) -> Any:
    """Returns the JSON value of a long line. Raises InputError if it has too many values or keys."""
    limits.check_values(file_and_line(piece, line), data)
    doc = orjson.loads(data)
    if type(doc) is dict and len(doc) > limits.MAX_COLUMNS:
        raise limits.too_many_columns_error(file_and_line(piece, line), len(doc))
    return doc


def _not_json_error(piece: FilePiece, line: int, data: bytes, error: orjson.JSONDecodeError) -> InputError:
    data = data.rstrip()
    if not data:
        return _empty_line_error(piece, line)
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return _bad_byte_error(piece, line, data, wrong.start)
    if "surrogate" in error.msg:
        actual = f"an unpaired surrogate escape at column {error.colno} ({error.msg})"
        return row_error(piece, line, actual, "Unicode text", "fix or remove the escape")
    actual = f"no valid JSON ({error.msg} at column {error.colno} of {len(data.decode())}: {short_repr(data)})"
    return row_error(piece, line, actual, "one JSON object per line", "fix or remove the line")


def text_lines(piece: FilePiece) -> Iterable[tuple[int, str]]:
    """Returns the lines of a piece as text without line ends, each with its line number."""
    data = piece.data or b""
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as wrong:
        start = data.rfind(b"\n", 0, wrong.start) + 1
        line = piece.first_line + data.count(b"\n", 0, wrong.start)
        raise _bad_byte_error(piece, line, data[start:], wrong.start - start) from None
    if b"\r" in data:
        lines = [line.removesuffix("\r") for line in lines]
    if "" in lines:
        raise _empty_line_error(piece, piece.first_line + lines.index(""))
    return enumerate(lines, piece.first_line)


def quoted_rows(piece: FilePiece, expected: str, num_columns: int) -> Iterator[tuple[int, list[str]]]:
    """Yields the tab-separated fields of each line, quoted as by Python's csv module; DPR's own reader uses it."""
    allow_long_fields()
    lines = [line for _, line in text_lines(piece)]
    rows = csv.reader([*lines, ""], delimiter="\t")  # the empty line reveals an unclosed quote in the last line
    for number, line in enumerate(lines, piece.first_line):
        if len(line) > limits.MAX_COLUMNS:
            limits.check_columns(file_and_line(piece, number), line, "\t")
        try:
            fields = next(rows)
        except csv.Error as error:
            raise row_error(piece, number, f"a bad field ({error})", "a CR within quotes only", "remove it") from None
        if rows.line_num != number - piece.first_line + 1:
            problem = f"a quoted field that does not end in its line ({short_repr(line)})"
            raise row_error(
                piece, number, problem, "one row per line, a quote in a quoted field doubled", "fix the line"
            )
        if len(fields) != num_columns:
            raise wrong_columns_error(piece, number, line, len(fields), expected)
        yield number, fields


def integer_id(piece: FilePiece, line: int, id: Any, name: str) -> str:
    """Returns an integer id as a string. Raises InputError for any other value."""
    if type(id) is int:
        return str(id)
    actual = f"no {name}" if id is None else f"{name} {short_repr(id)}"
    raise row_error(piece, line, actual, "a string that is not empty, or an integer", "give each row its id")


def row_error(piece: FilePiece, line: int, actual: str, expected: str, remedy: str) -> InputError:
    """Returns the error for a bad row."""
    return InputError(f"{file_and_line(piece, line)}: found {actual}, expected {expected}; {remedy}")


def file_and_line(piece: FilePiece, line: int) -> str:
    """Returns the file and line of a row; for Parquet, the file and row."""
    return f"{piece.file} row {line}" if piece.data is None else f"{piece.file}:{line}"


def wrong_text_error(piece: FilePiece, line: int, name: str, value: Any) -> InputError:
    """Returns the error for a field that is missing or not a string."""
    actual = f"no {name}" if value is None else f"{name} {short_repr(value)}"
    return row_error(piece, line, actual, f"{name} to be a string", "add it, or name another format")


def wrong_columns_error(piece: FilePiece, line: int, row: str, count: int, expected: str) -> InputError:
    """Returns the error for a line with a wrong number of columns."""
    remedy = "fix the line, or add a header line that names other columns"
    return row_error(piece, line, f"{count} columns ({short_repr(row)})", expected, remedy)


def _empty_line_error(piece: FilePiece, line: int) -> InputError:
    return row_error(piece, line, "an empty line", "empty lines at the end of the file only", "remove it")


def _bad_byte_error(piece: FilePiece, line: int, data: bytes, offset: int) -> InputError:
    actual = f"invalid UTF-8 (byte 0x{data[offset]:02x} at byte offset {offset} of the line)"
    return row_error(piece, line, actual, "UTF-8", "convert the file")


def dump_metadata(piece: FilePiece, line: int, fields: dict[str, Any]) -> str:
    """Returns metadata as JSON. Raises InputError for values that JSON cannot hold."""
    try:
        return orjson.dumps(fields, default=_as_python_prints).decode()
    except orjson.JSONEncodeError as error:
        raise row_error(
            piece, line, f"metadata that JSON cannot hold ({error})", "text or numbers", "drop it"
        ) from None


def _as_python_prints(value: Any) -> Any:
    """Returns decimals, durations and timestamps in nanoseconds as Python prints them. Refuses bytes."""
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)
