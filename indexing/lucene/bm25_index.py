"""Builds and searches BM25 indexes: Lucene shards are built in parallel and searched as one, with global statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus, passage_contents
from riptide.indexing.corpus.row_sets import RowSet
from riptide.indexing.exact import Hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.lucene.lucene import OPEN_LOCK, LuceneSearch, write_shard
from riptide.indexing.lucene.lucene_terms import parts_of_explanation
from riptide.indexing.lucene.segment_search import search_blocks, search_segments
from riptide.indexing.lucene.segments import (
    SegmentFiles,
    check_lucene_versions,
    commit_segment,
    query_versions,
    segment_files,
    segments_of,
)
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowPart, open_chain
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import NextGenerationWork
from riptide.indexing.work.work import TaskStage, WorkUnit, check_same_config, shard_units
from riptide.indexing.work.worker_tasks import ALL_CORES, JVM_CORE, Allocation, Report, Runner, WorkerResources
from riptide.process.temporary_folders import TemporaryFolder

DEFAULT = "bm25"  # the default name of an index, which searches without a name prefer
SHARD_ROWS = 1_000_000  # maximum number of passages per shard, if the number of shards is not given

_REPORT_EVERY = 1_000  # passages


class Bm25:
    """A BM25 index opened for reading: all complete generations of bm25/NAME."""

    def __init__(self, name: str, generations: Sequence[Artifact]):
        self.name = name
        self.generations = list(generations)
        self.shards = [(artifact, part) for artifact in generations for part in artifact.numbered_parts("shard")]
        self.num_rows = sum(part.rows for _, part in self.shards)
        config = generations[0].config
        self.k1, self.b, self.language = float(config["k1"]), float(config["b"]), str(config["language"])

    def __repr__(self) -> str:
        return f"Bm25({self.name!r}, {self.num_rows:,} passages)"

    @classmethod
    def open(cls, store: Store, name: str | None, corpus: Corpus) -> Bm25:
        """Opens bm25/NAME. If `name` is None, opens the only BM25 index, or bm25/bm25 if there are several.

        Raises InputError if it was built from another corpus, or lacks passages of this one.
        """
        names = store.names("bm25")
        if name is None and len(names) > 1:
            if DEFAULT not in names:
                raise InputError(f"{store.url} has several BM25 indexes: {', '.join(names)}; say which with bm25:NAME")
            name = DEFAULT
        name = store.only_name("bm25", name)
        return cls(name, open_chain(store, "bm25", name, corpus.generations))

    def searcher(self, shard_range: slice = slice(None)) -> LuceneSearch:
        """Opens the shards in this process; the next call for the same shards returns the same object.

        Args:
            shard_range: Which of the shards are searched; the statistics are those of all.

        Raises:
            InputError: If they were made with another version of Lucene, whose terms may differ.
        """
        first, end, _ = shard_range.indices(len(self.shards))
        with OPEN_LOCK:
            check_lucene_versions(self.generations[0])
            return _open_searcher(segment_files(self.shards), self.k1, self.b, self.language, first, end)

    def search(
        self,
        queries: Sequence[str],
        k: int,
        deleted: np.ndarray,
        *,
        threads: int = 1,
        allowed_rows: RowSet | np.ndarray | None = None,
        searcher: LuceneSearch | None = None,
    ) -> Hits:
        """Returns the top k passages of each query; see `SegmentedIndex.search`.

        Deleted rows still count in the statistics.
        """
        return search_segments(searcher or self.searcher(), queries, k, deleted, allowed_rows, threads)

    def explain(
        self, queries: Sequence[str], rows: RowsOfQueries, searcher: LuceneSearch
    ) -> list[dict[int, ScoreParts]]:
        """Returns the terms of passages; see `SegmentedIndex.explain`."""
        explanations = [searcher.explain(query, of_query) for query, of_query in zip(queries, rows, strict=True)]
        return [{row: parts_of_explanation(each) for row, each in by_row.items()} for by_row in explanations]


@functools.lru_cache(maxsize=2)
def _open_searcher(
    files: SegmentFiles, k1: float, b: float, language: str, first_shard: int, end_shard: int
) -> LuceneSearch:
    return LuceneSearch(segments_of(files), k1=k1, b=b, language=language, shard_range=slice(first_shard, end_shard))


class BuildBm25Work(NextGenerationWork):
    """The work that builds bm25/NAME, or its next generation: Lucene shards, each filled by one worker.

    Attributes:
        num_shards: The number of shards that are filled in parallel.
    """

    def __init__(
        self,
        store: Store,
        corpus: Corpus,
        name: str,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        language: str = "en",
        shards: int | None = None,
        limit: int | None = None,
    ):
        """Checks the settings, and that the existing generations were built with the same ones.

        Raises:
            InputError: If BM25 does not accept a value, or if the existing generations have other settings.
        """
        if not (0 <= k1 < float("inf") and 0 <= b <= 1):
            raise InputError(f"{Parameter('k1', k1)}, {Parameter('b', b)}: expected k1 >= 0 and 0 <= b <= 1")
        if shards is not None and shards < 1:
            raise InputError(f"{Parameter('shards', shards)}: expected at least 1")
        super().__init__(store, "bm25", name, corpus.generations)
        self.corpus, self.language = corpus, language
        self.config = {"k1": k1, "b": b, "language": language, "shards": shards, "limit": limit, "title": "space"}
        if self.previous:
            check_same_config(self.previous[0], self.config)
        self.end = min(corpus.num_rows, limit or corpus.num_rows)
        rows = self.end - self.first_row
        self.num_shards = max(1, min(shards or -(-rows // SHARD_ROWS), rows))

    def pin_versions(self, runner: Runner) -> None:
        """Adds the versions of Lucene and Anserini that a worker reports to the configuration.

        Raises:
            InputError: If Java does not work there or does not know the language, or if the existing generations were
                built with other versions.
        """
        self.config |= query_versions(runner, self.previous, self.language, self.num_shards)

    @property
    def stages(self) -> list[TaskStage]:
        """Returns the only stage, which fills the shards."""
        units = shard_units(self.first_row, self.end, self.num_shards)
        return [TaskStage("index text", "passages", units, self._fill_task)]

    def _fill_task(self, drafts: Sequence[Draft]) -> FillLuceneTask:
        """Returns the task whose workers fill the shards."""
        return FillLuceneTask(drafts[0], self.corpus.parts, self.language)


@dataclass(frozen=True)
class FillLuceneTask:
    """A worker task that writes the passages of a range of rows to a Lucene segment and commits the segment."""

    draft: Draft
    parts: Sequence[RowPart]
    language: str
    resources: WorkerResources = JVM_CORE  # one worker per process: pyjnius methods are not thread-safe
    reports_progress: bool = True

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Returns a function that fills a shard. Raises InputError if the Lucene version is not the pinned one."""
        check_lucene_versions(self.draft)
        return self._fill

    def _fill(self, unit: WorkUnit, report: Report) -> None:
        [name] = unit.names
        first, end = unit.payload
        if self.draft.find_part(name):  # an earlier attempt, whose acknowledgement was lost, has committed the part
            return
        with TemporaryFolder("lucene") as folder:
            texts = report_texts(passage_contents(self.parts, first, end), report)
            segment = write_shard(texts, Path(folder), language=self.language)
            commit_segment(self.draft, name, segment, Path(folder), first, end)


