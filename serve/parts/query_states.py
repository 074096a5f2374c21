"""Queries to the engine of a service, their states during a search, and their answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import orjson

from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.fusion import fuse
from riptide.indexing.hit_sources.query_encoder import select_queries
from riptide.indexing.search.explanations import HitExplanation
from riptide.retriever.options import Side
from riptide.serve.parts.leaf import Passage
from riptide.serve.protocol import MAX_RESPONSE_BYTES
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedSource, ServedTask, SourceSearch
from riptide.serve.service_errors import ExpiredError, IncompleteError, RequestError, StoreError

SPAN = ("document", "start", "end")  # fields of a hit that only split corpora have


@dataclass(frozen=True)
class PendingQuery:
    """A query to one release.

    Attributes:
        release: The release that answers.
        text: The query's text.
        task: A task of the release.
        k: Number of hits to return.
        search: The sources to search.
        deadline: Time of `time.monotonic()` in seconds.
        filter: The text of a Filter; None: no filter.
        rerank: Number of first hits to re-rank; 0: none.
        allow_partial: Whether an answer without some of the shards is allowed.
        by_document: Whether hits are documents, each as its best passage; only if the corpus is split.
        max_bytes: Maximum bytes of the JSON of its result.
        explain: Whether its hits are explained.
    """

    release: Release
    text: str
    task: ServedTask
    k: int
    search: SourceSearch
    deadline: float
    filter: str | None = None
    rerank: int = 0
    allow_partial: bool = False
    by_document: bool = False
    max_bytes: int = MAX_RESPONSE_BYTES
    explain: bool = False

    @property
    def vector_key(self) -> tuple[str, str]:
        """The name of the task and the text, which determine the query's vector."""
        return self.task.name, self.text

    @property
    def fetch_depth(self) -> int:
        """The maximum number of hits whose passages are fetched."""
        return self.k + self.rerank if self.by_document else max(self.k, self.rerank)


class AnswerHit(NamedTuple):
    """A hit of an answer, with its passage.

    Attributes:
        metadata: JSON text.
        scores: By source that found it, and the re-ranker's score.
        span: If the corpus is split: the id of the document, and the characters of its text at which the passage
            starts and ends; None: it is not.
        explanation: Why it is a hit; None: the query does not ask for it.
    """

    row: int
    id: str
    title: str
    text: str
    metadata: str
    score: float
    scores: dict[str, float]
    span: tuple[str, int, int] | None = None
    explanation: HitExplanation | None = None


class ShardCounts(NamedTuple):
    """The number of searchers that a query was sent to, and the numbers that answered, failed and timed out."""

    total: int = 0
    successful: int = 0
    failed: int = 0
    timed_out: int = 0


@dataclass
class QueryAnswer:
    """The answer to a query: its hits, or an error.

    Attributes:
        hits: Hits, best first.
        shards: How many searchers answered.
        stage_seconds: Seconds by stage, for the whole batch.
        error: The exception, if there is no answer.
        json: The result in the response to a request, as bytes.
    """

    hits: list[AnswerHit] = field(default_factory=list)
    shards: ShardCounts = field(default_factory=ShardCounts)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None
    json: bytes = b""

    def fail(self, error: Exception) -> None:
        """Replaces the hits by an error."""
        self.hits, self.json, self.error = [], b"", error

    def result_json(self, text: str) -> bytes:
        """Returns the JSON of a query's result in the response of a search (`protocol.ResultOut`). text: the query."""
        hits = [
            {
                "id": hit.id,
                **(dict(zip(SPAN, hit.span, strict=True)) if hit.span else {}),
                "rank": rank,
                "score": hit.score,
                "title": hit.title,
                "text": hit.text,
                "metadata": orjson.Fragment(hit.metadata) if hit.metadata else None,
                "scores": hit.scores,
                **({"explanation": hit.explanation} if hit.explanation else {}),
            }
            for rank, hit in enumerate(self.hits, 1)
        ]
        return orjson.dumps({"query": text, "hits": hits, "shards": self.shards._asdict()})


