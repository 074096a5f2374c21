"""The search engine: runs batches of queries on the parts of a service, and reports how each answer came about.

The stages of a search are: encode the queries, search the sources, fuse the hits, fetch the passages, re-rank.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from indexing.exact import Hits, merge, nothing
from indexing.hit_sources.fusion import fuse, source_depth
from indexing.hit_sources.online import Target
from indexing.rescoring import reranked
from retriever.errors import InputError
from serve.calls.protocols import (
    Clients,
    Encoded,
    EncodeRequest,
    LostError,
    Passage,
    PassagesRequest,
    Reply,
    ScoreRequest,
    SourceHits,
    SourceRequest,
)
from serve.health.failures import StoreError
from serve.health.states import ENCODER, PASSAGES, RERANKER
from serve.parts import ExpiredError
from serve.release import Release
from serve.tasks import Search, Task

log = logging.getLogger("riptide.serve")

Result = TypeVar("Result")
TOGETHER = 64  # texts per call of the encoder or of the re-ranker
LATE = 0.05  # seconds after the deadline in which a reply still counts: parts drop late work themselves
REST = 0.5  # seconds before the deadline at which waiting for shards ends, if a partial answer is allowed


@dataclass(frozen=True)
class Query:
    """One query to one release.

    Attributes:
        text: The query's text.
        task: The task of the release.
        k: Number of hits to return.
        search: The sources to search.
        deadline: Wall-clock time in seconds (time.time()).
        filter: The text of a Filter; None: no filter.
        rerank: Number of first hits to re-rank; 0: none.
        partial: Whether an answer without some of the shards is allowed.
    """

    text: str
    task: Task
    k: int
    search: Search
    deadline: float
    filter: str | None = None
    rerank: int = 0
    partial: bool = False


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
        json: The result in the response to a request, which `serve.work` writes.
    """

    hits: list[Hit] = field(default_factory=list)
    shards: Shards = field(default_factory=Shards)
    took: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None
    json: bytes = b""


class IncompleteError(Exception):
    """Not all shards answered, and the query did not allow a partial answer."""


@dataclass
class _Found:
    """Hits of each source for one query, [1, k], by the source's label.

    unreadable: the error of a searcher that could not read its files.
    refused: the error of a source that cannot use the query.
    """

    sources: dict[str, Hits] = field(default_factory=dict)
    shards: Shards = field(default_factory=Shards)
    unreadable: StoreError | None = None
    refused: InputError | None = None


class _Group(NamedTuple):
    """What queries have in common that are sent to a source in one call."""

    part: str
    kind: str
    takes_vectors: bool
    target: Target
    depth: int
    filter: str | None
    partial: bool | int  # queries with an equal number end together


