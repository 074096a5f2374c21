"""A search from questions to passages: what runs on which part, in what order, and what an answer says of itself."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from indexing.exact import Hits, merge, nothing
from indexing.fusion import weighted
from indexing.retrieval import HYBRID
from indexing.retrievers import FUSION_DEPTH
from retriever.errors import InputError
from serve.parts import ExpiredError
from serve.places import Places, Reply
from serve.release import Release, Task

log = logging.getLogger("riptide.serve")

Mode = Literal["dense", "exact", "bm25", "hybrid"]
TOGETHER = 64  # texts that the encoder or the re-ranker is given at once
LATE = 0.05  # seconds that a part may answer after the deadline: it drops what is late itself
REST = 0.5  # seconds before the deadline at which shards are waited for no longer, where those that came will do


@dataclass(frozen=True)
class Query:
    """One question, as it is asked of one release. filter: the text of a Filter. rerank: hits to re-rank, 0: none.
    deadline: a time of day in seconds."""

    text: str
    task: Task
    k: int
    mode: Mode
    deadline: float
    filter: str | None = None
    rerank: int = 0
    partial: bool = False


class Hit(NamedTuple):
    """scores: of each source that found it, and the re-ranker's."""

    row: int
    id: str
    title: str
    text: str
    metadata: str
    score: float
    scores: dict[str, float]


@dataclass
class Shards:
    """How many searchers a question went to, and how they ended."""

    total: int = 0
    failed: int = 0
    timed_out: int = 0

    @property
    def successful(self) -> int:
        return self.total - self.failed - self.timed_out


@dataclass
class Answer:
    """hits: best first. took: seconds by stage, those of the whole batch."""

    hits: list[Hit] = field(default_factory=list)
    shards: Shards = field(default_factory=Shards)
    took: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None


class IncompleteError(Exception):
    """Not all shards answered, and the question did not allow for that."""


@dataclass
class _Found:
    """What the searches gave each question: hits of each source, [1, k]."""

    sources: dict[str, Hits] = field(default_factory=dict)
    shards: Shards = field(default_factory=Shards)


