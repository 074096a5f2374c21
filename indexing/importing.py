"""Raw files to a corpus generation: chunks are parsed in parallel, ids made unique, deletions recorded."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from indexing.artifact import Artifact, Draft, Part, differences
from indexing.corpus import Corpus, write_table
from indexing.formats import text_lines
from indexing.ids import candidates, merge_bucket, num_buckets, repeated, sorted_hashes
from indexing.parse import parse_corpus
from indexing.raw import Lines, Piece, no_rows, open_input
from indexing.sources import Chunk, Source, chunks
from indexing.store import Store, generation
from indexing.tasks import run_tasks
from retriever.errors import InputError

IN_FLIGHT_BYTES = 4 << 30  # of raw text: the driver and the object store both hold what is being parsed


@dataclass(frozen=True)
class ImportOptions:
    """What shapes a corpus generation."""

    part_size: int = 10_000  # rows a part, fewer of long ones: 30 to 60 s of one encoding worker
    filters: Mapping[str, str] = field(default_factory=dict)  # metadata field -> type of a column to filter by
    limit: int | None = None


class Importing:
    """A store's first corpus generation, or (append, delete) its next one, begun; `complete`: nothing is left to do."""

    def __init__(
        self, store: Store, source: Source | None, options: ImportOptions, *, append: bool, delete: str | None = None
    ):
        """Pin source and options. `delete` names a file of ids, one a line; one may be deleted and added anew at once.

        Raises InputError where the store holds another corpus, or an unfinished one of another source.
        """
        previous = store.generations("corpus")
        if previous:
            options = replace(options, filters=_same_filters(previous[0], options.filters))
        self.store, self.source, self.options, self.delete = store, source, options, delete
        config = {
            "format": source.format if source else None,
            "part_size": options.part_size,
            "filters": dict(options.filters),
            "limit": options.limit,
            "source": [file_identity(file) for file in source.corpus] if source else [],
            "delete": file_identity(delete) if delete else None,
        }
        grows = append or delete is not None
        done = previous[1:][-1:] if grows else previous[:1]
        self.complete = any(artifact.config == config for artifact in done)
        self.before = Corpus(previous)
        if self.complete:
            return
        if previous and not grows:
            raise InputError(
                f"{previous[0].url} was imported otherwise ({differences(previous[0].config, config)}): --append "
                "adds to it, another --store starts anew"
            )
        if not previous and grows:
            raise InputError(f"{store.url} has no corpus yet: import one first, without --append and --delete")
        self.deleted = rows_to_delete(self.before, delete) if delete else None
        inputs = {"previous": previous[-1]} if previous else {}
        self.draft = store.create("corpus", generation(len(previous)), inputs=inputs, config=config, by_content=True)

    def run(self) -> Iterator[tuple[bool, int]]:
        """Import what is left; yields (kept from an earlier run, passages) for each part.

        Raises InputError for bad input; what is committed by then is kept, and nothing of the generation is visible.
        """
        if self.complete:
            return
        with self.draft:
            if self.deleted is not None:
                rows = self.deleted
                self.draft.commit("deleted", ".npy", lambda path: np.save(path, rows), rows=len(rows))
            if self.source:
                yield from self._parts(self.source)
                _commit_ids(self.draft, self.before)

    def _parts(self, source: Source) -> Iterator[tuple[bool, int]]:
        committed = self.draft.committed()
        kept: list[int] = []

        def missing() -> Iterator[Chunk]:
            for chunk in chunks(source, self.options.part_size, limit=self.options.limit):
                part = committed.get(f"part-{chunk.index:05d}")
                if part and [piece[1:] for piece in part.facts["source"]] != [
                    [piece.first_line, piece.rows, digest(piece)] for piece in chunk.pieces
                ]:
                    raise InputError(
                        f"{chunk.pieces[0].file}:{chunk.pieces[0].first_line}: changed since {part.name} was made; "
                        f"remove {self.draft.key} (jobs/store.py remove) and import again"
                    )
                if part and f"hashes-{chunk.index:05d}" in committed:
                    kept.append(part.rows)
                else:
                    yield chunk

        for together in rounds(missing(), IN_FLIGHT_BYTES):
            for _, rows in run_tasks(import_part, together, self.draft, source.format, dict(self.options.filters)):
                yield False, rows
        for rows in kept:
            yield True, rows


def rounds(items: Iterator[Chunk], max_bytes: int) -> Iterator[Iterator[Chunk]]:
    """The chunks in groups of at most `max_bytes` (or one chunk): drawn one by one, each group before the next."""
    number = size = 0

    def round_of(chunk: Chunk) -> int:
        nonlocal number, size
        held = sum(len(piece.data) for piece in chunk.pieces if piece.data is not None)
        if size and size + held > max_bytes:
            number, size = number + 1, 0
        size += held
        return number

    for _, together in itertools.groupby(items, round_of):
        yield together


