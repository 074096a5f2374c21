"""Makes the corpus equal to its source: compares them by id and content, and imports the passages that differ."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import PASSAGE_COLUMNS, Corpus, document_starts, open_table
from riptide.indexing.corpus.ids import hash_texts, text_bytes
from riptide.indexing.corpus.importing import (
    DeleteStage,
    ImportCorpusWork,
    ImportOptions,
    MergeIdsStage,
    commit_passages,
)
from riptide.indexing.files.raw import short_repr
from riptide.indexing.formats.chunking import CHUNK_BYTES, CorpusChunk, cut_into_chunks
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.sources import ImportSource
from riptide.indexing.storage.storage import explain_disk_errors
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart, fingerprint_of
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import ArtifactTarget, BaseStage, Committed, DriverStage, SpreadStage, WorkUnit
from riptide.indexing.work.worker_tasks import PYTHON_CORE, Allocation, Report, WorkerResources


class RowsToImport(NamedTuple):
    """The passages of a chunk to import: their positions, int64 [n], and the digest of their contents."""

    positions: np.ndarray
    digest: str


@dataclass(frozen=True)
class Difference:
    """How a source differs from the corpus. The numbers are passages; in a split corpus, documents.

    Attributes:
        added: The corpus has no passage with this id.
        changed: The title, text or metadata differ.
        removed: The source lacks the id.
        unchanged: Nothing differs.
        imports: The added and changed passages, by the number of their chunk.
        deleted: The rows of changed and removed passages: int64, ascending.
    """

    added: int
    changed: int
    removed: int
    unchanged: int
    imports: dict[int, RowsToImport]
    deleted: np.ndarray

    def __str__(self) -> str:
        numbers = f"{self.added:,} added, {self.changed:,} changed, {self.removed:,} removed"
        return f"{numbers}, {self.unchanged:,} unchanged"

    @property
    def is_empty(self) -> bool:
        """Whether the corpus is equal to the source."""
        return not self.imports and not len(self.deleted)

    @property
    def digest(self) -> str:
        """A digest of the passages to import and of the deleted rows."""
        imports = [[number, rows.digest] for number, rows in self.imports.items()]
        return fingerprint_of([imports, xxhash.xxh3_128_hexdigest(self.deleted.tobytes())])


class SyncCorpusWork(ImportCorpusWork):
    """The work that makes the generation after which the corpus is equal to the source.

    Attributes:
        is_complete: Whether there is nothing to do.
        difference: How the source differs from the corpus.
    """

    def __init__(
        self,
        store: Store,
        source: ImportSource,
        options: ImportOptions,
        *,
        max_removed: float,
        is_same_source: Callable[[], bool] | None = None,
    ):
        """Compares the source with the corpus, which takes the time of parsing the source.

        Args:
            store: The store, which has a corpus.
            source: The raw files, which are the whole corpus.
            options: The options that shape the generation.
            max_removed: The largest share of the corpus that the source may lack.
            is_same_source: For a watch: returns whether the source is as it was at the look; None: there is no watch.

        Raises:
            InputError: As `ImportCorpusWork` does. Also for a bad row, a second row with the id of a passage of the
                corpus, a source that lacks too much, and one that has changed since the look of a watch.
        """
        super().__init__(store, source, options, append=True, sync=True)
        self.difference = difference = compare_source(source, self.options, self.earlier_corpus)
        before = self.earlier_corpus.num_documents
        if is_same_source is not None and not difference.is_empty and not is_same_source():
            raise InputError(f"{source.corpus[0]}: changed while it was compared with the corpus, or shortly before")
        if difference.removed > max_removed * before:
            allow = f"give {Parameter('max_removed', 1)}"
            if is_same_source is not None:  # in a watch, it would allow every later deletion too
                allow = f"run {Parameter('sync')} {Parameter('max_removed', 1)} once without {Parameter('watch')}"
            raise InputError(
                f"{Parameter('sync')}: {difference.removed:,} of {before:,} ids of the corpus are not in the source, "
                f"expected at most {max_removed:.0%}; is the source complete? If so, {allow}"
            )
        # The identities of files are those of samples, so the draft of another difference may have equal ones.
        self.config["sync"] = difference.digest
        self.is_complete = difference.is_empty
        if len(difference.deleted):
            self.deleted = difference.deleted

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the generation to make; [] if the corpus is equal to the source.

        It replaces a draft of an earlier state of the source, as the source may never have this state again.
        """
        return [replace(target, replaces="sync") for target in super().targets]

    @property
    def stages(self) -> list[SpreadStage | DriverStage]:
        """Returns the stages: recording deletions, importing the passages that differ, and merging ids."""
        assert self.source is not None
        stages: list[SpreadStage | DriverStage] = []
        if self.deleted is not None:
            stages.append(DeleteStage(self.deleted))
        if imports := self.difference.imports:
            stages += [
                SyncStage(self.source, self.options, imports),
                MergeIdsStage(self.earlier_corpus, self.options),
            ]
        return stages


