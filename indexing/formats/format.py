"""The interface of a corpus format: how to recognise files, and to read passages, queries and judgements."""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.indexing.files.columns import PassageColumns, PassageNames, QueryColumns, QueryNames, TableColumns
from riptide.indexing.files.listing import file_identity
from riptide.indexing.files.raw import FilePiece, Lines, no_rows_error, short_repr
from riptide.indexing.files.rows import (
    BadRows,
    Row,
    RowReader,
    dump_metadata,
    halve_text,
    line_blocks,
    parse_valid_rows,
    row_error,
)
from riptide.indexing.files.start import FileStart

QUERIES_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("metadata", pa.large_string())])
QUERIES_AT_ONCE = 65_536


class CorpusFormat(ABC):
    """Base class of a format of a corpus, or of queries and judgements.

    A new format is a module with a subclass, and its entry in `riptide.indexing.formats.registry`. A format of text
    lines with fixed columns needs the attributes and `read_passages`, and `read_queries` if it has queries.

    Attributes:
        name: Its name as a value of the parameter format, and in the configuration of a corpus.
        title: Its name as the heading of its section in docs/data.md.
        endings: The endings of its files, without .gz.
        is_compressible: Whether its files may be compressed as .gz.
        corpus_files: Names of the corpus in a folder, without .gz: patterns of fnmatch.
        query_files: Names of the queries in a folder, with the split as "*". Empty: a folder has none that can be
            told apart, so they are imported by the path of the file.
        judgement_files: Names of the judgements in a folder, with the split as "*"; "": a folder has none.
        title_files: Names of a file in the folder of the corpus with the titles of its passages (`files/titles.py`).
        is_generic: Whether its files in a folder count only if no other format has a corpus there.
        has_many_files: Whether a corpus may consist of several files of a folder.
        is_folder: Whether a corpus is a folder with its subfolders, each of its files a passage. It counts only if no
            other format has a corpus there.
        has_columns: Whether the caller can name the columns; otherwise they are fixed.
        has_text_values: Whether all values are text, as in CSV, which filters convert to their types.
        has_one_passage_per_row: Whether a row is one passage, so that the number of passages is known before parsing.
        describes_passages: Whether the passages of a split document have other metadata than the document.
        has_provenance: Whether queries name their relevant pages in their metadata (`indexing/queries/provenance.py`).
        section: Its section of docs/data.md below the heading, in Markdown: the columns, and examples with their
            results.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    endings: ClassVar[tuple[str, ...]]
    is_compressible: ClassVar[bool] = True
    corpus_files: ClassVar[tuple[str, ...]]
    query_files: ClassVar[tuple[str, ...]] = ()
    judgement_files: ClassVar[str] = ""
    title_files: ClassVar[tuple[str, ...]] = ()
    is_generic: ClassVar[bool] = False
    has_many_files: ClassVar[bool] = False
    is_folder: ClassVar[bool] = False
    has_columns: ClassVar[bool] = False
    has_text_values: ClassVar[bool] = False
    has_one_passage_per_row: ClassVar[bool] = True
    describes_passages: ClassVar[bool] = False
    has_provenance: ClassVar[bool] = False
    section: ClassVar[str]

    def has_ending(self, start: FileStart) -> bool:
        """Returns whether a file has one of the file extensions of the format."""
        return start.ending in self.endings and (self.is_compressible or not start.is_compressed)

    def detects_corpus(self, start: FileStart) -> bool:
        """Returns whether a file, whose name may be any, is a corpus of this format."""
        return self.has_ending(start)

    def detects_queries(self, start: FileStart) -> bool:
        """Returns whether a file, whose name may be any, has queries of this format."""
        return self.has_ending(start)

    def matches_start(self, start: FileStart) -> bool:
        """Returns whether a file with a name in `corpus_files` also begins as this format does."""
        return True

    def find_corpus(self, names: Sequence[str]) -> list[str]:
        """Returns which of a folder's file names are a corpus of this format."""
        return self.match(names, self.corpus_files)

    def find_queries(self, names: Sequence[str]) -> list[str]:
        """Returns which of a folder's file names are queries of this format."""
        return self.match(names, self.query_files)

    def identity(self, file: str) -> dict[str, Any]:
        """Returns a file's identity (at least `file`, its name, and `bytes`), by which a resume detects changes."""
        return file_identity(file)

    def describe_skipped_files(self, file: str) -> str:
        """Returns a line for the user about files of a folder that an import leaves out; "" if there are none."""
        return ""

    def match(self, names: Sequence[str], patterns: Sequence[str]) -> list[str]:
        """Returns the names that match a pattern, also with .gz appended if the files may be compressed."""
        endings = ("", ".gz") if self.is_compressible else ("",)
        full = [f"{pattern}{ending}" for pattern in patterns for ending in endings]
        return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in full)]

    def describe_files(self, patterns: Sequence[str]) -> str:
        """Formats file patterns for a message: "queries.jsonl[.gz] or queries.SPLIT.jsonl[.gz]"."""
        gz = "[.gz]" if self.is_compressible else ""
        return " or ".join(re.sub(r"(?<=.)\*", "SPLIT", pattern) + gz for pattern in patterns)

    def choose_columns(self, file: str, names: PassageNames) -> PassageColumns | None:
        """Chooses the columns of a corpus; returns None if the format has fixed columns."""
        return None

    def choose_query_columns(self, file: str, names: QueryNames) -> QueryColumns | None:
        """Chooses the columns of a file of queries; returns None if the format has fixed columns."""
        return None

    def shown_columns(self, file: str, columns: PassageColumns | None) -> PassageColumns | None:
        """Returns the columns of a corpus that an import prints; None to print nothing."""
        return columns

    def shown_query_columns(self, file: str, columns: QueryColumns | None) -> tuple[TableColumns, QueryColumns] | None:
        """Returns the table and the columns of a file of queries that an import prints; None to print nothing."""
        return None

    def open_rows(self, file: str, table: TableColumns | None = None) -> RowReader:
        """Opens a file and returns a reader of its rows, which starts after the header.

        Args:
            file: The file.
            table: Its columns; None: the fixed columns of the format.
        """
        return Lines(file)

    def blocks(self, piece: FilePiece, columns: PassageColumns | None = None) -> Iterator[FilePiece]:
        """Splits a piece into blocks that are small enough to become Python objects."""
        return line_blocks(piece)

    def halve(self, block: FilePiece) -> tuple[FilePiece, FilePiece]:
        """Splits a block into two blocks with half of its rows each, to find a bad row."""
        return halve_text(block)

    def source_bytes(self, piece: FilePiece) -> int:
        """Returns the decompressed size of the source of a piece in bytes."""
        return len(piece.data or b"")

    @abstractmethod
    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        """Yields the passages of a block. Raises InputError with the file and line of a bad row."""

    def read_documents(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        """Yields the documents of a block, one per row, which an import splits into passages."""
        return self.read_passages(block, columns)

    def passage_metadata(self, metadata: str, spans: np.ndarray) -> list[str]:
        """Returns the metadata of the passages of a split document, as JSON text; used if `describes_passages`.

        Args:
            metadata: That of the document, as JSON text.
            spans: First character and end of each passage in the text of the document, int64 [passages, 2].
        """
        return [metadata] * len(spans)

    def split_of(self, file: str) -> str | None:
        """Returns the split that the name of a file of queries with provenance has; None if it has none."""
        return None

    def read_queries(self, block: FilePiece) -> Iterator[Row]:
        """Yields the queries of a block of lines. Raises InputError with the file and line of a bad row."""
        raise InputError(f"{block.file}: found the format {self.name}, which has no queries; name another format")

    def read_query_files(
        self, files: Sequence[str], columns: QueryColumns | None, qrels: Mapping[str, str], bad_rows: BadRows
    ) -> tuple[pa.Table, dict[str, pa.Table]]:
        """Reads files of queries, and the judgements in them.

        In files with fixed columns, as those of MS MARCO, dev.small is part of dev: a query that an earlier file has
        with the same text is left out.

        Args:
            files: The files, in their order.
            columns: Their columns; None: the fixed columns of the format.
            qrels: Split -> file of judgements, which may be one of `files`.
            bad_rows: Receives the bad rows, which are left out.

        Returns:
            The queries (QUERIES_SCHEMA), in the order of the files; and the judgements in these files by split
            (QRELS_SCHEMA, `line` the 1-based line or row of each).

        Raises:
            InputError: If a file cannot be read, or has no rows.
        """
        return pa.concat_tables([QUERIES_SCHEMA.empty_table(), *self._query_tables(files, bad_rows)]), {}

    def _query_tables(self, files: Sequence[str], bad_rows: BadRows) -> Iterator[pa.Table]:
        """Yields tables of the queries in files of text lines."""
        earlier: dict[str, str] = {}
        for number, file in enumerate(files):
            lines = Lines(file)
            seen: dict[str, str] = {}
            while piece := lines.take(QUERIES_AT_ONCE):
                for block in line_blocks(piece):
                    ids, texts, metadata = [], [], []
                    for rows in parse_valid_rows(block, self._parse_queries, self.halve, bad_rows):
                        for line, id, text, fields in rows:
                            if id not in earlier:
                                ids.append(id)
                                texts.append(text)
                                metadata.append(fields)
                            elif earlier[id] != text:
                                problem = f"query {short_repr(id)} with another text"
                                bad_rows.add(row_error(block, line, problem, "an earlier file's", "rename it"))
                    if number + 1 < len(files):
                        seen.update(zip(ids, texts, strict=True))
                    yield pa.table([ids, texts, metadata], schema=QUERIES_SCHEMA)
            if lines.line == 1:
                raise no_rows_error(file)
            earlier.update(seen)

    def _parse_queries(self, block: FilePiece) -> list[tuple[int, str, str, str]]:
        """Returns (line, id, text, metadata as JSON) of each query of a block. Raises RowError for a bad row."""
        return [
            (line, id, text, dump_metadata(block, line, fields) if fields else "")
            for line, id, _, text, fields in self.read_queries(block)
        ]
