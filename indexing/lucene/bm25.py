"""BM25 over a corpus: Lucene shards built in parallel and searched as one, so that its statistics are global."""

from __future__ import annotations

import base64
import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indexing.corpus.corpus import Corpus, contents
from indexing.exact import Hits, nothing
from indexing.lucene.lucene import LuceneSearch, LuceneShard, SegmentSearch, analyzer, versions, write_shard
from indexing.store.artifact import Artifact, Draft, Part
from indexing.store.chain import RowPart, RowRange, check_lineage
from indexing.store.store import Store
from indexing.work.growth import next_target
from indexing.work.tasks import ALL_CORES, JVM_CORE, Place, Report, Resources, Runner, Task
from indexing.work.work import RangeStage, Target, Unit, WorkDefaults, check_same_options
from retriever.errors import InputError

DEFAULT = "bm25"  # the default name
SHARD_ROWS = 1_000_000  # passages of a shard at most, if the number of shards is not given
BLOCK_QUERIES = 256  # queries of a task at least; most of the time of a smaller one is its start


SegmentFiles = tuple[tuple[str, tuple[tuple[str, bytes], ...], str], ...]
"""Of each segment: the name of its bulk, its small files, and the path of the bulk. A key of caches."""


class Bm25:
    """All complete generations of bm25/NAME, for reading."""

    def __init__(self, name: str, generations: Sequence[Artifact]):
        self.name = name
        self.generations = list(generations)
        self.shards = [(artifact, part) for artifact in generations for part in artifact.group("shard")]
        self.num_rows = sum(part.rows for _, part in self.shards)
        config = generations[0].config
        self.k1, self.b, self.language = float(config["k1"]), float(config["b"]), str(config["language"])

    @classmethod
    def open(cls, store: Store, name: str | None, corpus: Corpus) -> Bm25:
        """Opens bm25/NAME; without a name, the index that is called bm25, or the only one.

        Raises InputError if it was built from another corpus, or lacks passages of this one.
        """
        names = store.names("bm25")
        if name is None and len(names) > 1:
            if DEFAULT not in names:
                raise InputError(f"{store.url} has several bm25: {', '.join(names)}; say which with bm25:NAME")
            name = DEFAULT
        name = store.only("bm25", name)
        generations = store.generations("bm25", name)
        check_lineage(generations, corpus.generations)
        found = cls(name, generations)
        wanted = min(corpus.num_rows, generations[0].config["limit"] or corpus.num_rows)
        if found.num_rows < wanted:
            raise InputError(
                f"{store.url}/bm25/{name} covers {found.num_rows:,} of the corpus' {wanted:,} passages: run "
                f"jobs/build_bm25.py --name {name} again to add the new ones"
            )
        return found

    def searcher(self, searched: slice = slice(None)) -> LuceneSearch:
        """Opens the shards in this process; the next call for the same shards returns the same object.

        Args:
            searched: Which of the shards are searched; the statistics are those of all.

        Raises:
            InputError: If they were made with another version of Lucene, whose terms may differ.
        """
        check_versions(self.generations[0])
        first, end, _ = searched.indices(len(self.shards))
        return _searcher(segment_files(self.shards), self.k1, self.b, self.language, first, end)


@functools.lru_cache(maxsize=2)
def _searcher(files: SegmentFiles, k1: float, b: float, language: str, first: int, end: int) -> LuceneSearch:
    return LuceneSearch(segments_of(files), k1=k1, b=b, language=language, searched=slice(first, end))


def segment_rows(shards: Sequence[tuple[Artifact, Part]]) -> list[RowRange]:
    """Returns the rows of each of some committed segments."""
    return [RowRange(int(part.facts["first_row"]), int(part.facts["end"])) for _, part in shards]


def segment_files(shards: Sequence[tuple[Artifact, Part]]) -> SegmentFiles:
    """Returns the local files of committed segments; `segments_of` converts them for a search."""
    files = []
    for artifact, part in shards:
        small = tuple((name, base64.b64decode(content)) for name, content in part.facts["small_files"].items())
        files.append((part.facts["segment_file"], small, str(artifact.local(part))))
    return tuple(files)


def segments_of(files: SegmentFiles) -> list[tuple[LuceneShard, Path]]:
    """Returns the segments, each with the path of its bulk."""
    return [(LuceneShard(bulk, dict(small)), Path(path)) for bulk, small, path in files]


def check_versions(of: Artifact | Draft) -> None:
    """Raises InputError if this process has another Lucene than the pinned one."""
    for package, version in versions().items():
        if of.config[package] != version:
            raise InputError(
                f"{of.url} was made with {package} {of.config[package]}, here is {version}: build another one "
                "(parameter name), or install that version of pyserini on every node"
            )


