"""Query sets: queries/NAME holds the queries, and the judgements (qrels) of each split."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from riptide.base.arguments import refuse_unknown_names
from riptide.base.errors import InputError, RowError
from riptide.base.wording import Parameter, list_first, printable
from riptide.indexing.corpus.corpus import Corpus, write_table
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.files.listing import file_identity
from riptide.indexing.files.qrels import read_qrels
from riptide.indexing.files.raw import short_repr
from riptide.indexing.files.rows import BadRows
from riptide.indexing.formats.parse import read_queries
from riptide.indexing.formats.sources import ImportSource
from riptide.indexing.queries.hold_out import HoldOut
from riptide.indexing.queries.provenance import NONE, judge_passages
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.conflicts import TakenNameError, describe_changes
from riptide.indexing.store.draft import Draft, remove_command
from riptide.indexing.store.store import Store, artifact_key, check_name
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import (
    ArtifactTarget,
    BaseStage,
    BaseWork,
    Committed,
    Progress,
    ProgressCounter,
    WorkUnit,
    run_work,
)
from riptide.indexing.work.worker_tasks import Runner

ALL = "all"  # name of the split with all queries, which every query set has


class SplitQueries(NamedTuple):
    """The ids and texts of the queries of a split, in file order."""

    ids: list[str]
    texts: list[str]


@refuse_unknown_names
class Queries:
    """Reads a complete query set: queries, and the judgements of each split."""

    def __init__(self, artifact: Artifact):
        self.artifact = artifact
        self.splits = sorted(part.name.removeprefix("qrels-") for part in _qrels_parts(artifact))

    @classmethod
    def open(cls, store: Store, name: str | None = None) -> Queries:
        """Opens a query set. `name` may be left out if the store has only one. Raises InputError if it is missing."""
        return cls(store.open("queries", store.only_name("queries", name)))

    def __repr__(self) -> str:
        return f"Queries({self.artifact.name!r}, splits={self.splits})"

    @property
    def table(self) -> pa.Table:
        """All queries as a table with the columns id, text and metadata (JSON text or "")."""
        parts = [
            pa.ipc.open_file(pa.memory_map(str(self.artifact.local_path(p)))).read_all()
            for p in self.artifact.numbered_parts("part")
        ]
        return pa.concat_tables(parts)

    def split(self, split: str, limit: int | None = None) -> SplitQueries:
        """Returns the queries that a split judges (for "all", every query), in file order.

        Args:
            split: A split of the query set, or "all" for every query.
            limit: Number of queries to take from the start; None: all.

        Raises:
            InputError: If the query set has no such split.
        """
        return self.select(None if split == ALL else self.qrels(split), limit)

    def select(self, qrels: pa.Table | None, limit: int | None = None) -> SplitQueries:
        """Returns the queries that a table of judgements names, in file order.

        Args:
            qrels: A table as `qrels` returns it; None: every query is returned.
            limit: Number of queries to take from the start; None: all.
        """
        table = self.table.select(["id", "text"])
        if qrels is not None:
            table = table.filter(pc.is_in(table["id"], qrels["query_id"].combine_chunks().unique()))
        table = table.slice(0, limit)
        return SplitQueries(table["id"].to_pylist(), table["text"].to_pylist())

    def filters(self, ids: Sequence[str], field: str, columns: Mapping[str, pa.DataType]) -> list[Filter | None]:
        """Returns the filter of each query, from a field of its metadata; None if it is missing, null or "".

        Args:
            ids: The queries.
            field: The metadata field.
            columns: The types of the filters that the corpus has (`filter_columns`).

        Raises:
            InputError: If no query has the field, or if a filter does not parse; the message names the query.
        """
        table = self.table
        metadata = dict(zip(table["id"].to_pylist(), table["metadata"].to_pylist(), strict=True))
        fields = [json.loads(metadata[id] or "{}") for id in ids]
        if not any(field in each for each in fields):
            names = list_first(sorted({name for each in fields for name in each}))
            raise InputError(
                f"{self.artifact.key}: no query has a filter in the metadata field {field!r}, expected one of "
                f"{names or 'none'}; name the field, or import the queries with their filters"
            )
        filters = list[Filter | None]()
        for id, each in zip(ids, fields, strict=True):
            try:
                filters.append(None if each.get(field) in (None, "") else Filter.parse(each[field], columns))
            except InputError as error:
                reason = str(error).removeprefix("filter: ")
                raise InputError(f"{self.artifact.key}: query {short_repr(id)}: {field}: {reason}") from error
        return filters

    def require_split(self, split: str) -> None:
        """Raises InputError if the query set has no judgements of a split."""
        if split not in self.splits:
            have = ", ".join(self.splits) or "no split"
            raise InputError(
                f"{self.artifact.url}: no split {split!r} with qrels; it has {have} (and {ALL}, without qrels)"
            )

    def qrels(self, split: str) -> pa.Table:
        """Returns the judgements of a split as a table with the columns query_id, corpus_id and score (int32).

        Raises:
            InputError: If the query set has no such split.
        """
        table = self._read_qrels(split)
        return table.drop_columns(["rows"]) if "rows" in table.column_names else table

    def judged_rows(self, split: str) -> list[list[int]] | None:
        """Returns the rows of the relevant passages of each judged document, in the order of `qrels`.

        A document without rows is judged as a whole. None: every document is, or every passage is a document.
        """
        table = self._read_qrels(split)
        return table["rows"].to_pylist() if "rows" in table.column_names else None

    def _read_qrels(self, split: str) -> pa.Table:
        self.require_split(split)
        # pq.read_table would import pyarrow.dataset, which takes 0.3 s.
        with pq.ParquetFile(self.artifact.local_path(f"qrels-{split}")) as file:
            return file.read()


@dataclass(frozen=True)
class QueryImportOptions:
    """Options of an import of queries.

    Attributes:
        limit: Number of queries to take from the start; None: all.
        hold_out: Queries that are moved to a new split; None: none.
        skip_unknown: Whether to leave out judgements of unknown queries and passages; the notes of the artifact count
            them.
        skip_invalid: Whether to leave out bad rows, and judgements as `skip_unknown` does; the notes count and list
            them.
        provenance: Whether the provenance of queries judges passages: "span", "page" or "none", as `judge_passages`
            takes it.
    """

    limit: int | None = None
    hold_out: HoldOut | None = None
    skip_unknown: bool = False
    skip_invalid: bool = False
    provenance: str = NONE

    @property
    def counts_unknown(self) -> bool:
        """Whether judgements of unknown queries and passages are left out and counted."""
        return self.skip_unknown or self.skip_invalid

    def leaves_out_unknown(self, is_limited: bool) -> bool:
        """Returns whether judgements of unknown queries and passages are left out; always True if a limit applies."""
        return is_limited or self.limit is not None or self.counts_unknown

    def config(self) -> dict[str, Any]:
        """Returns the options as the configuration of a query set records them."""
        config: dict[str, Any] = {"limit": self.limit}
        if self.counts_unknown:
            config["skip_unknown"] = True
        if self.hold_out:
            config |= {
                "hold_out": self.hold_out.queries,
                "hold_out_split": self.hold_out.split,
                "hold_out_seed": self.hold_out.seed,
            }
        if self.skip_invalid:
            config["skip_invalid"] = True
        if self.provenance != NONE:
            config["provenance"] = self.provenance
        return config


ALL_QUERIES = QueryImportOptions()


@dataclass(frozen=True)
class JudgedQueries:
    """Queries and their judgements, before the judged passages are looked up in a corpus.

    Attributes:
        queries: The queries, as `parse.read_queries` returns them.
        qrels: The judgements of these queries by split, as `parse.read_qrels` returns them, without repetitions.
        num_skipped: Number of judgements of other queries, which are left out.
        bad_rows: The rows that are left out.
    """

    queries: pa.Table
    qrels: Mapping[str, pa.Table]
    num_skipped: int = 0
    bad_rows: BadRows = field(default_factory=BadRows)


def read_judged_queries(
    source: ImportSource, options: QueryImportOptions = ALL_QUERIES, *, is_limited: bool = False
) -> JudgedQueries:
    """Reads the query and qrels files of a source and makes all checks that need no corpus.

    Args:
        source: The source of the queries.
        options: The options of the import.
        is_limited: Whether the corpus is imported with a limit: judgements of unknown queries are left out then.

    Raises:
        InputError: With file and line, for bad rows, a repeated query id, an unknown query, and if one split judges
            a query and a passage twice with different scores. If all queries are left out.
    """
    check_splits(source)
    bad_rows = BadRows()
    queries, tables = read_queries(source, bad_rows)
    queries = queries.slice(0, options.limit)
    ids = queries["id"].to_pylist()
    _refuse_repeated_ids(source, ids)
    read = {}
    for split, file in sorted(source.qrels.items()):
        table = tables[split] if split in tables else read_qrels(file, bad_rows)
        read[split] = _without_repetitions(file, table, bad_rows)
    if not options.skip_invalid:
        bad_rows.refuse()
    elif not ids:
        bad_rows.refuse(remedy="no query can be imported; correct them")
    qrels, num_skipped = {}, 0
    for split, table in read.items():
        known = pc.is_in(table["query_id"], pa.array(ids, pa.string())).to_numpy()
        if not options.leaves_out_unknown(is_limited):
            _refuse_unknown(source.qrels[split], table, "query_id", known, "query", "the query file")
        qrels[split] = table.filter(pa.array(known))
        num_skipped += int((~known).sum())
    return JudgedQueries(queries, qrels, num_skipped, bad_rows)


def import_queries(
    store: Store,
    source: ImportSource,
    name: str,
    options: QueryImportOptions = ALL_QUERIES,
    *,
    judged: JudgedQueries | None = None,
) -> Queries:
    """Commits queries/NAME from the query and qrels files of a source, or returns it if it is complete.

    Every judged query and passage must be known, except with `skip_unknown`. With `limit`, or over a corpus that was
    imported with one, judgements of excluded queries and passages are excluded too. A judgement that is repeated with
    the same score counts once.

    Everything is read and checked before the artifact begins: bad input leaves nothing that blocks the next import.

    Args:
        store: The store, with its corpus.
        source: The source of the queries.
        name: Name of the query set.
        options: The options of the import.
        judged: The result of `read_judged_queries` for this source and options; None: the files are read here.

    Returns:
        The query set.

    Raises:
        InputError: With file and line, for a bad row, for an unknown query or passage, and if one split judges a query
            and a passage twice with different scores. Also if `name` or a split is not a valid artifact name.
    """
    if (existing := find_complete_queries(store, source, name, options)) is not None:
        return existing
    run_work(store, open_queries_work(store, source, name, options, judged=judged), LocalRunner(cores=1))
    return Queries.open(store, name)


def open_queries_work(
    store: Store,
    source: ImportSource,
    name: str,
    options: QueryImportOptions = ALL_QUERIES,
    *,
    judged: JudgedQueries | None = None,
) -> CommitQueriesWork:
    """Reads and checks queries and judgements, and returns the work that commits them. See `import_queries`."""
    check_name("queries", name)
    check_splits(source)
    corpus = Corpus.open(store)
    is_limited = any(g.config["limit"] is not None for g in corpus.generations)
    judged = judged or read_judged_queries(source, options, is_limited=is_limited)
    partial = options.leaves_out_unknown(is_limited)
    qrels = {
        split: _known_judgements(source.qrels[split], table, corpus, partial) for split, table in judged.qrels.items()
    }
    num_judgements = [sum(map(len, tables.values())) for tables in (judged.qrels, qrels)]
    skipped = {"unknown_query": judged.num_skipped, "unknown_passage": num_judgements[0] - num_judgements[1]}
    notes = judged.bad_rows.notes()
    if options.provenance != NONE:
        judgements = judge_passages(source.queries[0], judged.queries, corpus, options.provenance, partial=partial)
        skipped["unknown_passage"] += judgements.num_missing
        notes["provenance"] = {"spans": judgements.num_spans, "pages": judgements.num_pages}
        if len(judgements.qrels):
            qrels[source.provenance_split] = judgements.qrels
    if options.hold_out:
        qrels = options.hold_out.apply(qrels)
    inputs = {"corpus": _judged_generation(corpus, qrels.values())}
    target = ArtifactTarget("queries", name, inputs, _queries_config(source, options), by_content=True)
    notes |= {"skipped_judgements": skipped} if options.counts_unknown else {}
    return CommitQueriesWork(target, judged.queries, qrels, notes)


def find_complete_queries(
    store: Store, source: ImportSource, name: str, options: QueryImportOptions = ALL_QUERIES
) -> Queries | None:
    """Returns queries/NAME if it is complete, else None. Raises InputError if its source or options differ."""
    config = _queries_config(source, options)
    if name not in store.names("queries"):
        return None
    existing = Queries.open(store, name)
    if existing.artifact.config != config:
        changed = describe_changes(existing.artifact.config, config)
        raise TakenNameError(
            f"{existing.artifact.url} was imported otherwise ({changed}): give it another name, or, if "
            f"nobody needs it, remove it: {remove_command(store.storage, existing.artifact.key)}"
        )
    return existing


def _queries_config(source: ImportSource, options: QueryImportOptions) -> dict[str, Any]:
    """Returns the configuration of a query set: format, source files, options and columns."""
    files = dict.fromkeys([*source.queries, *source.qrels.values()])  # one table can hold queries and judgements
    config = {"format": source.format.name, "source": [file_identity(file) for file in files], **options.config()}
    if source.query_columns:
        config["columns"] = source.query_columns.config | {"splits": sorted(source.qrels)}
    elif options.provenance != NONE:
        config["splits"] = [source.provenance_split]
    elif not source.has_own_qrels:  # otherwise the names of the qrels files contain the splits
        config["splits"] = sorted(source.qrels)
    return config


@dataclass(frozen=True)
class CommitQueriesWork(BaseWork, BaseStage):
    """The work that commits checked queries and the judgements of each split, in a single unit."""

    target: ArtifactTarget
    queries: pa.Table
    qrels: Mapping[str, pa.Table]
    notes: Mapping[str, Any] = field(default_factory=dict)
    title: str = "import queries"
    noun: str = "queries"

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the query set to commit."""
        return [self.target]

    @property
    def stages(self) -> list[CommitQueriesWork]:
        """Returns this object, which is the only stage."""
        return [self]

    @property
    def total(self) -> int:
        """The number of queries."""
        return len(self.queries)

    def units(self, committed_parts: Committed) -> list[WorkUnit]:
        """Returns the only unit, which commits the queries and the judgements of all splits."""
        splits = (f"qrels-{split}" for split, table in self.qrels.items() if len(table))
        return [WorkUnit(("part-00000", *splits), len(self.queries), None)]

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Commits the tables of queries and judgements that are not committed yet."""
        for name in missing_names:
            if name == "part-00000":
                draft.commit(name, ".arrow", lambda path: write_table(self.queries, path), rows=len(self.queries))
            else:
                table = self.qrels[name.removeprefix("qrels-")]
                draft.commit(name, ".parquet", _parquet_writer(table), rows=len(table))
        counter.count(unit.rows)

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Adds the rows and judgements that were left out to the notes."""
        drafts[0].add_notes(**self.notes)


