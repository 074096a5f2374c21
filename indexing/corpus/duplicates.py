"""Merges the ids of a generation's parts, and refuses an id that occurs twice with the places of both rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from indexing.corpus.corpus import Corpus, document_starts, save_array
from indexing.corpus.ids import candidates, merge_bucket, repeated
from indexing.files.delimited import line_of_row
from indexing.files.raw import clip
from indexing.store.artifact import Artifact, Draft, Part
from retriever.errors import InputError


def merge_ids(
    bucket: int, draft: Draft, committed: Mapping[str, Part], previous: Sequence[Artifact], buckets: int
) -> None:
    """Commits the merged ids of a bucket.

    Args:
        bucket: Number of the bucket.
        draft: The draft of the generation.
        committed: Its committed parts, with the hashes of all ids.
        previous: The earlier generations.
        buckets: Number of buckets.

    Raises:
        InputError: For an id that occurs twice, or that the corpus has already.
    """
    before = Corpus(previous)
    rows = _DraftRows(draft, committed, before.num_rows)
    ids = merge_bucket(rows.hash_files(committed), bucket, buckets)
    for one, other in repeated(ids).tolist():
        if rows.value("id", one) == rows.value("id", other):
            raise _duplicate(rows, *sorted((one, other)))
    _refuse_known(rows, ids, before, committed)
    draft.commit(f"ids-{bucket:05d}", ".npy", lambda path: save_array(ids, path), rows=ids.shape[1])


class _DraftRows:
    """The rows of a draft, with their numbers in the corpus."""

    def __init__(self, draft: Draft, committed: Mapping[str, Part], first_row: int):
        self.draft = draft
        self.parts = [part for name, part in committed.items() if name.startswith("part-")]
        self.starts = first_row + np.cumsum([0, *(part.rows for part in self.parts)])
        self.id_column = "document" if "split" in draft.config else "id"  # the ids of the source

    def hash_files(self, committed: Mapping[str, Part]) -> list[tuple[Path, int]]:
        """Returns the file of the hashes of each part, with the first row of the part."""
        files = [self.draft.local(committed[part.name.replace("part", "hashes")]) for part in self.parts]
        return list(zip(files, self.starts.tolist(), strict=False))

    def value(self, column: str, row: int) -> str:
        """Returns the value of a row in a column."""
        _, table, offset = self._find(row)
        return str(table.column(column)[offset].as_py())

    def source_id(self, row: int) -> str:
        """Returns the id of a row in the source, for messages."""
        return clip(self.value(self.id_column, row))

    def place(self, row: int) -> str:
        """Returns `file:line` of a row; if a line can hold several rows (KILT), that of the first line of the part."""
        part, table, offset = self._find(row)
        pieces, num_rows = part.facts["source"], part.rows
        if "document" in table.schema.names:
            documents = document_starts(table)
            offset, num_rows = int(np.searchsorted(documents, offset, side="right")) - 1, len(documents)
        if sum(rows for _, _, rows, _ in pieces) != num_rows:
            return f"{pieces[0][0]}:{pieces[0][1]} or after"
        for file, first_line, rows, _ in pieces:
            if offset < rows:
                if delimiter := part.facts.get("delimiter"):
                    return f"{file}:{line_of_row(file, delimiter, first_line, offset)}"
                return f"{file}:{first_line + offset}"
            offset -= rows
        raise AssertionError("a row beyond its part")

    def _find(self, row: int) -> tuple[Part, pa.Table, int]:
        """Returns the part of a row, its passages, and the row within it."""
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        table = pa.ipc.open_file(pa.memory_map(str(self.draft.local(self.parts[index])))).read_all()
        return self.parts[index], table, row - int(self.starts[index])


def _refuse_known(rows: _DraftRows, ids: np.ndarray, before: Corpus, committed: Mapping[str, Part]) -> None:
    """Raises InputError if an id belongs to a passage of an earlier generation that is not deleted."""
    deleted = before.deleted if before.generations else np.empty(0, np.int64)
    if "deleted" in committed:
        deleted = np.union1d(deleted, np.load(rows.draft.local(committed["deleted"])))
    for artifact in before.generations:
        files = [np.load(artifact.local(part), mmap_mode="r") for part in artifact.group("ids")]
        positions, known = candidates(files, ids[0])
        alive = ~np.isin(known, deleted)
        for position, row in zip(positions[alive], known[alive], strict=True):
            new = int(ids[1][position])
            if before.passages([row])[0].id == rows.value("id", new):
                raise InputError(
                    f"{rows.place(new)}: id {rows.source_id(new)} is in the corpus already, as row {row}; "
                    "delete it in the same command to replace it, or leave the line out"
                )


def _duplicate(rows: _DraftRows, first: int, second: int) -> InputError:
    """Returns the error for two rows with the same id."""
    if (columns := rows.draft.config.get("columns")) and columns["id"] is None:
        return InputError(
            f"{rows.place(second)}: found the title and text of {rows.place(first)}, expected "
            "distinct passages, since their ids are hashes of title and text; remove one, or give every passage an id"
        )
    return InputError(
        f"{rows.place(second)}: id {rows.source_id(second)} comes a second time, first in "
        f"{rows.place(first)}; rename or remove one and import again"
    )
