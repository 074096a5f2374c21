"""Parses blocks of raw text or Parquet into rows, and collects bad rows with file and line."""

import csv
import html.entities
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import orjson

from riptide.base.errors import InputError, RowError
from riptide.base.wording import STORED, Parameter, list_first, shorten
from riptide.indexing.files import limits
from riptide.indexing.files.raw import FilePiece, allow_long_fields, short_repr

SHOWN_ROWS = 20  # maximum bad rows in an error
LISTED_ROWS = 100  # maximum bad rows that an artifact records
LEAVE_OUT = "or leave the row out"  # a remedy that artifacts record, so it names no option
LISTED_CHARACTERS = 500  # maximum length of a recorded problem

MAX_FLOAT_ID = 1 << 53  # float64 represents all integers up to this one exactly

_ENTITY = re.compile(r"&(?:[A-Za-z][A-Za-z0-9]{1,31}|#[0-9]{1,7}|#[Xx][0-9A-Fa-f]{1,6});")
_DIGITS_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)

# A passage or a query: line, id, title ("" for a query), text and metadata fields. Not a named tuple, which takes twice
# as long to create.
Row = tuple[int, str, str, str, dict[str, Any]]
ParseResult = TypeVar("ParseResult")


class RowReader(Protocol):
    """The interface of readers that return the rows of a file in pieces."""

    def take(self, num_rows: int, max_bytes: int = ..., /) -> FilePiece | None:
        """Returns the next rows as a piece, within the limits that `Lines.take` has; None at the end of the file."""


@dataclass
class BadRows:
    """Collects the rows that cannot be imported, in file order.

    Attributes:
        count: Their number.
        problems: What is wrong with the first LISTED_ROWS of them, each with its file and line.
        positions: The number of each row among the rows that are parsed, from 0.
    """

    count: int = 0
    problems: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, problem: RowError, position: int = 0) -> None:
        """Adds a bad row with its problem and its position."""
        text = f"{problem}"
        if len(text) > LISTED_CHARACTERS:  # The cut could go through the mark of a parameter.
            text = STORED.render(text)
        self.extend({"skipped": 1, "skipped_rows": [shorten(text, LISTED_CHARACTERS)]})
        self.positions.append(position)

    def extend(self, facts: Mapping[str, Any]) -> None:
        """Adds the bad rows of a part from its facts, which `facts` has returned."""
        self.count += facts.get("skipped", 0)
        self.problems += facts.get("skipped_rows", [])[: LISTED_ROWS - len(self.problems)]

    def facts(self) -> dict[str, Any]:
        """Returns the facts that a part records about bad rows, for `extend`; {} if there are none."""
        return {"skipped": self.count, "skipped_rows": self.problems} if self.count else {}

    def notes(self) -> dict[str, Any]:
        """Returns the facts in the words that people read in the notes of an artifact."""
        return {**self.facts(), "skipped_rows": list(map(STORED.render, self.problems))} if self.count else {}

    def refuse(self, scope: str = "", remedy: str = f"correct them, or set {Parameter('skip_invalid')}") -> None:
        """Raises InputError if there are bad rows; its notes list the first SHOWN_ROWS of them.

        Args:
            scope: Which rows were read, if not all were, such as " in the first 64 MiB".
            remedy: What to do about several bad rows.
        """
        if not self.count:
            return
        if self.count == 1:
            by = f" by {Parameter('skip_invalid')}" if self.problems[0].endswith(LEAVE_OUT) else ""
            raise InputError(f"{self.problems[0]}{by}")
        more = f"{self.count - 1:,} more bad row{'s' if self.count > 2 else ''}{scope}"
        error = InputError(f"{self.problems[0]}; found {more}: {remedy}")
        for problem in self.problems[1:SHOWN_ROWS]:
            error.add_note(problem)
        if self.count > SHOWN_ROWS:
            error.add_note(f"and {self.count - SHOWN_ROWS:,} more")
        raise error


def parse_valid_rows(
    block: FilePiece,
    parse: Callable[[FilePiece], ParseResult],
    halve: Callable[[FilePiece], tuple[FilePiece, FilePiece]],
    bad_rows: BadRows,
    position: int = 0,
) -> Iterator[ParseResult]:
    """Parses a block and yields results without bad rows: halves a block that fails until each bad row is alone.

    Args:
        block: The block.
        parse: Parses a block; raises RowError for a bad row.
        halve: Cuts a block of several rows into two.
        bad_rows: Receives the bad rows.
        position: The number of the first row of the block, for `bad_rows`.
    """
    try:
        result = parse(block)
    except RowError as error:
        if block.rows == 1:
            bad_rows.add(error, position)
            return
        first, second = halve(block)
        yield from parse_valid_rows(first, parse, halve, bad_rows, position)
        yield from parse_valid_rows(second, parse, halve, bad_rows, position + first.rows)
    else:
        yield result


