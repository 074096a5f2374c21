"""Reads Parquet files: takes ranges of rows for chunks, and reads the rows of a range in blocks of bounded size."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.files.columns import TableColumns, refuse_repeated_columns
from riptide.indexing.files.parquet_pages import check_footer, group_sizes, has_dictionary
from riptide.indexing.files.raw import FilePiece, one_line, open_input
from riptide.indexing.files.rows import metadata_text, row_error

BATCH_ROWS = 16_384
MAX_BATCH_BYTES = 16 << 20  # maximum size of a batch, computed with the longest values that the file declares
BUFFER_BYTES = 8 << 20  # bytes of a column that are read at once if a row group is large
PYTHON_VALUE_BYTES = 50  # estimated size of a value as a Python object
WHOLE_BYTES = 256 << 20  # row groups of at most this size are read whole in advance, which is faster


class ParquetRows:
    """Takes ranges of the rows of a Parquet file; reads only the footer."""

    def __init__(self, file: str):
        self.file, self.row = file, 0
        self.groups: deque[tuple[int, int]] = deque()  # (end row, bytes per row) of the remaining row groups
        footer = read_footer(file)
        end = 0
        for group in map(footer.row_group, range(footer.num_row_groups)):
            if group.num_rows:
                end += group.num_rows
                self.groups.append((end, max(1, group.total_byte_size // group.num_rows)))
        if end != footer.num_rows:
            raise _lost_rows_error(file, footer.num_rows, end, "in its row groups")

    def take(self, num_rows: int, max_bytes: int = sys.maxsize) -> FilePiece | None:
        """Returns the next range of rows, within the limits that `Lines.take` has; None at the end."""
        first, size = self.row, 0
        while self.groups and self.row < first + num_rows and size < max_bytes:
            end, width = self.groups[0]
            rows = min(end - self.row, first + num_rows - self.row, -(-(max_bytes - size) // width))
            self.row, size = self.row + rows, size + rows * width
            if self.row == end:
                self.groups.popleft()
        return FilePiece(self.file, first + 1, self.row - first, size, None) if size else None


def read_footer(file: str) -> Any:
    """Reads the footer metadata of a Parquet file. Raises InputError if the file is not Parquet or exceeds a limit."""
    with open_input(file) as opened:
        check_footer(file, opened)
    footer = _read_checked_footer(file)
    if footer.num_columns > limits.MAX_COLUMNS:
        raise limits.too_many_columns_error(file)
    return footer


def _read_checked_footer(file: str) -> Any:
    """Reads the footer metadata without `check_footer`, which has passed and takes 0.2 s for a footer of 1 MB."""
    with open_input(file) as opened:
        try:
            return pq.read_metadata(opened)
        except (pa.ArrowException, OSError) as error:
            raise _no_parquet_error(file, error) from None


def _no_parquet_error(file: str, error: Exception) -> InputError:
    if "too deeply nested" in str(error):
        return InputError(
            f"{file}: found a Parquet schema of more than 100 levels, expected fewer; write the nested column as JSON "
            "text"
        )
    return InputError(f"{file}: found no Parquet ({one_line(error)}), expected a whole file; fetch it again")


def _lost_rows_error(file: str, expected: int, actual: int, place: str) -> InputError:
    """Returns the error for a file of which fewer rows can be read than its footer says."""
    return InputError(
        f"{file}: found damaged Parquet ({actual:,} rows {place}, {expected:,} by its footer); fetch the file again"
    )


def read_parquet_columns(file: str) -> TableColumns:
    """Reads the column names and struct field paths of a Parquet file. Raises InputError if it is not Parquet."""
    try:
        schema = read_footer(file).schema.to_arrow_schema()
        names = schema.names
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _no_parquet_error(file, error) from None
    refuse_repeated_columns(file, names)
    return TableColumns(tuple(names), nested=tuple(path for field in schema for path in _nested_paths(field)))


def _nested_paths(field: Any, path: str = "") -> Iterator[str]:
    """Yields the paths of the fields of a struct; omits fields with a dot in a name."""
    if "." in field.name:
        return
    if pa.types.is_struct(field.type) and field.type.num_fields:
        for inner in field.type:
            yield from _nested_paths(inner, f"{path}{field.name}.")
    elif path:
        yield f"{path}{field.name}"


def decompressed_bytes(piece: FilePiece) -> int:
    """Estimates the decompressed size of the rows of a piece in bytes, with row groups spread evenly over their rows.

    The size of a row group is the smaller one of those in the footer and in the page headers.
    """
    footer = _read_checked_footer(piece.file)
    total = 0.0
    for number, rows in _row_groups(footer, piece):
        group = footer.row_group(number)
        size = min(group.total_byte_size, group_sizes(piece.file, footer, number, None).pages)
        total += size * rows / group.num_rows
    return int(total)


def parquet_blocks(piece: FilePiece, columns: Sequence[str] | None = None) -> Iterator[FilePiece]:
    """Reads the rows of a piece in blocks, each with a `batch` of at most about BLOCK_BYTES.

    Args:
        piece: A range of rows.
        columns: The columns to read; None: all.

    Raises:
        InputError: If the file is damaged, or a row is too long.
    """
    with open_input(piece.file) as opened:
        try:
            footer = pq.read_metadata(opened)
            refuse_repeated_columns(piece.file, footer.schema.to_arrow_schema().names)
            groups = [number for number, _ in _row_groups(footer, piece)]
            largest = max((footer.row_group(number).total_byte_size for number in groups), default=0)
            sizes = [group_sizes(piece.file, footer, number, columns) for number in groups]
            width = max((size.row for size in sizes), default=1)
            coded_width = max((size.coded_row for size in sizes), default=1)
            # Long values that many rows share stay in a dictionary: a copy for each row would take too much memory.
            is_coded = width * BATCH_ROWS > MAX_BATCH_BYTES and width > 2 * coded_width
            width = coded_width if is_coded else width
            leaves = [footer.schema.column(number) for number in range(len(footer.schema))] if is_coded else []
            is_read_whole = largest <= WHOLE_BYTES
            file = pq.ParquetFile(
                opened,
                metadata=footer,
                read_dictionary=[leaf.path for leaf in leaves if has_dictionary(leaf)],
                pre_buffer=is_read_whole,
                buffer_size=0 if is_read_whole else BUFFER_BYTES,
                page_checksum_verification=True,  # for pages that have a checksum
            )
            rows_per_batch = max(1, min(BATCH_ROWS, piece.rows, MAX_BATCH_BYTES // width))
            for first, batch in _read_batches(file, piece, groups, rows_per_batch, columns):
                yield from _split_batch(piece, first, batch)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{piece.file}: found damaged Parquet ({one_line(error)}); fetch the file again") from None


def parquet_objects(block: FilePiece) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row number, dict without nulls) of each row of a block.

    A string in the column `metadata` is parsed as a JSON object.

    Raises:
        InputError: If a row is not UTF-8, or if its metadata is not a JSON object.
    """
    for line, row in enumerate(_rows_as_dicts(block), block.first_line):
        document = {name: value for name, value in row.items() if value is not None}
        if type(document.get("metadata")) is str:
            document["metadata"] = metadata_text(block, line, document["metadata"])
        yield line, document


