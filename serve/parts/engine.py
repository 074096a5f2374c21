"""The search engine: runs batches of queries on the parts of a service, and reports the failures of the parts.

The stages of a search are: encode the queries, search the sources, fuse the hits, fetch the passages, re-rank. By
document, the sources are searched until there are enough documents, and the best passage of each is kept at the end.
Hits are explained last, by further calls of the leaves, if a query asks for it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from riptide.base.cuts import Cuts
from riptide.indexing.exact import Hits, empty_hits, merge_hits, without_rows
from riptide.indexing.exact.score_parts import ScoreParts
from riptide.indexing.hit_sources.fusion import source_depth
from riptide.indexing.search.document_search import (
    DEEPER,
    first_search_depth,
    has_enough_documents,
    passages_to_rerank,
    reranked_documents,
)
from riptide.indexing.search.hit_explanations import SourceResult, explain_hits, rows_to_explain
from riptide.indexing.search.rescoring import reorder_hits
from riptide.retriever.options import Side
from riptide.serve.parts.leaf import (
    AskLeaves,
    ExplainRequest,
    HitsRequest,
    Passage,
    PassagesRequest,
    Reply,
    SourceHitRows,
    SourceQueries,
    wait_for_reply,
)
from riptide.serve.parts.part import UsableQueries
from riptide.serve.parts.part_states import ENCODER, PASSAGES, RERANKER
from riptide.serve.parts.query_states import (
    EmbedTextsRequest,
    PendingQuery,
    QueryAnswer,
    QueryGroup,
    QueryState,
    ScorePairsRequest,
    rows_and_scores,
)
from riptide.serve.parts.service_models import (
    TOGETHER,
    EncodedTexts,
    EncoderPart,
    RerankPart,
    are_finite,
    unusable_text_error,
)
from riptide.serve.release.release import Release
from riptide.serve.service_errors import ExpiredError, LostError, StoreError

log = logging.getLogger("riptide.serve")

# Maximum number of passages per query in a search by document; at this limit a query may get fewer than k documents.
MAX_PASSAGES = 16_384
REST_S = 0.5  # maximum seconds that are kept for the stages after the search, if partial answers are allowed


class Engine:
    """Answers batches of queries, of texts to embed and of pairs to re-rank, each batch from one release.

    Args:
        encoder: Encodes queries and texts.
        reranker: Scores passages.
        ask_leaves: Asks all leaves.

    Attributes:
        on_encoded: Called with the number of texts and of tokens after each forward pass of the encoder.
        on_failure: Called with the name of a part that fails and the exception.
        erased_rows: Returns the rows, int64 ascending, that answers of a release leave out.
        on_searched: Called with the groups of a batch after their sources are searched.
    """

    def __init__(self, encoder: EncoderPart, reranker: RerankPart, ask_leaves: AskLeaves):
        self.encoder, self.reranker, self.ask_leaves = encoder, reranker, ask_leaves
        self.on_encoded: Callable[[int, int], object] = lambda texts, tokens: None
        self.on_failure: Callable[[str, Exception], object] = lambda part, error: None
        self.erased_rows: Callable[[Release], np.ndarray] = lambda release: np.empty(0, np.int64)
        self.on_searched: Callable[[Sequence[QueryGroup]], object] = lambda groups: None

    def search(self, queries: Sequence[PendingQuery]) -> list[QueryAnswer]:
        """Returns one answer per query; the answer to a failed query holds its exception.

        Args:
            queries: Queries of one release; either all of them allow partial answers, or none does. If they do, the
                engine stops waiting for all of them at the same time.
        """
        states = [QueryState(query, _first_depth(query)) for query in queries]
        try:
            BatchSearch(self, states).run()
        except Exception as error:
            for state in states:
                state.answer.error = state.answer.error or error
        return [state.answer for state in states]

    def embed(self, requests: Sequence[EmbedTextsRequest]) -> list[tuple[np.ndarray, Cuts] | Exception]:
        """Returns the vectors of each request's texts, float32 [n, dim], and the counts of cut texts; or an exception.

        A request with a text that cannot be used fails alone.

        Args:
            requests: Requests of one release and side, which are encoded together.
        """
        texts = [text for request in requests for text in request.texts]
        tasks = [request.task for request in requests for _ in request.texts]
        deadline = max(request.deadline for request in requests)
        encoded = self.encode(requests[0].release, texts, tasks, requests[0].side, deadline)
        results, end = list[tuple[np.ndarray, Cuts] | Exception](), 0
        for request in requests:
            start, end = end, end + len(request.texts)
            vectors = encoded.vectors[start:end]
            if len(bad := np.flatnonzero(~are_finite(vectors))):
                first = int(bad[0])
                results.append(unusable_text_error(request.task, encoded.unusable.get(start + first), first))
            else:
                results.append((vectors, Cuts.from_lengths(encoded.lengths[start:end], encoded.num_cut[start:end])))
        return results

    def rerank(self, requests: Sequence[ScorePairsRequest]) -> list[np.ndarray]:
        """Returns the probabilities of each request's documents, float32 [n].

        Args:
            requests: Requests of one release, which are scored together.
        """
        queries = [request.query for request in requests for _ in request.documents]
        texts = [text for request in requests for text in request.documents]
        deadline = max(request.deadline for request in requests)
        with self.report_failures(RERANKER):
            scores = self.reranker.score(requests[0].release.id, queries, [""] * len(texts), texts, deadline)
        return np.split(scores, np.cumsum([len(request.documents) for request in requests])[:-1])

    def encode(
        self, release: Release, texts: Sequence[str], tasks: Sequence[str], side: Side, deadline: float
    ) -> EncodedTexts:
        """Encodes texts as `EncoderPart.encode` does, and counts the forward passes."""
        with self.report_failures(ENCODER):
            encoded = self.encoder.encode(release.id, texts, tasks, side, deadline)
        for start in range(0, len(texts), TOGETHER):
            lengths = encoded.lengths[start : start + TOGETHER]
            self.on_encoded(len(lengths), int(lengths.sum()))
        return encoded

    def passages(self, release: Release, rows: np.ndarray, deadline: float) -> list[Passage]:
        """Returns the passages of rows, int64 [n]. Raises the exception of a leaf that fails."""
        replies = self.ask_leaves("fetch", PassagesRequest(release.id, deadline, rows))
        return [passage for reply in replies for passage in wait_for_reply(reply, deadline)]

    @contextlib.contextmanager
    def report_failures(self, part: str) -> Iterator[None]:
        """Context that reports the failure of a part and raises it again."""
        try:
            yield
        except Exception as error:
            self.report(part, error)
            raise

    def report(self, part: str, error: Exception, leaf: int = 0) -> None:
        """Logs the failure of a part, and calls `on_failure` if the part cannot read its files or is lost.

        Args:
            part: The name of the part.
            error: The failure; passed deadlines are not logged.
            leaf: The number of the leaf that has the part.
        """
        if not isinstance(error, ExpiredError):
            log.warning("%s of leaf %d failed: %r", part, leaf, error)
        if isinstance(error, StoreError | LostError):
            self.on_failure(part, error)


class BatchSearch:
    """The search of one batch of queries. The answers are in their states.

    Args:
        engine: Calls the models and the leaves.
        states: The states of queries of one release; either all of them allow partial answers, or none does.

    Attributes:
        groups: The groups of usable queries, one for each source and parameters of the search.
        passages: The passages that answers or the re-ranker need, by row.
        deadline: The latest deadline of the queries; if partial answers are allowed, the earliest one.
        reserve_s: Seconds before the deadline at which the engine stops waiting for hits; for passages it waits until
            half of them are left, and for explanations until a quarter is left.
    """

    def __init__(self, engine: Engine, states: Sequence[QueryState]):
        queries = [state.query for state in states]
        self.engine, self.release, self.states = engine, queries[0].release, states
        self.groups: list[QueryGroup] = []
        self.passages: dict[int, Passage] = {}
        self.deadline, self.reserve_s = max(query.deadline for query in queries), 0.0
        if queries[0].allow_partial:
            self.deadline = min(query.deadline for query in queries)
            self.reserve_s = min(REST_S, max(0.0, self.deadline - time.monotonic()) / 4)
        self._stage_seconds: dict[str, float] = {}

    def run(self) -> None:
        """Runs all stages. An exception ends the batch; errors of single queries are in their answers."""
        with self._measure_stage("encode"):
            self._make_groups()
        with self._measure_stage("search"):
            self._search_leaves(self.groups)
            for state in self.states:
                state.fuse()
            self._find_documents()
        self.engine.on_searched(self.groups)
        with self._measure_stage("passages"):
            self._fetch_passages()
        for state in self.states:
            state.answer.shards, state.answer.error = state.shards, state.search_error
        with self._measure_stage("rerank"):
            self._rerank()
        for state in self.states:
            state.make_hits(self.passages)
        if any(state.query.explain for state in self.states):
            with self._measure_stage("explain"):
                self._explain()
        for state in self.states:
            state.make_json()
            state.answer.stage_seconds = self._stage_seconds

    @contextlib.contextmanager
    def _measure_stage(self, name: str) -> Iterator[None]:
        """Context that measures the seconds of a stage."""
        start = time.perf_counter()
        yield
        self._stage_seconds[name] = time.perf_counter() - start

    def _make_groups(self) -> None:
        """Groups the queries by source and encodes them; queries that cannot be used get an error."""
        by_key: dict[object, QueryGroup] = {}
        for state in self.states:
            query, search = state.query, state.query.search
            depth = source_depth(state.depth, len(search.sources))
            for source, label in zip(search.sources, search.labels, strict=True):
                effort = search.efforts.get(source)
                key = source.kind.name, source.target, depth, query.filter, effort
                group = by_key.setdefault(key, QueryGroup(source, depth, query.filter, effort=effort))
                group.members.append((state, label))
        groups = by_key.values()
        dense = [group for group in groups if group.source.kind.queries == "vectors"]
        dense_states, vectors = list(dict.fromkeys(state for group in dense for state, _ in group.members)), {}
        try:
            vectors = self._encode_queries(dense_states)
        except Exception as error:  # the error concerns only the queries with dense sources
            for state in dense_states:
                state.query_error = error
        for group in groups:
            group.members = [(state, label) for state, label in group.members if state.query_error is None]
            if not group.members:
                continue
            group.queries = [state.query.text for state, _ in group.members]
            if group.source.kind.queries == "vectors":
                group.queries = np.stack([vectors[state.query.vector_key] for state, _ in group.members])
            elif group.source.kind.online.encodes:
                self._encode_group(group)
        self.groups = [group for group in groups if group.members]

    def _encode_queries(self, states: Sequence[QueryState]) -> dict[tuple[str, str], np.ndarray]:
        """Returns the vectors of queries by task and text; queries without a finite vector get an error."""
        keys = list(dict.fromkeys(state.query.vector_key for state in states))
        if not keys:
            return {}
        tasks, texts = zip(*keys, strict=True)
        encoded = self.engine.encode(self.release, texts, tasks, "query", self.deadline)
        unusable = {keys[number]: reason for number, reason in encoded.unusable.items()}
        vectors = dict(zip(keys, encoded.vectors, strict=True))
        for state in states:
            key = state.query.vector_key
            if not are_finite(vectors[key]):
                state.query_error = unusable_text_error(state.query.task.name, unusable.get(key))
        return vectors

    def _encode_group(self, group: QueryGroup) -> None:
        """Encodes the queries of a group with the encoder of its source, such as SPLADE, and removes unusable ones."""
        kind, target = group.source.kind, group.source.target
        try:
            with self.engine.report_failures(ENCODER):
                used = self.engine.encoder.encode_for(
                    self.release.id, kind.online, target, group.queries, self.deadline
                )
        except Exception as error:  # the error concerns only the queries with this source
            used = UsableQueries(None, [], {})
            for state, _ in group.members:
                state.query_error = error
        group.record_unusable(used.unusable)
        group.queries, group.members = used.result, [group.members[position] for position in used.numbers]

    def _search_leaves(self, groups: Sequence[QueryGroup]) -> None:
        """Sends all groups to all leaves, in one call per leaf, and merges the hits."""
        if not groups:
            return
        deadline = self.deadline - self.reserve_s
        sources = [
            SourceQueries(
                group.source.kind.name, group.source.target, group.queries, group.depth, group.filter, group.effort
            )
            for group in groups
        ]
        replies = self.engine.ask_leaves("search", HitsRequest(self.release.id, deadline, sources))
        erased_rows = self.engine.erased_rows(self.release)
        for group, results in zip(groups, self._results_of_groups(replies, groups, deadline), strict=True):
            leaf_hits, num_hits = list[Hits](), np.zeros(len(group.members), np.int64)
            for source_hits in results:
                leaf_hits.append(without_rows(source_hits.hits, erased_rows))
                num_hits += (source_hits.hits.rows >= 0).sum(axis=1)
                group.record_unusable(source_hits.unusable)
            no_hits = empty_hits(len(group.members), group.depth)
            scores, rows = merge_hits(leaf_hits, group.depth) if leaf_hits else no_hits
            for row, (state, label) in enumerate(group.members):
                if label not in state.hits_by_label:  # otherwise a deeper search repeats the query
                    state.searchers += len(replies)
                state.hits_by_label[label] = Hits(scores[row : row + 1], rows[row : row + 1])
                state.may_have_more[label] = bool(num_hits[row] >= group.depth)

    def _results_of_groups(
        self, replies: Sequence[Reply[Any]], groups: Sequence[QueryGroup], deadline: float
    ) -> list[list[Any]]:
        """Returns the results of those leaves that answered, for each group; reports and counts the failures."""
        results: list[list[Any]] = [[] for _ in groups]
        for leaf, reply in enumerate(replies):
            try:
                answered = wait_for_reply(reply, deadline)
            except Exception as error:
                answered = [error] * len(groups)
            for group, result, of_group in zip(groups, answered, results, strict=True):
                if not isinstance(result, Exception):
                    of_group.append(result)
                    continue
                self.engine.report(group.source.kind.online.name, result, leaf)
                for state, label in group.members:
                    state.count_lost(leaf, [label], result)
        return results

    def _find_documents(self) -> None:
        """Reduces the hits of queries by document to the best passage of each document and the passages to re-rank.

        Queries whose passages have fewer than k documents are searched again, DEEPER times as deep each time.
        """
        pending = [state for state in self.states if state.query.by_document]
        while searched := [(state, state.hits) for state in pending if state.hits is not None]:
            rows = np.unique(np.concatenate([hits.rows[0] for _, hits in searched]))
            deadline = self.deadline - self.reserve_s
            replies, errors = self._ask_about_passages("documents", rows, deadline)
            document_of = {
                row: number for reply in replies for row, number in zip(*(each.tolist() for each in reply), strict=True)
            }
            pending = []
            for state, hits in searched:
                query = state.query
                documents = np.array([[document_of.get(row, -1) for row in hits.rows[0].tolist()]], np.int64)
                if errors and ((hits.rows >= 0) & (documents < 0)).any():
                    state.count_all_lost(errors)
                has_all_hits = hits.rows[0, -1] < 0 and not any(state.may_have_more.values())
                is_enough = has_enough_documents(documents, query.k)[0] or has_all_hits
                if is_enough or state.depth >= MAX_PASSAGES or errors:
                    state.hits = passages_to_rerank(hits, documents, query.k, query.rerank)
                    state.documents = dict(zip(hits.rows[0].tolist(), documents[0].tolist(), strict=True))
                else:
                    state.depth = min(DEEPER * state.depth, MAX_PASSAGES)
                    pending.append(state)
            self._search_leaves([deeper for group in self.groups for deeper in group.deeper_groups(pending)])
            for state in pending:
                state.fuse()

    def _ask_about_passages(
        self, method: str, rows: np.ndarray, deadline: float
    ) -> tuple[list[Any], dict[int, Exception]]:
        """Calls a method of all leaves about passages; returns the results, and the errors by number of the leaf."""
        request = PassagesRequest(self.release.id, deadline, rows[rows >= 0])
        results, errors = list[Any](), dict[int, Exception]()
        for leaf, reply in enumerate(self.engine.ask_leaves(method, request) if len(request.rows) else ()):
            try:
                results.append(wait_for_reply(reply, deadline))
            except Exception as error:
                self.engine.report(PASSAGES, error, leaf)
                errors[leaf] = error
        return results, errors

    def _fetch_passages(self) -> None:
        """Fetches the passages of hits that are returned or re-ranked; removes hits of lost leaves."""
        wanted = [state.hits.rows[0, : state.query.fetch_depth] for state in self.states if state.hits is not None]
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *wanted]))
        deadline = self.deadline - self.reserve_s / 2
        replies, errors = self._ask_about_passages("fetch", rows, deadline)
        self.passages = {passage[0]: passage for reply in replies for passage in reply}
        for state in self.states if errors else ():
            if state.hits is None:
                continue
            rows = state.hits.rows[0, : state.query.fetch_depth]
            is_kept = np.isin(rows, [-1, *self.passages])
            if not is_kept.all():
                state.hits = Hits(state.hits.scores[:, : len(rows)][:, is_kept], rows[None, is_kept])
                state.count_all_lost(errors)

    def _rerank(self) -> None:
        """Re-ranks the first hits of queries with `rerank` by probability; deeper hits keep their order below them."""
        reranked = [(state, state.hits) for state in self.states if state.query.rerank and state.hits is not None]
        pairs = [
            (state, self.passages[row])
            for state, hits in reranked
            for row, _ in rows_and_scores(hits, state.query.rerank)
        ]
        if not pairs:
            return
        deadline = max(state.query.deadline for state, _ in reranked)
        texts = [state.query.text for state, _ in pairs]
        titles, bodies = [passage[2] for _, passage in pairs], [passage[3] for _, passage in pairs]
        try:
            with self.engine.report_failures(RERANKER):
                scores = self.engine.reranker.score(self.release.id, texts, titles, bodies, deadline)
        except Exception as error:
            for state, _ in reranked:
                state.answer.error = error
            return
        by_state: dict[QueryState, list[float]] = defaultdict(list)
        for (state, _), score in zip(pairs, scores, strict=True):
            by_state[state].append(score)
        for state, hits in reranked:
            if state not in by_state:
                continue
            state.hits = reorder_hits(hits, np.array([by_state[state]], np.float32))
            if state.query.by_document:
                documents = np.array([[state.documents[row] for row in state.hits.rows[0].tolist()]])
                state.hits = reranked_documents(state.hits, documents, state.query.k)

    def _explain(self) -> None:
        """Adds explanations to the hits of queries with `explain`.

        If a leaf fails, these queries get an error; if they allow partial answers, their hits lack terms and lists.
        """
        deadline = self.deadline - self.reserve_s / 4
        rows = {
            state: [hit.row for hit in state.answer.hits]
            for state in self.states
            if state.query.explain and state.answer.hits
        }
        explained, sources = list[QueryGroup](), list[SourceHitRows]()
        for group in self.groups:
            hit_rows = {
                position: source_rows
                for position, (state, label) in enumerate(group.members)
                if state in rows and (source_rows := rows_to_explain(rows[state], state.hits_by_label[label]))
            }
            if hit_rows:
                part = group.select(list(hit_rows))
                explained.append(part)
                names = part.source.kind.name, part.source.target
                sources.append(SourceHitRows(*names, part.queries, list(hit_rows.values()), part.effort))
        request = ExplainRequest(self.release.id, deadline, sources)
        replies = self.engine.ask_leaves("explain", request) if sources else []
        parts: dict[tuple[QueryState, str], dict[int, ScoreParts]] = defaultdict(dict)
        by_group = self._results_of_groups(replies, explained, deadline)
        for group, results in zip(explained, by_group, strict=True):
            for by_query in results:
                for member, by_row in zip(group.members, by_query, strict=True):
                    parts[member].update(by_row)
        for state, answer_rows in rows.items():
            query, answer = state.query, state.answer
            answer.shards = state.shards
            if not query.allow_partial and (error := state.search_error) is not None:
                answer.fail(error)
                continue
            results = [
                SourceResult(label, state.hits_by_label[label], parts[state, label]) for label in query.search.labels
            ]
            reranked = [hit.scores.get("reranker") for hit in answer.hits]
            explanations = explain_hits(answer_rows, results, query.search.weights, state.depth, reranked, query.filter)
            pairs = zip(answer.hits, explanations, strict=True)
            answer.hits = [hit._replace(explanation=explanation) for hit, explanation in pairs]


def _first_depth(query: PendingQuery) -> int:
    """Returns the number of passages that the first search of a query requests."""
    if query.by_document:
        return min(first_search_depth(query.k, query.rerank, len(query.search.sources)), MAX_PASSAGES)
    return max(query.k, query.rerank)
