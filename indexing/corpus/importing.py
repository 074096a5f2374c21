"""Imports raw files as a corpus generation: parses chunks in parallel, checks that ids are unique, records deletions.

An import that bad input ends leaves nothing visible and nothing that blocks the next one. The first rows are parsed
before anything is written; if a later row is refused, the generation is marked as failed, and the next import
replaces it (indexing/store/draft.py). An import that was killed keeps its parts for the same command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus, document_starts, save_array, write_table
from riptide.indexing.corpus.duplicates import merge_ids
from riptide.indexing.corpus.filters import check_field_names
from riptide.indexing.corpus.ids import num_buckets, sorted_hashes
from riptide.indexing.files.listing import file_identity
from riptide.indexing.files.raw import FilePiece, Lines, no_rows_error, short_repr
from riptide.indexing.files.rows import LISTED_ROWS, BadRows, text_lines
from riptide.indexing.files.splitting import DocumentSplit
from riptide.indexing.files.titles import title_facts
from riptide.indexing.formats.chunking import CorpusChunk, cut_into_chunks
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.formats.parse import check_filter_types, parse_corpus
from riptide.indexing.formats.sources import ImportSource
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.conflicts import TakenNameError, describe_changes
from riptide.indexing.store.draft import Draft, remove_command
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store, generation
from riptide.indexing.work.work import (
    ArtifactTarget,
    BaseStage,
    BaseWork,
    Committed,
    DriverStage,
    Progress,
    ProgressCounter,
    SpreadStage,
    WorkUnit,
)
from riptide.indexing.work.worker_tasks import ONE_CORE, PYTHON_CORE, Allocation, Report, Runner, WorkerResources

FIRST_ROWS = 100  # rows that are parsed and checked before a generation begins
CHECKED_BYTES = 64 << 20  # bytes of the source that are read before a generation begins, if a first row is bad
MAX_FIELDS = 20  # metadata fields that an error shows


@dataclass(frozen=True)
class ImportOptions:
    """The import options that determine the contents of a corpus generation."""

    part_size: int = 10_000  # maximum rows per part; an encoding worker takes 30 to 60 s for them
    filters: Mapping[str, str] = field(default_factory=dict)  # metadata field -> type of its filter column
    limit: int | None = None
    drop_duplicates: bool = False  # drop a passage if an earlier one has its id, title and text
    skip_invalid: bool = False  # leave out bad rows; the notes count and list them
    split: DocumentSplit | None = (
        None  # how documents are split into passages; later generations use the split of the first
    )


class ImportCorpusWork(BaseWork):
    """The work that makes a store's first corpus generation, or (append, delete) its next one.

    Attributes:
        is_complete: Whether the generation exists already.
    """

    def __init__(
        self,
        store: Store,
        source: ImportSource | None,
        options: ImportOptions,
        *,
        append: bool,
        delete: str | None = None,
        sync: bool = False,
    ):
        """Checks the options and the first rows.

        Args:
            store: The store to import into.
            source: The raw files; None if passages are only deleted.
            options: The options that shape the generation.
            append: Whether the source is added to the existing corpus.
            delete: A file of ids, one per line; an id may be deleted and added again in one command.
            sync: Whether the generation makes the corpus equal to the source (`SyncCorpusWork`).

        Raises:
            InputError: If the store holds another corpus, or if the options or the first rows are bad.
        """
        self.previous = store.generations("corpus")
        if self.previous:
            existing = self.previous[-1 if append or delete is not None else 0]
            options = replace(options, filters=_require_same_filters(existing, self.previous[-1], options.filters))
        else:
            check_field_names(options.filters)
        grows = append or delete is not None
        if self.previous and grows:
            options = replace(options, split=_require_same_split(self.previous[0], options.split))
        check_filter_types(options.filters)
        self.source, self.options = source, options
        self.config: dict[str, Any] = {
            "format": source.format.name if source else None,
            "part_size": options.part_size,
            "filters": dict(options.filters),
            "limit": options.limit,
            "source": [source.format.identity(file) for file in source.corpus] if source else [],
            "delete": file_identity(delete) if delete else None,
        }
        if source and source.columns:
            self.config["columns"] = source.columns.config
        if source and source.titles:
            self.config["titles"] = [file_identity(source.titles)]
        if options.split:
            self.config["split"] = asdict(options.split)
        if options.drop_duplicates:
            self.config["drop_duplicates"] = True
        if options.skip_invalid:
            self.config["skip_invalid"] = True
        done = self.previous[1:][-1:] if grows else self.previous[:1]
        # A file's identity is that of a sample, so a source that is to be compared may differ from an equal one.
        self.is_complete = not sync and any(artifact.config == self.config for artifact in done)
        self.earlier_corpus = Corpus(self.previous)
        self.deleted: np.ndarray | None = None
        if self.is_complete:
            return
        if self.previous and not grows:
            changes = describe_changes(self.previous[0].config, self.config)
            raise TakenNameError(
                f"{self.previous[0].url} was imported otherwise ({changes}); append to it, import into another store, "
                f"or remove it first: {remove_command(store.storage, 'corpus')}"
            )
        if not self.previous and grows:
            raise InputError(f"{store.url} has no corpus yet: import one first, without append and delete")
        if delete:
            self.deleted = rows_to_delete(self.earlier_corpus, delete)
        if source:
            _check_first_rows(source, options)

    @property
    def newest_name(self) -> str:
        """The name of the newest generation after the import."""
        return generation(len(self.previous) - self.is_complete)

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the generation to make; [] if it is complete. After bad input, the next import starts it again."""
        if self.is_complete:
            return []
        target = ArtifactTarget(
            "corpus",
            generation(len(self.previous)),
            {"previous": self.previous[-1]} if self.previous else {},
            self.config,
            by_content=True,
            fails_whole=True,
        )
        return [target]

    @property
    def stages(self) -> list[SpreadStage | DriverStage]:
        """Returns the stages: recording deletions, parsing, and merging ids, which finds those that occur twice."""
        stages: list[SpreadStage | DriverStage] = []
        if self.deleted is not None:
            stages.append(DeleteStage(self.deleted))
        if self.source:
            stages += [ParseStage(self.source, self.options), MergeIdsStage(self.earlier_corpus, self.options)]
        return stages

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Adds the number and the list of the bad rows that were left out to the notes."""
        for draft in drafts:
            draft.add_notes(**_bad_rows_of(draft.committed_parts()).notes())


@dataclass(frozen=True)
class DeleteStage(BaseStage):
    """The stage that records which rows the generation deletes. rows: int64 [n]."""

    rows: np.ndarray
    title: str = "delete"
    noun: str = "passages"

    @property
    def total(self) -> int:
        """The number of deleted passages."""
        return len(self.rows)

    def units(self, committed_parts: Committed) -> list[WorkUnit]:
        """Returns the only unit, which commits the deleted rows."""
        return [WorkUnit(("deleted",), len(self.rows), None)]

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Commits the file of deleted rows."""
        draft.commit("deleted", ".npy", lambda path: save_array(self.rows, path), rows=len(self.rows))
        counter.count(len(self.rows))