def _rows_as_dicts(block: FilePiece) -> list[dict[str, Any]]:
    """Converts the rows of a block of Parquet to dicts, with None for NaN and infinities.

    Raises:
        RowError: For values without a Python object: the year 10000.
    """
    batch = _with_finite_numbers(block)
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        raise row_error(block, block.first_line, f"invalid UTF-8 ({error})", "UTF-8", "write the file again") from None
    except (OverflowError, ValueError):
        for name, column in zip(block.batch.schema.names, block.batch.columns, strict=True):
            for line, value in enumerate(column, block.first_line):
                try:
                    value.as_py()
                except (OverflowError, ValueError) as error:
                    actual = f"a value of column {name!r} ({column.type}) that is out of range ({one_line(error)})"
                    raise row_error(
                        block, line, actual, "a time in the years 1 to 9999", "correct or drop it"
                    ) from None
        raise


def _with_finite_numbers(block: FilePiece) -> Any:
    """Returns the rows of a block as a record batch, with null for NaN and infinities, which JSON cannot hold."""
    columns = list(block.batch.columns)
    for number, column in enumerate(columns):
        if pa.types.is_floating(column.type) and column.type != pa.float16():
            columns[number] = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
    return pa.record_batch(columns, names=block.batch.schema.names)


def _row_groups(footer: Any, piece: FilePiece) -> Iterator[tuple[int, int]]:
    """Yields (row group number, number of rows in the piece) for each row group that overlaps a piece."""
    first, end = piece.first_line - 1, piece.first_line - 1 + piece.rows
    row = 0
    for group in range(footer.num_row_groups):
        num_rows = footer.row_group(group).num_rows
        if row < end and row + num_rows > first:
            yield group, min(end, row + num_rows) - max(first, row)
        row += num_rows
        if row >= end:
            return


