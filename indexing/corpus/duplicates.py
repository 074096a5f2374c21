"""Merges the ids of a generation's parts, and refuses an id that occurs twice with the places of both rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from indexing.corpus.corpus import Corpus, save_array
from indexing.corpus.ids import candidates, merge_bucket, repeated
from indexing.files.delimited import line_of_row
from indexing.files.raw import clip
from indexing.store.artifact import Artifact, Draft
from indexing.store.documents import Part
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
    parts = [part for name, part in committed.items() if name.startswith("part-")]
    starts = before.num_rows + np.cumsum([0, *(part.rows for part in parts)])
    files = [
        (draft.local(committed[part.name.replace("part", "hashes")]), int(start))
        for part, start in zip(parts, starts, strict=False)
    ]
    ids = merge_bucket(files, bucket, buckets)
    for one, other in repeated(ids):
        if _id_at(draft, parts, starts, one) == _id_at(draft, parts, starts, other):
            raise _duplicate(draft, parts, starts, one, other)
    _refuse_known(draft, parts, starts, ids, before, committed)
    draft.commit(f"ids-{bucket:05d}", ".npy", lambda path: save_array(ids, path), rows=ids.shape[1])


def _refuse_known(
    draft: Draft, parts: list[Part], starts: np.ndarray, ids: np.ndarray, before: Corpus, committed: Mapping[str, Part]
) -> None:
    """Raises InputError if an id belongs to a passage of an earlier generation that is not deleted."""
    deleted = before.deleted if before.generations else np.empty(0, np.int64)
    if "deleted" in committed:
        deleted = np.union1d(deleted, np.load(draft.local(committed["deleted"])))
    for artifact in before.generations:
        files = [np.load(artifact.local(part), mmap_mode="r") for part in artifact.group("ids")]
        positions, rows = candidates(files, ids[0])
        alive = ~np.isin(rows, deleted)
        for position, row in zip(positions[alive], rows[alive], strict=True):
            new = int(ids[1][position])
            name = _id_at(draft, parts, starts, new)
            if before.passages([row])[0].id == name:
                raise InputError(
                    f"{_place(parts, starts, new)}: id {clip(name)} is in the corpus already, as row {row}; "
                    "delete it in the same command to replace it, or leave the line out"
                )


def _id_at(draft: Draft, parts: list[Part], starts: np.ndarray, row: int) -> str:
    """Returns the id of a row of the draft."""
    index = int(np.searchsorted(starts, row, side="right")) - 1
    table = pa.ipc.open_file(pa.memory_map(str(draft.local(parts[index])))).read_all()
    return table.column("id")[int(row - starts[index])].as_py()


def _duplicate(draft: Draft, parts: list[Part], starts: np.ndarray, one: int, other: int) -> InputError:
    """Returns the error for two rows with the same id."""
    first, second = sorted((int(one), int(other)))
    if (columns := draft.config.get("columns")) and columns["id"] is None:
        return InputError(
            f"{_place(parts, starts, second)}: found the title and text of {_place(parts, starts, first)}, expected "
            "distinct passages, since their ids are hashes of title and text; remove one, or give every passage an id"
        )
    id = clip(_id_at(draft, parts, starts, second))
    return InputError(
        f"{_place(parts, starts, second)}: id {id} comes a second time, first in "
        f"{_place(parts, starts, first)}; rename or remove one and import again"
    )


def _place(parts: list[Part], starts: np.ndarray, row: int) -> str:
    """Returns `file:line` of a row; if a line can hold several passages (KILT), that of the first line of the part."""
    index = int(np.searchsorted(starts, row, side="right")) - 1
    part, offset = parts[index], int(row - starts[index])
    pieces = part.facts["source"]
    if sum(rows for _, _, rows, _ in pieces) != part.rows:
        return f"{pieces[0][0]}:{pieces[0][1]} or after"
    for file, first_line, rows, _ in pieces:
        if offset < rows:
            if delimiter := part.facts.get("delimiter"):
                return f"{file}:{line_of_row(file, delimiter, first_line, offset)}"
            return f"{file}:{first_line + offset}"
        offset -= rows
    raise AssertionError("a row beyond its part")
