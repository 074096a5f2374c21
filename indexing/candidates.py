"""The pool of unified negative mining (DPTDR, section 3.3): candidates/NAME, every source's hits, part by part.

candidates/NAME      part-*.parquet   PART_QUERIES questions each, pooled (mining.pool)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indexing import mining
from indexing.answers import AnswerMatcher, answers_of
from indexing.artifact import Artifact, Draft
from indexing.corpus import Corpus
from indexing.exact import Hits
from indexing.queries import Queries
from indexing.retrieval import QUERY_BLOCK, label
from indexing.retrievers import Retrievers, SearchOptions
from indexing.runs import write_parquet
from indexing.store import Store
from indexing.tasks import run_tasks
from retriever.errors import InputError

PART_QUERIES = 512  # whose pairs a processor's re-ranker scores in a minute or two


class Asked(NamedTuple):
    """Some questions of a split: ids, texts, known answers, and the rows that are relevant (int64 arrays)."""

    ids: list[str]
    texts: list[str]
    answers: list[list[str]]
    positives: list[np.ndarray]

    def part(self, start: int, count: int) -> Asked:
        piece = slice(start, start + count)
        return Asked(self.ids[piece], self.texts[piece], self.answers[piece], self.positives[piece])


@dataclass(frozen=True)
class MiningOptions:
    """What shapes the pool."""

    sources: tuple[str, ...]
    depth: int = 200  # hits of each source (DPTDR, section 4.1)
    drop_answers: bool = False  # passages that contain a known answer are no negatives
    part_queries: int = PART_QUERIES  # of a part, the unit of work and of resume

    def __post_init__(self) -> None:
        for name in ("depth", "part_queries"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")


class Mining:
    """The pool of a split's questions, begun: which parts are left."""

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
        """Raises InputError where something is missing, or was not made from what it is asked to fit."""
        self.store, self.options = store, options
        self.corpus = Corpus.open(store)
        self.queries = Queries.open(store, queries)
        self.asked = read_asked(self.corpus, self.queries, split, limit, answers=options.drop_answers)
        if options.drop_answers and not any(self.asked.answers):
            raise InputError(
                f"--drop-answers: no query of {self.queries.artifact.key} {split} has answers in its metadata"
            )
        self._sources = Retrievers(store, self.corpus, search or SearchOptions())
        self.retrievers = [self._sources.open(source) for source in options.sources]
        sources = [retriever.source for retriever in self.retrievers]
        if len(set(sources)) < len(sources) or not sources:
            raise InputError(f"--sources {' '.join(options.sources)}: expected at least one, and each once")
        self.limit = limit
        self.name = self.limited(
            name or f"{self.queries.artifact.key.partition('/')[2]}-{split}-{label('+'.join(sources))}"
        )
        config = {
            "sources": sources,
            "dials": {retriever.source: retriever.dials for retriever in self.retrievers},
            "split": split,
            "depth": options.depth,
            "drop_answers": options.drop_answers,
            "part_queries": options.part_queries,
            "limit": limit,
        }
        inputs = {"queries": self.queries.artifact, "corpus": self.corpus.generations[-1]}
        for retriever in self.retrievers:
            inputs |= retriever.inputs()
        self._lineage: dict[str, Any] = {"inputs": inputs, "config": config}

    def limited(self, name: str) -> str:
        """A name for what is made of these questions: another one with a limit."""
        return name if self.limit is None else f"{name}-limit{self.limit}"

    def draft(self) -> Draft:
        return self.store.create("candidates", self.name, **self._lineage)

    def parts(self) -> list[tuple[str, Asked]]:
        """The name and the questions of each part."""
        size = self.options.part_queries
        starts = range(0, len(self.asked.ids), size)
        return [(f"part-{number:05d}", self.asked.part(start, size)) for number, start in enumerate(starts)]

    def pool(self) -> Iterator[tuple[bool, int]]:
        """Search for the questions of the parts that are left, and pool; yields (kept, questions)."""
        with self.draft() as draft:
            committed = draft.committed()
            for part in committed.values():
                self._sources.pin(part.facts)
            left = {name for name, _ in self.parts()} - committed.keys()
            yield True, sum(len(part.ids) for name, part in self.parts() if name not in left)
            # A block is searched whole where one of its parts is left: vectors and FAISS' sums depend on the batch.
            per_block = max(1, QUERY_BLOCK // self.options.part_queries)
            for first in range(0, len(self.parts()), per_block):
                block = self.parts()[first : first + per_block]
                if any(name in left for name, _ in block):
                    yield from self._pool_block(draft, block, left)

    def _pool_block(
        self, draft: Draft, parts: Sequence[tuple[str, Asked]], left: Container[str]
    ) -> Iterator[tuple[bool, int]]:
        asked = [part for _, part in parts]
        texts = [text for part in asked for text in part.texts]
        # Positives are dropped from a list of `depth`: the first hits of each source, as they were found.
        found = {r.source: r.search(texts, self.options.depth) for r in self.retrievers}
        ends = np.cumsum([len(part.ids) for part in asked])
        items = []
        for (name, _), part, end in zip(parts, asked, ends, strict=True):
            start = end - len(part.ids)
            if name in left:
                items.append((name, part, {s: Hits(h.scores[start:end], h.rows[start:end]) for s, h in found.items()}))
        corpus = self.corpus if self.options.drop_answers else None
        shared = (draft, self.options.depth, corpus, self._sources.numerics())
        for (_, part, _), _ in run_tasks(pool_part, items, *shared, num_cpus=1):
            yield False, len(part.ids)

    def candidates(self) -> Artifact:
        return self.store.open("candidates", self.name)


def read_asked(corpus: Corpus, queries: Queries, split: str, limit: int | None, *, answers: bool) -> Asked:
    """The split's first `limit` questions with their positives and, where asked for, their `answers`.

    Raises InputError for a split without qrels, and for answers that are not texts.
    """
    qrels = queries.qrels(split).filter(pc.field("score") > 0)
    chosen = queries.split(split, limit)
    metadata = dict(zip(*(queries.table[column].to_pylist() for column in ("id", "metadata")), strict=True))
    passages = qrels["corpus_id"].combine_chunks().dictionary_encode()
    rows = corpus.rows_of(passages.dictionary.to_pylist())[passages.indices.to_numpy()]
    positives: dict[str, set[int]] = {}  # a pair may be judged twice
    for query, row in zip(qrels["query_id"].to_pylist(), rows.tolist(), strict=True):
        if row >= 0:  # deleted since
            positives.setdefault(query, set()).add(row)
    return Asked(
        chosen.ids,
        chosen.texts,
        [_checked_answers(metadata[id], f"{queries.artifact.key} {id}") if answers else [] for id in chosen.ids],
        [np.array(sorted(positives.get(id, [])), np.int64) for id in chosen.ids],
    )


def _checked_answers(metadata: str, where: str) -> list[str]:
    """The answers in a question's metadata. Raises InputError where they are no texts: nothing would contain them."""
    fields = json.loads(metadata) if metadata else {}
    given = fields.get("answers", fields.get("answer")) if isinstance(fields, dict) else None
    for answer in given if isinstance(given, list) else [given]:
        if isinstance(answer, dict | list):
            raise InputError(
                f"--drop-answers: {where}: its metadata's answers hold {json.dumps(answer, ensure_ascii=False)[:60]}, "
                'expected texts, {"answers": ["a", "b"]}: write them so and import the queries again'
            )
    return answers_of(metadata)


def pool_part(
    item: tuple[str, Asked, Mapping[str, Hits]], draft: Draft, depth: int, corpus: Corpus | None,
    facts: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """One task: pool a part's hits, leave out what answers the question, commit. `corpus`: to look for answers in."""
    name, asked, found = item
    table = mining.pool(asked.ids, found, asked.positives, depth)
    if corpus is not None:
        table = without_answers(table, asked.answers, corpus)
    draft.commit(name, ".parquet", functools.partial(write_parquet, table), rows=len(table), **(facts or {}))


def without_answers(table: pa.Table, answers: Sequence[Sequence[str]], corpus: Corpus) -> pa.Table:
    """The pool without the passages that contain an answer that is known for their question."""
    rows = np.unique(table["row"].to_numpy())
    matcher = AnswerMatcher()
    texts = {row: passage.text for row, passage in zip(rows.tolist(), corpus.passages(rows), strict=True)}
    return mining.without_answers(
        table, lambda query, found: matcher.contains([texts[row] for row in found.tolist()], answers[query])
    )