class Engine:
    """Answers batches of questions of one release at a time."""

    def __init__(self, places: Places):
        self.places = places
        self.encoded: Callable[[int, int], object] = lambda texts, tokens: None  # told of each of the encoder's passes

    def search(self, release: Release, queries: Sequence[Query]) -> list[Answer]:
        """An answer for each question, in order; one that cannot be given holds its error."""
        answers = [Answer() for _ in queries]
        try:
            self._search(release, queries, answers)
        except Exception as error:
            for answer in answers:
                answer.error = answer.error or error
        return answers

    def embed(
        self, release: Release, texts: Sequence[str], tasks: Sequence[str], side: str, deadline: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Vectors float32 [n, dim], and tokens [n]. Of long lists TOGETHER at a time, so that the deadline is kept."""
        found = []
        for at in range(0, len(texts), TOGETHER):
            share = list(texts[at : at + TOGETHER]), list(tasks[at : at + TOGETHER])
            vectors, tokens = _taken(self.places.encoder.call("encode", release.id, *share, side, deadline), deadline)
            self.encoded(len(vectors), int(tokens.sum()))
            found.append((vectors, tokens))
        if len(found) == 1:
            return found[0]
        return np.concatenate([vectors for vectors, _ in found]), np.concatenate([tokens for _, tokens in found])

    def rerank(
        self, release: Release, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str], deadline: float
    ) -> np.ndarray:
        """The probability of each pair: float32 [n]."""
        assert self.places.reranker is not None
        found = []
        for at in range(0, len(texts), TOGETHER):
            share = [list(of[at : at + TOGETHER]) for of in (questions, titles, texts)]
            found.append(_taken(self.places.reranker.call("score", release.id, *share, deadline), deadline))
        return np.concatenate(found) if found else np.empty(0, np.float32)

    def _search(self, release: Release, queries: Sequence[Query], answers: list[Answer]) -> None:
        clock = _Clock()
        vectors = self._encode(release, queries)
        for query, answer in zip(queries, answers, strict=True):
            if query.mode != "bm25" and not finite(vectors[query.task.name, query.text]):
                answer.error = not_finite(query.task.name)
        clock.lap("encode")
        found = self._find(release, queries, vectors, [answer.error is None for answer in answers])
        clock.lap("search")
        kept: list[Hits | None] = []
        for query, one, answer in zip(queries, found, answers, strict=True):
            answer.shards = one.shards
            whole, none = one.shards.successful == one.shards.total, one.shards.successful == 0
            if answer.error is None and (none or not (whole or query.partial)):
                expired = one.shards.failed == 0
                answer.error = ExpiredError() if expired else IncompleteError()
            kept.append(None if answer.error else _fused(query, one))
        texts = self._fetch(release, queries, kept)
        clock.lap("passages")
        self._rerank(release, queries, kept, texts, answers)
        clock.lap("rerank")
        for query, hits, one, answer in zip(queries, kept, found, answers, strict=True):
            if hits is not None and answer.error is None:
                answer.hits = _hits(query, hits, one, texts)
            answer.took = clock.laps

    def _encode(self, release: Release, queries: Sequence[Query]) -> dict[tuple[str, str], np.ndarray]:
        """The vector of each (task, text) that is searched for by one."""
        wanted = list(dict.fromkeys((query.task.name, query.text) for query in queries if query.mode != "bm25"))
        if not wanted:
            return {}
        deadline = max(query.deadline for query in queries)
        vectors, _ = self.embed(release, [text for _, text in wanted], [task for task, _ in wanted], "query", deadline)
        return dict(zip(wanted, vectors, strict=True))

    def _find(
        self, release: Release, queries: Sequence[Query], vectors: dict[tuple[str, str], np.ndarray], wanted: list[bool]
    ) -> list[_Found]:
        """Questions that are asked alike go to every shard together; all searches are on their way at once."""
        found = [_Found() for _ in queries]
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number, query in enumerate(queries):
            if not wanted[number]:
                continue
            depth = max(query.k, query.rerank, FUSION_DEPTH if query.mode == "hybrid" else 0)
            alike = query.filter, query.partial and 1 + int(query.deadline / REST)  # those that end together
            if query.mode != "bm25":
                groups["dense", query.task.space, depth, query.mode == "exact", *alike].append(number)
            if query.mode in ("bm25", "hybrid"):
                groups["bm25", query.task.bm25, depth, False, *alike].append(number)
        sent: list[tuple[str, int, list[int], float, list[Reply]]] = []
        for (kind, place, depth, exact, filter, partial), members in groups.items():
            deadline = max(queries[number].deadline for number in members)
            if partial:  # what the others found has to be read still
                deadline = min(queries[number].deadline for number in members)
                deadline -= min(REST, max(0.0, deadline - time.time()) / 4)
            replies: list[Reply] = []
            if kind == "dense":
                asked = np.stack([vectors[queries[n].task.name, queries[n].text] for n in members])
                for shard in self.places.shards:
                    replies.append(shard.call("search", release.id, *place, asked, depth, filter, exact, deadline))
            else:
                assert self.places.words is not None
                texts = [queries[number].text for number in members]
                replies.append(self.places.words.call("search", release.id, place, texts, depth, filter, deadline))
            sent.append((kind, depth, members, deadline, replies))
        for kind, depth, members, deadline, replies in sent:
            self._gather(kind, depth, members, deadline, replies, found)
        return found

    def _gather(
        self, kind: str, depth: int, members: list[int], deadline: float, replies: list[Reply], found: list[_Found]
    ) -> None:
        """Put the replies of a group's searchers together, those that came."""
        parts, failed, timed_out = [], 0, 0
        for number, reply in enumerate(replies):
            try:
                parts.append(Hits(*_taken(reply, deadline)))
            except (ExpiredError, TimeoutError):
                timed_out += 1
            except Exception as error:
                failed += 1
                log.warning("%s searcher %d failed: %r", kind, number, error)
        hits = merge(parts, depth) if parts else nothing(len(members), depth)
        for place, number in enumerate(members):
            shards = found[number].shards
            shards.total += len(replies)
            shards.failed += failed
            shards.timed_out += timed_out
            found[number].sources[kind] = Hits(hits.scores[place : place + 1], hits.rows[place : place + 1])

    def _fetch(
        self, release: Release, queries: Sequence[Query], kept: Sequence[Hits | None]
    ) -> dict[int, tuple[int, str, str, str, str]]:
        """The passages of all hits that are shown or re-ranked, by row."""
        shown = [hits.rows[0, : max(query.k, query.rerank)] for query, hits in zip(queries, kept, strict=True) if hits]
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *shown]))
        rows = rows[rows >= 0]
        if not len(rows):
            return {}
        deadline = max(query.deadline for query in queries)
        passages = _taken(self.places.passages.call("fetch", release.id, rows, deadline), deadline)
        return {passage[0]: passage for passage in passages}

    def _rerank(
        self, release: Release, queries: Sequence[Query], kept: list[Hits | None],
        texts: dict[int, tuple[int, str, str, str, str]], answers: Sequence[Answer],
    ) -> None:  # fmt: skip
        """Order the first hits of the questions that ask for it by their probability; those below stay below."""
        asked = [n for n, (query, hits) in enumerate(zip(queries, kept, strict=True)) if query.rerank and hits]
        pairs = [(n, int(row)) for n in asked for row, _ in _listed(kept[n], queries[n].rerank)]
        if not pairs:
            return
        deadline = max(queries[number].deadline for number in asked)
        questions = [queries[number].text for number, _ in pairs]
        titles, bodies = [texts[row][2] for _, row in pairs], [texts[row][3] for _, row in pairs]
        try:
            scores = self.rerank(release, questions, titles, bodies, deadline)
        except Exception as error:
            for number in asked:
                answers[number].error = error
            return
        by_query: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for (number, row), score in zip(pairs, scores, strict=True):
            by_query[number].append((float(score), row))
        for number, scored in by_query.items():
            scored.sort(key=lambda pair: (-pair[0], pair[1]))
            hits = kept[number]
            assert hits is not None
            below = hits.rows[:, len(scored) :]
            ranks = -np.arange(len(scored) + 1, len(scored) + 1 + below.shape[1], dtype=np.float32)[None]
            kept[number] = Hits(
                np.concatenate([np.array([[s for s, _ in scored]], np.float32), ranks], axis=1),
                np.concatenate([np.array([[row for _, row in scored]], np.int64), below], axis=1),
            )