def halve_batch(block: FilePiece) -> tuple[FilePiece, FilePiece]:
    """Splits a block with a `batch` into two blocks with half of its rows each."""
    rows = block.rows // 2
    return (
        replace(block, rows=rows, batch=block.batch[:rows]),
        replace(block, first_line=block.first_line + rows, rows=block.rows - rows, batch=block.batch[rows:]),
    )


def halve_text(block: FilePiece, ends: np.ndarray | None = None) -> tuple[FilePiece, FilePiece]:
    """Splits a block of text into two blocks with half of its rows each.

    Args:
        block: A block of at least two rows.
        ends: The positions of the newlines between its rows, int64; None: each line is a row.
    """
    data = block.data or b""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) if ends is None else ends
    rows = block.rows // 2
    end = int(ends[rows - 1])
    line = block.first_line + data.count(b"\n", 0, end) + 1
    return (
        FilePiece(block.file, block.first_line, rows, end, data[:end]),
        FilePiece(block.file, line, block.rows - rows, len(data) - end - 1, data[end + 1 :]),
    )


def line_blocks(piece: FilePiece) -> Iterator[FilePiece]:
    """Splits a piece of lines into blocks of about BLOCK_BYTES, small enough to become Python objects."""
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


def decode_entities(text: str) -> str:
    """Decodes the HTML entities of a text once (`&amp;`, `&#39;`); names without a semicolon are unchanged.

    An address such as `?lang=en&copy=2` is thus kept, which a browser would change.
    """
    return _ENTITY.sub(_decode_entity, text) if "&" in text else text


def _decode_entity(entity: re.Match[str]) -> str:
    # html.unescape would decode a known prefix of an unknown name: `&notit;` as `&not` and `it;`.
    return html.unescape(entity[0]) if entity[0][1] == "#" or entity[0][1:] in html.entities.html5 else entity[0]


def read_document(piece: FilePiece, line: int, doc: dict[str, Any], id_name: str, *, has_title: bool = True) -> Row:
    """Converts a JSON object with BEIR's fields (id, `text`, `title`, metadata) to a passage or a query.

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
    """Merges the fields of the object `metadata` and of the top level; removes `metadata` from `doc`."""
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
    """Parses the JSON of a metadata column; None for an empty string. Raises RowError if it is malformed."""
    try:
        if len(text) > limits.MAX_VALUES:
            limits.check_value_count(file_and_line(piece, line), text)
        value = orjson.loads(text) if text else None
        is_exact = not _may_have_long_integers(text.encode())
        return value if is_exact else _with_exact_integers(piece, line, text.encode())
    except orjson.JSONDecodeError as error:
        raise row_error(
            piece, line, f"metadata {short_repr(text)} ({error.msg})", "a JSON object", "rename the column"
        ) from None


def json_objects(piece: FilePiece) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, JSON object) of each line of a piece. Raises RowError for a line that is no object."""
    most = limits.MAX_COLUMNS
    has_long_integers = _may_have_long_integers(piece.data or b"")
    for line, data in enumerate((piece.data or b"").split(b"\n"), piece.first_line):
        try:
            doc = orjson.loads(data) if len(data) <= most else _long_object(piece, line, data)
            if has_long_integers and _may_have_long_integers(data):
                doc = _with_exact_integers(piece, line, data)
        except orjson.JSONDecodeError as error:
            raise _not_json_error(piece, line, data, error) from None
        if type(doc) is not dict:
            raise row_error(
                piece, line, f"JSON {short_repr(data.rstrip())}", "a JSON object", "write one document per line"
            )
        yield line, doc


def _may_have_long_integers(data: bytes) -> bool:
    """Returns whether a JSON text has 19 consecutive digits, so may hold an integer of more than 64 bits."""
    # Among 19 consecutive digits, a sample of every ninth byte has at least two adjacent digits. All bytes are checked
    # only if the sample has such digits, because the full check takes eighteen times as long.
    is_digit = np.frombuffer(data, np.uint8)[::9] - ord("0") < 10
    return bool((is_digit[1:] & is_digit[:-1]).any()) and b"0" * 19 in data.translate(_DIGITS_AS_ZERO)