class PassageBatch(NamedTuple):
    """The passages of a part: its number, the table, and the facts of its record."""

    number: int
    table: pa.Table
    facts: dict[str, Any]


@dataclass(frozen=True)
class SyncStage(BaseStage):
    """The stage that imports the passages that differ. They are parsed here, as each chunk has few of them.

    Attributes:
        source: The raw files.
        options: The options that shape the generation.
        imports: The passages to import, by the number of their chunk.
    """

    source: ImportSource
    options: ImportOptions
    imports: dict[int, RowsToImport]
    title: str = "import"
    noun: str = "passages"

    @property
    def total(self) -> int:
        """The number of passages to import."""
        return sum(len(rows.positions) for rows in self.imports.values())

    def units(self, committed_parts: Committed) -> Iterator[WorkUnit]:
        """Yields a unit for each part. Raises InputError if the source has changed since it was compared."""
        for number, chunks in enumerate(self._grouped()):
            table = pa.concat_tables([table for _, table in chunks])
            pieces = [[piece.file, piece.first_line, piece.rows, ""] for chunk, _ in chunks for piece in chunk.pieces]
            facts: dict[str, Any] = {"source": pieces, "content": content_digest(table)}
            if self.source.titles:
                facts["titles"] = sum(map(bool, table["title"].to_pylist()))
            names = (f"part-{number:05d}", f"hashes-{number:05d}")
            yield WorkUnit(names, len(table), PassageBatch(number, table, facts), size_bytes=table.nbytes)

    def _grouped(self) -> Iterator[list[tuple[CorpusChunk, pa.Table]]]:
        """Yields groups of chunks, with the passages to import of each; a group becomes a part."""
        group: list[tuple[CorpusChunk, pa.Table]] = []
        rows = size = 0
        pending = dict(self.imports)
        for chunk, passages in _parsed_chunks(self.source, self.options):
            wanted = pending.pop(chunk.index, None)
            if wanted is None:
                continue
            is_long_enough = len(passages) > wanted.positions[-1]
            table = passages.take(pa.array(wanted.positions)) if is_long_enough else passages
            if not is_long_enough or content_digest(table) != wanted.digest:
                raise self._changed_error()
            if group and (rows + len(table) > self.options.part_size or size + table.nbytes > CHUNK_BYTES):
                yield group
                group, rows, size = [], 0, 0
            group.append((chunk, table))
            rows, size = rows + len(table), size + table.nbytes
        if pending:
            raise self._changed_error()
        yield group

    def _changed_error(self) -> InputError:
        return InputError(
            f"{self.source.corpus[0]}: changed after it was compared with the corpus: run the command again"
        )

    def check(self, unit: WorkUnit, parts: Sequence[ArtifactPart]) -> None:
        """Raises InputError if a part was made from other passages."""
        if parts[0].facts["content"] != unit.payload.facts["content"]:
            raise self._changed_error()

    def task(self, drafts: Sequence[Draft]) -> CommitTask:
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

    Reads the corpus once and the source once, in any order. In memory are a chunk of the source, two bytes for each row
    of the corpus (ten with `drop_duplicates`), 8 bytes for each document of a split corpus and for each passage that
    differs; in a temporary file are the `StoredHashes`.

    Raises:
        InputError: For bad rows, and for a second row with the id of a passage of the corpus, unless `drop_duplicates`
            is set and it has the title and text of the first one.
    """
    is_unchanged, is_met = np.zeros(corpus.num_rows, bool), np.zeros(corpus.num_rows, bool)
    contents = np.zeros(corpus.num_rows if options.drop_duplicates else 0, np.uint64)
    added = changed = unchanged = 0
    imports: dict[int, RowsToImport] = {}
    stored = StoredHashes(corpus)
    for chunk, table in _parsed_chunks(source, options):
        starts = document_starts(table) if options.split else np.arange(len(table))
        lengths = np.diff(np.append(starts, len(table)))
        firsts, ends = stored.find(table["id"].take(pa.array(starts)))
        is_known = firsts >= 0
        is_counted = _is_first(firsts, is_met)
        repeated = np.flatnonzero(~is_counted)
        if options.drop_duplicates:
            hashes = _document_hashes(table, starts, stored.seed)
            counted = np.flatnonzero(is_known & is_counted)
            contents[firsts[counted]] = hashes[counted]
            repeated = repeated[hashes[repeated] != contents[firsts[repeated]]]
        if len(repeated):
            name = table["document" if options.split else "id"][starts[repeated[0]]].as_py()
            raise _repeated_id_error(chunk, name, drop_duplicates=options.drop_duplicates)
        is_met[firsts[is_known]] = True
        is_equal = is_known & is_counted & (ends - firsts == lengths)
        numbers = np.repeat(np.arange(len(starts)), lengths)  # the document of each passage
        rows = firsts[numbers] + np.arange(len(table)) - starts[numbers]
        positions = np.flatnonzero(is_equal[numbers])
        is_changed = stored.contents[rows[positions]] != _content_hashes(table, stored.seed)[positions]
        is_equal[numbers[positions[is_changed]]] = False
        is_unchanged[rows[is_equal[numbers]]] = True
        unchanged += int(is_equal.sum())
        changed += int((is_known & is_counted & ~is_equal).sum())
        added += int((~is_known).sum())
        if len(others := np.flatnonzero((is_counted & ~is_equal)[numbers])):
            imports[chunk.index] = RowsToImport(others, content_digest(table.take(pa.array(others))))
    is_unchanged[corpus.deleted] = True
    removed = corpus.num_documents - unchanged - changed
    return Difference(added, changed, removed, unchanged, imports, np.flatnonzero(~is_unchanged))


def _parsed_chunks(source: ImportSource, options: ImportOptions) -> Iterator[tuple[CorpusChunk, pa.Table]]:
    """Yields each chunk of a source with its passages, as an import makes them. Raises InputError for bad rows."""
    for chunk in cut_into_chunks(source, options.part_size, split=options.split):
        yield chunk, parse_corpus(source.format, chunk, options.filters, options.split)


def _is_first(firsts: np.ndarray, is_met: np.ndarray) -> np.ndarray:
    """Returns whether each document is the first one of the source that has its id: bool [n].

    Args:
        firsts: The row of the first passage in the corpus, int64 [n]; -1 for an id that the corpus lacks, which counts
            as the first one.
        is_met: Whether an earlier chunk had the document that begins at this row of the corpus: bool [rows].
    """
    known = np.flatnonzero(firsts >= 0)
    is_first = firsts < 0
    _, places = np.unique(firsts[known], return_index=True)
    candidates = known[places]
    is_first[candidates] = ~is_met[firsts[candidates]]
    return is_first


def _document_hashes(table: pa.Table, starts: np.ndarray, seed: int) -> np.ndarray:
    """Returns a hash of the titles and texts of each document, whose first passages are at `starts`: uint64 [n]."""
    titles, texts = table["title"].to_pylist(), table["text"].to_pylist()
    ends = np.append(starts, len(table))[1:].tolist()
    pieces = ((titles[first:end], texts[first:end]) for first, end in zip(starts.tolist(), ends, strict=True))
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(orjson.dumps(piece), seed) for piece in pieces), np.uint64, len(starts))


def _repeated_id_error(chunk: CorpusChunk, id: str, *, drop_duplicates: bool) -> InputError:
    """Returns the error for a second row with the id of a passage of the corpus."""
    place = f"{chunk.pieces[0].file}:{chunk.pieces[0].first_line} or after"
    if drop_duplicates:
        return InputError(
            f"{place}: id {short_repr(id)} comes a second time with another title or text; rename or remove one"
        )
    return InputError(
        f"{place}: id {short_repr(id)} comes a second time; remove one, or leave the later one out by "
        f"{Parameter('drop_duplicates')} if title and text are equal"
    )


class StoredHashes:
    """Hashes of the ids and contents of all rows of a corpus, and its documents by id.

    All parts are read once, in their order; so the order of the source does not matter afterwards. The hashes are in a
    temporary file, 16 bytes for each row, which is memory-mapped.

    Attributes:
        seed: The seed of the hashes. It is random, so that an author cannot prepare two texts with equal hashes.
        contents: The `_content_hashes` of the rows: uint64 [rows]; 0 for a part without live rows.
    """

    def __init__(self, corpus: Corpus):
        self._corpus, self.seed = corpus, secrets.randbits(64)
        starts = [np.empty(0, np.int64)]
        folder = Path(tempfile.gettempdir())
        with explain_disk_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
            for part in corpus.parts:
                hashes = np.zeros((part.part.rows, 2), np.uint64)
                starts.append(np.array([part.first_row]))
                deleted = np.searchsorted(corpus.deleted, [part.first_row, part.end])
                if deleted[1] - deleted[0] < part.part.rows:
                    table = open_table(part)
                    hashes[:, 0] = hash_texts(table["id"], self.seed)
                    hashes[:, 1] = _content_hashes(table, self.seed)
                    if corpus.is_split:
                        starts.append(part.first_row + document_starts(table)[1:])
                file.write(hashes.data)
            file.flush()
            self._ids, self.contents = np.memmap(file, np.uint64, "r", shape=(corpus.num_rows, 2)).T
        self._starts = np.append(np.concatenate(starts), corpus.num_rows)

    def find(self, ids: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first row and the end row (exclusive) of documents: two int64 [n]; -1 for an unknown one.

        Args:
            ids: The ids of the first passages of the documents.
        """
        seconds = hash_texts(ids, self.seed)
        firsts = self._corpus.rows_with_hashes(
            hash_texts(ids), lambda positions, rows: self._ids[rows] == seconds[positions]
        )
        ends = firsts + 1
        if self._corpus.is_split:
            ends = self._starts[np.searchsorted(self._starts[:-1], firsts, side="right")]
        return firsts, np.where(firsts < 0, -1, ends)


