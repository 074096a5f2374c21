"""The corpus: a chain of generations, each with parts of passages, files of id hashes and the deleted rows.

A passage's row is its global position, from 0; rows are never reused. Parts are Arrow IPC files, memory-mapped.
"""

from __future__ import annotations

import bisect
import functools
import json
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from riptide.base.arguments import check_texts
from riptide.base.errors import InputError
from riptide.indexing.corpus.ids import hash_ids, open_buckets, rows_with_hashes
from riptide.indexing.corpus.row_sets import RowSet
from riptide.indexing.storage.cache import CorruptError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowChain, RowPart, RowRange, split_rows
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store

READERS = 16  # parts that are read from a remote store at the same time
PASSAGE_COLUMNS = ["id", "title", "text", "metadata"]
RANGE_SHARE = 1 / 4  # largest share of a part's rows whose record batches are fetched instead of its file
BATCH_ROWS = 1024  # rows of a record batch; looking up a passage reads one batch


class Passage(NamedTuple):
    """A passage with its row. metadata_json: the metadata as JSON text; "" if it has none."""

    row: int
    id: str
    title: str
    text: str
    metadata_json: str

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata: values by field; empty if the passage has none."""
        return parse_metadata(self.metadata_json)


class MissingPassageError(InputError, KeyError):
    """The corpus has no passage with the requested id. Also a KeyError."""

    __str__ = InputError.__str__  # KeyError.__str__ would show the message in quotes


class Corpus(RowChain):
    """Reads the corpus of a store from all of its complete generations.

    `len`, `in`, `corpus[ID]` and iteration mean its passages that are not deleted, by their ids or in row order.
    """

    @classmethod
    def open(cls, store: Store) -> Corpus:
        """Opens the corpus of a store. Raises InputError if it has no complete one, or one without passages."""
        generations = store.generations("corpus")
        if not generations:
            store.open("corpus", "g0000")  # raises an error that says why the corpus is missing
        elif not generations[0].rows:
            raise CorruptError(f"{generations[0].url}: holds no passages; restore its manifest.json from a copy")
        return cls(generations)

    def __repr__(self) -> str:
        return f"Corpus({self.describe_size()})"

    def __len__(self) -> int:
        """Returns the number of passages that are not deleted."""
        return self.num_rows - len(self.deleted)

    def __bool__(self) -> bool:
        """Returns True, also for a corpus of length 0."""
        return True

    def __contains__(self, id: object) -> bool:
        """Returns whether a passage has this id and is not deleted."""
        return isinstance(id, str) and bool(self.rows_of([id])[0] >= 0)

    def __getitem__(self, id: str) -> Passage:
        """Returns the passage with the given id.

        Raises:
            MissingPassageError: If no passage has this id, or if it is deleted.
        """
        if not isinstance(id, str):
            raise InputError(f"a passage has a text as its id, got {id!r}: corpus.passages([ROW]) reads rows")
        if id in self:
            return self.passages(self.rows_of([id]))[0]
        url = self.generations[0].url.rpartition("/")[0] if self.generations else "the corpus"
        if self.rows_of([id], with_deleted=True)[0] >= 0:
            raise MissingPassageError(f"{url}: the passage {id!r} is deleted")
        first = f", such as {self.ids(np.zeros(1, np.int64))[0]!r}" if self.num_rows else ""
        raise MissingPassageError(f"{url}: no passage has the id {id!r}; it has {len(self):,} passages{first}")

    def __iter__(self) -> Iterator[Passage]:
        """Yields the passages that are not deleted, in row order."""
        for first in range(0, self.num_rows, BATCH_ROWS):
            rows = np.arange(first, min(first + BATCH_ROWS, self.num_rows))
            yield from self.passages(rows[~np.isin(rows, self.deleted)])

    @functools.cached_property
    def deleted(self) -> np.ndarray:
        """The deleted rows: int64, ascending."""
        files = [artifact.local_path(part) for artifact in self.generations for part in deletion_parts(artifact)]
        return np.unique(np.concatenate([np.load(file) for file in files])) if files else np.empty(0, np.int64)

    @functools.cached_property
    def _deleted_set(self) -> RowSet:
        return RowSet(self.deleted)

    def table(self, part: RowPart) -> pa.Table:
        """Returns the passages of a part as a memory-mapped table.

        The columns are id, title, text, metadata and the typed filters; in a split corpus also document, start and end.
        """
        return open_table(part)

    @functools.cached_property
    def _later_filters(self) -> dict[int, tuple[Artifact, ArtifactPart]]:
        """The latest file of typed columns that was added to an existing part, by the first row of the part."""
        files: dict[int, tuple[Artifact, ArtifactPart]] = {}
        for artifact in self.generations:
            # The typed columns of a generation cover only the parts that existed when they were made: the first parts.
            columns = artifact.numbered_parts("filters")
            files |= {part.first_row: (artifact, file) for part, file in zip(self.parts, columns, strict=False)}
        return files

    def filters(self, part: RowPart) -> pa.Table:
        """Returns a memory-mapped table with the typed columns `filter.NAME` of a part, and maybe other columns."""
        if part.first_row not in self._later_filters:
            return open_table(part)
        artifact, file = self._later_filters[part.first_row]
        return _map_file(str(artifact.local_path(file)))

    def passages(self, rows: Sequence[int] | np.ndarray) -> list[Passage]:
        """Returns the passages at the given rows, in their order. Raises IndexError for a row outside of the corpus."""
        numbers = _row_numbers(rows)
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= self.num_rows):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of a corpus of {self.num_rows}")
        passages: list[Passage | None] = [None] * len(numbers)
        for _, positions, table in self._read_rows(numbers, PASSAGE_COLUMNS):
            values = zip(*table.to_pydict().values(), strict=True)
            for position, row, fields in zip(positions, numbers[positions], values, strict=True):
                passages[position] = Passage(int(row), *fields)
        return [passage for passage in passages if passage is not None]

    def open_passage_reader(self) -> Callable[[np.ndarray], list[Passage]]:
        """Returns a function like `passages` that keeps part files open, for many calls with few rows, int64 [n]."""

        def passage(part: RowPart, row: int) -> Passage:
            table = self.keep_open(part, self.table)
            return Passage(row, *(table.column(name)[row - part.first_row].as_py() for name in PASSAGE_COLUMNS))

        def passages(rows: np.ndarray) -> list[Passage]:
            owners = [self.parts[number] for number in np.searchsorted(self.parts.starts, rows, side="right") - 1]
            if not all(part.artifact.has_file(part.part) for part in owners):
                return self.passages(rows)  # reads ranges
            return list(map(passage, owners, rows.tolist()))

        return passages

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Returns the passage ids at rows (int64, any shape) as an object array of str; "" for a row of -1."""
        return self._read_column(rows, "id")

    @property
    def is_split(self) -> bool:
        """Whether the corpus consists of documents that the import split into passages."""
        return bool(self.generations) and "split" in self.generations[0].config

    @property
    def num_documents(self) -> int:
        """The number of documents that are not deleted. Without a split, each passage is a document."""
        if not self.is_split:
            return len(self)
        deleted = np.unique(DocumentNumbers(self.parts).numbers(self.deleted))
        return sum(part.part.facts["documents"] for part in self.parts) - len(deleted)

    def describe_size(self) -> str:
        """Describes the numbers of passages and documents: `14 passages of 9 documents, without 3 deleted passages`."""
        size = _count_of(len(self), "passage")
        if self.is_split:
            size += f" of {_count_of(self.num_documents, 'document')}"
        return size + (f", without {_count_of(len(self.deleted), 'deleted passage')}" if len(self.deleted) else "")

    def documents(self, rows: np.ndarray) -> np.ndarray:
        """Returns the document id of each row, in the form of `ids`; without a split, each passage is a document."""
        return self._read_column(rows, "document" if self.is_split else "id")

    def rows_of_documents(self, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first row and the end row (exclusive) of each document's passages: two int64 [n].

        Both are -1 for an id that is unknown or deleted. Without a split, each passage is a document.
        """
        if not self.is_split:
            firsts = self.rows_of(ids)
            return firsts, np.where(firsts < 0, -1, firsts + 1)
        firsts = self.rows_of([first_passage(id) for id in ids])
        ends = np.full(len(firsts), -1, np.int64)
        known = np.flatnonzero(firsts >= 0)
        for part, positions, local in split_rows(self.parts, firsts[known]):
            starts = np.append(document_starts(open_table(part)), part.part.rows)
            ends[known[positions]] = part.first_row + starts[np.searchsorted(starts, local, side="right")]
        return firsts, ends

    def _read_column(self, rows: np.ndarray, column: str) -> np.ndarray:
        """Returns a text column's values at rows (int64, any shape) as an object array of str; "" for a row of -1."""
        rows = np.asarray(rows)
        flat = rows.ravel()
        wanted, inverse = np.unique(flat, return_inverse=True)
        names = np.empty(len(wanted), object)
        names[:] = ""
        first = int(np.searchsorted(wanted, 0))
        for _, positions, table in self._read_rows(wanted[first:], [column]):
            names[positions + first] = table.column(0).to_numpy(zero_copy_only=False)
        return names[inverse].reshape(rows.shape)

    def _read_rows(self, rows: np.ndarray, columns: list[str]) -> Iterator[tuple[RowPart, np.ndarray, pa.Table]]:
        """Yields columns of rows, int64 [n], part by part: (part, positions in `rows`, table).

        Parts that the node does not have are read by several threads.
        """
        pieces = list(split_rows(self.parts, rows))

        def read(piece: tuple[RowPart, np.ndarray, np.ndarray]) -> tuple[RowPart, np.ndarray, pa.Table]:
            part, positions, local = piece
            return part, positions, read_rows(part, local, columns)

        if all(part.artifact.has_file(part.part) for part, _, _ in pieces):
            yield from map(read, pieces)
            return
        with ThreadPoolExecutor(READERS) as threads:
            yield from threads.map(read, pieces)

    def rows_of(self, ids: Sequence[str], *, with_deleted: bool = False) -> np.ndarray:
        """Returns the row of each id, int64 [n]; -1 for an id that is unknown or, unless `with_deleted`, deleted."""
        check_texts(ids)

        def have_ids(positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
            pairs = zip(self.ids(rows), positions, strict=True)
            return np.fromiter((name == ids[position] for name, position in pairs), bool, len(rows))

        return self.rows_with_hashes(hash_ids(ids), have_ids, with_deleted=with_deleted)

    def rows_with_hashes(
        self,
        hashes: np.ndarray,
        have_ids: Callable[[np.ndarray, np.ndarray], np.ndarray],
        *,
        with_deleted: bool = False,
    ) -> np.ndarray:
        """Returns the row of each id, as `rows_of` does, by the hashes of the ids.

        Args:
            hashes: The `hash_ids` of the ids: uint64 [n].
            have_ids: Returns whether rows have ids, as hashes may collide: positions of ids, int64 [m], and rows,
                int64 [m] -> bool [m].
            with_deleted: Whether deleted rows count.
        """
        result = np.full(len(hashes), -1, np.int64)
        for artifact in self.generations:
            positions, rows = rows_with_hashes(open_buckets(artifact, hashes), hashes)
            if not with_deleted:
                alive = ~self._deleted_set.contains(rows)
                positions, rows = positions[alive], rows[alive]
            is_same = have_ids(positions, rows)
            result[positions[is_same]] = rows[is_same]
        return result


def _row_numbers(rows: Any) -> np.ndarray:
    """Converts row numbers to int64 [n]. Raises InputError unless they are a list of integers."""
    numbers = np.asarray(rows)
    if numbers.ndim != 1 or (len(numbers) and not np.issubdtype(numbers.dtype, np.integer)):
        raise InputError(f"rows {str(rows)[:40]}: expected a list of row numbers; corpus[ID] reads a passage by its id")
    return numbers.astype(np.int64)


def _count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def parse_metadata(text: str) -> dict[str, Any]:
    """Parses metadata from JSON text into a dict; a JSON value that is not an object becomes the field `metadata`."""
    metadata = json.loads(text) if text else {}
    return metadata if isinstance(metadata, dict) else {"metadata": metadata}


def first_passage(document: str) -> str:
    """Returns the id of the first passage of a document in a split corpus."""
    return f"{document}#0"


def document_starts(table: pa.Table) -> np.ndarray:
    """Returns the first row of each document in a part of a split corpus: int64, ascending."""
    names, starts = table["document"].to_numpy(), table["start"].to_numpy()
    # Adjacent documents may have the same id until an import refuses or drops one, so `start` is compared too.
    begins = (names[1:] != names[:-1]) | (np.diff(starts) <= 0)
    return np.flatnonzero(np.append(True, begins)) if len(names) else np.empty(0, np.int64)


class DocumentNumbers:
    """Maps passages to document numbers; the number of a document is the row of its first passage.

    Args:
        parts: Parts of a corpus of split documents.
    """

    def __init__(self, parts: Sequence[RowPart]):
        self._parts = parts
        self.num_rows = parts[-1].end if parts else 0

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Returns the document number of each row, int64, any shape; -1 for a row of -1."""
        firsts = np.append(self._first_rows, -1)  # with no parts, index -1 finds this -1
        return np.where(rows >= 0, firsts[np.searchsorted(self._first_rows, rows, side="right") - 1], -1)

    @functools.cached_property
    def _first_rows(self) -> np.ndarray:
        """The rows at which a document begins, int64, ascending."""
        starts = [part.first_row + document_starts(open_table(part)) for part in self._parts]
        return np.concatenate([*starts, np.empty(0, np.int64)])


def save_array(array: np.ndarray, path: Path) -> None:
    """Writes an array to a .npy file; raises an error if the disk is full.

    numpy writes to a real file through C's stdio and ignores an error of the last flush: on a full disk the file would
    be cut without an error. Here, Python's file writes the bytes.

    Raises:
        OSError: If the bytes cannot be written.
    """
    with open(path, "wb") as file:
        np.save(types.SimpleNamespace(write=file.write), array)


def write_table(table: pa.Table, path: object) -> None:
    """Writes an Arrow IPC file of uncompressed record batches, which `open_table` maps into memory."""
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=BATCH_ROWS)


@functools.lru_cache(maxsize=256)
def _map_file(path: str) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(path)).read_all()


def open_table(part: RowPart) -> pa.Table:
    """Opens a part as a memory-mapped table.

    Raises CorruptError for a damaged file, and InputError if its number of rows is not that of its record.
    """
    table = _map_file(str(part.artifact.local_path(part.part)))
    if len(table) != part.part.rows:
        raise InputError(f"{part.artifact.url}/{part.part.file}: {len(table)} rows, its record says {part.part.rows}")
    return table


def read_rows(part: RowPart, rows: np.ndarray, columns: list[str]) -> pa.Table:
    """Returns columns of rows of a part, int64 [n], in their order.

    A part that this node has is opened. Of another one, the record batches of the rows are fetched if they are few and
    if the part has checksums; otherwise its file is fetched.
    """
    batches = np.unique(rows // BATCH_ROWS)
    if len(batches) * BATCH_ROWS <= part.part.rows * RANGE_SHARE and not part.artifact.has_file(part.part):
        file = part.artifact.open_ranges(part.part)
        if file is not None:
            schema = pa.ipc.open_file(pa.PythonFile(file, "r")).schema
            options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in columns])
            reader = pa.ipc.open_file(pa.PythonFile(file, "r"), options=options)
            if reader.num_record_batches == -(-part.part.rows // BATCH_ROWS):
                table = pa.Table.from_batches([reader.get_batch(number) for number in batches.tolist()])
                local = np.searchsorted(batches, rows // BATCH_ROWS) * BATCH_ROWS + rows % BATCH_ROWS
                return table.select(columns).take(pa.array(local))
    return open_table(part).select(columns).take(pa.array(rows))


def deletion_parts(generation: Artifact) -> list[ArtifactPart]:
    """Returns the parts of a generation that list its deleted rows and the rows that it dropped as duplicates."""
    deleted = generation.find_part("deleted")
    return [*([deleted] if deleted else []), *generation.numbered_parts("dropped")]


def passage_contents(parts: Sequence[RowPart], first_row: int, end: int) -> Iterator[str]:
    """Yields the title and text of each row in [first_row, end) as one string, as in Anserini's flat collections."""
    for part in parts:
        if part.first_row < end and part.end > first_row:
            start = max(first_row, part.first_row)
            table = open_table(part).slice(start - part.first_row, min(end, part.end) - start)
            for batch in table.select(["title", "text"]).to_batches():
                for title, text in zip(batch["title"].to_pylist(), batch["text"].to_pylist(), strict=True):
                    yield f"{title} {text}" if title else text


def passage_parts(corpus: Corpus, rows: RowRange) -> list[RowPart]:
    """Returns the parts of a corpus that hold passages of a range of rows."""
    return [part for part in corpus.parts if part.first_row < rows.end and rows.first_row < part.end]


class OpenPassages:
    """Reads passages of a range of rows from open files, which were checked: a lookup takes time in proportion to the
    passage's length."""

    def __init__(self, corpus: Corpus, rows: RowRange):
        self.rows, parts = rows, passage_parts(corpus, rows)
        self._corpus, self._parts = corpus, parts
        self._starts = [part.first_row for part in parts]
        self._names = [*PASSAGE_COLUMNS, *(["document", "start", "end"] if corpus.is_split else [])]
        for part in parts:
            corpus.table(part)  # fetches and checks its file now instead of in the first search
        self._documents = DocumentNumbers(parts if corpus.is_split else [])
        self._documents.numbers(np.empty(0, np.int64))  # reads the document starts now instead of in the first search

    def fetch(self, rows: np.ndarray) -> list[tuple[Any, ...]]:
        """Returns the passages of those given rows, int64 [n], that are in the range.

        Returns:
            (row, id, title, text, metadata as JSON) of each passage; if the corpus is split, also the id of its
            document, and the characters of its text at which the passage starts and ends.
        """
        passages = []
        for row in self._rows_in_range(rows).tolist():
            number = bisect.bisect_right(self._starts, row) - 1
            table = self._corpus.keep_open(self._parts[number], self._corpus.table)
            local = row - self._starts[number]
            passages.append((row, *(table.column(name)[local].as_py() for name in self._names)))
        return passages

    def documents(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the given rows, int64 [n], that are in the range, and the document number of each."""
        rows = self._rows_in_range(rows)
        return rows, self._documents.numbers(rows)

    def _rows_in_range(self, rows: np.ndarray) -> np.ndarray:
        return rows[(rows >= self.rows.first_row) & (rows < self.rows.end)]
