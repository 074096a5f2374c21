"""Reads text files (local or in a cloud, plain or .gz) as pieces of whole lines."""

import csv
import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow.fs as pafs

from riptide.base.errors import InputError, RowError, StorageError
from riptide.base.wording import printable, shorten
from riptide.indexing.files import limits
from riptide.indexing.storage.object_store import SERVICES, ObjectFiles
from riptide.indexing.storage.s3 import s3_filesystem
from riptide.indexing.storage.storage import is_text

SCHEMES = ("s3", *SERVICES)  # of addresses of raw files
BLOCK = 1 << 20  # bytes that are read at a time
BOM = b"\xef\xbb\xbf"


class _EmptyLinesError(Exception):
    """A file has more than MAX_GAP_BYTES of empty lines between two rows."""


@dataclass(frozen=True)
class FilePiece:
    """Consecutive rows of a file: raw lines, a range of Parquet rows, or a range of the files of a folder.

    A row is a line, except in CSV and TSV, where a quoted field may hold newlines.
    """

    file: str
    first_line: int  # 1-based number of the first line; for Parquet, of the first row
    rows: int
    size: int  # bytes of the rows; for Parquet, an estimate that spreads a row group evenly
    data: bytes | None  # raw lines, the last one without its newline; None for Parquet and folders
    # For Parquet, the rows as a record batch, after reading; for a folder, the names and sizes of the files.
    batch: Any = None


class Lines:
    """Reads a text file as pieces of whole lines."""

    def __init__(self, file: str):
        self.file, self.line = file, 1  # line: the number of the next line
        self.blocks = read_blocks(file)
        self.block, self.start = b"", 0  # start: where the next line begins in the block
        self.ends: np.ndarray = np.empty(
            0, np.int64
        )  # positions of the block's newlines; the first `used` belong to earlier pieces
        self.used = 0

    def take(self, num_lines: int, max_bytes: int = limits.PIECE_BYTES) -> FilePiece | None:
        """Returns the next lines as a piece; None at the end of the file.

        Args:
            num_lines: Number of lines; at the end of the file there may be fewer.
            max_bytes: The line that reaches this number of bytes is the last one, so every piece has a line.

        Raises:
            InputError: If a line is longer than MAX_ROW_BYTES.
        """
        parts, rows, size, length = [], 0, 0, 0  # length: bytes of the unfinished last line
        while (last := self._last_newline(num_lines - rows, max_bytes - size)) == len(self.ends):
            parts.append(self.block[self.start :] if self.start else self.block)
            has_end = len(self.ends) > self.used
            length = len(self.block) - int(self.ends[-1]) - 1 if has_end else length + len(parts[-1])
            if length > limits.MAX_ROW_BYTES:
                raise limits.too_long_error(f"{self.file}:{self.line + rows + len(self.ends) - self.used}")
            rows, size = rows + len(self.ends) - self.used, size + len(parts[-1])
            self.block, self.start, self.used = self.next_block(self.line + rows), 0, 0
            self.ends = self._row_ends(self.block)
            if not self.block:  # the rest has no newline, since read_blocks removes the last one
                rest = b"".join(parts)
                return self._make_piece(rest, rows + 1) if rest else None
        end = int(self.ends[last])
        parts.append(self.block[self.start : end])
        rows, self.used, self.start = rows + last + 1 - self.used, last + 1, end + 1
        return self._make_piece(b"".join(parts), rows)

    def next_block(self, line: int = 1) -> bytes:
        """Returns the next block; b"" at the end of the file. line: the line in which the previous block ends."""
        try:
            return next(self.blocks, b"")
        except _EmptyLinesError:
            raise InputError(
                f"{self.file}:{line}: found more than {limits.MAX_GAP_BYTES >> 20} MiB of line ends after this line, "
                "expected empty lines at the end of the file only; remove them"
            ) from None

    def _last_newline(self, num_lines: int, max_bytes: int) -> int:
        """Returns the index of the newline that ends the next piece; len(self.ends) if it is in a later block."""
        full = len(self.ends)
        if max_bytes < len(self.block):
            full = max(self.used, int(np.searchsorted(self.ends, self.start + max_bytes)))
        return min(self.used + num_lines - 1, full)

    def _row_ends(self, block: bytes) -> np.ndarray:
        """Returns the positions of the newlines that end a row: int64. The block is b"" at the end of the file."""
        return np.flatnonzero(np.frombuffer(block, np.uint8) == 10)

    def _make_piece(self, data: bytes, rows: int) -> FilePiece:
        self.line += rows
        return FilePiece(self.file, self.line - rows, rows, len(data), data)


def open_input(file: str) -> Any:
    """Opens a file on this machine or in a cloud for random access (pyarrow.NativeFile).

    Raises:
        InputError: If it is missing or unreadable, or local and no regular file: a pipe or a device can be read once
            only, and an import reads a file several times.
    """
    check_path(file)
    filesystem, key = filesystem_of(file)
    try:
        if not is_remote(file):
            refuse_special_files(file)
        return filesystem.open_input_file(key)
    except OSError as error:
        raise unreadable_error(file, error) from None


