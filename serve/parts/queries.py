"""What the engine of a service is asked, and its answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from indexing.exact import Hits
from indexing.hit_sources.fusion import source_depth
from retriever.options import Side
from serve.errors import StoreError
from serve.parts.part import ExpiredError
from serve.release.release import Release
from serve.release.tasks import Search, ServedSource, Task

REST = 0.5  # seconds before the deadline at which waiting for shards ends, if a partial answer is allowed


@dataclass(frozen=True)
class Query:
    """One query to one release.

    Attributes:
        release: The release that answers.
        text: The query's text.
        task: A task of the release.
        k: Number of hits to return.
        search: The sources to search.
        deadline: Wall-clock time in seconds (time.time()).
        filter: The text of a Filter; None: no filter.
        rerank: Number of first hits to re-rank; 0: none.
        partial: Whether an answer without some of the shards is allowed.
    """

    release: Release
    text: str
    task: Task
    k: int
    search: Search
    deadline: float
    filter: str | None = None
    rerank: int = 0
    partial: bool = False

    @property
    def depth(self) -> int:
        """Number of hits of which the passages are needed."""
        return max(self.k, self.rerank)

    @property
    def ending(self) -> int:
        """Equal for queries for which waiting for the leaves ends at about the same time."""
        return 1 + int(self.deadline / REST) if self.partial else 0


class Hit(NamedTuple):
    """One hit with its passage. scores: by source that found it, and the re-ranker's score.

    metadata: JSON text.
    """

    row: int
    id: str
    title: str
    text: str
    metadata: str
    score: float
    scores: dict[str, float]


@dataclass
class Shards:
    """Number of searchers that a query was sent to, and how many of them failed or timed out."""

    total: int = 0
    failed: int = 0
    timed_out: int = 0

    @property
    def successful(self) -> int:
        return self.total - self.failed - self.timed_out


@dataclass
class Answer:
    """The answer to one query.

    Attributes:
        hits: Hits, best first.
        shards: How many searchers answered.
        took: Seconds by stage, for the whole batch.
        error: The exception, if there is no answer.
        json: The result in the response to a request, as bytes.
    """

    hits: list[Hit] = field(default_factory=list)
    shards: Shards = field(default_factory=Shards)
    took: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None
    json: bytes = b""


class IncompleteError(Exception):
    """Not all shards answered, and the query did not allow a partial answer."""


@dataclass
class QueryState:
    """What is known of a query so far: the hits of each source, and what failed.

    Attributes:
        sources: Hits [1, k] by the source's label.
        searchers: Number of searchers, which are the sources times the leaves.
        failed, timed_out: The searchers, as (number of the leaf, label), that failed or timed out.
        unreadable: The error of a leaf that could not read its files.
        refused: Why a source cannot search the query.
    """

    sources: dict[str, Hits] = field(default_factory=dict)
    searchers: int = 0
    failed: set[tuple[int, str]] = field(default_factory=set)
    timed_out: set[tuple[int, str]] = field(default_factory=set)
    unreadable: StoreError | None = None
    refused: Exception | None = None

    @property
    def shards(self) -> Shards:
        return Shards(self.searchers, len(self.failed), len(self.timed_out - self.failed))

    def lose(self, leaf: int, labels: Iterable[str], error: Exception) -> None:
        """Counts the searchers of some sources in a leaf as failed, or as timed out."""
        is_late = isinstance(error, ExpiredError | TimeoutError)
        (self.timed_out if is_late else self.failed).update((leaf, label) for label in labels)
        if isinstance(error, StoreError):
            self.unreadable = error

    def error(self, is_partial: bool) -> Exception | None:
        """Returns why there is no answer; None: all searchers answered, or some did and that is enough."""
        shards = self.shards
        if self.refused or shards.successful == shards.total or (is_partial and shards.successful):
            return self.refused
        return self.unreadable or (IncompleteError() if self.failed else ExpiredError())


@dataclass
class Group:
    """Queries of a batch to one source with the same parameters.

    Attributes:
        source: The source.
        depth: Number of hits per query.
        filter: The text of a Filter; None: no filter.
        members: The number of each query, and the label that it has for the source.
        queries: What the leaves get in place of the members.
    """

    source: ServedSource
    depth: int
    filter: str | None
    members: list[tuple[int, str]] = field(default_factory=list)
    queries: Any = None


@dataclass
class Batch:
    """Queries for which the leaves are asked together, as they end at the same time.

    Attributes:
        numbers: The numbers of the queries.
        groups: The queries by source.
        ends: When the time of the queries has passed.
        reserve_s: Seconds before that at which waiting for hits ends, if partial answers are allowed.
    """

    numbers: list[int]
    groups: list[Group]
    ends: float
    reserve_s: float

    @classmethod
    def of(cls, queries: Mapping[int, Query]) -> Batch:
        """Returns the batch of queries whose `ending` is equal, by number."""
        groups: dict[object, Group] = {}
        for number, query in queries.items():
            depth = source_depth(query.depth, len(query.search.parts))
            for source, label in zip(query.search.parts, query.search.labels, strict=True):
                key = source.kind.name, source.target, depth, query.filter
                groups.setdefault(key, Group(source, depth, query.filter)).members.append((number, label))
        deadlines = [query.deadline for query in queries.values()]
        if not next(iter(queries.values())).partial:
            return cls(list(queries), list(groups.values()), max(deadlines), 0.0)
        ends = min(deadlines)
        return cls(list(queries), list(groups.values()), ends, min(REST, max(0.0, ends - time.time()) / 4))


class Texts(NamedTuple):
    """The texts of one request, whose vectors are computed together."""

    release: Release
    texts: list[str]
    task: str
    side: Side
    deadline: float


class Pairs(NamedTuple):
    """The query and the documents of one request, which the re-ranker scores."""

    release: Release
    query: str
    documents: list[str]
    deadline: float


def as_result(text: str, answer: Answer) -> bytes:
    """Returns the result of a query in the response of a search (`protocol.ResultOut`)."""
    shards = answer.shards
    hits = [
        {
            "id": hit.id,
            "rank": rank,
            "score": hit.score,
            "title": hit.title,
            "text": hit.text,
            "metadata": orjson.Fragment(hit.metadata) if hit.metadata else None,
            "scores": hit.scores,
        }
        for rank, hit in enumerate(answer.hits, 1)
    ]
    counts = {
        "total": shards.total,
        "successful": shards.successful,
        "failed": shards.failed,
        "timed_out": shards.timed_out,
    }
    return orjson.dumps({"query": text, "hits": hits, "shards": counts})