def _read_batches(
    file: Any, piece: FilePiece, groups: list[int], rows_per_batch: int, columns: Sequence[str] | None
) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a piece as (1-based first row, record batch); decodes only `groups`.

    Raises:
        InputError: If a column ends before the piece, at which Arrow ends without an error.
    """
    first, end = piece.first_line - 1, piece.first_line - 1 + piece.rows
    start = sum(file.metadata.row_group(group).num_rows for group in range(groups[0])) if groups else 0
    for batch in file.iter_batches(rows_per_batch, row_groups=groups, columns=columns, use_threads=False):
        skip = max(first - start, 0)
        part = batch.slice(skip, max(min(end - start, len(batch)) - skip, 0))
        if len(part):
            yield start + skip + 1, part
        start += len(batch)
        if start >= end:
            return
    if groups:
        raise _lost_rows_error(piece.file, file.metadata.num_rows, start, "in the shortest column")


def _split_batch(piece: FilePiece, first_row: int, batch: Any) -> Iterator[FilePiece]:
    """Splits a record batch into blocks of about BLOCK_BYTES. Raises InputError for a row above MAX_ROW_BYTES."""
    sizes = sum((_count_bytes(column) for column in batch.columns), np.zeros(len(batch), np.int64))
    if len(long_rows := np.flatnonzero(sizes > limits.MAX_ROW_BYTES)):
        raise limits.too_long_error(f"{piece.file} row {first_row + long_rows[0]}", int(sizes[long_rows[0]]))
    values = sum((_count_values(column) for column in batch.columns), np.zeros(len(batch), np.int64))
    ends = np.cumsum(sizes + PYTHON_VALUE_BYTES * values)
    start = 0
    while start < len(batch):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + limits.BLOCK_BYTES, side="right")))
        size = int(sizes[start:end].sum())
        yield FilePiece(piece.file, first_row + start, end - start, size, None, batch.slice(start, end - start))
        start = end


def _count_bytes(array: Any) -> np.ndarray:
    """Returns the decoded size of each value of an array in bytes: int64 [values]."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        sizes = np.append(_count_bytes(array.dictionary), 0)  # the last entry is the size of null
        return sizes[array.indices.fill_null(len(array.dictionary)).to_numpy()]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return pc.binary_length(array).fill_null(0).to_numpy().astype(np.int64)
    return _sum_nested(array, _count_bytes, array.nbytes // max(len(array), 1))


def _count_values(array: Any) -> np.ndarray:
    """Counts each value of an array with all values nested in it: int64 [values]."""
    return 1 + _sum_nested(array, _count_values, 0)


def _sum_nested(array: Any, measure: Callable[[Any], np.ndarray], simple: int) -> np.ndarray:
    """Sums a measure over the elements or fields of each value of an array: int64 [values].

    Args:
        array: The array.
        measure: Returns the measure of each value of an array of elements or of a field, int64.
        simple: The result for values that have neither elements nor fields.
    """
    kind = array.type
    if pa.types.is_struct(kind):
        return sum((measure(field) for field in array.flatten()), np.zeros(len(array), np.int64))
    if pa.types.is_map(kind):
        inner, offsets = measure(array.keys) + measure(array.items), array.offsets.to_numpy()
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner, offsets = measure(array.values), array.offsets.to_numpy()
    elif pa.types.is_fixed_size_list(kind):
        inner, offsets = measure(array.values), kind.list_size * (array.offset + np.arange(len(array) + 1))
    else:
        return np.full(len(array), simple, np.int64)
    totals = np.append(0, np.cumsum(inner))
    return totals[offsets[1:]] - totals[offsets[:-1]]
