"""Checks a Parquet file before Arrow reads it: the size of the footer, and the sizes that page headers declare.

The sizes in a footer may be wrong, but Arrow allocates what the header of a page says. A column of one repeated text
compresses 30,000 times and more; its dictionary tells how large a value can become.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.files.raw import open_input
from riptide.indexing.files.thrift import LIST, STRUCT, MalformedError, Thrift

MIN_STRUCT_BYTES = 3  # smallest encoding of a struct with one field in a footer
MAX_HEADER_BYTES = 16 << 20  # maximum size of a page header, as in Arrow
SMALL_LISTS = 32 << 20  # if all lists of a column in a row group take fewer bytes, the longest is not measured
LEVELS_STEP = 1 << 18  # groups of eight repetition levels that are unpacked at once
DATA, DICTIONARY, DATA_V2 = 0, 2, 3  # page types of the Parquet format
SMALL_VALUE = 2048  # bytes of a value so small that a whole batch of them is small
DICTIONARY_ENCODINGS = (2, 8)
PREFIX_ENCODING = 7  # DELTA_BYTE_ARRAY: a value is stored as a shared prefix with the previous value and a suffix
CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4_RAW": "lz4_raw"}


class PageHeader(NamedTuple):
    """The parsed header of a Parquet page; sizes in bytes."""

    kind: int  # DICTIONARY, DATA or DATA_V2
    offset: int  # where the page's data begins in the file, after the header
    size: int
    compressed_size: int
    num_values: int
    encoding: int
    levels_size: int  # bytes of the repetition levels; 0 for DATA, where a length prefix holds it


def check_footer(file: str, open_file: Any) -> None:
    """Raises InputError if the footer of a Parquet file is so large that Arrow would need much memory for it.

    Arrow needs about 720 bytes for a column of a row group, which may take 3 bytes in the footer. It reports other
    faults of the file, and schemas that are nested too deeply.
    """
    size = open_file.size()
    if size < 12:
        return
    open_file.seek(size - 8)
    tail = open_file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or length > size - 8:
        return
    if length > limits.MAX_FOOTER_BYTES:
        raise InputError(
            f"{file}: found a Parquet footer of {length:,} bytes, expected at most {limits.MAX_FOOTER_BYTES >> 20} "
            "MiB; write the file with larger row groups or fewer columns"
        )
    if length < MIN_STRUCT_BYTES * limits.MAX_FOOTER_ENTRIES:
        return
    open_file.seek(size - 8 - length)
    entries = 0
    with contextlib.suppress(MalformedError):
        for count in _list_sizes(Thrift(open_file.read(length)), levels=1):
            entries += count
            if entries > limits.MAX_FOOTER_ENTRIES:
                raise InputError(
                    f"{file}: found a Parquet footer of more than {limits.MAX_FOOTER_ENTRIES:,} columns, row groups "
                    "and columns of row groups together, expected fewer; write the file with larger row groups or "
                    "fewer columns"
                )


def _list_sizes(thrift: Thrift, levels: int) -> Iterator[int]:
    """Yields the length of each list of structs in a struct, before reading the elements of the list.

    Args:
        thrift: Reads the struct.
        levels: The lists in elements of such a list count too, down to this level.
    """
    for _, kind in thrift.read_fields():
        if kind != LIST:
            thrift.skip(kind)
            continue
        size, element = thrift.read_list_header()
        if element == STRUCT:
            yield size
        for _ in range(size):
            if element == STRUCT and levels:
                yield from _list_sizes(thrift, levels - 1)
            else:
                thrift.skip_element(element)


class GroupSizes(NamedTuple):
    """The sizes of a row group in bytes, computed from page headers; only the columns to read count.

    Attributes:
        row: A bound of the bytes of a row, as Arrow decodes it; where texts are stored one by one, an average.
        coded_row: The same if Arrow keeps dictionaries (read_dictionary) and rows have indices of 4 bytes.
        pages: Bytes of all pages, decompressed.
    """

    row: int
    coded_row: int
    pages: int


def group_sizes(file: str, footer: Any, group: int, names: Sequence[str] | None) -> GroupSizes:
    """Computes the sizes of a row group from the headers of its pages.

    Args:
        file: A Parquet file that passed `check_footer`.
        footer: Its metadata, by pyarrow.
        group: Number of the row group.
        names: The top-level columns that are read; None: all.

    Raises:
        InputError: If a page, a dictionary, a list or a value is too large.
    """
    return _group_sizes(_Key(file, footer.serialized_size, footer), group, None if names is None else frozenset(names))


def has_dictionary(column: Any) -> bool:
    """Returns whether Arrow can read a column as dictionary-encoded: its values are byte arrays outside of lists."""
    return column.physical_type == "BYTE_ARRAY" and not column.max_repetition_level


class _Key(NamedTuple):
    """The cache key of a file for `_group_sizes`: its name and the size of its footer."""

    file: str
    size: int
    footer: Any

    def __hash__(self) -> int:
        return hash((self.file, self.size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self.file, self.size) == (other.file, other.size)


@functools.lru_cache(maxsize=16)
def _group_sizes(key: _Key, group: int, names: frozenset[str] | None) -> GroupSizes:
    metadata = key.footer.row_group(group)
    row = coded_row = pages = 0
    with open_input(key.file) as opened:
        for number in range(metadata.num_columns):
            chunk = metadata.column(number)
            path = chunk.path_in_schema
            if names is None or path in names or any(path.startswith(f"{name}.") for name in names):
                sizes = _ColumnPages(key, group, opened, chunk, key.footer.schema.column(number)).sizes()
                row, coded_row, pages = row + sizes.row, coded_row + sizes.coded_row, pages + sizes.pages
    if coded_row > limits.MAX_DECODED_ROW:
        raise InputError(
            f"{key.file}: row group {group + 1}: the longest values and lists of all columns add up to {coded_row:,} "
            f"bytes per row, expected at most {limits.MAX_DECODED_ROW >> 20} MiB; leave out columns, or cut the texts "
            "into passages"
        )
    return GroupSizes(max(row, 1), max(coded_row, 1), pages)


class _ColumnPages:
    """Computes the decoded size of a column of a row group from the headers of its pages."""

    def __init__(self, key: _Key, group: int, opened: Any, chunk: Any, column: Any):
        self.place = f"{key.file}: row group {group + 1}, column {chunk.path_in_schema[:60]!r}"
        self.opened, self.chunk, self.column = opened, chunk, column
        self.num_rows = key.footer.row_group(group).num_rows

    def sizes(self) -> GroupSizes:
        """Returns the sizes of this column. Raises InputError if a page, dictionary, list or value is too large."""
        pages = list(self._page_headers())
        width, coded_width = self._value_bytes(pages)
        values = self._values_per_row(pages, width)
        coded_width = coded_width if has_dictionary(self.column) else width
        return GroupSizes(values * width, values * coded_width, sum(page.size for page in pages))

    def _values_per_row(self, pages: Sequence[PageHeader], width: int) -> int:
        """Returns a bound on the values per row, or their mean if all lists are small. width: bytes of a value."""
        if not self.column.max_repetition_level:
            return 1
        num_values = sum(page.num_values for page in pages if page.kind != DICTIONARY)
        if num_values <= limits.MAX_VALUES and num_values * width <= SMALL_LISTS:
            return num_values // max(self.num_rows, 1) + 1
        longest = self._longest_list(pages)
        if longest > limits.MAX_VALUES:
            raise InputError(
                f"{self.place}: found a list of {longest:,} values, expected at most {limits.MAX_VALUES:,}; leave the "
                "column out, or shorten its lists"
            )
        return longest

    def _value_bytes(self, pages: Sequence[PageHeader]) -> tuple[int, int]:
        """Estimates the bytes of the longest value: of all values, and of those that are not dictionary-encoded.

        In pages of plain values the estimate is their mean. Raises InputError for a page or a value that is too large.
        """
        widest = coded = self.column.length if self.chunk.physical_type == "FIXED_LEN_BYTE_ARRAY" else 8
        dictionary = 0
        for page in pages:
            self._check_page(page)
            if self.chunk.physical_type == "BYTE_ARRAY":
                if page.kind == DICTIONARY:
                    dictionary = self._longest_value(page)
                elif page.encoding in DICTIONARY_ENCODINGS:
                    widest = max(widest, dictionary)
                elif page.encoding == PREFIX_ENCODING:
                    coded = max(coded, page.size)
                else:
                    coded = max(coded, page.size // max(page.num_values, 1))
            widest = max(widest, coded)
            if widest > limits.MAX_ROW_BYTES:
                raise limits.too_long_error(self.place, widest)
        return widest, coded

    def _page_headers(self) -> Iterator[PageHeader]:
        """Yields the header of each page, in the order in which Arrow reads the pages."""
        chunk = self.chunk
        offset, seen = chunk.data_page_offset, 0
        if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < offset:
            offset = chunk.dictionary_page_offset
        size = self.opened.size()
        while seen < chunk.num_values and 0 < offset < size:
            page = self._read_header(offset)
            yield page
            offset = page.offset + page.compressed_size
            seen += 0 if page.kind == DICTIONARY else page.num_values

    def _read_header(self, offset: int) -> PageHeader:
        length = 256
        while True:
            self.opened.seek(offset)
            data = self.opened.read(length)
            try:
                return _parse_header(data, offset)
            except MalformedError:
                if len(data) < length or length >= MAX_HEADER_BYTES:
                    raise self._damaged_error(offset) from None
                length *= 16

    def _damaged_error(self, offset: int) -> InputError:
        return InputError(f"{self.place}: found damaged Parquet (no page at byte {offset}); fetch the file again")

    def _check_page(self, page: PageHeader) -> None:
        if page.size > limits.MAX_ROW_BYTES and page.num_values == 1:
            raise limits.too_long_error(self.place, page.size)
        if page.size > max(limits.MAX_PAGE_BYTES, limits.MAX_PAGE_GROWTH * page.compressed_size):
            raise InputError(
                f"{self.place}: found a page of {page.size:,} bytes, more than {limits.MAX_PAGE_GROWTH} times its "
                f"compressed size, expected at most {limits.MAX_PAGE_BYTES >> 20} MiB; write the file with smaller "
                "pages (pyarrow: write_batch_size=1)"
            )
        if page.kind == DICTIONARY and page.num_values > limits.MAX_DICTIONARY:
            raise InputError(
                f"{self.place}: found a dictionary of {page.num_values:,} values, expected at most "
                f"{limits.MAX_DICTIONARY:,}; write the file without dictionaries"
            )

    def _read_page(self, page: PageHeader) -> bytes | None:
        """Returns the decompressed bytes of a page; None if it cannot be decompressed."""
        self.opened.seek(page.offset)
        data = self.opened.read(page.compressed_size)
        if self.chunk.compression == "UNCOMPRESSED":
            return data
        try:
            return pa.Codec(CODECS[self.chunk.compression]).decompress(data, page.size, asbytes=True)
        except (KeyError, pa.ArrowException, OSError, ValueError):
            return None

    def _longest_value(self, page: PageHeader) -> int:
        """Returns the size of the longest value of a dictionary page; the page size if it is small or unreadable."""
        if page.size <= SMALL_VALUE or (data := self._read_page(page)) is None:
            return page.size
        at = longest = 0
        for _ in range(page.num_values):
            length = int.from_bytes(data[at : at + 4], "little")
            if length > longest:
                longest = length
            at += 4 + length
        return longest if at == len(data) else page.size

    def _longest_list(self, pages: Sequence[PageHeader]) -> int:
        """Returns the maximum number of values per row, from the repetition levels, in which 0 begins a row."""
        width = self.column.max_repetition_level.bit_length()
        longest = num_row_values = 0
        for page in pages:
            if page.kind == DICTIONARY:
                continue
            if page.kind == DATA_V2:
                self.opened.seek(page.offset)
                levels = self.opened.read(page.levels_size)
            elif (data := self._read_page(page)) is None:
                raise self._damaged_error(page.offset)
            else:
                levels = data[4 : 4 + int.from_bytes(data[:4], "little")]
            try:
                for run in _read_level_runs(levels, width, page.num_values):
                    longest = max(longest, num_row_values + run.before, run.longest)
                    num_row_values = run.after if run.longest else num_row_values + run.before
            except MalformedError:
                raise self._damaged_error(page.offset) from None
        return max(longest, num_row_values)


class _LevelRun(NamedTuple):
    """Counts of a run of consecutive repetition levels."""

    before: int  # levels before the first row that begins in the run; they continue an earlier row
    # Number of values of the longest row that begins and ends in the run; at least 1 if a row begins, 0 if none does.
    longest: int
    after: int  # levels of the last row that begins in the run


def _read_level_runs(data: bytes, width: int, num_values: int) -> Iterator[_LevelRun]:
    """Decodes repetition levels in Parquet's RLE/bit-packing hybrid, and yields the counts of each run.

    Args:
        data: The levels.
        width: Bits of a level.
        num_values: Number of levels.
    """
    thrift = Thrift(data)  # for `read_varint`, since run lengths are varints as in Thrift
    while num_values > 0:
        header = thrift.read_varint()
        if header & 1:
            for start in range(0, header >> 1, LEVELS_STEP):
                size = min(LEVELS_STEP, (header >> 1) - start) * width
                packed = np.frombuffer(data[thrift.at : thrift.at + size], np.uint8)
                if not len(packed):
                    raise MalformedError
                thrift.at += size
                bits = np.unpackbits(packed, bitorder="little")
                levels = bits[: len(bits) // width * width].reshape(-1, width)[:num_values]
                num_values -= len(levels)
                starts = np.flatnonzero(~levels.any(axis=1))
                if len(starts):
                    yield _LevelRun(int(starts[0]), int(np.diff(starts).max(initial=1)), len(levels) - int(starts[-1]))
                else:
                    yield _LevelRun(len(levels), 0, 0)
                if num_values <= 0:
                    return
        else:
            count = min(header >> 1, num_values)
            is_zero = not any(thrift.read_byte() for _ in range(-(-width // 8)))
            num_values -= count
            yield _LevelRun(0, 1, 1) if is_zero and count else _LevelRun(count, 0, 0)


def _parse_header(data: bytes, offset: int) -> PageHeader:
    thrift = Thrift(data)
    kind = size = compressed_size = num_values = encoding = levels_size = 0
    for number, field in thrift.read_fields():
        if number == 1:
            kind = thrift.read_integer()
        elif number == 2:
            size = thrift.read_integer()
        elif number == 3:
            compressed_size = thrift.read_integer()
        elif number in (5, 7, 8):
            for inner, inner_field in thrift.read_fields():
                if inner == 1:
                    num_values = thrift.read_integer()
                elif inner == (4 if number == 8 else 2):
                    encoding = thrift.read_integer()
                elif inner == 6:
                    levels_size = thrift.read_integer()
                else:
                    thrift.skip(inner_field)
        else:
            thrift.skip(field)
    if thrift.at > len(data):
        raise MalformedError
    if min(size, compressed_size, num_values, levels_size) < 0:
        raise MalformedError
    return PageHeader(kind, offset + thrift.at, size, compressed_size, num_values, encoding, levels_size)
