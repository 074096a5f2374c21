"""The search engine: runs batches of queries on the parts of a service, and reports how each answer came about.

The stages of a search are: encode the queries, search the sources, fuse the hits, fetch the passages, re-rank.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from indexing.exact import Hits, merge, nothing
from indexing.hit_sources.fusion import fuse
from indexing.search.rescoring import reranked
from retriever.cuts import Cuts
from retriever.errors import InputError
from retriever.options import Side
from serve.errors import LostError, StoreError
from serve.parts.leaf import Ask, HitsRequest, Passage, PassagesRequest, Reply, SourceHits, SourceQueries
from serve.parts.models import Encoded, EncoderPart, RerankPart
from serve.parts.part import ExpiredError, Usable
from serve.parts.queries import Answer, Batch, Group, Hit, Pairs, Query, QueryState, Texts, as_result
from serve.parts.states import ENCODER, PASSAGES, RERANKER
from serve.release.release import Release

log = logging.getLogger("riptide.serve")

Item = TypeVar("Item")
Result = TypeVar("Result")
TOGETHER = 64  # texts per call of the encoder or of the re-ranker
LATE = 0.05  # seconds after the deadline in which a reply still counts: parts drop late work themselves


class Engine:
    """Answers batches of queries, each batch for one release.

    Args:
        encoder: Encodes queries and texts.
        reranker: Scores passages.
        ask: Asks all leaves.

    Attributes:
        encoded: Called with the number of texts and of tokens after each forward pass of the encoder.
        failed: Called with the name of a part that fails and the exception.
    """

    def __init__(self, encoder: EncoderPart, reranker: RerankPart, ask: Ask):
        self.encoder, self.reranker, self.ask = encoder, reranker, ask
        self.encoded: Callable[[int, int], object] = lambda texts, tokens: None
        self.failed: Callable[[str, Exception], object] = lambda part, error: None

    def search(self, queries: Sequence[Query]) -> list[Answer]:
        """Returns one answer per query, in the order of the queries; an answer that failed holds its exception."""
        answers = [Answer() for _ in queries]
        for members in _alike(queries, lambda query: query.release.id):
            group = [answers[number] for number in members]
            try:
                self._search(queries[members[0]].release, [queries[number] for number in members], group)
            except Exception as error:
                for answer in group:
                    answer.error = answer.error or error
        return answers

    def embed(self, requests: Sequence[Texts]) -> list[tuple[np.ndarray, Cuts] | Exception]:
        """Returns the vectors of the texts of each request, float32 [n, dim], and the counts of texts that were cut.

        Requests of one release and side are encoded together; one with a text that cannot be used fails alone.
        """
        results: list[tuple[np.ndarray, Cuts] | Exception] = [(np.empty(0), Cuts())] * len(requests)
        for members in _alike(requests, lambda request: (request.release.id, request.side)):
            group = [requests[number] for number in members]
            texts = [text for request in group for text in request.texts]
            tasks = [request.task for request in group for _ in request.texts]
            deadline = max(request.deadline for request in group)
            encoded = self.encode(group[0].release, texts, tasks, group[0].side, deadline)
            ends = np.cumsum([len(request.texts) for request in group])
            for number, request, end in zip(members, group, ends.tolist(), strict=True):
                start = end - len(request.texts)
                vectors = encoded.vectors[start:end]
                results[number] = vectors, Cuts.of(encoded.lengths[start:end], encoded.num_cut[start:end])
                if len(bad := np.flatnonzero(~finite(vectors))):
                    first = int(bad[0])
                    results[number] = unusable(request.task, encoded.refused.get(start + first), first)
        return results

    def rerank(self, requests: Sequence[Pairs]) -> list[np.ndarray]:
        """Returns the probabilities of the documents of each request, float32 [n]; a release's are scored together."""
        results: list[np.ndarray] = [np.empty(0)] * len(requests)
        for members in _alike(requests, lambda request: request.release.id):
            group = [requests[number] for number in members]
            queries = [request.query for request in group for _ in request.documents]
            texts = [text for request in group for text in request.documents]
            deadline = max(request.deadline for request in group)
            scores = self.score(group[0].release, queries, [""] * len(texts), texts, deadline)
            ends = np.cumsum([len(request.documents) for request in group])[:-1]
            for number, share in zip(members, np.split(scores, ends), strict=True):
                results[number] = share
        return results

    def encode(
        self, release: Release, texts: Sequence[str], tasks: Sequence[str], side: Side, deadline: float
    ) -> Encoded:
        """Returns the vectors of texts, and what those of them lack that have no words for their prompts.

        Long lists are encoded TOGETHER texts at a time, so that the deadline is met.

        Args:
            release: A release with an encoder.
            texts: Texts to encode.
            tasks: Name of the task per text.
            side: Whether the texts are queries or passages.
            deadline: Wall-clock time in seconds.

        Raises:
            ExpiredError: If the deadline passes.
        """
        batches = list[Encoded]()
        for start in range(0, len(texts), TOGETHER):
            piece = slice(start, start + TOGETHER)
            with self._reported(ENCODER):
                encoded = self.encoder.encode(release.id, texts[piece], tasks[piece], side, deadline)
            self.encoded(len(encoded.vectors), int(encoded.lengths.sum()))
            refused = {start + number: reason for number, reason in encoded.refused.items()}
            batches.append(encoded._replace(refused=refused))
        if len(batches) == 1:
            return batches[0]
        vectors, lengths, num_cut = (np.concatenate([batch[field] for batch in batches]) for field in range(3))
        refused = {number: reason for batch in batches for number, reason in batch.refused.items()}
        return Encoded(vectors, lengths, num_cut, refused)

    def score(
        self, release: Release, queries: Sequence[str], titles: Sequence[str], texts: Sequence[str], deadline: float
    ) -> np.ndarray:
        """Returns the probability of each (query, passage) pair, float32 [n].

        Args:
            release: A release with a re-ranker.
            queries: Query per pair.
            titles: Title of the passage per pair.
            texts: Text of the passage per pair.
            deadline: Wall-clock time in seconds.

        Raises:
            ExpiredError: If the deadline passes.
        """
        scores = [np.empty(0, np.float32)]
        for start in range(0, len(texts), TOGETHER):
            piece = slice(start, start + TOGETHER)
            with self._reported(RERANKER):
                scores.append(self.reranker.score(release.id, queries[piece], titles[piece], texts[piece], deadline))
        return np.concatenate(scores)

    def passages(self, release: Release, rows: np.ndarray, deadline: float) -> list[Passage]:
        """Returns the passages of rows, int64 [n]. Raises the exception of a leaf that fails."""
        replies = self.ask("fetch", PassagesRequest(release.id, rows, deadline))
        return [passage for reply in replies for passage in _result(reply, deadline)]

    def _search(self, release: Release, queries: Sequence[Query], answers: list[Answer]) -> None:
        clock = _Clock()
        results = [QueryState() for _ in queries]
        batches = self._batches(release, queries, results)
        clock.lap("encode")
        self._find(release, batches, results)
        clock.lap("search")
        fused: list[Hits | None] = []
        for query, result in zip(queries, results, strict=True):
            fused.append(_fused(query, result) if result.error(query.partial) is None else None)
        texts = self._fetch(release, queries, batches, fused, results)
        clock.lap("passages")
        for query, result, answer in zip(queries, results, answers, strict=True):
            answer.shards, answer.error = result.shards, result.error(query.partial)
        self._rerank(release, queries, fused, texts, answers)
        clock.lap("rerank")
        for query, hits, result, answer in zip(queries, fused, results, answers, strict=True):
            if hits is not None and answer.error is None:
                answer.hits = _hits(query, hits, result, texts)
                answer.json = as_result(query.text, answer)
            answer.took = clock.laps

    def _batches(self, release: Release, queries: Sequence[Query], results: list[QueryState]) -> list[Batch]:
        """Encodes the queries, and returns the batches for the leaves; queries that cannot be used get an error."""
        vectors = self._vectors(release, queries, results)
        alike: dict[int, list[int]] = defaultdict(list)
        for number, query in enumerate(queries):
            if results[number].refused is None:
                alike[query.ending].append(number)
        batches = []
        for numbers in alike.values():
            batch = Batch.of({number: queries[number] for number in numbers})
            for group in batch.groups:
                kind, texts = group.source.kind, [queries[number].text for number, _ in group.members]
                group.queries = texts
                if kind.queries == "vectors":
                    keys = [(queries[number].task.name, queries[number].text) for number, _ in group.members]
                    group.queries = np.stack([vectors[key] for key in keys])
                elif kind.online.encodes:
                    try:
                        with self._reported(ENCODER):
                            used = self.encoder.encode_for(
                                release.id, kind.online, group.source.target, texts, batch.ends
                            )
                    except Exception as error:  # other sources need not fail
                        used = Usable(None, [], {})
                        for number, _ in group.members:
                            results[number].refused = error
                    _refuse(group, used.refused, results)
                    group.queries, group.members = used.result, [group.members[place] for place in used.numbers]
            batch.groups = [group for group in batch.groups if group.members]
            batches.append(batch)
        return batches

    def _vectors(
        self, release: Release, queries: Sequence[Query], results: list[QueryState]
    ) -> dict[tuple[str, str], np.ndarray]:
        """Returns the vectors of queries that need them, by task and text; refuses queries without a finite vector."""
        dense = [query for query in queries if query.search.needs_vectors]
        if not dense:
            return {}
        keys = list(dict.fromkeys((query.task.name, query.text) for query in dense))
        tasks, texts = zip(*keys, strict=True)
        encoded = self.encode(release, texts, tasks, "query", max(query.deadline for query in queries))
        refused = {keys[number]: reason for number, reason in encoded.refused.items()}
        vectors = dict(zip(keys, encoded.vectors, strict=True))
        for query, result in zip(queries, results, strict=True):
            key = query.task.name, query.text
            if query.search.needs_vectors and not finite(vectors[key]):
                result.refused = unusable(query.task.name, refused.get(key))
        return vectors

    def _find(self, release: Release, batches: Sequence[Batch], results: list[QueryState]) -> None:
        """Asks all leaves for the hits of all groups, in one call for each batch, and merges them."""
        pending = []
        for batch in batches:
            sources = [
                SourceQueries(group.source.kind.name, group.source.target, group.queries, group.depth, group.filter)
                for group in batch.groups
            ]
            deadline = batch.ends - batch.reserve_s
            pending.append((deadline, batch.groups, self.ask("search", HitsRequest(release.id, sources, deadline))))
        for deadline, groups, replies in pending:
            hits_of_leaves: list[list[Hits]] = [[] for _ in groups]
            for leaf, reply in enumerate(replies):
                answered: list[SourceHits | Exception]
                try:
                    answered = _result(reply, deadline)
                except Exception as error:
                    answered = [error] * len(groups)
                for group, hits, merged in zip(groups, answered, hits_of_leaves, strict=True):
                    if isinstance(hits, SourceHits):
                        merged.append(hits.hits)
                        _refuse(group, hits.refused, results)
                        continue
                    self._report(group.source.kind.online.name, hits, leaf)
                    for number, label in group.members:
                        results[number].lose(leaf, [label], hits)
            for group, merged in zip(groups, hits_of_leaves, strict=True):
                scores, rows = merge(merged, group.depth) if merged else nothing(len(group.members), group.depth)
                for row, (number, label) in enumerate(group.members):
                    results[number].searchers += len(replies)
                    results[number].sources[label] = Hits(scores[row : row + 1], rows[row : row + 1])

    def _fetch(
        self,
        release: Release,
        queries: Sequence[Query],
        batches: Sequence[Batch],
        fused: list[Hits | None],
        results: list[QueryState],
    ) -> dict[int, Passage]:
        """Returns the passages of all hits that are returned or re-ranked, by row; drops the hits of lost leaves."""
        texts: dict[int, Passage] = {}
        pending = []
        for batch in batches:
            lists = [hits.rows[0, : queries[number].depth] for number in batch.numbers if (hits := fused[number])]
            rows = np.unique(np.concatenate([np.empty(0, np.int64), *lists]))
            deadline = batch.ends - batch.reserve_s / 2
            request = PassagesRequest(release.id, rows[rows >= 0], deadline)
            pending.append((batch, deadline, self.ask("fetch", request) if len(request.rows) else ()))
        for batch, deadline, replies in pending:
            errors = dict[int, Exception]()
            for leaf, reply in enumerate(replies):
                try:
                    texts |= {passage[0]: passage for passage in _result(reply, deadline)}
                except Exception as error:
                    self._report(PASSAGES, error, leaf)
                    errors[leaf] = error
            for number in batch.numbers if errors else ():
                if (hits := fused[number]) is None:
                    continue
                rows = hits.rows[0, : queries[number].depth]
                is_kept = np.isin(rows, [-1, *texts])
                if not is_kept.all():
                    fused[number] = Hits(hits.scores[:, : len(rows)][:, is_kept], rows[None, is_kept])
                    for leaf, lost in errors.items():
                        results[number].lose(leaf, queries[number].search.labels, lost)
        return texts

    def _rerank(
        self,
        release: Release,
        queries: Sequence[Query],
        fused: list[Hits | None],
        texts: dict[int, Passage],
        answers: Sequence[Answer],
    ) -> None:
        """Sorts the first hits of queries with `rerank` by probability; lower hits keep their order below them."""
        numbers = [n for n, (query, hits) in enumerate(zip(queries, fused, strict=True)) if query.rerank and hits]
        pairs = [(n, int(row)) for n in numbers for row, _ in _listed(fused[n], queries[n].rerank)]
        if not pairs:
            return
        deadline = max(queries[number].deadline for number in numbers)
        query_texts = [queries[number].text for number, _ in pairs]
        titles, bodies = [texts[row][2] for _, row in pairs], [texts[row][3] for _, row in pairs]
        try:
            scores = self.score(release, query_texts, titles, bodies, deadline)
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

    @contextlib.contextmanager
    def _reported(self, part: str) -> Iterator[None]:
        """Reports the failures of a part."""
        try:
            yield
        except Exception as error:
            self._report(part, error)
            raise

    def _report(self, part: str, error: Exception, leaf: int = 0) -> None:
        if not isinstance(error, ExpiredError):
            log.warning("%s of leaf %d failed: %r", part, leaf, error)
        if isinstance(error, StoreError | LostError):
            self.failed(part, error)