def import_part(chunk: Chunk, draft: Draft, format: Any, filters: Mapping[str, str]) -> int:
    """Parse a chunk and commit its part, then the sorted hashes of its ids. Returns the number of passages."""
    table = parse_corpus(format, chunk, filters)
    pieces = [[piece.file, piece.first_line, piece.rows, digest(piece)] for piece in chunk.pieces]
    name = f"{chunk.index:05d}"
    draft.commit(f"part-{name}", ".arrow", lambda path: write_table(table, path), rows=len(table), source=pieces)
    hashes = sorted_hashes(table.column("id").to_pylist())
    draft.commit(f"hashes-{name}", ".npy", lambda path: np.save(path, hashes), rows=len(table))
    return len(table)


def _same_filters(first: Artifact, asked: Mapping[str, str]) -> Mapping[str, str]:
    """The filters of a corpus' first generation, which all later ones have too."""
    filters = first.config["filters"]
    if asked and dict(asked) != filters:
        raise InputError(f"--filters {dict(asked)}: {first.url} was imported with {filters}; leave the option out")
    return filters


def digest(piece: Piece) -> str:
    """A hash of a piece's raw lines; "" for Parquet, whose rows only the worker reads."""
    return xxhash.xxh3_128_hexdigest(piece.data) if piece.data is not None else ""


def _commit_ids(draft: Draft, before: Corpus) -> None:
    committed = draft.committed()
    parts = [part for name, part in committed.items() if name.startswith("part-")]
    total = sum(part.rows for part in parts)
    if total == 0:
        raise InputError(f"{draft.url}: the source has no passages; nothing is imported")
    buckets = num_buckets(total)
    todo = [b for b in range(buckets) if f"ids-{b:05d}" not in committed]
    for _ in run_tasks(merge_ids, todo, draft, committed, before.generations, buckets):
        pass


def merge_ids(
    bucket: int, draft: Draft, committed: Mapping[str, Part], previous: Sequence[Artifact], buckets: int
) -> None:
    """Commit one bucket of the generation's id file, from its parts' hashes, all of them `committed`.

    Raises InputError for an id that comes twice.
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
    draft.commit(f"ids-{bucket:05d}", ".npy", lambda path: np.save(path, ids), rows=ids.shape[1])


def _refuse_known(
    draft: Draft, parts: list[Part], starts: np.ndarray, ids: np.ndarray, before: Corpus, committed: Mapping[str, Part]
) -> None:
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
                    f"{_place(parts, starts, new)}: id {name!r} is in the corpus already, as row {row}; "
                    "delete it in the same command (--delete) to replace it, or leave the line out"
                )


def _id_at(draft: Draft, parts: list[Part], starts: np.ndarray, row: int) -> str:
    index = int(np.searchsorted(starts, row, side="right")) - 1
    table = pa.ipc.open_file(pa.memory_map(str(draft.local(parts[index])))).read_all()
    return table.column("id")[int(row - starts[index])].as_py()


def _duplicate(draft: Draft, parts: list[Part], starts: np.ndarray, one: int, other: int) -> InputError:
    first, second = sorted((int(one), int(other)))
    return InputError(
        f"{_place(parts, starts, second)}: id {_id_at(draft, parts, starts, second)!r} comes a second time, first in "
        f"{_place(parts, starts, first)}; rename or remove one, remove the begun {draft.key} (jobs/store.py remove) "
        "and import again"
    )


def _place(parts: list[Part], starts: np.ndarray, row: int) -> str:
    """`file:line` of a row. Exact where a line is a passage; KILT's pages hold several, so there it is the part's."""
    index = int(np.searchsorted(starts, row, side="right")) - 1
    part, offset = parts[index], int(row - starts[index])
    pieces = part.facts["source"]
    if sum(rows for _, _, rows, _ in pieces) != part.rows:
        return f"{pieces[0][0]}:{pieces[0][1]} or after"
    for file, first_line, rows, _ in pieces:
        if offset < rows:
            return f"{file}:{first_line + offset}"
        offset -= rows
    raise AssertionError("a row beyond its part")


def rows_to_delete(before: Corpus, delete: str) -> np.ndarray:
    """Rows int64, ascending, of the ids in a file. Raises InputError with the line of one that is unknown."""
    lines = Lines(delete)
    ids: list[str] = []
    while piece := lines.take(1 << 20):
        ids += [id for _, id in text_lines(piece)]
    if not ids:
        raise no_rows(delete)
    rows = before.rows_of(ids)
    if len(unknown := np.flatnonzero(rows < 0)):
        line = int(unknown[0])
        raise InputError(
            f"{delete}:{line + 1}: id {ids[line]!r} is not in the corpus (or deleted already)"
            f"{f', nor are {len(unknown) - 1} more' if len(unknown) > 1 else ''}; remove the line"
        )
    return np.unique(rows)


def file_identity(file: str) -> dict[str, Any]:
    """Name, bytes and a hash over three samples of a raw file: what a resume compares to be sure it is the same."""
    with open_input(file) as source:
        size = source.size()
        digest = hashlib.sha256()
        for offset in (0, size // 2, max(0, size - (1 << 20))):
            source.seek(offset)
            digest.update(source.read(1 << 20))
    return {"file": Path(file).name, "bytes": size, "samples": digest.hexdigest()}
