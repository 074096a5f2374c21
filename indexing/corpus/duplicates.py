"""Merges the ids of a generation's parts, and finds ids that occur twice.

A duplicate id is an error that names the places of both rows. With drop_duplicates, the later row is dropped instead
if title and text are the same too.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from riptide.base.errors import RowError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus, document_starts, open_table, save_array
from riptide.indexing.corpus.ids import merge_bucket, open_buckets, repeated_hashes, rows_with_hashes
from riptide.indexing.files.delimited import line_of_row
from riptide.indexing.files.raw import short_repr
from riptide.indexing.files.rows import SHOWN_ROWS, BadRows
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import split_rows
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart

PAIRS_AT_ONCE = 4_096  # pairs of passages that are compared at once
Content = tuple[Any, ...]  # the compared fields of a passage; the id is the first


def merge_ids(
    bucket: int,
    draft: Draft,
    committed: Mapping[str, ArtifactPart],
    previous: Sequence[Artifact],
    buckets: int,
    *,
    drop_duplicates: bool = False,
) -> None:
    """Commits the merged id hashes of a bucket and, with drop_duplicates, the numbers of the dropped rows.

    Args:
        bucket: Number of the bucket.
        draft: The draft of the generation.
        committed: Its committed parts, with the hashes of all ids.
        previous: The earlier generations.
        buckets: Number of buckets.
        drop_duplicates: Whether a row is dropped if an earlier one has its id, title and text.

    Raises:
        InputError: For an id that occurs twice, or that the corpus has already, unless its row is dropped.
    """
    earlier_corpus = Corpus(previous)
    new = _NewRows(draft, committed, earlier_corpus.num_rows)
    ids = merge_bucket(new.hash_files(committed), bucket, buckets)
    dropped_rows = []
    duplicate_rows = BadRows()

    def find_duplicate_rows() -> Iterator[tuple[int, int, bool, bool]]:
        """Yields duplicates to refuse: (row, other row, whether the other is in an older generation, whether equal)."""
        in_import = ((row, first, False, equal) for first, row, equal in _repeated_in_import(new, ids))
        from_earlier = _repeated_from_earlier(new, ids, earlier_corpus, committed)
        for repeated in itertools.chain(in_import, ((row, known, True, equal) for row, known, equal in from_earlier)):
            if drop_duplicates and repeated[-1]:
                dropped_rows.append(repeated[0])
            else:
                duplicate_rows.count += 1
                yield repeated

    # The error shows the smallest row numbers, which belong to the first lines of the files.
    for row, other, is_earlier, is_equal in heapq.nsmallest(SHOWN_ROWS, find_duplicate_rows()):
        error = _known_id_error if is_earlier else _duplicate_error
        duplicate_rows.problems.append(f"{error(new, row, other, drop_duplicates, is_equal)}")
    duplicate_rows.refuse(remedy="correct them")
    draft.commit(f"ids-{bucket:05d}", ".npy", lambda path: save_array(ids, path), rows=ids.shape[1], has_ranges=True)
    if drop_duplicates:
        rows = np.unique(np.array(dropped_rows, np.int64))
        draft.commit(f"dropped-{bucket:05d}", ".npy", lambda path: save_array(rows, path), rows=len(rows))


class _NewRows:
    """The rows that a generation adds to the corpus; methods take row numbers of the whole corpus."""

    def __init__(self, draft: Draft, committed: Mapping[str, ArtifactPart], first_row: int):
        self.draft = draft
        self.parts = [part for name, part in committed.items() if name.startswith("part-")]
        self.starts = first_row + np.cumsum([0, *(part.rows for part in self.parts)])
        self.id_column = "document" if "split" in draft.config else "id"  # the column with the ids of the source

    def hash_files(self, committed: Mapping[str, ArtifactPart]) -> list[tuple[Path, int]]:
        """Returns (file of id hashes, first row) for each part."""
        files = [self.draft.local_path(committed[part.name.replace("part", "hashes")]) for part in self.parts]
        return list(zip(files, self.starts.tolist(), strict=False))

    def contents(self, rows: np.ndarray) -> list[Content]:
        """Returns the compared fields of each row, in the order of `rows`."""
        contents: list[Content] = [()] * len(rows)
        owners = np.searchsorted(self.starts, rows, side="right") - 1
        for index in np.unique(owners):
            positions = np.flatnonzero(owners == index)
            some = _read_contents(self._open_part_table(index), rows[positions] - self.starts[index])
            for position, content in zip(positions, some, strict=True):
                contents[position] = content
        return contents

    def source_id(self, row: int) -> str:
        """Returns the id that a row has in the source, shortened for messages."""
        index, offset = self._locate(row)
        return short_repr(self._open_part_table(index).column(self.id_column)[offset].as_py())

    def file_and_line(self, row: int) -> str:
        """Returns `file:line` of a row; if rows do not match lines (as in KILT), the part's first line "or after"."""
        index, offset = self._locate(row)
        part, table = self.parts[index], self._open_part_table(index)
        pieces, num_rows = part.facts["source"], part.rows
        if "document" in table.schema.names:
            starts = document_starts(table)
            offset, num_rows = int(np.searchsorted(starts, offset, side="right")) - 1, len(starts)
        skipped = sorted(part.facts.get("skipped_positions", ()))
        for position in skipped:
            if position <= offset:
                offset += 1
        if sum(rows for _, _, rows, _ in pieces) != num_rows + len(skipped):
            return f"{pieces[0][0]}:{pieces[0][1]} or after"
        for file, first_line, rows, _ in pieces:
            if offset < rows:
                if delimiter := part.facts.get("delimiter"):
                    return f"{file}:{line_of_row(file, delimiter, first_line, offset)}"
                return f"{file}:{first_line + offset}"
            offset -= rows
        raise AssertionError("a row beyond its part")

    def _locate(self, row: int) -> tuple[int, int]:
        """Returns the number of the part that holds a row, and the offset of the row in this part."""
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        return index, row - int(self.starts[index])

    def _open_part_table(self, index: int) -> pa.Table:
        """Opens the passages of a part as a memory-mapped table."""
        return pa.ipc.open_file(pa.memory_map(str(self.draft.local_path(self.parts[index])))).read_all()


