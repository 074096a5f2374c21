"""Makes the corpus equal to its source: compares them by id and content, and imports only what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import PASSAGE_COLUMNS, Corpus, document_starts, read_rows
from riptide.indexing.corpus.importing import (
    DeleteStage,
    ImportCorpusWork,
    ImportOptions,
    MergeIdsStage,
    ParseStage,
    commit_passages,
)
from riptide.indexing.files.raw import short_repr
from riptide.indexing.formats.chunking import CHUNK_BYTES, CorpusChunk, cut_into_chunks
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.sources import ImportSource
from riptide.indexing.store.artifact import Draft
from riptide.indexing.store.chain import split_rows
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import Committed, WorkUnit
from riptide.indexing.work.worker_tasks import PYTHON_CORE, Allocation, Report, WorkerResources


class Taken(NamedTuple):
    """The passages of a chunk that are imported: their positions, int64 [n], and the digest of their contents."""

    positions: np.ndarray
    digest: str


@dataclass(frozen=True)
class Difference:
    """How a source differs from the corpus. The numbers are passages; in a split corpus, documents.

    Attributes:
        added: The corpus has no passage with this id.
        changed: The title, text or metadata differ.
        gone: The source lacks the id.
        same: Nothing differs.
        taken: What is imported, by the number of its chunk.
        deleted: The rows of changed and gone passages: int64, ascending.
    """

    added: int
    changed: int
    gone: int
    same: int
    taken: dict[int, Taken]
    deleted: np.ndarray

    def __str__(self) -> str:
        return f"{self.added:,} added, {self.changed:,} changed, {self.gone:,} gone, {self.same:,} the same"

    @property
    def is_empty(self) -> bool:
        """Whether the corpus is equal to the source."""
        return not self.taken and not len(self.deleted)


class SyncCorpusWork(ImportCorpusWork):
    """The work that makes the generation after which the corpus is equal to the source.

    Attributes:
        is_complete: Whether there is nothing to do.
        difference: How the source differs from the corpus.
    """

    def __init__(self, store: Store, source: ImportSource, options: ImportOptions, *, max_gone: float):
        """Compares the source with the corpus, which takes the time of parsing the source.

        Args:
            store: The store, which has a corpus.
            source: The raw files, which are the whole corpus.
            options: The options that shape the generation.
            max_gone: The largest share of the corpus that the source may lack.

        Raises:
            InputError: As `ImportCorpusWork` does. Also for a bad row, an id that occurs twice among the passages that
                the corpus has, and a source that lacks too much.
        """
        super().__init__(store, source, options, append=True, sync=True)
        self.difference = difference = compare_source(source, self.options, self.earlier_corpus)
        before = self.earlier_corpus.num_documents
        if difference.gone > max_gone * before:
            raise InputError(
                f"{Parameter('sync')}: {difference.gone:,} of {before:,} ids of the corpus are not in the source, "
                f"expected at most {max_gone:.0%}; is the source whole? If so, give {Parameter('max_gone', 1)}"
            )
        self.is_complete = difference.is_empty
        if len(difference.deleted):
            self.deleted = difference.deleted

    @property
    def stages(self) -> list[DeleteStage | ParseStage | MergeIdsStage]:
        """Returns the stages: recording deletions, importing what differs, and merging ids."""
        assert self.source is not None
        stages: list[DeleteStage | ParseStage | MergeIdsStage] = []
        if self.deleted is not None:
            stages.append(DeleteStage(self.deleted))
        if taken := self.difference.taken:
            stages += [
                SyncStage(self.source, self.options, taken=taken),
                MergeIdsStage(self.earlier_corpus, self.options),
            ]
        return stages


class TakenPassages(NamedTuple):
    """The passages of a part: its number, the table, and the facts of its record."""

    number: int
    table: pa.Table
    facts: dict[str, Any]


@dataclass(frozen=True)
class SyncStage(ParseStage):
    """The stage that imports the passages that differ. They are parsed here, as few of each chunk are taken.

    Attributes:
        taken: What is imported, by the number of its chunk.
    """

    taken: dict[int, Taken] | None = None

    def units(self, committed_parts: Committed) -> Iterator[WorkUnit]:
        """Yields a unit for each part. Raises InputError if the source has changed since it was compared."""
        for number, chunks in enumerate(self._grouped()):
            table = pa.concat_tables([table for _, table in chunks])
            pieces = [[piece.file, piece.first_line, piece.rows, ""] for chunk, _ in chunks for piece in chunk.pieces]
            facts: dict[str, Any] = {"source": pieces, "content": content_digest(table)}
            if self.source.titles:
                facts["titles"] = sum(map(bool, table["title"].to_pylist()))
            names = (f"part-{number:05d}", f"hashes-{number:05d}")
            yield WorkUnit(names, len(table), TakenPassages(number, table, facts), size_bytes=table.nbytes)

    def _grouped(self) -> Iterator[list[tuple[CorpusChunk, pa.Table]]]:
        """Yields groups of chunks, with the passages that are taken of each; a group becomes a part."""
        group: list[tuple[CorpusChunk, pa.Table]] = []
        rows = size = 0
        for chunk, passages in _parsed_chunks(self.source, self.options):
            taken = (self.taken or {}).get(chunk.index)
            if taken is None:
                continue
            fits = len(passages) > taken.positions[-1]
            table = passages.take(pa.array(taken.positions)) if fits else passages
            if not fits or content_digest(table) != taken.digest:
                first = chunk.pieces[0]
                raise InputError(
                    f"{first.file}:{first.first_line}: changed while it was compared with the corpus; run the command "
                    "again"
                )
            if group and (rows + len(table) > self.options.part_size or size + table.nbytes > CHUNK_BYTES):
                yield group
                group, rows, size = [], 0, 0
            group.append((chunk, table))
            rows, size = rows + len(table), size + table.nbytes
        yield group

    def check(self, unit: WorkUnit, parts: Sequence[ArtifactPart]) -> None:
        """Raises InputError if a part was made from other passages."""
        if parts[0].facts["content"] != unit.payload.facts["content"]:
            raise InputError(
                f"{self.source.name}: changed since {parts[0].name} was made; import again to start from the beginning"
            )

    def task(self, drafts: Sequence[Draft]) -> CommitTask:  # type: ignore[override]
        """Returns the task that each worker runs."""
        return CommitTask(drafts[0], is_split=self.options.split is not None)


@dataclass(frozen=True)
class CommitTask:
    """The task that commits parts of passages that are parsed already."""

    draft: Draft
    is_split: bool
    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], int]:
        """Returns the function that processes a work unit."""
        return self._commit

    def _commit(self, unit: WorkUnit, report: Report) -> int:
        number, table, facts = unit.payload
        return commit_passages(self.draft, number, table, facts, is_split=self.is_split)


def compare_source(source: ImportSource, options: ImportOptions, corpus: Corpus) -> Difference:
    """Compares a source with the corpus by id, title, text and metadata; a document of a split corpus as a whole.

    It holds a chunk of the source, a byte for each row of the corpus, and 8 bytes for each passage that differs.

    Raises:
        InputError: For bad rows, and for an id that occurs twice among the passages that the corpus has.
    """
    kept = np.zeros(corpus.num_rows, bool)
    added = changed = same = 0
    taken: dict[int, Taken] = {}
    for chunk, table in _parsed_chunks(source, options):
        starts = document_starts(table) if options.split else np.arange(len(table))
        lengths = np.diff(np.append(starts, len(table)))
        names = table["document" if options.split else "id"].take(pa.array(starts)).to_pylist()
        firsts, ends = corpus.rows_of_documents(names)
        is_equal = (firsts >= 0) & (ends - firsts == lengths)
        numbers = np.repeat(np.arange(len(starts)), lengths)  # the document of each passage
        rows = firsts[numbers] + np.arange(len(table)) - starts[numbers]
        positions = np.flatnonzero(is_equal[numbers])
        differing = positions[~_have_equal_contents(table, positions, corpus, rows[positions])]
        is_equal[numbers[differing]] = False
        first, repeated = _first_repeated(firsts[is_equal], kept)
        if repeated and not options.drop_duplicates:
            place, id = chunk.pieces[0], names[np.flatnonzero(is_equal)[first]]
            raise InputError(
                f"{place.file}:{place.first_line} or after: id {short_repr(id)} comes a second time; remove one, or "
                f"leave the later one out by {Parameter('drop_duplicates')}"
            )
        same += int(is_equal.sum()) - repeated
        kept[rows[is_equal[numbers]]] = True
        changed += int((~is_equal & (firsts >= 0)).sum())
        added += int((firsts < 0).sum())
        if len(others := np.flatnonzero(~is_equal[numbers])):
            taken[chunk.index] = Taken(others, content_digest(table.take(pa.array(others))))
    kept[corpus.deleted] = True
    return Difference(added, changed, corpus.num_documents - same - changed, same, taken, np.flatnonzero(~kept))


def _parsed_chunks(source: ImportSource, options: ImportOptions) -> Iterator[tuple[CorpusChunk, pa.Table]]:
    """Yields each chunk of a source with its passages, as an import makes them. Raises InputError for bad rows."""
    for chunk in cut_into_chunks(source, options.part_size, split=options.split):
        yield chunk, parse_corpus(source.format, chunk, options.filters, options.split)


def _have_equal_contents(table: pa.Table, positions: np.ndarray, corpus: Corpus, rows: np.ndarray) -> np.ndarray:
    """Returns whether passages of a table have the contents of rows of the corpus: bool [n].

    Args:
        table: Passages.
        positions: Their positions, int64 [n].
        corpus: The corpus.
        rows: The row of the corpus to compare with each one, int64 [n].
    """
    result = np.zeros(len(positions), bool)
    for part, places, local in split_rows(corpus.parts, rows):
        stored = read_rows(part, local, PASSAGE_COLUMNS)
        new = table.select(PASSAGE_COLUMNS).take(pa.array(positions[places]))
        equal = [pc.equal(new[name], stored[name].cast(new[name].type)).to_numpy() for name in PASSAGE_COLUMNS]
        result[places] = np.logical_and.reduce(equal)
    return result


def _first_repeated(rows: np.ndarray, kept: np.ndarray) -> tuple[int, int]:
    """Returns the place of the first row that is kept already or occurs twice, and the number of such rows."""
    is_new = np.zeros(len(rows), bool)
    is_new[np.unique(rows, return_index=True)[1]] = True
    repeated = np.flatnonzero(~is_new | kept[rows])
    return (int(repeated[0]) if len(repeated) else -1), len(repeated)


def content_digest(table: pa.Table) -> str:
    """Returns a digest of the ids, titles, texts and metadata of passages."""
    digest = xxhash.xxh3_128()
    for name in PASSAGE_COLUMNS:
        values = table[name].cast(pa.large_string()).combine_chunks()
        _, offsets, data = values.buffers()
        ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
        digest.update((ends - ends[:1]).tobytes())
        digest.update(memoryview(data or b"")[int(ends[0]) : int(ends[-1])])
    return digest.hexdigest()
