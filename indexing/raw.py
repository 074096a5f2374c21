"""Raw files, local or on S3, plain or .gz: read in blocks and given out as whole lines, any number at a time."""

import csv
import gzip
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from indexing.s3 import s3_filesystem
from retriever.errors import InputError

BLOCK = 1 << 20  # bytes read at a time
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one file: raw lines, or for Parquet (`data` None) a range of rows to read."""

    file: str
    first_line: int  # 1-based line of the file, for Parquet its 1-based row
    rows: int  # lines
    size: int  # bytes of them: for Parquet what its footer says, spread evenly over a row group
    data: bytes | None  # whole lines, the last one without its newline


class Lines:
    """A text file's lines, given out as many at a time as one likes."""

    def __init__(self, file: str):
        self.file, self.line = file, 1  # the next line to give
        self.blocks = read_blocks(file)
        self.block, self.start = b"", 0  # of the block, what lies before start is given
        self.ends: np.ndarray = np.empty(0, np.int64)  # the block's newlines, of which `used` are given
        self.used = 0

    def take(self, num_lines: int, max_bytes: int = sys.maxsize) -> Piece | None:
        """The next `num_lines` lines, fewer at the end of the file, then None.

        Fewer too where a line brings them to `max_bytes`: it is the last, so that every piece has one.
        """
        parts, rows, size = [], 0, 0
        while (last := self._last(num_lines - rows, max_bytes - size)) == len(self.ends):
            parts.append(self.block[self.start :] if self.start else self.block)
            rows, size = rows + len(self.ends) - self.used, size + len(parts[-1])
            self.block, self.start, self.used = next(self.blocks, b""), 0, 0
            self.ends = np.flatnonzero(np.frombuffer(self.block, np.uint8) == 10)
            if not self.block:  # read_blocks leaves no newline at the end
                rest = b"".join(parts)
                return self._give(rest, rows + 1) if rest else None
        end = int(self.ends[last])
        parts.append(self.block[self.start : end])
        rows, self.used, self.start = rows + last + 1 - self.used, last + 1, end + 1
        return self._give(b"".join(parts), rows)

    def _last(self, num_lines: int, max_bytes: int) -> int:
        """Which of the block's newlines ends what is asked for; the number of them where the block does not hold it."""
        full = len(self.ends)
        if max_bytes < len(self.block):
            full = max(self.used, int(np.searchsorted(self.ends, self.start + max_bytes)))
        return min(self.used + num_lines - 1, full)

    def _give(self, data: bytes, rows: int) -> Piece:
        self.line += rows
        return Piece(self.file, self.line - rows, rows, len(data), data)


class ParquetRows:
    """A Parquet file's rows as ranges, from its footer alone."""

    def __init__(self, file: str):
        self.file, self.row = file, 0
        self.groups: deque[tuple[int, int]] = deque()  # of those to give: the row after it, bytes of one of its rows
        with open_input(file) as opened:
            try:
                footer = pq.read_metadata(opened)
            except (pa.ArrowInvalid, OSError) as error:
                raise InputError(
                    f"{file}: found no Parquet ({one_line(error)}), expected a whole file; fetch it again"
                ) from None
        end = 0
        for group in map(footer.row_group, range(footer.num_row_groups)):
            if group.num_rows:
                end += group.num_rows
                self.groups.append((end, max(1, group.total_byte_size // group.num_rows)))

    def take(self, num_rows: int, max_bytes: int = sys.maxsize) -> Piece | None:
        """Like Lines.take."""
        first, size = self.row, 0
        while self.groups and self.row < first + num_rows and size < max_bytes:
            end, width = self.groups[0]
            rows = min(end - self.row, first + num_rows - self.row, -(-(max_bytes - size) // width))
            self.row, size = self.row + rows, size + rows * width
            if self.row == end:
                self.groups.popleft()
        return Piece(self.file, first + 1, self.row - first, size, None) if size else None


def open_input(file: str) -> Any:
    """Open a local or s3:// file for random access (pyarrow.NativeFile). InputError: not there, not readable."""
    filesystem, key = filesystem_of(file)
    try:
        return filesystem.open_input_file(key)
    except OSError as error:
        raise unreadable(file, error) from None


def read_blocks(file: str) -> Iterator[bytes]:
    """The file's bytes in blocks, unzipped where its name ends with .gz.

    A byte-order mark is left out, and so are the ends of line, thus any empty lines, at the end of the file.
    InputError: missing, unreadable, truncated or damaged.
    """
    with open_input(file) as raw:
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if file.endswith(".gz") else raw
        held, start = b"", True
        while block := _read(stream, file):
            if start:
                while len(block) < len(BOM) and (more := _read(stream, file)):
                    block += more
                block, start = block.removeprefix(BOM), False
            body = block.rstrip(b"\r\n")
            if body:
                yield held + body if held else body
                held = block[len(body) :]
            else:
                held += block


def _read(stream: BinaryIO, file: str) -> bytes:
    try:
        return stream.read(BLOCK)
    except EOFError:
        raise InputError(
            f"{file}: found a gzip stream that breaks off, expected its end; fetch the file again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{file}: found damaged gzip data ({error}), expected a .gz file; fetch it again") from None
    except OSError as error:
        raise unreadable(file, error) from None


def filesystem_of(path: str) -> tuple[Any, str]:
    """The pyarrow filesystem of a path and the path in it."""
    if not path.startswith("s3://"):
        return pafs.LocalFileSystem(), path
    return s3_filesystem(), path.removeprefix("s3://")


def tsv_fields(line: str) -> list[str]:
    """One line's tab-separated fields, quoted as by Python's csv module."""
    allow_long_fields()
    return next(csv.reader([line.removesuffix("\r")], delimiter="\t"), [""])


def allow_long_fields() -> None:
    """A passage may be longer than the 128 KiB that csv takes by default."""
    csv.field_size_limit(2**31 - 1)


def clip(found: object) -> str:
    """What was found, short enough for an error's one line."""
    shown = repr(found[:200].decode("utf-8", "replace") if isinstance(found, bytes) else found)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def unreadable(path: str, error: OSError) -> InputError:
    return InputError(
        f"{path}: found nothing readable ({one_line(error)}), expected a file; check the path and its permissions"
    )


def no_rows(*files: str) -> InputError:
    return InputError(f"{' and '.join(files)}: found no rows, expected at least one; check that the file is complete")
