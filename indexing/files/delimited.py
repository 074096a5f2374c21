"""Reads CSV and TSV by RFC 4180: splits files into rows, and rows into fields.

Quoted fields may hold newlines. Every quote is checked while a file is cut, so a stray quote is refused with its line,
and a field that is never closed is refused after MAX_ROW_BYTES, not at the end of the file. The fields of a row are
counted before it is split.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from riptide.base.errors import InputError, RowError
from riptide.indexing.files import limits
from riptide.indexing.files.columns import TableColumns, refuse_repeated_columns, shown_columns
from riptide.indexing.files.raw import FilePiece, Lines, allow_long_fields, no_rows_error, short_repr

DELIMITERS = ",;\t|"  # possible delimiters of CSV, in order of preference
NEWLINE, RETURN, QUOTE = 10, 13, 34


class DelimitedRows(Lines):
    """Reads a CSV or TSV file as pieces of whole rows, which may span several lines."""

    def __init__(self, file: str, delimiter: str):
        super().__init__(file)
        self._is_quoted = False  # whether the block ends within quotes
        self._last_byte = NEWLINE  # the byte that precedes the block
        # The lines in which the next block, the open row and the open quoted field begin.
        self._block_line = self._row_line = self._quote_line = 1
        self._row_bytes = 0  # bytes of the open row so far
        self._before = np.zeros(256, bool)  # bytes that may stand before an opening quote
        self._before[[ord(delimiter), NEWLINE, QUOTE]] = True
        self._after = self._before.copy()  # bytes that may stand after a closing quote
        self._after[RETURN] = True

    def _make_piece(self, data: bytes, rows: int) -> FilePiece:
        first_line = self.line
        self.line += data.count(b"\n") + 1
        return FilePiece(self.file, first_line, rows, len(data), data)

    def next_block(self, line: int = 1) -> bytes:
        return super().next_block(self._block_line)

    def _row_ends(self, block: bytes) -> np.ndarray:
        if not block:
            if self._is_quoted:
                raise InputError(
                    f"{self.file}:{self._quote_line}: found a quoted field that is not closed before the end of the "
                    "file, expected a closing quote; close it, or double a quote that belongs to the text"
                )
            return np.empty(0, np.int64)
        data = np.frombuffer(block, np.uint8)
        ends = newlines = np.flatnonzero(data == NEWLINE)
        if self._is_quoted or b'"' in block or self._last_byte == QUOTE:
            quotes = np.flatnonzero(data == QUOTE)
            self._check_quotes(data, quotes, newlines)
            is_outside = (np.searchsorted(quotes, newlines) + self._is_quoted) % 2 == 0
            ends = newlines[is_outside]
            is_quoted = bool((len(quotes) + self._is_quoted) % 2)
            if is_quoted and len(quotes):
                self._quote_line = self._line_at(int(quotes[-1]), newlines)
            self._is_quoted = is_quoted
        if len(ends):
            self._row_bytes = len(block) - int(ends[-1]) - 1
            self._row_line = self._line_at(int(ends[-1]), newlines) + 1
        else:
            self._row_bytes += len(block)
        if self._row_bytes > limits.MAX_ROW_BYTES:
            quote = f" (the quote in line {self._quote_line} opens a field and is not closed)"
            raise limits.too_long_error(f"{self.file}:{self._row_line}", note=quote if self._is_quoted else "")
        self._last_byte = int(data[-1])
        self._block_line += len(newlines)
        return ends

    def _line_at(self, position: int, newlines: np.ndarray) -> int:
        return self._block_line + int(np.searchsorted(newlines, position))

    def _check_quotes(self, data: np.ndarray, quotes: np.ndarray, newlines: np.ndarray) -> None:
        """Raises InputError for a quote that does not open or close a field and is not doubled within one."""
        first = int(self._is_quoted)
        opening, closing = quotes[first::2], quotes[1 - first :: 2]
        after_last = self._last_byte == QUOTE and not self._is_quoted and not self._after[data[0]]
        before = data[opening - 1]
        if len(opening) and opening[0] == 0:
            before[0] = self._last_byte
        after = data[np.minimum(closing + 1, len(data) - 1)]  # the block's last quote is checked with the next block
        bad_opening, bad_closing = opening[~self._before[before]], closing[~self._after[after]]
        if after_last or (len(bad_closing) and (not len(bad_opening) or bad_closing[0] < bad_opening[0])):
            position = -1 if after_last else int(bad_closing[0])
            earlier = opening[opening < position]
            start = self._line_at(int(earlier[-1]), newlines) if len(earlier) else self._quote_line
            raise InputError(
                f"{self.file}:{self._line_at(max(position, 0), newlines)}: found text after the closing quote of a "
                f"field that begins in line {start}, expected the end of the field; double a quote that belongs to "
                "the text, and close every quoted field"
            )
        if len(bad_opening):
            raise InputError(
                f"{self.file}:{self._line_at(int(bad_opening[0]), newlines)}: found a quote within a field that is "
                "not quoted, expected the whole field in quotes and its own quotes doubled; fix the line"
            )


def read_header(file: str, delimiter: str = "") -> TableColumns:
    """Reads the column names of a CSV or TSV file from its header line, and detects the delimiter of CSV.

    Args:
        file: Path or address.
        delimiter: Of the fields; "": the one of DELIMITERS that the first line has most often outside quotes.

    Raises:
        InputError: If there is no header, a column has no name, two have the same, or there are too many.
    """
    if not delimiter:
        line = Lines(file).take(1, limits.MAX_ROW_BYTES)
        if line is None:
            raise no_rows_error(file)
        data = line.data or b""
        delimiter = max(DELIMITERS, key=lambda character: limits.count_outside_quotes(data, character.encode()))
    piece = DelimitedRows(file, delimiter).take(1)
    if piece is None:
        raise no_rows_error(file)
    names = [name.strip() for name in next(_parse_with_csv_module(piece, delimiter))[1]]
    if "" in names:
        raise InputError(
            f"{file}:1: found no name for column {names.index('') + 1} of {len(names)}, expected a header that names "
            "every column; name it or write the file without it (pandas: index=False)"
        )
    refuse_repeated_columns(f"{file}:1", names)
    return TableColumns(tuple(names), delimiter)


def delimited_blocks(piece: FilePiece, table: TableColumns) -> Iterator[FilePiece]:
    """Cuts a piece between rows into smaller pieces of about BLOCK_BYTES.

    The bytes of the column names count for each row, because its metadata repeats them.
    """
    data = piece.data or b""
    names_bytes = sum(len(name) for name in table.names)
    if len(data) + piece.rows * names_bytes <= limits.BLOCK_BYTES:
        yield piece
        return
    ends = np.append(row_ends(data), len(data))
    costs = ends + names_bytes * np.arange(1, len(ends) + 1)
    first = start = cost = 0
    line = piece.first_line
    while first < len(ends):
        last = max(first, int(np.searchsorted(costs, cost + limits.BLOCK_BYTES)) - 1)
        end, cost = int(ends[last]), int(costs[last])
        yield FilePiece(piece.file, line, last + 1 - first, end - start, data[start:end])
        line += data.count(b"\n", start, end) + 1
        first, start = last + 1, end + 1


def read_fields(
    piece: FilePiece, table: TableColumns, column_numbers: Sequence[int]
) -> tuple[Sequence[int], list[list[str]]]:
    """Returns the line number of each row of a piece, and the values of the requested columns.

    pyarrow reads the piece; Python's csv module, five times slower, finds the line of a row that pyarrow refuses.

    Args:
        piece: Whole rows, as `delimited_blocks` cuts them.
        table: All columns of the file.
        column_numbers: Numbers of the columns to return, from 0.

    Raises:
        InputError: If a row has another number of fields, is empty, or is not UTF-8.
    """
    data = piece.data or b""
    if len(data) > limits.BLOCK_BYTES:  # the block is a single long row
        limits.check_columns(f"{piece.file}:{piece.first_line}", data, table.delimiter)
    names = [str(number) for number in range(len(table.names))]
    keep = sorted(set(column_numbers)) or [0]
    try:
        read = pa_csv.read_csv(
            pa.BufferReader(data),
            read_options=pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
            parse_options=pa_csv.ParseOptions(delimiter=table.delimiter, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.large_string()),
                include_columns=[names[number] for number in keep],
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        read = None
    # pyarrow skips empty lines, and ends a row at a carriage return without a newline.
    if read is None or len(read) != piece.rows or _has_bare_return(data):
        lines, rows = [], []
        for line, fields in _parse_with_csv_module(piece, table.delimiter):
            if len(fields) != len(names):
                raise _field_count_error(piece, table, line, fields)
            lines.append(line)
            rows.append(fields)
        return lines, [[fields[number] for fields in rows] for number in column_numbers]
    columns = {number: read.column(names[number]).to_pylist() for number in keep}
    return row_lines(piece), [columns[number] for number in column_numbers]


def _has_bare_return(data: bytes) -> bool:
    """Returns whether a piece has a carriage return that neither precedes a newline nor ends the piece."""
    return data.count(b"\r") != data.count(b"\r\n") + data.endswith(b"\r")


def row_lines(piece: FilePiece) -> Sequence[int]:
    """Returns the line number at which each row of a piece of CSV or TSV begins."""
    data = piece.data or b""
    if data.count(b"\n") == piece.rows - 1:
        return range(piece.first_line, piece.first_line + piece.rows)
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)
    is_end = np.isin(newlines, row_ends(data), assume_unique=True)
    return [piece.first_line, *(piece.first_line + 1 + np.flatnonzero(is_end)).tolist()]


def row_ends(data: bytes) -> np.ndarray:
    """Returns the positions of the newlines that separate the rows of a piece (those outside quotes): int64."""
    codes = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(codes == NEWLINE)
    if b'"' not in data:
        return newlines
    is_quoted = np.logical_xor.accumulate(codes == QUOTE)
    return newlines[~is_quoted[newlines]]


def line_of_row(file: str, delimiter: str, first_line: int, offset: int) -> str:
    """Returns the line number, as text, of the row `offset` rows after the row that begins in line `first_line`.

    Reads the file up to there. "LINE or after" if this node cannot read it.
    """
    rows = DelimitedRows(file, delimiter)
    known = first_line
    try:
        while piece := rows.take(1 << 16, 16 << 20):
            lines = row_lines(piece)
            if lines[-1] >= first_line:
                position = int(np.searchsorted(lines, first_line)) + offset
                if position < len(lines):
                    return str(lines[position])
                first_line, offset = rows.line, position - len(lines)
    except InputError:
        pass
    return f"{known} or after"


def _parse_with_csv_module(piece: FilePiece, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (line number, fields) of each row, parsed by Python's csv module. Raises RowError for a malformed row."""
    allow_long_fields()
    data = piece.data or b""
    if piece.rows == 1:
        limits.check_columns(f"{piece.file}:{piece.first_line}", data, delimiter)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = piece.first_line + data.count(b"\n", 0, error.start)
        raise RowError(
            f"{piece.file}:{line}: found invalid UTF-8 (byte 0x{data[error.start]:02x}), expected UTF-8; convert the "
            "file"
        ) from None
    if not text:
        raise _empty_line_error(piece, piece.first_line)
    reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter, strict=True)
    line = piece.first_line
    try:
        for fields in reader:
            if not fields:
                raise _empty_line_error(piece, line)
            yield line, fields
            line = piece.first_line + reader.line_num
    except csv.Error as error:
        problem = "a carriage return outside quotes" if "new-line" in str(error) else str(error)
        raise RowError(
            f"{piece.file}:{line}: found a row that is not CSV ({problem}), expected RFC 4180; fix the line"
        ) from None


def _empty_line_error(piece: FilePiece, line: int) -> RowError:
    return RowError(
        f"{piece.file}:{line}: found an empty line, expected empty lines at the end of the file only; remove it"
    )


def _field_count_error(piece: FilePiece, table: TableColumns, line: int, fields: list[str]) -> RowError:
    quoting = "quote a field that contains the delimiter" if len(fields) > len(table.names) else "add what is missing"
    return RowError(
        f"{piece.file}:{line}: found {len(fields)} field{'s' if len(fields) != 1 else ''} "
        f"({short_repr(fields[0])} first), expected {len(table.names)}: {shown_columns(table.names)}; {quoting}"
    )