@dataclass(frozen=True)
class ParseStage(BaseStage):
    """The stage that parses the source, one unit for each chunk."""

    source: ImportSource
    options: ImportOptions
    title: str = "import"
    noun: str = "passages"
    total: int | None = None

    def units(self, committed_parts: Committed) -> Iterator[WorkUnit]:
        """Yields a unit for each chunk. It is a generator, so the raw text of only a few chunks is in memory."""
        options = self.options
        for chunk in cut_into_chunks(self.source, options.part_size, limit=options.limit, split=options.split):
            names = (f"part-{chunk.index:05d}", f"hashes-{chunk.index:05d}")
            size = sum(len(piece.data) for piece in chunk.pieces if piece.data is not None)
            part = committed_parts[0].get(names[0])
            rows = part.rows if part else sum(piece.rows for piece in chunk.pieces)
            yield WorkUnit(names, rows, chunk, size_bytes=size)

    def check(self, unit: WorkUnit, parts: Sequence[ArtifactPart]) -> None:
        """Raises InputError if the raw lines or titles of a chunk have changed since its part was made."""
        pieces, part = unit.payload.pieces, parts[0]
        expected = {} if unit.payload.titles is None else title_facts(unit.payload.titles)
        if [piece[1:] for piece in part.facts["source"]] != [[p.first_line, p.rows, hash_lines(p)] for p in pieces] or (
            any(part.facts.get(name) != value for name, value in expected.items())
        ):
            raise InputError(
                f"{pieces[0].file}:{pieces[0].first_line}: changed since {part.name} was made; import again to start "
                "from the beginning"
            )

    def count_rows(self, unit: WorkUnit, result: int) -> int:
        """Returns the number of passages of a parsed chunk; a KILT page or a split document has several per row."""
        return result

    def task(self, drafts: Sequence[Draft]) -> ParseTask:
        """Returns the task that each worker runs."""
        return ParseTask(drafts[0], self.source.format, dict(self.options.filters), self.options.split)