def finite(vectors: np.ndarray) -> np.ndarray:
    """Of which vectors [..., dim] all numbers are: bool [...]."""
    found: np.ndarray = np.isfinite(vectors).all(axis=-1)
    return found


def not_finite(task: str, number: int | None = None) -> InputError:
    """What the asker of a task is told whose prompt or text leads the backbone beyond its numbers."""
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


def _taken(reply: Reply, deadline: float) -> Any:
    """A reply's result. Raises ExpiredError where it does not come in time."""
    try:
        return reply.result(timeout_s=max(0.0, deadline - time.time()) + LATE)
    except TimeoutError as error:
        raise ExpiredError from error


def _fused(query: Query, found: _Found) -> Hits:
    """The sources' hits as one list, as `search --mode hybrid` fuses them. Where one of both failed, the other's."""
    sources = found.sources
    if query.mode == "hybrid":
        return weighted([sources["bm25"], sources["dense"]], max(query.k, query.rerank), [HYBRID, 1 - HYBRID])
    [hits] = sources.values()
    return hits


def _listed(hits: Hits | None, k: int) -> Iterable[tuple[int, float]]:
    """(row, score) of the first k."""
    if hits is None:
        return []
    rows, scores = hits.rows[0, :k].tolist(), hits.scores[0, :k].tolist()
    return [(row, score) for row, score in zip(rows, scores, strict=True) if row >= 0]


def _hits(query: Query, hits: Hits, found: _Found, texts: dict[int, tuple[int, str, str, str, str]]) -> list[Hit]:
    """The hits that are shown, each with its passage and with the scores of all sources that found it."""
    by_source = {source: dict(_listed(hits, hits.rows.shape[1])) for source, hits in found.sources.items()}
    shown = []
    for place, (row, score) in enumerate(_listed(hits, query.k)):
        scores = {"reranker": score} if place < query.rerank else {}
        scores |= {source: of[row] for source, of in by_source.items() if row in of}
        shown.append(Hit(*texts[row], score, scores))
    return shown