class BuildBm25(WorkDefaults):
    """The work that makes bm25/NAME, or its next generation: Lucene shards, each filled by one worker.

    Attributes:
        first_row, end: The rows to be indexed.
        num_shards: The number of shards that are filled in parallel.
        complete: Whether the existing generations cover the corpus.
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
        """Checks the settings, also against those of the existing generations.

        Raises:
            InputError: If BM25 does not accept a value, or if the existing generations have other settings.
        """
        if not (0 <= k1 < float("inf") and 0 <= b <= 1):
            raise InputError(f"parameter k1 {k1}, parameter b {b}: expected k1 >= 0 and 0 <= b <= 1")
        if shards is not None and shards < 1:
            raise InputError(f"parameter shards {shards}: expected at least 1")
        self.corpus, self.language = corpus, language
        self.name = name
        self.previous = store.generations("bm25", self.name)
        check_lineage(self.previous, corpus.generations)
        self.config = {"k1": k1, "b": b, "language": language, "shards": shards, "limit": limit, "title": "space"}
        if self.previous:
            check_same_options(self.previous[0], self.config)
        self.first_row = Bm25(self.name, self.previous).num_rows if self.previous else 0
        self.end = min(corpus.num_rows, limit or corpus.num_rows)
        rows = self.end - self.first_row
        self.num_shards = max(1, min(shards or -(-rows // SHARD_ROWS), rows))
        self.complete = bool(self.previous) and self.first_row >= self.end

    def pin_versions(self, runner: Runner) -> None:
        """Adds the versions of Lucene and Anserini to the configuration, as a worker reports them.

        Raises:
            InputError: If Java does not work there or does not know the language, or if the existing generations were
                built with other versions.
        """
        self.config |= find_versions(runner, self.previous, self.language, self.num_shards)

    @property
    def targets(self) -> list[Target]:
        """Returns the generation to be made."""
        if self.complete:
            return []
        return [next_target("bm25", self.name, self.corpus.generations, self.previous, self.config)]

    @property
    def stages(self) -> list[FillLucene]:
        """Returns the one stage: filling the shards."""
        return [
            FillLucene(
                corpus=self.corpus,
                language=self.language,
                first_row=self.first_row,
                end=self.end,
                num_shards=self.num_shards,
            )
        ]


def find_versions(runner: Runner, previous: Sequence[Artifact], language: str, count: int) -> dict[str, str]:
    """Returns the versions of Lucene and Anserini that a worker reports.

    Args:
        runner: What runs the worker.
        previous: The existing generations of the index, which must have been built with the same versions.
        language: The language of the analyzer, which the worker must know.
        count: Number of workers that can fill shards at the same time.

    Raises:
        InputError: If Java does not work there, or if the existing generations were built with other versions.
    """
    reported: dict[str, str] = runner.first(LuceneVersions(language), None, count)
    before = {key: previous[0].config[key] for key in reported} if previous else reported
    if before != reported:
        raise InputError(
            f"{previous[0].url} was built with {before}, this is {reported}, whose terms may differ: build "
            "another one (parameter name)"
        )
    return reported


@dataclass(frozen=True, kw_only=True)
class FillLucene(RangeStage):
    """The stage that fills Lucene shards."""

    corpus: Corpus
    language: str
    title: str = "index text"
    noun: str = "passages"

    def task(self, drafts: Sequence[Draft]) -> FillLuceneTask:
        """Returns the task of a worker."""
        return FillLuceneTask(drafts[0], self.corpus.parts, self.language)


@dataclass(frozen=True)
class FillLuceneTask:
    """Writes the passages of a range of rows to a Lucene segment and commits it."""

    draft: Draft
    parts: Sequence[RowPart]
    language: str
    resources: Resources = JVM_CORE  # pyjnius binds a method to the object that a thread used last: no threads
    reports: bool = True

    def open(self, place: Place) -> Callable[[Unit, Report], None]:
        """Returns the worker. Raises InputError if this process has another Lucene than the pinned one."""
        check_versions(self.draft)
        return self._fill

    def _fill(self, unit: Unit, report: Report) -> None:
        [name] = unit.names
        first, end = unit.payload
        if self.draft.find(name):  # committed by an earlier attempt whose acknowledgement was lost
            return
        with tempfile.TemporaryDirectory(prefix="riptide-lucene-", ignore_cleanup_errors=True) as folder:
            texts = counted(contents(self.parts, first, end), report)
            made = write_shard(texts, Path(folder), language=self.language)
            commit_segment(self.draft, name, made, Path(folder), first, end)


def commit_segment(
    draft: Draft, name: str, segment: LuceneShard, folder: Path, first: int, end: int, **facts: int
) -> None:
    """Commits a segment of the rows [first, end) as a part: its bulk is the file, its small files are in the record.

    facts: further facts of the record.
    """
    small = {file: base64.b64encode(content).decode() for file, content in sorted(segment.small.items())}
    draft.commit(
        name,
        ".cfs",
        lambda path: shutil.move(folder / segment.bulk, path),
        rows=end - first,
        first_row=first,
        end=end,
        segment_file=segment.bulk,
        small_files=small,
        **facts,
    )


@dataclass(frozen=True)
class LuceneVersions:
    """Returns the versions of Lucene and Anserini of a worker, and checks that its Java knows the language."""

    language: str
    resources: Resources = JVM_CORE  # a thread that ends while the JVM knows it brings the JVM down

    def open(self, place: Place) -> Callable[[None, Report], dict[str, str]]:
        """Returns the worker. Raises InputError if Java does not work or does not know the language."""
        analyzer(self.language)
        return lambda item, report: versions()


def counted(texts: Iterable[str], report: Report, every: int = 1_000) -> Iterator[str]:
    """Yields the texts and reports their number now and then."""
    for number, text in enumerate(texts):
        if number % every == 0:
            report(number)
        yield text


def search_bm25(bm25: Bm25, queries: Sequence[str], k: int, deleted: np.ndarray, runner: Runner) -> Hits:
    """Returns the top k of each query by BM25.

    Args:
        bm25: The shards.
        queries: The texts of the queries.
        k: Hits per query.
        deleted: Rows to exclude, int64, ascending. They still count in the statistics.
        runner: What spreads the queries over workers.
    """
    task = SearchBm25Task(bm25, k, deleted)
    return search_blocks(task, len(queries), lambda first, end: list(queries[first:end]), runner)


def search_blocks(task: Task, num_queries: int, block_of: Callable[[int, int], Any], runner: Runner) -> Hits:
    """Returns the hits of queries, spread over workers.

    Args:
        task: Searches a block of queries: an item is (number of the first query, block).
        num_queries: The number of queries.
        block_of: Returns the block of the queries from a first number to an end.
        runner: What spreads the blocks over workers.
    """
    pieces = max(1, num_queries // BLOCK_QUERIES)
    bounds = np.linspace(0, num_queries, pieces + 1).astype(int).tolist()
    blocks = [(first, block_of(first, end)) for first, end in itertools.pairwise(bounds)]
    by_block = {first: hits for (first, _), hits in runner.run(task, blocks)}
    return Hits(*(np.concatenate(column) for column in zip(*(by_block[first] for first, _ in blocks), strict=True)))


@dataclass(frozen=True)
class SearchBm25Task:
    """Searches a block of queries: an item is (number of the first query, texts)."""

    bm25: Bm25
    k: int
    deleted: np.ndarray
    resources: Resources = ALL_CORES

    def open(self, place: Place) -> Callable[[tuple[int, list[str]], Report], Hits]:
        """Returns the worker, with the shards opened."""
        searcher = self.bm25.searcher()
        return lambda block, report: search_alive(searcher, block[1], self.k, self.deleted, place.cores)


def search_alive(searcher: SegmentSearch, queries: Sequence[str], k: int, deleted: np.ndarray, threads: int) -> Hits:
    """Returns the top k of each query without the deleted rows. Searches deeper until there are k."""
    if not len(deleted):
        return searcher.search(queries, k, threads=threads)
    depth = k + min(len(deleted), max(16, k // 8))
    return _deepened(searcher, queries, k, depth, lambda rows: ~np.isin(rows, deleted), threads)


def search_among(searcher: SegmentSearch, queries: Sequence[str], k: int, rows: np.ndarray, threads: int) -> Hits:
    """Returns the top k of each query among some rows, int64, ascending. Searches deeper until there are k."""
    if not len(rows):
        return nothing(len(queries), k)
    depth = int(min(searcher.num_documents, 1.5 * k * searcher.num_documents / max(1, len(rows)) + 16))
    return _deepened(searcher, queries, k, depth, lambda found: np.isin(found, rows), threads, most=len(rows))


def _deepened(
    searcher: SegmentSearch,
    queries: Sequence[str],
    k: int,
    depth: int,
    taken: Callable[[np.ndarray], np.ndarray],
    threads: int,
    most: int | None = None,
) -> Hits:
    """Returns the top k of each query among the rows that `taken` accepts (int64 -> bool).

    Searches to `depth`, and doubles it until there are k hits, or `most`, the number of rows that can be accepted.
    """
    wanted = k if most is None else min(k, most)
    scores, rows = nothing(len(queries), k)
    left = np.arange(len(queries))
    while len(left):
        found = searcher.search([queries[int(number)] for number in left], depth, threads=threads)
        alive = (found.rows >= 0) & taken(found.rows)
        order = np.argsort(~alive, axis=1, kind="stable")[:, :k]
        kept = np.take_along_axis(alive, order, axis=1)
        width = order.shape[1]
        rows[left, :width] = np.where(kept, np.take_along_axis(found.rows, order, axis=1), -1)
        scores[left, :width] = np.where(kept, np.take_along_axis(found.scores, order, axis=1), -np.inf)
        enough = (alive.sum(axis=1) >= wanted) | (found.rows[:, -1] < 0) | (depth >= searcher.num_documents)
        left, depth = left[~enough], min(2 * depth, searcher.num_documents)
    return Hits(scores, rows)
