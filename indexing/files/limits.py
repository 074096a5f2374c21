"""The limits of raw files, which are the same for every format, and checks of them that need no parsing.

They keep a small file from taking all memory: text of one character compresses a thousand times and more, and a value
of two bytes in JSON or CSV is a Python object of fifty. A row is checked before it is split or parsed.
"""

import numpy as np

from riptide.base.errors import InputError, RowError

# Maximum size of a row: a line, the fields of a CSV row, or the values of a Parquet row. The longest novels have 12 MB.
# Reading a row takes six times its size in memory or more: raw, decoded, as a string and in Arrow.
MAX_ROW_BYTES = 32 << 20
MAX_COLUMNS = 10_000  # maximum columns of a table, fields of a line, and keys of a JSON object and its metadata
MAX_VALUES = 1 << 20  # brackets, commas and colons of a JSON row; each value needs about 100 bytes of memory
MAX_GAP_BYTES = 16 << 20  # empty lines between two rows, checked per block; unlimited at the end of a file
MAX_ANSWERS = 1 << 20  # characters of a list of answers; parsing one takes about a hundred times as many bytes
BLOCK_BYTES = 4 << 20  # raw text that is converted to Python objects at once; a longer row forms its own block
PIECE_BYTES = 16 << 20  # lines that are read at once unless the caller sets another size
# A part may hold MAX_PART_BYTES of text, or MAX_PART_GROWTH times its input bytes, whichever is larger.
MAX_PART_BYTES = 48 << 20
MAX_PART_GROWTH = 24
MAX_DEPTH = 100  # maximum depth of nested JSON objects whose fields can be columns
# Limits of a Parquet file. Arrow allocates as many bytes for a page as its header declares.
MAX_FOOTER_BYTES = 64 << 20
MAX_FOOTER_ENTRIES = 1 << 18  # columns, plus row groups, plus the columns of each row group
MAX_DICTIONARY = 1 << 22  # values of a dictionary
MAX_PAGE_BYTES = 128 << 20  # maximum size of a page that decompression enlarges more than MAX_PAGE_GROWTH times
MAX_PAGE_GROWTH = 20
MAX_DECODED_ROW = 256 << 20  # maximum sum, over all columns, of the longest values and lists of a row group

_STEP = 1 << 20  # bytes that are processed at once
_JSON_MARKS = b",:[{"


def check_columns(place: str, row: bytes | str, delimiter: str) -> None:
    """Raises InputError if a row has more than MAX_COLUMNS fields; counts them without splitting the row.

    Args:
        place: The file and line, for the message.
        row: The row; a delimiter between double quotes is text.
        delimiter: The delimiter of the fields, one ASCII character.
    """
    if len(row) < MAX_COLUMNS:
        return
    mark = delimiter.encode()
    if (row.count(mark) if isinstance(row, bytes) else row.count(delimiter)) < MAX_COLUMNS:
        return
    data = row if isinstance(row, bytes) else row.encode()
    if (fields := count_outside_quotes(data, mark) + 1) > MAX_COLUMNS:
        raise too_many_columns_error(place, fields)


def too_many_columns_error(place: str, count: int | None = None) -> InputError:
    """Returns the error for a row or a table with more than MAX_COLUMNS columns. count: None if unknown."""
    actual = f"{count:,}" if count is not None else "too many"
    return RowError(
        f"{place}: found {actual} columns, expected at most {MAX_COLUMNS:,}; leave out the columns that no search "
        "needs, or put their values into the text"
    )


def too_long_error(place: str, actual_bytes: int | None = None, note: str = "") -> InputError:
    """Returns the error for a row of more than MAX_ROW_BYTES.

    Args:
        place: The file and line.
        actual_bytes: The size of the row; None: unknown, since it is not read to its end.
        note: What may be wrong with the row.
    """
    actual = "a row of more than" if actual_bytes is None else f"a row of {actual_bytes:,} bytes, more than"
    return InputError(
        f"{place}: found {actual} {MAX_ROW_BYTES >> 20} MiB, expected a shorter one{note}; cut its text into passages"
    )


def check_value_count(place: str, data: bytes | str) -> None:
    """Raises InputError if a JSON text has more than MAX_VALUES values; counts them without parsing.

    Args:
        place: The file and line, for the message.
        data: The text. A text of at most MAX_VALUES bytes needs no check.
    """
    if len(data) <= MAX_VALUES:
        return
    text = data if isinstance(data, bytes) else data.encode()
    if sum(text.count(mark) for mark in (b",", b":", b"[", b"{")) <= MAX_VALUES:
        return
    if (count := count_outside_quotes(text, _JSON_MARKS, escapes=True)) > MAX_VALUES:
        raise RowError(
            f"{place}: found JSON with {count:,} commas, colons and brackets, expected at most {MAX_VALUES:,}; leave "
            "out fields, or write one passage per line"
        )


def count_outside_quotes(data: bytes, marks: bytes, *, escapes: bool = False) -> int:
    """Counts the given characters outside double quotes, in a few MiB of memory.

    Args:
        data: A text.
        marks: The ASCII characters to count.
        escapes: Whether a backslash escapes the next character, as in JSON; otherwise a quote is doubled, as in CSV.
    """
    is_mark = np.zeros(256, bool)
    is_mark[list(marks)] = True
    count, is_inside, escape = 0, False, b""
    for start in range(0, len(data), _STEP):
        step = data[start : start + _STEP]
        if escapes:
            step = (escape + step).replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
            escape = b"\\" if step.endswith(b"\\") else b""
            step = step.removesuffix(escape)
        codes = np.frombuffer(step, np.uint8)
        inside = np.logical_xor.accumulate(codes == 34) ^ is_inside
        count += int(np.count_nonzero(is_mark[codes] & ~inside))
        if len(inside):
            is_inside = bool(inside[-1])
    return count