def check_splits(source: ImportSource) -> None:
    """Raises InputError if the split name of a judgements file is not a valid file name in a store."""
    files = dict(source.qrels)
    if source.format.has_provenance and source.queries:
        files[source.provenance_split] = source.queries[0]
    for split, file in files.items():
        try:
            artifact_key("qrels", split)
        except InputError as error:
            raise InputError(f"{printable(file)}: its split has no valid name: {error}; rename the file") from None


def _judged_generation(corpus: Corpus, qrels: Iterable[pa.Table]) -> Artifact:
    """Returns the first corpus generation that, with all earlier ones, contains all judged passages.

    The query set needs no later generation.
    """
    judged = [table["corpus_id"].combine_chunks().unique().to_pylist() for table in qrels]
    last = max((int(corpus.rows_of_documents(ids)[0].max()) for ids in judged if ids), default=0)
    end = 0
    for artifact in corpus.generations:
        end += artifact.rows
        if last < end:
            return artifact
    return corpus.generations[-1]


def _parquet_writer(table: pa.Table) -> Callable[[Path], None]:
    return lambda path: pq.write_table(table, path, compression="zstd")


def _known_judgements(file: str, qrels: pa.Table, corpus: Corpus, partial: bool) -> pa.Table:
    """Returns the judgements of known passages. Raises InputError for an unknown passage, unless `partial`.

    In a split corpus, documents are judged.
    """
    passages = qrels["corpus_id"].combine_chunks().dictionary_encode()
    known = (corpus.rows_of_documents(passages.dictionary.to_pylist())[0] >= 0)[passages.indices.to_numpy()]
    if not partial:
        _refuse_unknown(file, qrels, "corpus_id", known, "document" if corpus.is_split else "passage", "the corpus")
    return qrels.filter(pa.array(known)).drop_columns(["line"])