def refuse_special_files(path: str) -> None:
    """Raises InputError for a local path that is neither a regular file nor a folder, and OSError for a missing one."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        return
    if not stat.S_ISREG(mode):
        raise InputError(
            f"{path}: found a pipe, a socket or a device, expected a regular file; write its contents to a file"
        )


def check_path(path: str) -> None:
    """Raises InputError for a path with a zero byte, a path that is not UTF-8, or an address without a bucket."""
    scheme, colon, place = path.partition(":")
    if colon and scheme in SCHEMES and not place.strip("/:"):
        raise InputError(f"{path}: found no bucket, expected {scheme}://bucket/prefix; name the bucket")
    if "\0" in path:
        shown = path.replace("\0", "\\0")
        raise InputError(f"{shown}: found a zero byte in the path, expected the path of a file or folder; correct it")
    if not is_text(path):
        raise InputError(
            f"{printable(path)}: found a path that is not UTF-8, expected UTF-8; rename the file or folder"
        )


def read_blocks(file: str) -> Iterator[bytes]:
    """Yields the bytes of a file in blocks, decompressed if its name ends with .gz.

    A byte-order mark is left out, and so are line ends (and thus empty lines) at the end of the file, in memory that
    does not grow with their number. Raises InputError for a file that is missing, unreadable, truncated
    or damaged, and _EmptyLinesError for more than MAX_GAP_BYTES of empty lines before its last line.
    """
    with open_input(file) as raw:
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if file.endswith(".gz") else raw
        start = True
        held: list[bytes] = []  # line ends that are yielded only if text follows
        held_bytes = 0
        while block := _read_block(stream, file):
            if start:
                while len(block) < len(BOM) and (more := _read_block(stream, file)):
                    block += more
                block, start = block.removeprefix(BOM), False
            body = block.rstrip(b"\r\n")
            if body:
                if held_bytes > limits.MAX_GAP_BYTES:
                    raise _EmptyLinesError
                yield b"".join([*held, body]) if held else body
                held, held_bytes = [], 0
            if len(body) < len(block):
                held_bytes += len(block) - len(body)
                if held_bytes <= limits.MAX_GAP_BYTES:
                    held.append(block[len(body) :])


def _read_block(stream: BinaryIO, file: str) -> bytes:
    try:
        return stream.read(BLOCK)
    except EOFError:
        raise InputError(
            f"{file}: found a gzip stream that breaks off, expected its end; fetch the file again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{file}: found damaged gzip data ({error}), expected a .gz file; fetch it again") from None
    except OSError as error:
        raise unreadable_error(file, error) from None


def is_remote(path: str) -> bool:
    """Returns whether a path is the address of a file or a folder in a cloud."""
    return path.partition("://")[0] in SCHEMES and "://" in path


def filesystem_of(path: str) -> tuple[Any, str]:
    """Returns the filesystem of a path (pyarrow's, or ObjectFiles), and the path within this filesystem."""
    if not is_remote(path):
        return pafs.LocalFileSystem(), path
    scheme, _, place = path.partition("://")
    return s3_filesystem() if scheme == "s3" else ObjectFiles(scheme), place


def split_tsv_line(place: str, line: str) -> list[str]:
    """Splits a line into tab-separated fields, which may be quoted as in Python's csv module.

    Raises RowError that names the place if there are too many, or if one has a carriage return outside of quotes.
    """
    limits.check_columns(place, line, "\t")
    allow_long_fields()
    try:
        return next(csv.reader([line.removesuffix("\r")], delimiter="\t"), [""])
    except csv.Error:
        raise RowError(f"{place}: found a carriage return outside of quotes, expected none; remove it") from None


def allow_long_fields() -> None:
    """Sets the field size limit of the csv module to 2 GiB, since passages may exceed the default of 128 KiB."""
    csv.field_size_limit(2**31 - 1)


def short_repr(value: object) -> str:
    """Returns the repr of a value, shortened for a one-line error."""
    if isinstance(value, bytes | str):
        value = value[:200]
    return shorten(repr(value.decode("utf-8", "replace") if isinstance(value, bytes) else value), 60)


def one_line(error: Exception) -> str:
    """Returns the message of an exception with line breaks replaced by spaces."""
    return " ".join(str(error).split())


def unreadable_error(path: str, error: OSError) -> InputError:
    """Returns the error for a path that cannot be read, with the reason from the operating system."""
    return StorageError(
        f"{path}: found nothing readable ({one_line(error)}), expected a file; check the path and its permissions"
    )


def no_rows_error(*files: str) -> InputError:
    """Returns the error for files without rows."""
    return InputError(f"{' and '.join(files)}: found no rows, expected at least one; check that the file is complete")