class Engine:
    """Answers batches of queries, each batch for one release.

    Args:
        clients: The parts of the service.

    Attributes:
        encoded: Called with the number of texts and of tokens after each forward pass of the encoder.
        failed: Called with the name of a part that fails and the exception.
    """

    def __init__(self, clients: Clients):
        self.clients = clients
        self.encoded: Callable[[int, int], object] = lambda texts, tokens: None
        self.failed: Callable[[str, Exception], object] = lambda part, error: None

    def search(self, release: Release, queries: Sequence[Query]) -> list[Answer]:
        """Returns one answer per query, in the order of the queries; an answer that failed holds its exception.

        Args:
            release: The release that answers.
            queries: Queries of tasks of that release.
        """
        answers = [Answer() for _ in queries]
        try:
            self._search(release, queries, answers)
        except Exception as error:
            for answer in answers:
                answer.error = answer.error or error
        return answers

    def embed(
        self, release: Release, texts: Sequence[str], tasks: Sequence[str], side: str, deadline: float
    ) -> Encoded:
        """Returns the vectors of texts, and what those of them lack that have no words for their prompts.

        Long lists are encoded TOGETHER texts at a time, so that the deadline is met.

        Args:
            release: A release with an encoder.
            texts: Texts to encode.
            tasks: Name of the task per text.
            side: "query" or "passage".
            deadline: Wall-clock time in seconds.

        Raises:
            ExpiredError: If the deadline passes.
        """
        encoder, batches = self.clients.encoder, list[Encoded]()
        assert encoder is not None
        for start in range(0, len(texts), TOGETHER):
            batch = list(texts[start : start + TOGETHER]), list(tasks[start : start + TOGETHER])
            reply = encoder.encode(EncodeRequest(release.id, *batch, side, deadline))
            encoded = self._taken(ENCODER, reply, deadline)
            self.encoded(len(encoded.vectors), int(encoded.lengths.sum()))
            refused = {start + number: reason for number, reason in encoded.refused.items()}
            batches.append(encoded._replace(refused=refused))
        if len(batches) == 1:
            return batches[0]
        vectors, lengths, num_cut = (np.concatenate([batch[field] for batch in batches]) for field in range(3))
        refused = {number: reason for batch in batches for number, reason in batch.refused.items()}
        return Encoded(vectors, lengths, num_cut, refused)

    def rerank(
        self, release: Release, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str], deadline: float
    ) -> np.ndarray:
        """Returns the probability of each (query, passage) pair, float32 [n].

        Args:
            release: A release with a re-ranker.
            questions: Query per pair.
            titles: Title of the passage per pair.
            texts: Text of the passage per pair.
            deadline: Wall-clock time in seconds.

        Raises:
            ExpiredError: If the deadline passes.
        """
        assert self.clients.reranker is not None
        scores = []
        for start in range(0, len(texts), TOGETHER):
            piece = slice(start, start + TOGETHER)
            request = ScoreRequest(release.id, questions[piece], titles[piece], texts[piece], deadline)
            reply = self.clients.reranker.score(request)
            scores.append(self._taken(RERANKER, reply, deadline))
        return np.concatenate(scores) if scores else np.empty(0, np.float32)

    def _search(self, release: Release, queries: Sequence[Query], answers: list[Answer]) -> None:
        clock = _Clock()
        vectors, refused = self._encode(release, queries)
        for query, answer in zip(queries, answers, strict=True):
            key = query.task.name, query.text
            if query.search.needs_vectors and not finite(vectors[key]):
                answer.error = unusable(query.task.name, refused.get(key))
        clock.lap("encode")
        results = self._find(release, queries, vectors, [answer.error is None for answer in answers])
        clock.lap("search")
        fused: list[Hits | None] = []
        for query, result, answer in zip(queries, results, answers, strict=True):
            answer.shards = result.shards
            answer.error = answer.error or result.refused
            is_complete, is_empty = result.shards.successful == result.shards.total, result.shards.successful == 0
            if answer.error is None and (is_empty or not (is_complete or query.partial)):
                is_expired = result.shards.failed == 0
                answer.error = result.unreadable or (ExpiredError() if is_expired else IncompleteError())
            fused.append(None if answer.error else _fused(query, result))
        texts = self._fetch(release, queries, fused)
        clock.lap("passages")
        self._rerank(release, queries, fused, texts, answers)
        clock.lap("rerank")
        for query, hits, result, answer in zip(queries, fused, results, answers, strict=True):
            if hits is not None and answer.error is None:
                answer.hits = _hits(query, hits, result, texts)
            answer.took = clock.laps

    def _encode(
        self, release: Release, queries: Sequence[Query]
    ) -> tuple[dict[tuple[str, str], np.ndarray], dict[tuple[str, str], str]]:
        """Returns the query vectors by (task, text), of the queries that need them, and what refused queries lack."""
        keys = list(dict.fromkeys((query.task.name, query.text) for query in queries if query.search.needs_vectors))
        if not keys:
            return {}, {}
        deadline = max(query.deadline for query in queries)
        encoded = self.embed(release, [text for _, text in keys], [task for task, _ in keys], "query", deadline)
        refused = {keys[number]: reason for number, reason in encoded.refused.items()}
        return dict(zip(keys, encoded.vectors, strict=True)), refused

    def _find(
        self, release: Release, queries: Sequence[Query], vectors: dict[tuple[str, str], np.ndarray], valid: list[bool]
    ) -> list[_Found]:
        """Searches all sources. Queries with the same parameters share one call; all calls run concurrently."""
        results = [_Found() for _ in queries]
        groups: dict[_Group, list[tuple[int, str]]] = defaultdict(list)  # (number of the query, label of the source)
        for number, query in enumerate(queries):
            if not valid[number]:
                continue
            depth = source_depth(max(query.k, query.rerank), len(query.search.parts))
            partial = query.partial and 1 + int(query.deadline / REST)
            for source, label in zip(query.search.parts, query.search.labels, strict=True):
                kind = source.kind
                group = _Group(
                    kind.online.name, kind.name, kind.queries == "vectors", source.target, depth, query.filter, partial
                )
                groups[group].append((number, label))
        pending: list[tuple[_Group, list[tuple[int, str]], float, list[Reply[SourceHits]]]] = []
        for group, members in groups.items():
            deadline = max(queries[number].deadline for number, _ in members)
            if group.partial:  # the hits of the other shards must still be fetched
                deadline = min(queries[number].deadline for number, _ in members)
                deadline -= min(REST, max(0.0, deadline - time.time()) / 4)
            inputs: list[str] | np.ndarray = [queries[number].text for number, _ in members]
            if group.takes_vectors:
                inputs = np.stack([vectors[queries[n].task.name, queries[n].text] for n, _ in members])
            request = SourceRequest(release.id, group.kind, group.target, inputs, group.depth, group.filter, deadline)
            replies = [searcher.search(request) for searcher in self.clients.searchers[group.part]]
            pending.append((group, members, deadline, replies))
        for group, members, deadline, replies in pending:
            self._gather(group.part, group.depth, members, deadline, replies, results)
        return results

    def _gather(
        self, part: str, depth: int, members: list[tuple[int, str]], deadline: float,
        replies: list[Reply[SourceHits]], results: list[_Found],
    ) -> None:  # fmt: skip
        """Merges the replies of a group's searchers; failed and late searchers are counted."""
        parts, failed, timed_out = list[Hits](), 0, 0
        unreadable: StoreError | None = None
        for number, reply in enumerate(replies):
            try:
                hits, refused = self._taken(part, reply, deadline)
                parts.append(hits)
                for place, reason in refused.items():
                    query, label = members[place]
                    results[query].refused = InputError(f"source {label}: {reason}")
            except (ExpiredError, TimeoutError):
                timed_out += 1
            except Exception as error:
                failed += 1
                log.warning("%s searcher %d failed: %r", part, number, error)
                if isinstance(error, StoreError):
                    unreadable = error
        hits = merge(parts, depth) if parts else nothing(len(members), depth)
        for row, (number, label) in enumerate(members):
            shards = results[number].shards
            shards.total += len(replies)
            shards.failed += failed
            shards.timed_out += timed_out
            results[number].unreadable = unreadable or results[number].unreadable
            results[number].sources[label] = Hits(hits.scores[row : row + 1], hits.rows[row : row + 1])

    def _fetch(self, release: Release, queries: Sequence[Query], fused: Sequence[Hits | None]) -> dict[int, Passage]:
        """Returns the passages of all hits that are returned or re-ranked, by row."""
        lists = [hits.rows[0, : max(query.k, query.rerank)] for query, hits in zip(queries, fused, strict=True) if hits]
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *lists]))
        rows = rows[rows >= 0]
        if not len(rows):
            return {}
        deadline = max(query.deadline for query in queries)
        reply = self.clients.passages.fetch(PassagesRequest(release.id, rows, deadline))
        passages = self._taken(PASSAGES, reply, deadline)
        return {passage[0]: passage for passage in passages}

    def _rerank(
        self, release: Release, queries: Sequence[Query], fused: list[Hits | None],
        texts: dict[int, Passage], answers: Sequence[Answer],
    ) -> None:  # fmt: skip
        """Sorts the first hits of queries with `rerank` by probability; lower hits keep their order below them."""
        numbers = [n for n, (query, hits) in enumerate(zip(queries, fused, strict=True)) if query.rerank and hits]
        pairs = [(n, int(row)) for n in numbers for row, _ in _listed(fused[n], queries[n].rerank)]
        if not pairs:
            return
        deadline = max(queries[number].deadline for number in numbers)
        query_texts = [queries[number].text for number, _ in pairs]
        titles, bodies = [texts[row][2] for _, row in pairs], [texts[row][3] for _, row in pairs]
        try:
            scores = self.rerank(release, query_texts, titles, bodies, deadline)
        except Exception as error:
            for number in numbers:
                answers[number].error = error
            return
        by_query: dict[int, list[float]] = defaultdict(list)
        for (number, _), score in zip(pairs, scores, strict=True):
            by_query[number].append(score)
        for number, probabilities in by_query.items():
            hits = fused[number]
            assert hits is not None
            fused[number] = reranked(hits, np.array([probabilities], np.float32))

    def _taken(self, part: str, reply: Reply[Result], deadline: float) -> Result:
        """Returns a part's reply. Raises ExpiredError if it does not arrive in time."""
        try:
            return reply.result(timeout_s=max(0.0, deadline - time.time()) + LATE)
        except TimeoutError as error:
            raise ExpiredError from error
        except (StoreError, LostError) as error:
            self.failed(part, error)
            raise


