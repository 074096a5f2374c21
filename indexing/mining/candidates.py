"""Pools the hits of all sources for unified negative mining (DPTDR, section 3.3).

candidates/NAME      copies.parquet   the passages with the text of a positive (copies.search)
                     part-*.parquet   the pooled hits of PART_QUERIES queries each (`pools.pool_hits`)
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.option_fields import OptionGroup, option
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.grammar import source_label
from riptide.indexing.hit_sources.opened_sources import HitSources
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.measures.answers import AnswerMatcher, answers_of
from riptide.indexing.mining import pools as mining
from riptide.indexing.mining.copies import PART as COPIES
from riptide.indexing.mining.copies import CopyGroups, commit_copies, find_copies, read_copies
from riptide.indexing.queries.judged_pairs import read_judged_pairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.retrieval import QUERY_BLOCK
from riptide.indexing.search.runs import write_parquet
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import ArtifactTarget, BaseStage, BaseWork, Committed, ProgressCounter, WorkUnit
from riptide.indexing.work.worker_tasks import ONE_CORE, Allocation, Report, Runner, WorkerResources

PART_QUERIES = 512  # queries per part: a re-ranker on a CPU scores their pairs in a minute or two


class MiningQueries(NamedTuple):
    """The queries of a split from which negatives are mined, with their positives.

    Attributes:
        ids, texts: Their ids and texts.
        answers: Their known answers.
        positives: Rows of their relevant passages, int64 [any] each, in the order of the judgements.
        others: Rows of the other passages of the same documents, int64 [any] each; None: each passage is a document.
    """

    ids: list[str]
    texts: list[str]
    answers: list[list[str]]
    positives: list[np.ndarray]
    others: list[np.ndarray] | None = None

    def slice(self, start: int, count: int) -> MiningQueries:
        """Returns at most `count` queries, from number `start` on."""
        piece = slice(start, start + count)
        others = None if self.others is None else self.others[piece]
        return MiningQueries(self.ids[piece], self.texts[piece], self.answers[piece], self.positives[piece], others)

    def copies_of_positives(self, copies: CopyGroups) -> list[np.ndarray]:
        """Returns the rows per query that, like the positives, are never negatives: int64 [any] each.

        They are the passages with the text of a positive, and the other passages of the documents of positives.
        """
        same = copies.other_rows(self.positives)
        return same if self.others is None else [*map(np.union1d, same, self.others)]


@dataclass(frozen=True)
class MiningOptions(OptionGroup):
    """The options that determine the content of the pool."""

    GROUP: ClassVar = "pool"

    sources: tuple[str, ...] = ("bm25",)
    """Search sources, as search --source takes them: bm25, exact:EMB, index:NAME, splade:NAME, a mode, …"""
    depth: int = option(200, minimum=1)
    """Hits per query and source (DPTDR, section 4.1)."""
    drop_answers: bool = False
    """Exclude passages that contain a known answer of the query (`answers` in its metadata)."""
    half: Literal[1, 2] | None = None
    """Mine one half of the queries only: a hash of its id decides the half of a query. A re-ranker that is trained on
    the negatives of one half can then denoise those of the other, and scores no query that it has seen."""
    part_queries: int = option(PART_QUERIES, minimum=1)
    """Queries per part, the unit of work and of resume."""


class PoolCandidatesWork(BaseWork):
    """The work that builds candidates/NAME: the pooled hits of all sources for the queries of a split.

    Attributes:
        name: The name of the pool.
        mined: The queries of the split.
    """

    def __init__(
        self,
        store: Store,
        queries: str | None,
        split: str,
        options: MiningOptions,
        *,
        name: str | None = None,
        search: SearchOptions | None = None,
        limit: int | None = None,
    ):
        """Opens and checks the query set, the corpus and the sources.

        Raises:
            InputError: If an artifact is missing, or was not made from the ones that it is searched with.
        """
        self.store, self.options = store, options
        self.corpus = Corpus.open(store)
        self.queries = Queries.open(store, queries)
        self.mined = read_queries(
            self.corpus, self.queries, split, limit, answers=options.drop_answers, half=options.half
        )
        if not self.mined.ids and options.half is not None:
            raise InputError(
                f"{Parameter('half', options.half)}: no query of {self.queries.artifact.key} {split} is in this half: "
                "leave it out"
            )
        if options.drop_answers and not any(self.mined.answers):
            raise InputError(
                f"{Parameter('drop_answers')}: no query of {self.queries.artifact.key} {split} has answers in its "
                "metadata, which are no labels (FEVER) and no entities (entity linking); mine without it"
            )
        self.sources = HitSources(store, self.corpus, search)
        self.hit_sources = [self.sources.open(source) for source in options.sources]
        sources = [each.source_text for each in self.hit_sources]
        if len(set(sources)) < len(sources) or not sources:
            raise InputError(f"{Parameter('sources', ' '.join(options.sources))}: expected at least one, and each once")
        part = "" if options.half is None else f"-half{options.half}"
        label = source_label("+".join(sources))
        self.name = name or f"{self.queries.artifact.key.partition('/')[2]}-{split}{part}-{label}"
        self.config = {
            "sources": sources,
            "search_parameters": {each.source_text: each.search_parameters for each in self.hit_sources},
            "split": split,
            "depth": options.depth,
            "drop_answers": options.drop_answers,
            "copies": "excluded",
            "part_queries": options.part_queries,
            "limit": limit,
        }
        if options.half is not None:
            self.config["half"] = options.half

    def parts(self) -> list[tuple[str, MiningQueries]]:
        """Splits the queries into parts; returns (name of the part, its queries) for each part."""
        size = self.options.part_queries
        starts = range(0, len(self.mined.ids), size)
        return [(f"part-{number:05d}", self.mined.slice(start, size)) for number, start in enumerate(starts)]

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the only target: the pool, candidates/NAME."""
        inputs = {"queries": self.queries.artifact, "corpus": self.corpus.generations[-1]}
        for hit_source in self.hit_sources:
            inputs |= hit_source.inputs()
        return [ArtifactTarget("candidates", self.name, inputs, self.config)]

    @property
    def stages(self) -> list[CopiesStage | PoolStage]:
        """Returns the two stages: find the copies of positives, then search and pool."""
        return [CopiesStage(self), PoolStage(self)]