@dataclass(eq=False)
class QueryState:
    """The state of a query during a search: its hits until now, its failures, and its answer.

    Attributes:
        query: The query.
        depth: Number of passages that the fusion of the sources returns.
        hits: The hits [1, n] after the last stage, best first; None: before the fusion, or without an answer.
        answer: The answer, to which the last stages add hits and JSON.
        hits_by_label: Hits [1, k] by the source's label.
        may_have_more: By label: whether the source found as many hits as requested, erased ones included.
        searchers: Number of searchers, which are the sources times the leaves.
        failed, timed_out: The searchers, as (number of the leaf, label), that failed or timed out.
        unreadable: The error of a leaf that could not read its files.
        query_error: Why a source cannot search the query.
        documents: The numbers of the documents of the passages that may be hits, by row; only by document.
    """

    query: PendingQuery
    depth: int
    hits: Hits | None = None
    answer: QueryAnswer = field(default_factory=QueryAnswer)
    hits_by_label: dict[str, Hits] = field(default_factory=dict)
    may_have_more: dict[str, bool] = field(default_factory=dict)
    searchers: int = 0
    failed: set[tuple[int, str]] = field(default_factory=set)
    timed_out: set[tuple[int, str]] = field(default_factory=set)
    unreadable: StoreError | None = None
    query_error: Exception | None = None
    documents: dict[int, int] = field(default_factory=dict)

    @property
    def shards(self) -> ShardCounts:
        failed, timed_out = len(self.failed), len(self.timed_out - self.failed)
        return ShardCounts(self.searchers, self.searchers - failed - timed_out, failed, timed_out)

    def count_lost(self, leaf: int, labels: Iterable[str], error: Exception) -> None:
        """Records that searchers of some sources in a leaf failed, or timed out."""
        is_late = isinstance(error, ExpiredError | TimeoutError)
        (self.timed_out if is_late else self.failed).update((leaf, label) for label in labels)
        if isinstance(error, StoreError):
            self.unreadable = error

    def count_all_lost(self, errors: Mapping[int, Exception]) -> None:
        """Records that the searchers of all sources failed in each leaf with an error."""
        for leaf, error in errors.items():
            self.count_lost(leaf, self.query.search.labels, error)

    @property
    def search_error(self) -> Exception | None:
        """The error of the search; None if the query has an answer, as all searchers answered or enough of them."""
        shards = self.shards
        if self.query_error or shards.successful == shards.total or (self.query.allow_partial and shards.successful):
            return self.query_error
        return self.unreadable or (IncompleteError() if self.failed else ExpiredError())

    def fuse(self) -> None:
        """Fuses the hits of the sources as a search job does; if a source failed, fuses those of the other sources."""
        search, self.hits = self.query.search, None
        if self.search_error is None:
            self.hits = fuse([self.hits_by_label[label] for label in search.labels], self.depth, search.weights)

    def make_hits(self, passages: Mapping[int, Passage]) -> None:
        """Sets the hits of the answer, each with its passage and the scores of its sources, unless the query failed."""
        if self.hits is None or self.answer.error is not None:
            return
        by_source = {
            source: dict(rows_and_scores(hits, hits.rows.shape[1])) for source, hits in self.hits_by_label.items()
        }
        answer_hits = []
        for row, score in rows_and_scores(self.hits, self.query.k):
            # The re-ranker gives probabilities; hits below those that it scored have their negative rank as score.
            scores = {"reranker": score} if self.query.rerank and score >= 0 else {}
            scores |= {source: by_row[row] for source, by_row in by_source.items() if row in by_row}
            _, id, title, text, metadata, *span = passages[row]
            span_of_hit = tuple(span) if span else None
            answer_hits.append(AnswerHit(row, id, title, text, metadata, score, scores, span_of_hit))
        self.answer.hits = answer_hits

    def make_json(self) -> None:
        """Sets the JSON of the answer, unless the query failed; an answer that is too large becomes an error."""
        if self.hits is None or self.answer.error is not None:
            return
        self.answer.json = self.answer.result_json(self.query.text)
        if (size := len(self.answer.json)) > self.query.max_bytes:
            error = f"a query has a result of {size:,} bytes, expected up to {self.query.max_bytes:,}: ask for fewer "
            self.answer.fail(RequestError(f"{error}hits (k), or send fewer queries at once"))


@dataclass
class QueryGroup:
    """Queries of a batch that search the same source with the same parameters.

    Attributes:
        source: The source.
        depth: Number of hits per query.
        filter: The text of a Filter; None: no filter.
        members: The state of each query, and its label for the source.
        queries: The members as the leaves receive them: texts or vectors.
        effort: Search effort (nprobe or efSearch) of an index; None: the one that its build measured.
    """

    source: ServedSource
    depth: int
    filter: str | None
    members: list[tuple[QueryState, str]] = field(default_factory=list)
    queries: Any = None
    effort: int | None = None

    def deeper_groups(self, states: Collection[QueryState]) -> list[QueryGroup]:
        """Returns groups that repeat the search of the members in `states`, one group for each depth."""
        by_depth: dict[int, list[int]] = {}
        for position, (state, _) in enumerate(self.members):
            if state in states:
                by_depth.setdefault(state.depth, []).append(position)
        return [replace(self.select(positions), depth=depth) for depth, positions in by_depth.items()]

    def record_unusable(self, unusable: Mapping[int, str]) -> None:
        """Records the reasons why the source cannot use some queries. unusable: reasons by position in the group."""
        for position, reason in unusable.items():
            state, label = self.members[position]
            state.query_error = RequestError(f"source {label}: {reason}")

    def select(self, positions: Sequence[int]) -> QueryGroup:
        """Returns a group of the members at these positions."""
        members = [self.members[position] for position in positions]
        return replace(self, members=members, queries=select_queries(self.queries, np.array(positions)))


class EmbedTextsRequest(NamedTuple):
    """The texts of one request to `embed`, whose vectors are computed together."""

    release: Release
    texts: list[str]
    task: str
    side: Side
    deadline: float


class ScorePairsRequest(NamedTuple):
    """The query and the documents of one request to `rerank`, whose pairs the re-ranker scores."""

    release: Release
    query: str
    documents: list[str]
    deadline: float


def rows_and_scores(hits: Hits, k: int) -> list[tuple[int, float]]:
    """Returns (row, score) of the first k hits."""
    rows, scores = hits.rows[0, :k].tolist(), hits.scores[0, :k].tolist()
    return [(row, score) for row, score in zip(rows, scores, strict=True) if row >= 0]