def _alike(items: Sequence[Item], key: Callable[[Item], object]) -> list[list[int]]:
    """Returns the numbers of items with equal keys, one list for each key."""
    groups: dict[object, list[int]] = {}
    for number, one in enumerate(items):
        groups.setdefault(key(one), []).append(number)
    return list(groups.values())


def _result(reply: Reply[Result], deadline: float) -> Result:
    """Returns a leaf's reply. Raises ExpiredError if it does not arrive in time."""
    try:
        return reply.result(timeout=max(0.0, deadline - time.time()) + LATE)
    except TimeoutError as error:
        raise ExpiredError from error


def _refuse(group: Group, refused: Mapping[int, str], results: list[QueryState]) -> None:
    """Records why a source cannot use some of a group's queries. refused: by their place in the group."""
    for place, reason in refused.items():
        number, label = group.members[place]
        results[number].refused = InputError(f"source {label}: {reason}")


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


def _fused(query: Query, result: QueryState) -> Hits:
    """Returns the fused hits of the sources, as a search job fuses them; if one source failed, those of the others."""
    hits = [result.sources[label] for label in query.search.labels]
    return fuse(hits, query.depth, query.search.weights)


def _listed(hits: Hits | None, k: int) -> Iterable[tuple[int, float]]:
    """Returns (row, score) of the first k hits."""
    if hits is None:
        return []
    rows, scores = hits.rows[0, :k].tolist(), hits.scores[0, :k].tolist()
    return [(row, score) for row, score in zip(rows, scores, strict=True) if row >= 0]


def _hits(query: Query, hits: Hits, result: QueryState, texts: dict[int, Passage]) -> list[Hit]:
    """Returns the hits of an answer, each with its passage and with the scores of all sources that found it."""
    by_source = {source: dict(_listed(hits, hits.rows.shape[1])) for source, hits in result.sources.items()}
    output = []
    for position, (row, score) in enumerate(_listed(hits, query.k)):
        scores = {"reranker": score} if position < query.rerank else {}
        scores |= {source: by_row[row] for source, by_row in by_source.items() if row in by_row}
        output.append(Hit(*texts[row], score, scores))
    return output