def _with_exact_integers(piece: FilePiece, line: int, data: bytes) -> Any:
    """Parses JSON by Python's json, because orjson converts integers of more than 64 bits to floats."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # Python refuses integers of more than 4,300 digits
        remedy = "write the number as a string"
        raise row_error(piece, line, f"a number that is too long ({error})", "a shorter one", remedy) from None


def _long_object(piece: FilePiece, line: int, data: bytes) -> Any:
    """Parses a long line of JSON. Raises InputError if it has too many values or keys."""
    limits.check_value_count(file_and_line(piece, line), data)
    doc = orjson.loads(data)
    if type(doc) is dict and len(doc) > limits.MAX_COLUMNS:
        raise limits.too_many_columns_error(file_and_line(piece, line), len(doc))
    return doc


def _not_json_error(piece: FilePiece, line: int, data: bytes, error: orjson.JSONDecodeError) -> RowError:
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
    """Returns (line number, text without line end) of each line. Raises RowError for invalid UTF-8 or an empty line."""
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
    """Yields (line number, fields) of tab-separated lines, quoted as in Python's csv module, which DPR uses too."""
    allow_long_fields()
    lines = [line for _, line in text_lines(piece)]
    rows = csv.reader([*lines, ""], delimiter="\t")  # the added empty line reveals an unclosed quote in the last line
    for number, line in enumerate(lines, piece.first_line):
        if len(line) > limits.MAX_COLUMNS:
            limits.check_columns(file_and_line(piece, number), line, "\t")
        try:
            fields = next(rows)
        except csv.Error:
            raise row_error(piece, number, "a carriage return outside of quotes", "none", "remove it") from None
        if rows.line_num != number - piece.first_line + 1:
            problem = f"a quoted field that does not end in its line ({short_repr(line)})"
            raise row_error(
                piece, number, problem, "one row per line, a quote in a quoted field doubled", "fix the line"
            )
        if len(fields) != num_columns:
            raise wrong_columns_error(piece, number, line, len(fields), expected)
        yield number, fields


def integer_id(piece: FilePiece, line: int, id: Any, name: str) -> str:
    """Converts an integer id to a string. Raises RowError for any other value.

    A float without a fraction counts as an integer: pandas gives a column of integers with missing values this type.
    """
    if type(id) is int or (type(id) is float and id.is_integer() and abs(id) <= MAX_FLOAT_ID):
        return str(int(id))
    actual = f"no {name}" if id is None else f"{name} {short_repr(id)}"
    raise row_error(piece, line, actual, "a string that is not empty, or an integer", "give each row its id")


def row_error(piece: FilePiece, line: int, actual: str, expected: str, remedy: str) -> RowError:
    """Returns the error for a bad row, with its file and line."""
    return RowError(f"{file_and_line(piece, line)}: found {actual}, expected {expected}; {remedy}")


def file_and_line(piece: FilePiece, line: int) -> str:
    """Returns `FILE:LINE` of a row; for Parquet, `FILE row ROW`."""
    return f"{piece.file} row {line}" if piece.data is None else f"{piece.file}:{line}"


def wrong_text_error(piece: FilePiece, line: int, name: str, value: Any) -> RowError:
    """Returns the error for a field that is missing or not a string."""
    if value is None:
        return row_error(piece, line, f"no {name}", f"{name} to be a string", f"add it, {LEAVE_OUT}")
    remedy = "write it as a string, or name another format"
    if isinstance(value, dict) and value:
        remedy = f"it is an object: name one of its fields, such as {list_first([f'{name}.{key}' for key in value])}"
    return row_error(piece, line, f"{name} {short_repr(value)}", f"{name} to be a string", remedy)


def wrong_columns_error(piece: FilePiece, line: int, row: str, count: int, expected: str) -> RowError:
    """Returns the error for a line with a wrong number of columns."""
    remedy = "fix the line, or add a header line that names other columns"
    return row_error(piece, line, f"{count} columns ({short_repr(row)})", expected, remedy)


def _empty_line_error(piece: FilePiece, line: int) -> RowError:
    return row_error(piece, line, "an empty line", "empty lines at the end of the file only", "remove it")


def _bad_byte_error(piece: FilePiece, line: int, data: bytes, offset: int) -> RowError:
    actual = f"invalid UTF-8 (byte 0x{data[offset]:02x} at byte offset {offset} of the line)"
    return row_error(piece, line, actual, "UTF-8", "convert the file")


def dump_metadata(piece: FilePiece, line: int, fields: dict[str, Any]) -> str:
    """Serialises metadata to JSON text. Raises RowError for values that JSON cannot hold."""
    try:
        return orjson.dumps(fields, default=_as_python_prints).decode()
    except orjson.JSONEncodeError as error:
        if "64-bit" in str(error):
            actual = "an integer of more than 64 bits in the metadata"
            raise row_error(piece, line, actual, "at most 64 bits", "write it as a string") from None
        raise row_error(
            piece, line, f"metadata that JSON cannot hold ({error})", "text or numbers", "drop it"
        ) from None


def _as_python_prints(value: Any) -> Any:
    """Converts a value that orjson cannot serialise (decimals, durations) to str. Raises TypeError for bytes."""
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)