def _refuse_unknown(file: str, qrels: pa.Table, column: str, is_known: np.ndarray, noun: str, place: str) -> None:
    """Raises InputError with the first line whose query or passage is unknown. is_known: bool [lines]."""
    if is_known.all():
        return
    first = int(np.flatnonzero(~is_known)[0])
    more = int((~is_known).sum()) - 1
    raise InputError(
        f"{file}:{qrels['line'][first]}: judges {noun} {short_repr(qrels[column][first].as_py())}, which is not in "
        f"{place}{f' (and {more:,} more lines like it)' if more else ''}; add the {noun}, remove the line, or leave "
        f"such judgements out by {Parameter('skip_unknown')}"
    )


def _without_repetitions(file: str, qrels: pa.Table, bad_rows: BadRows) -> pa.Table:
    """Removes repeated judgements: keeps the first of each pair of query and passage, in file order.

    Args:
        file: The file of the judgements.
        qrels: The judgements.
        bad_rows: Receives the lines that give a pair another score than its first line does.
    """
    queries, passages = (
        qrels[name].combine_chunks().dictionary_encode().indices.to_numpy() for name in ("query_id", "corpus_id")
    )
    scores = qrels["score"].to_numpy()
    order = np.lexsort((passages, queries))  # stable: equal pairs stay in the order of the file
    same = (np.diff(queries[order]) == 0) & (np.diff(passages[order]) == 0)
    is_repeated = np.zeros(len(order), bool)
    is_repeated[1:] = same
    starts = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(order))))
    first = np.empty(len(order), np.int64)  # row -> the first row of its pair
    first[order] = order[starts]
    for row in np.flatnonzero(scores != scores[first]):
        query, passage = qrels["query_id"][row].as_py(), qrels["corpus_id"][row].as_py()
        bad_rows.add(
            RowError(
                f"{file}:{qrels['line'][row]}: judges query {short_repr(query)} and passage {short_repr(passage)} with "
                f"score {scores[row]}, line {qrels['line'][first[row]]} with score {scores[first[row]]}, expected one "
                "score; remove one of the lines"
            )
        )
    return qrels.filter(pa.array(first == np.arange(len(first)))) if same.any() else qrels


def _refuse_repeated_ids(source: ImportSource, ids: Sequence[str]) -> None:
    """Raises InputError if a query id occurs twice."""
    seen: dict[str, int] = {}
    for number, id in enumerate(ids, 1):
        if id in seen:
            name = Path(source.queries[0]).name if len(source.queries) == 1 else source.name
            raise InputError(
                f"{name}: query id {short_repr(id)} comes a second time (as query {number}, first as {seen[id]}); "
                "rename one"
            )
        seen[id] = number


def _qrels_parts(artifact: Artifact) -> list:
    return [part for part in artifact.parts if part.name.startswith("qrels-")]
