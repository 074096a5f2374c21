"""Cuts the rows of a corpus into chunks, each of which becomes a part.

    source = detect_source("data/scifact")              # local or in a cloud
    for chunk in cut_into_chunks(source, rows_per_chunk=50_000):
        table = parse_corpus(source.format, chunk)      # indexing/formats/parse.py, on any worker

A chunk holds complete raw rows (of Parquet, a range of rows that its worker reads), so cutting is cheap and the workers
do the parsing. A chunk ends at a number of rows or of bytes, whichever comes first, so that memory is bounded
regardless of the length of the rows. Lines end with LF or CRLF; U+2028 and similar characters are text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from riptide.base.errors import InputError
from riptide.indexing.files.columns import PassageColumns
from riptide.indexing.files.raw import FilePiece, no_rows_error
from riptide.indexing.files.splitting import BYTES_PER_WORD, DocumentSplit
from riptide.indexing.files.titles import Titles
from riptide.indexing.formats.sources import ImportSource

FIRST_CHUNK_ROWS = 512
CHUNKS_PER_SIZE = 16
CHUNK_BYTES = 256 << 20  # a chunk ends with the row that reaches this raw size; the parts depend on the value


@dataclass(frozen=True)
class CorpusChunk:
    """The rows [first_row, first_row + rows) of the source files; source, part size, limit and split determine it.

    If a row can become several passages or none, as a page of KILT or a document that is split, `first_row` is None,
    and the number of passages is known only after parsing.
    """

    index: int
    first_row: int | None
    rows: int
    pieces: tuple[FilePiece, ...]  # several if the chunk spans several files
    columns: PassageColumns | None = None
    titles: tuple[str, ...] | None = None  # the title of each row, if titles are in a separate file


def cut_into_chunks(
    source: ImportSource, rows_per_chunk: int, *, limit: int | None = None, split: DocumentSplit | None = None
) -> Iterator[CorpusChunk]:
    """Yields the corpus in chunks; holds one or two chunks in memory, regardless of the file sizes.

    Args:
        source: A corpus.
        rows_per_chunk: Rows per chunk at most (KILT: pages). The first chunks have fewer (`chunk_rows`), and so has a
            chunk that reaches CHUNK_BYTES of raw text.
        limit: Number of rows (KILT: pages) to take from the start; None: all.
        split: How the rows are split into passages. A chunk then also ends with the row that reaches the raw text of
            about as many passages as it may have rows, so that parts of long documents do not become large.

    Raises:
        InputError: If a file is unreadable or the corpus has no rows.
    """
    if rows_per_chunk < 1 or (limit is not None and limit < 1):
        raise InputError(f"found {rows_per_chunk} rows per chunk and limit {limit}, expected at least 1; raise them")
    index = first = held = size = 0
    full = chunk_rows(0, rows_per_chunk)
    full_bytes = _chunk_bytes(full, split)
    pieces: list[FilePiece] = []
    table = source.columns.table if source.columns else None
    titles = None if source.titles is None else Titles(source.titles)

    def chunk() -> CorpusChunk:
        return CorpusChunk(
            index,
            first if source.format.has_one_passage_per_row and split is None else None,
            held,
            tuple(pieces),
            source.columns,
            None if titles is None else titles.take(pieces),
        )

    for file in source.corpus:
        rows = source.format.open_rows(file, table)
        while wanted := (full if limit is None else min(full, limit - first)) - held:
            piece = rows.take(wanted, full_bytes - size)
            if piece is None:
                break
            pieces.append(piece)
            held, size = held + piece.rows, size + piece.size
            if held == full or size >= full_bytes:
                yield chunk()
                index, first, held, size, pieces = index + 1, first + held, 0, 0, []
                full = chunk_rows(index, rows_per_chunk)
                full_bytes = _chunk_bytes(full, split)
    if pieces:
        yield chunk()
    elif first == 0:
        raise no_rows_error(*source.corpus)
    if titles is not None and limit is None:
        titles.check_end()


def chunk_rows(index: int, max_rows: int) -> int:
    """Returns the maximum rows of a chunk: 512 for the first 16 chunks, doubled after every 16, up to `max_rows`.

    So a small corpus has several parts, and an interrupted job keeps those that are complete; a large one has few.
    """
    return min(max_rows, FIRST_CHUNK_ROWS << min(index // CHUNKS_PER_SIZE, 30))


def _chunk_bytes(rows: int, split: DocumentSplit | None) -> int:
    """Returns the raw text size in bytes at which a chunk of at most `rows` rows ends."""
    if split is None:
        return CHUNK_BYTES
    return min(CHUNK_BYTES, rows * (split.words - split.overlap) * BYTES_PER_WORD)