class CopiesStage(BaseStage):
    """The stage that finds the copies of positives (same title and text), which must not become negatives."""

    title = "find copies"
    noun = "passages"

    def __init__(self, work: PoolCandidatesWork):
        self.work = work
        self.total: int | None = work.corpus.num_rows

    def units(self, committed_parts: Committed) -> list[WorkUnit]:
        """Returns the only unit: the whole corpus."""
        return [WorkUnit((COPIES,), self.work.corpus.num_rows, None)]

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Finds the copies of the positives in the corpus, and commits them."""
        positives = np.concatenate([*self.work.mined.positives, np.empty(0, np.int64)])
        commit_copies(draft, find_copies(self.work.corpus, positives, runner, counter.count))


class PoolStage(BaseStage):
    """The stage that searches blocks of queries with every source and pools the hits of each part.

    A block is searched completely even if only one of its parts is pending: vectors and FAISS's sums depend on the
    batch.
    """

    title = "pool"
    noun = "queries"

    def __init__(self, work: PoolCandidatesWork):
        self.work = work
        self.total: int | None = len(work.mined.ids)

    def units(self, committed_parts: Committed) -> Iterator[WorkUnit]:
        """Yields a unit for each block of parts; pins the numerics classes of the committed parts."""
        for name, part in committed_parts[0].items():
            if name != COPIES:
                self.work.sources.pin(part.facts)
        parts = self.work.parts()
        size = max(1, QUERY_BLOCK // self.work.options.part_queries)
        for first in range(0, len(parts), size):
            block = parts[first : first + size]
            yield WorkUnit(tuple(name for name, _ in block), sum(len(queries.ids) for _, queries in block), block)

    def make(
        self, unit: WorkUnit, missing_names: Sequence[str], draft: Draft, runner: Runner, counter: ProgressCounter
    ) -> None:
        """Searches the queries of a block, pools their hits and commits the missing parts."""
        work, block = self.work, unit.payload
        texts = [text for _, queries in block for text in queries.texts]
        # Positives are dropped later, so a source may leave fewer than `depth` candidates.
        hits = {each.source_text: each.search(texts, work.options.depth, runner) for each in work.hit_sources}
        items: list[PoolItem] = []
        start = 0
        for name, queries in block:
            end = start + len(queries.ids)
            if name in missing_names:
                block_hits = {s: Hits(each.scores[start:end], each.rows[start:end]) for s, each in hits.items()}
                items.append(
                    (name, queries, block_hits, work.sources.numerics() | work.sources.count_cuts(slice(start, end)))
                )
            else:
                counter.count(len(queries.ids), is_kept=True)
            start = end
        corpus = work.corpus if work.options.drop_answers else None
        task = PoolTask(draft, work.options.depth, corpus, read_copies(draft))
        for (_, queries, _, _), _ in runner.run(task, items):
            counter.count(len(queries.ids))


PoolItem = tuple[str, MiningQueries, Mapping[str, Hits], Mapping[str, Any]]
"""The name of a part, its queries, the hits of each source, and facts of the part."""


@dataclass(frozen=True)
class PoolTask:
    """A worker task that pools the hits of a part's queries and commits the pool.

    Attributes:
        draft: The artifact.
        depth: Hits of each source.
        corpus: The corpus, to exclude passages that contain an answer; None: they are kept.
        copies: Passages with equal texts; copies of a positive are excluded.
    """

    draft: Draft
    depth: int
    corpus: Corpus | None
    copies: CopyGroups
    resources: WorkerResources = ONE_CORE

    def open(self, allocation: Allocation) -> Callable[[PoolItem, Report], None]:
        """Returns a function that pools and commits a part."""
        return self._pool

    def _pool(self, item: PoolItem, report: Report) -> None:
        name, queries, hits, facts = item
        table = mining.pool_hits(
            queries.ids, hits, queries.positives, self.depth, queries.copies_of_positives(self.copies)
        )
        if self.corpus is not None:
            table = without_answers(table, queries.answers, self.corpus)
        self.draft.commit(name, ".parquet", functools.partial(write_parquet, table), rows=len(table), **facts)


def half_of(query_id: str) -> int:
    """Returns the half of a query set that a query is in, 1 or 2: a function of its id alone."""
    return 1 + hashlib.sha256(query_id.encode()).digest()[0] % 2


def read_queries(
    corpus: Corpus, queries: Queries, split: str, limit: int | None, *, answers: bool, half: int | None = None
) -> MiningQueries:
    """Reads queries of a split with their positives and, if requested, their known answers.

    Args:
        corpus: The corpus.
        queries: The query set.
        split: The split.
        limit: Use only its first N queries; None: all.
        answers: Whether the answers are read.
        half: Only the queries among these that are in this half (`half_of`); None: all.

    Raises:
        InputError: If the split has no qrels, or if an answer is not a text.
    """
    pairs, chosen = read_judged_pairs(corpus, queries, split, limit), queries.split(split, limit)
    some = [place for place, id in enumerate(chosen.ids) if half in (None, half_of(id))]
    ids, texts = [chosen.ids[place] for place in some], [chosen.texts[place] for place in some]
    positives, others = (dict(zip(pairs.ids, rows, strict=True)) for rows in (pairs.rows, pairs.others))
    none = np.empty(0, np.int64)
    metadata = dict(zip(*(queries.table[column].to_pylist() for column in ("id", "metadata")), strict=True))
    return MiningQueries(
        ids,
        texts,
        [_parse_answers(metadata[id], f"{queries.artifact.key} {id}") if answers else [] for id in ids],
        [positives.get(id, none) for id in ids],
        [others.get(id, none) for id in ids] if corpus.is_split else None,
    )


def _parse_answers(metadata: str, where: str) -> list[str]:
    """Parses the answers in a query's metadata. Raises InputError if they are not texts."""
    fields = json.loads(metadata) if metadata else {}
    answers = fields.get("answers", fields.get("answer")) if isinstance(fields, dict) else None
    for answer in answers if isinstance(answers, list) else [answers]:
        if isinstance(answer, dict | list):
            shown = json.dumps(answer, ensure_ascii=False)[:60]
            raise InputError(
                f"{Parameter('drop_answers')}: {where}: its metadata's answers hold {shown}, "
                'expected texts, {"answers": ["a", "b"]}: write them so and import the queries again'
            )
    return answers_of(metadata)


def without_answers(table: pa.Table, answers: Sequence[Sequence[str]], corpus: Corpus) -> pa.Table:
    """Removes the passages that contain a known answer of their query from the pool."""
    rows = np.unique(table["row"].to_numpy())
    matcher = AnswerMatcher()
    texts = {row: passage.text for row, passage in zip(rows.tolist(), corpus.passages(rows), strict=True)}
    return mining.without_answers(
        table, lambda query, rows: matcher.contains([texts[row] for row in rows.tolist()], answers[query])
    )