def _content_hashes(table: pa.Table, seed: int) -> np.ndarray:
    """Returns a hash of the title, text and metadata of each passage: uint64 [n]."""
    title, text, metadata = (table[name].cast(pa.large_string()) for name in PASSAGE_COLUMNS[1:])
    lengths = [pc.binary_length(column).cast(pa.large_string()) for column in (title, text)]
    if any(values := metadata.to_pylist()):
        metadata = pa.chunked_array([pa.array(map(_ordered, values), pa.large_string())])
    columns = (column.combine_chunks() for column in (*lengths, title, text, metadata))
    joined = pc.binary_join_element_wise(*columns, pa.scalar(" ", pa.large_string()))
    return hash_texts(joined, seed)


def _ordered(metadata: str) -> str:
    """Returns metadata with the fields in the order of their names, as another order is no difference."""
    return orjson.dumps(orjson.loads(metadata), option=orjson.OPT_SORT_KEYS).decode() if metadata else ""


def content_digest(table: pa.Table) -> str:
    """Returns a digest of the ids, titles, texts and metadata of passages."""
    digest = xxhash.xxh3_128()
    for name in PASSAGE_COLUMNS:
        ends, data = text_bytes(table[name])
        digest.update((ends - ends[:1]).tobytes())
        digest.update(memoryview(data)[int(ends[0]) : int(ends[-1])])
    return digest.hexdigest()
