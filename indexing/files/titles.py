"""Joins the titles of a separate file to the passages of collection.tsv while both files are read once.

RocketQA publishes the titles of MS MARCO's passages as para.title.txt, with a line `id<TAB>title` for each; coCondenser
joins them in the same way. A passage without a line has no title. The lines stand in the order of the passages, so one
line is in memory at a time, regardless of the size of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.files.raw import FilePiece, Lines, short_repr

_LINES = 65_536  # lines that are read at once


class Titles:
    """Reads a file of titles once, from start to end, in step with collection.tsv."""

    def __init__(self, file: str):
        self.file = file
        self._rows = self._parse_rows()
        self._next = next(self._rows, None)

    def take(self, pieces: Iterable[FilePiece]) -> tuple[str, ...]:
        """Returns the title of each passage in the next pieces of collection.tsv; "" for a passage without a title."""
        titles = []
        for piece in pieces:
            for line in (piece.data or b"").split(b"\n"):
                if self._next is not None and self._next[1] == line.partition(b"\t")[0]:
                    titles.append(self._next[2])
                    self._next = next(self._rows, None)
                else:
                    titles.append("")
        return tuple(titles)

    def check_end(self) -> None:
        """Raises InputError if a title remains after the last passage."""
        if self._next is not None:
            line, id, _ = self._next
            raise self._error(
                line,
                f"a title for passage {short_repr(id.decode('utf-8', 'replace'))}, which is no later passage",
                "the ids of collection.tsv, in its order",
                "sort the file as collection.tsv is sorted (sort -n, for numbers), or remove the line",
            )

    def _parse_rows(self) -> Iterator[tuple[int, bytes, str]]:
        """Yields (line number, id, title) of each row of the file of titles."""
        lines = Lines(self.file)
        while piece := lines.take(_LINES):
            for line, row in enumerate((piece.data or b"").split(b"\n"), piece.first_line):
                if len(row) > limits.MAX_COLUMNS:
                    limits.check_columns(f"{self.file}:{line}", row, "\t")
                fields = row.removesuffix(b"\r").split(b"\t")
                if len(fields) != 2 or not fields[0]:
                    what = f"{len(fields)} columns" if fields[0] else "no id"
                    raise self._error(
                        line, f"{what} ({short_repr(row)})", "2: id<TAB>title", "fix the line or remove it"
                    )
                try:
                    yield line, fields[0], fields[1].decode()
                except UnicodeDecodeError as error:
                    problem = f"invalid UTF-8 (byte 0x{fields[1][error.start]:02x} of the title)"
                    raise self._error(line, problem, "UTF-8", "convert the file") from None

    def _error(self, line: int, problem: str, expected: str, remedy: str) -> InputError:
        return InputError(f"{self.file}:{line}: found {problem}, expected {expected}; {remedy}")


def title_facts(titles: Iterable[str]) -> dict[str, object]:
    """Returns the facts of a part with joined titles: their number, and a hash that a resume compares."""
    digest, count = xxhash.xxh3_128(), 0
    for title in titles:
        digest.update(f"{title}\n".encode())
        count += bool(title)
    return {"titles": count, "titles_digest": digest.hexdigest()}