@dataclass(frozen=True)
class ParseTask:
    """The task that parses a chunk and commits the part of passages and the sorted hashes of the ids."""

    draft: Draft
    format: CorpusFormat
    filters: Mapping[str, str]
    split: DocumentSplit | None
    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], int]:
        """Returns the function that processes a work unit."""
        return lambda unit, report: import_part(unit.payload, self.draft, self.format, self.filters, self.split)


@dataclass(frozen=True)
class MergeIdsStage(BaseStage):
    """The stage that merges the hashes of all ids into buckets and finds ids that occur twice."""

    earlier_corpus: Corpus
    options: ImportOptions
    title: str = "check ids"
    noun: str = "ids"
    total: int | None = None

    def units(self, committed_parts: Committed) -> list[WorkUnit]:
        """Returns a unit for each bucket.

        Raises:
            InputError: If a row is bad and not to be left out, if there are no passages, or for a filter without
                values.
        """
        bad_rows = _bad_rows_of(committed_parts[0])
        if not self.options.skip_invalid:
            bad_rows.refuse()
        if not self.earlier_corpus.generations:
            parts = [part.facts for name, part in committed_parts[0].items() if name.startswith("part-")]
            refuse_filters_without_values(parts, self.options.filters)
        total = sum(part.rows for name, part in committed_parts[0].items() if name.startswith("part-"))
        if total == 0:
            bad_rows.refuse(remedy="none can be imported; correct them")
            raise InputError("the source has no passages: expected at least one")
        buckets = num_buckets(total)
        kinds = ("ids", "dropped") if self.options.drop_duplicates else ("ids",)
        return [
            WorkUnit(tuple(f"{kind}-{bucket:05d}" for kind in kinds), total // buckets, (bucket, buckets))
            for bucket in range(buckets)
        ]

    def task(self, drafts: Sequence[Draft]) -> MergeIdsTask:
        """Returns the task that each worker runs."""
        return MergeIdsTask(
            drafts[0], drafts[0].committed_parts(), self.earlier_corpus.generations, self.options.drop_duplicates
        )


@dataclass(frozen=True)
class MergeIdsTask:
    """The task that merges and commits the id hashes of a bucket, and checks them for duplicates."""

    draft: Draft
    committed: Mapping[str, ArtifactPart]
    previous: Sequence[Artifact]
    drop_duplicates: bool
    resources: WorkerResources = ONE_CORE

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Returns the function that processes a work unit."""
        return self._merge

    def _merge(self, unit: WorkUnit, report: Report) -> None:
        bucket, buckets = unit.payload
        merge_ids(bucket, self.draft, self.committed, self.previous, buckets, drop_duplicates=self.drop_duplicates)


def import_part(
    chunk: CorpusChunk, draft: Draft, format: CorpusFormat, filters: Mapping[str, str], split: DocumentSplit | None
) -> int:
    """Parses a chunk, commits the passages and the sorted hashes of their ids, and returns the number of passages.

    Bad rows are left out. They are facts of the part, and are refused after all parts are made unless the import skips
    them, so that the error lists those of all parts.
    """
    bad_rows = BadRows()
    table = parse_corpus(format, chunk, filters, split, bad_rows)
    pieces = [[piece.file, piece.first_line, piece.rows, hash_lines(piece)] for piece in chunk.pieces]
    facts: dict[str, Any] = {"source": pieces, **unused_filter_facts(table, filters), **bad_rows.facts()}
    if 0 < bad_rows.count <= LISTED_ROWS:
        facts["skipped_positions"] = bad_rows.positions  # duplicates.py computes the lines of the other rows from them
    if chunk.titles is not None:
        facts |= title_facts(chunk.titles)
    if chunk.columns and chunk.columns.table.delimiter:
        facts["delimiter"] = chunk.columns.table.delimiter  # rows may span several lines, which duplicates.py counts
    return commit_passages(draft, chunk.index, table, facts, is_split=split is not None)


def commit_passages(draft: Draft, number: int, table: pa.Table, facts: dict[str, Any], *, is_split: bool) -> int:
    """Commits a part of passages and the sorted hashes of their ids; returns the number of passages.

    Args:
        draft: The draft of the generation.
        number: The number of the part.
        table: The passages.
        facts: Facts of the part's record.
        is_split: Whether the passages are those of documents that were split.
    """
    if is_split:
        facts["documents"] = len(document_starts(table))
    name = f"{number:05d}"
    draft.commit(
        f"part-{name}", ".arrow", lambda path: write_table(table, path), rows=len(table), has_ranges=True, **facts
    )
    hashes = sorted_hashes(table.column("id").to_pylist())
    draft.commit(f"hashes-{name}", ".npy", lambda path: save_array(hashes, path), rows=len(table))
    return len(table)


def _check_first_rows(source: ImportSource, options: ImportOptions) -> None:
    """Raises InputError if one of the first FIRST_ROWS rows is bad, unless `skip_invalid`, or if the source has no row.

    The error lists the bad rows of the first CHECKED_BYTES.
    """
    bad_rows = BadRows()
    first = next(cut_into_chunks(source, min(FIRST_ROWS, options.limit or FIRST_ROWS), split=options.split))
    parse_corpus(source.format, first, options.filters, options.split, bad_rows)
    if options.skip_invalid or not bad_rows.count:
        return
    bad_rows, size, scope = BadRows(), 0, ""
    for chunk in cut_into_chunks(source, options.part_size, limit=options.limit, split=options.split):
        if size > CHECKED_BYTES:
            scope = f" in the first {size >> 20:,} MiB"
            break
        parse_corpus(source.format, chunk, options.filters, options.split, bad_rows)
        size += sum(piece.size for piece in chunk.pieces)
    bad_rows.refuse(scope)


def _bad_rows_of(committed: Mapping[str, ArtifactPart]) -> BadRows:
    """Collects the bad rows that the facts of a generation's parts record."""
    bad_rows = BadRows()
    for name in sorted(committed):
        bad_rows.extend(committed[name].facts)
    return bad_rows


def unused_filter_facts(table: pa.Table, filters: Mapping[str, str]) -> dict[str, Any]:
    """Returns facts of a part: its filters without any value and its metadata fields; {} if all filters have values."""
    empty = sorted(name for name in filters if table[f"filter.{name}"].null_count == len(table))
    if not empty:
        return {}
    objects = (orjson.loads(text) for text in table["metadata"].to_pylist() if text)
    fields = sorted({path for metadata in objects for path in _field_paths(metadata)})
    return {"filters_without_values": empty, "fields": [name[:100] for name in fields[:MAX_FIELDS]]}


def _field_paths(metadata: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the field names that filters accept; fields of nested objects are paths such as meta.lang."""
    for name, value in metadata.items():
        if isinstance(value, dict):
            yield from _field_paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def refuse_filters_without_values(facts: Sequence[Mapping[str, Any]], filters: Mapping[str, str]) -> None:
    """Raises InputError if no passage has a value for a filter. facts: the `unused_filter_facts` of each part.

    Appended passages are not checked. They may all lack a field: their column is null.
    """
    for name in filters:
        if facts and all(name in fact.get("filters_without_values", ()) for fact in facts):
            fields = sorted({each for fact in facts for each in fact["fields"]})
            more = ", ..." if len(fields) > MAX_FIELDS else ""  # a part records at most MAX_FIELDS
            shown = ", ".join(fields[:MAX_FIELDS]) + more or "(no passage has metadata)"
            similar = next((f"; did you mean {each}?" for each in fields if each.endswith(f".{name}")), "")
            raise InputError(
                f"filter {name}: found no passage with a value in the metadata field {name!r}, expected one of the "
                f"fields {shown}; correct the name or leave the filter out{similar}"
            )


def _require_same_filters(
    generation: Artifact, latest_generation: Artifact, filters: Mapping[str, str]
) -> Mapping[str, str]:
    """Checks requested filters against an existing generation, and returns the filters of this generation.

    Raises:
        InputError: For filters that neither this generation nor the latest one has.
    """
    expected: Mapping[str, str] = generation.config["filters"]
    if filters and dict(filters) not in (expected, latest_generation.config["filters"]):
        raise InputError(
            f"filters {dict(filters)}: {latest_generation.url} has the filters "
            f"{latest_generation.config['filters']}; leave them out, or first run the import with these filters "
            "and without a source, which replaces those of the corpus"
        )
    return expected


def _require_same_split(first_generation: Artifact, split: DocumentSplit | None) -> DocumentSplit | None:
    """Returns the split of the first generation, which later ones use. Raises InputError if another is requested."""
    existing = DocumentSplit(**first_generation.config["split"]) if "split" in first_generation.config else None
    if split is not None and split != existing:
        actual = f"with {existing}" if existing else f"without {Parameter('split_words')}"
        raise InputError(
            f"{split}: {first_generation.url} was imported {actual}; leave the options out, or import into another "
            "store"
        )
    return existing


def hash_lines(piece: FilePiece) -> str:
    """Returns a hash of the raw lines of a piece; "" for Parquet and folders, whose rows only a worker reads."""
    return xxhash.xxh3_128_hexdigest(piece.data) if piece.data is not None else ""


def rows_to_delete(earlier_corpus: Corpus, delete: str) -> np.ndarray:
    """Reads ids to delete from a file, one per line, and returns their corpus rows: int64, ascending.

    In a split corpus the ids are ids of documents, and all passages of each are deleted. An id with a line break cannot
    be given.

    Raises InputError that names the line of an unknown id.
    """
    deleted: list[np.ndarray] = []
    unknown: list[tuple[int, str]] = []
    for lines in read_ids(delete):
        firsts, ends = earlier_corpus.rows_of_documents([id for _, id in lines])
        unknown += [lines[number] for number in np.flatnonzero(firsts < 0).tolist()]
        deleted.append(np.concatenate(list(map(np.arange, firsts, ends))))
    refuse_unknown_ids(delete, unknown, "deleted")
    return np.unique(np.concatenate(deleted))


def read_ids(file: str) -> Iterator[list[tuple[int, str]]]:
    """Yields (line number, id) of blocks of lines of a file of ids. Raises InputError if it has none."""
    lines, is_empty = Lines(file), True
    while piece := lines.take(1 << 20):
        is_empty = False
        yield list(text_lines(piece))
    if is_empty:
        raise no_rows_error(file)


def refuse_unknown_ids(file: str, unknown: Sequence[tuple[int, str]], state: str) -> None:
    """Raises InputError if a file names unknown ids.

    Args:
        file: The file.
        unknown: (line number, id) of each.
        state: What may have happened to their passages before, for the message.
    """
    if unknown:
        line, id = unknown[0]
        more = f", nor are {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise InputError(
            f"{file}:{line}: id {short_repr(id)} is not in the corpus (or {state} already){more}; remove the line"
        )