def report_texts(texts: Iterable[str], report: Report) -> Iterator[str]:
    """Yields the texts, and reports the number of texts so far every _REPORT_EVERY texts."""
    for number, text in enumerate(texts):
        if number % _REPORT_EVERY == 0:
            report(number)
        yield text


def search_bm25(
    bm25: Bm25,
    queries: Sequence[str],
    k: int,
    deleted: np.ndarray,
    runner: Runner,
    *,
    allowed_rows: np.ndarray | None = None,
) -> Hits:
    """Returns the top k passages of each query by BM25; spreads the queries over workers.

    Args:
        bm25: The shards.
        queries: The texts of the queries.
        k: Hits per query.
        deleted: Rows to exclude, int64, ascending. They still count in the statistics.
        runner: What spreads the queries over workers.
        allowed_rows: Only these rows are hits, int64, ascending, none of them deleted; None: all rows.
    """
    task = SearchBm25Task(bm25, k, deleted, allowed_rows)
    return search_blocks(task, len(queries), lambda first, end: list(queries[first:end]), runner)


@dataclass(frozen=True)
class SearchBm25Task:
    """A worker task that searches a block of queries; an item is (number of the first query, texts)."""

    bm25: Bm25
    k: int
    deleted: np.ndarray
    allowed_rows: np.ndarray | None
    resources: WorkerResources = ALL_CORES

    def open(self, allocation: Allocation) -> Callable[[tuple[int, list[str]], Report], Hits]:
        """Opens the shards and returns a function that searches a block of queries."""
        searcher = self.bm25.searcher()

        def search(block: tuple[int, list[str]], report: Report) -> Hits:
            return self.bm25.search(
                block[1],
                self.k,
                self.deleted,
                threads=allocation.cores,
                allowed_rows=self.allowed_rows,
                searcher=searcher,
            )

        return search