def finite(vectors: np.ndarray) -> np.ndarray:
    """Returns which vectors [..., dim] are finite in all dimensions: bool [...]."""
    result: np.ndarray = np.isfinite(vectors).all(axis=-1)
    return result


def unusable(task: str, reason: str | None, number: int | None = None) -> InputError:
    """Returns the error for a text without a finite vector.

    Args:
        task: The name of its task.
        reason: What it lacks for its prompt; None: nothing, its vector overflows.
        number: Number of the text in the request, if it has several.
    """
    if reason is not None:
        return InputError(f"task {task}: {'the text' if number is None else f'text {number}'} {reason}")
    which = "" if number is None else f" of text {number}"
    return InputError(f"task {task}: the vector{which} is not finite")


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = now - self._last
        self._last = now


def _fused(query: Query, result: _Found) -> Hits:
    """Returns the fused hits of the sources, as a search job fuses them; if one source failed, those of the others."""
    hits = [result.sources[label] for label in query.search.labels]
    return fuse(hits, max(query.k, query.rerank), query.search.weights)


def _listed(hits: Hits | None, k: int) -> Iterable[tuple[int, float]]:
    """Returns (row, score) of the first k hits."""
    if hits is None:
        return []
    rows, scores = hits.rows[0, :k].tolist(), hits.scores[0, :k].tolist()
    return [(row, score) for row, score in zip(rows, scores, strict=True) if row >= 0]


def _hits(query: Query, hits: Hits, result: _Found, texts: dict[int, Passage]) -> list[Hit]:
    """Returns the hits of an answer, each with its passage and with the scores of all sources that found it."""
    by_source = {source: dict(_listed(hits, hits.rows.shape[1])) for source, hits in result.sources.items()}
    output = []
    for position, (row, score) in enumerate(_listed(hits, query.k)):
        scores = {"reranker": score} if position < query.rerank else {}
        scores |= {source: by_row[row] for source, by_row in by_source.items() if row in by_row}
        output.append(Hit(*texts[row], score, scores))
    return output