def _read_contents(table: pa.Table, rows: np.ndarray) -> Iterator[Content]:
    """Yields id, title and text of each row of a table; in a split corpus, also the passage count of its document.

    So two documents are equal if all their passages are.
    """
    columns = list(table.select(["id", "title", "text"]).take(pa.array(rows)).to_pydict().values())
    if "document" in table.schema.names:
        starts = document_starts(table)
        lengths = np.diff(np.append(starts, len(table)))
        columns.append(lengths[np.searchsorted(starts, rows, side="right") - 1].tolist())
    return zip(*columns, strict=True)


def _known_contents(earlier_corpus: Corpus, rows: np.ndarray) -> list[Content]:
    """Returns the compared fields of each row of the earlier generations, in the order of `rows`."""
    contents: list[Content] = [()] * len(rows)
    for part, positions, local in split_rows(earlier_corpus.parts, rows):
        for position, content in zip(positions, _read_contents(open_table(part), local), strict=True):
            contents[position] = content
    return contents


def _repeated_in_import(new: _NewRows, ids: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """Yields (earlier row, later row, whether title and text are equal too) for new rows with the same id."""
    pairs = repeated_hashes(ids)
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        block = pairs[start : start + PAIRS_AT_ONCE]
        contents = zip(new.contents(block[:, 0]), new.contents(block[:, 1]), strict=True)
        for (one, other), (first, second) in zip(block.tolist(), contents, strict=True):
            if first[0] == second[0]:
                yield one, other, first == second


def _repeated_from_earlier(
    new: _NewRows, ids: np.ndarray, earlier_corpus: Corpus, committed: Mapping[str, ArtifactPart]
) -> Iterator[tuple[int, int, bool]]:
    """Yields each new row whose id a passage of an earlier generation has, unless this passage is deleted.

    Yields:
        The new row, the earlier row, and whether title and text are equal too.
    """
    deleted = earlier_corpus.deleted if earlier_corpus.generations else np.empty(0, np.int64)
    if "deleted" in committed:
        deleted = np.union1d(deleted, np.load(new.draft.local_path(committed["deleted"])))
    for artifact in earlier_corpus.generations:
        positions, known = rows_with_hashes(open_buckets(artifact, ids[0]), ids[0])
        alive = ~np.isin(known, deleted)
        rows, known = ids[1][positions[alive]].astype(np.int64), known[alive]
        for start in range(0, len(rows), PAIRS_AT_ONCE):
            block = slice(start, start + PAIRS_AT_ONCE)
            pairs = zip(new.contents(rows[block]), _known_contents(earlier_corpus, known[block]), strict=True)
            for row, earlier, (one, other) in zip(rows[block].tolist(), known[block].tolist(), pairs, strict=True):
                if one[0] == other[0]:
                    yield row, earlier, one == other


def _duplicate_error(new: _NewRows, second_row: int, first_row: int, drop_duplicates: bool, is_equal: bool) -> RowError:
    """Returns the error for two new rows with the same id; is_equal: whether title and text are the same too."""
    columns = new.draft.config.get("columns")
    if columns and columns["id"] is None:
        return RowError(
            f"{new.file_and_line(second_row)}: found the title and text of {new.file_and_line(first_row)}, "
            "expected distinct passages, since their ids are hashes of title and text; remove one, give every "
            f"passage an id, or leave the later one out by {Parameter('drop_duplicates')}"
        )
    difference = " with another title or text" if drop_duplicates else ""
    remedy = f"remove one, or leave the later one out by {Parameter('drop_duplicates')}"
    return RowError(
        f"{new.file_and_line(second_row)}: id {new.source_id(second_row)} comes a second time{difference}, "
        f"first in {new.file_and_line(first_row)}; {remedy if is_equal else 'rename or remove one and import again'}"
    )


def _known_id_error(new: _NewRows, row: int, known_row: int, drop_duplicates: bool, is_equal: bool) -> RowError:
    """Returns the error for a row whose id the corpus already has; is_equal: whether title and text are equal too."""
    difference = " with another title or text" if drop_duplicates else ""
    rest = "leave the line out" + (f" ({Parameter('drop_duplicates')} does)" if is_equal else "")
    return RowError(
        f"{new.file_and_line(row)}: id {new.source_id(row)} is in the corpus already{difference}, as row {known_row}; "
        f"delete it in the same command to replace it, or {rest}"
    )
