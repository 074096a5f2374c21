"""The search engine: runs batches of queries on the parts of a service, and reports the stages and failures of each.

The stages of a search are: encode the queries, search the sources, fuse the hits, fetch the passages, re-rank. By
document, the sources are searched until there are enough documents, and the best passage of each is kept at the end.
Hits are explained last, by further calls of the leaves, if a query asks for it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from riptide.base.cuts import Cuts
from riptide.indexing.exact import Hits, empty_hits, merge_hits
from riptide.indexing.exact.score_parts import ScoreParts
from riptide.indexing.hit_sources.fusion import fuse, source_depth
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
    AnswerHit,
    EmbedTextsRequest,
    PendingQuery,
    QueryAnswer,
    QueryGroup,
    QueryState,
    ScorePairsRequest,
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
from riptide.serve.service_errors import ExpiredError, LostError, RequestError, StoreError

log = logging.getLogger("riptide.serve")

SPAN = ("document", "start", "end")  # fields of a hit that only split corpora have
# Maximum number of passages per query in a search by document; at this limit a query may get fewer than k documents.
MAX_PASSAGES = 16_384
REST_S = 0.5  # seconds before the deadline at which the engine stops waiting for leaves, if partial answers are allowed


class Engine:
    """Answers batches of queries, each batch from one release.

    Args:
        encoder: Encodes queries and texts.
        reranker: Scores passages.
        ask_leaves: Asks all leaves.

    Attributes:
        on_encoded: Called with the number of texts and of tokens after each forward pass of the encoder.
        on_failure: Called with the name of a part that fails and the exception.
        erased_rows: Returns the rows, int64 ascending, that answers of a release leave out.
        on_searched: Called with the queries of a batch, their groups and their states when the sources are searched.
    """

    def __init__(self, encoder: EncoderPart, reranker: RerankPart, ask_leaves: AskLeaves):
        self.encoder, self.reranker, self.ask_leaves = encoder, reranker, ask_leaves
        self.on_encoded: Callable[[int, int], object] = lambda texts, tokens: None
        self.on_failure: Callable[[str, Exception], object] = lambda part, error: None
        self.erased_rows: Callable[[Release], np.ndarray] = lambda release: np.empty(0, np.int64)
        self.on_searched: Callable[[Sequence[PendingQuery], Sequence[QueryGroup], Sequence[QueryState]], object] = (
            lambda queries, groups, states: None
        )

    def search(self, queries: Sequence[PendingQuery]) -> list[QueryAnswer]:
        """Returns one answer per query; the answer to a failed query holds its exception.

        Args:
            queries: Queries of one release. Of those that allow partial answers, waiting ends together (REST_S).
        """
        answers = [QueryAnswer() for _ in queries]
        try:
            self._search(queries[0].release, queries, answers)
        except Exception as error:
            for answer in answers:
                answer.error = answer.error or error
        return answers

    def embed(self, requests: Sequence[EmbedTextsRequest]) -> list[tuple[np.ndarray, Cuts] | Exception]:
        """Returns the vectors of each request's texts, float32 [n, dim], and the counts of cut texts; or an exception.

        A request with a text that cannot be used fails alone.

        Args:
            requests: Requests of one release and side, which are encoded together.
        """
        texts = [text for request in requests for text in request.texts]
        tasks = [request.task for request in requests for _ in request.texts]
        deadline = max(request.deadline for request in requests)
        encoded = self._encode(requests[0].release, texts, tasks, requests[0].side, deadline)
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
        with self._report_failures(RERANKER):
            scores = self.reranker.score(requests[0].release.id, queries, [""] * len(texts), texts, deadline)
        return np.split(scores, np.cumsum([len(request.documents) for request in requests])[:-1])

    def _encode(
        self, release: Release, texts: Sequence[str], tasks: Sequence[str], side: Side, deadline: float
    ) -> EncodedTexts:
        """Encodes texts as `EncoderPart.encode` does, and counts the forward passes."""
        with self._report_failures(ENCODER):
            encoded = self.encoder.encode(release.id, texts, tasks, side, deadline)
        for start in range(0, len(texts), TOGETHER):
            lengths = encoded.lengths[start : start + TOGETHER]
            self.on_encoded(len(lengths), int(lengths.sum()))
        return encoded

    def passages(self, release: Release, rows: np.ndarray, deadline: float) -> list[Passage]:
        """Returns the passages of rows, int64 [n]. Raises the exception of a leaf that fails."""
        replies = self.ask_leaves("fetch", PassagesRequest(release.id, deadline, rows))
        return [passage for reply in replies for passage in wait_for_reply(reply, deadline)]

    def _search(self, release: Release, queries: Sequence[PendingQuery], answers: list[QueryAnswer]) -> None:
        stage_seconds: dict[str, float] = {}
        states = [QueryState(_first_depth(query)) for query in queries]
        # Either all queries of a batch allow partial answers, or none does.
        deadline = (min if queries[0].allow_partial else max)(query.deadline for query in queries)
        reserve_s = min(REST_S, max(0.0, deadline - time.monotonic()) / 4) if queries[0].allow_partial else 0.0
        with _measure_stage(stage_seconds, "encode"):
            groups = self._make_groups(release, queries, states, deadline)
        with _measure_stage(stage_seconds, "search"):
            self._search_leaves(release, groups, states, deadline - reserve_s)
            fused_hits = [_fuse_hits(query, state) for query, state in zip(queries, states, strict=True)]
            if any(query.by_document for query in queries):
                self._find_documents(release, queries, groups, states, fused_hits, deadline - reserve_s)
        self.on_searched(queries, groups, states)
        with _measure_stage(stage_seconds, "passages"):
            passages = self._fetch_passages(release, queries, fused_hits, states, deadline - reserve_s / 2)
        for query, state, answer in zip(queries, states, answers, strict=True):
            answer.shards, answer.error = state.shards, state.answer_error(query.allow_partial)
        with _measure_stage(stage_seconds, "rerank"):
            self._rerank(release, queries, fused_hits, passages, states, answers)
        for query, hits, state, answer in zip(queries, fused_hits, states, answers, strict=True):
            if hits is not None and answer.error is None:
                answer.hits = _make_hits(query, hits, state, passages)
        if any(query.explain for query in queries):
            with _measure_stage(stage_seconds, "explain"):
                self._explain(release, queries, groups, states, answers, deadline - reserve_s / 4)
        for query, hits, answer in zip(queries, fused_hits, answers, strict=True):
            if hits is not None and answer.error is None:
                answer.json = _result_json(query.text, answer)
                if len(answer.json) > query.max_bytes:
                    answer.hits, answer.json, answer.error = [], b"", _too_large_error(query, len(answer.json))
            answer.stage_seconds = stage_seconds

    def _make_groups(
        self, release: Release, queries: Sequence[PendingQuery], states: list[QueryState], deadline: float
    ) -> list[QueryGroup]:
        """Groups the queries by source and encodes them; queries that cannot be used get an error."""
        by_key: dict[object, QueryGroup] = {}
        for number, query in enumerate(queries):
            depth = source_depth(states[number].depth, len(query.search.sources))
            for source, label in zip(query.search.sources, query.search.labels, strict=True):
                effort = query.search.efforts.get(source)
                key = source.kind.name, source.target, depth, query.filter, effort
                group = by_key.setdefault(key, QueryGroup(source, depth, query.filter, effort=effort))
                group.members.append((number, label))
        groups = list(by_key.values())
        dense = [group for group in groups if group.source.kind.queries == "vectors"]
        numbers = dict.fromkeys(number for group in dense for number, _ in group.members)
        vectors = dict[tuple[str, str], np.ndarray]()
        try:
            vectors = self._encode_queries(release, {number: queries[number] for number in numbers}, states, deadline)
        except Exception as error:  # the error concerns only the queries with dense sources
            for number in numbers:
                states[number].query_error = error
        for group in groups:
            kind, target = group.source.kind, group.source.target
            group.members = [(number, label) for number, label in group.members if states[number].query_error is None]
            group.queries = texts = [queries[number].text for number, _ in group.members]
            if kind.queries == "vectors" and group.members:
                keys = [(queries[number].task.name, queries[number].text) for number, _ in group.members]
                group.queries = np.stack([vectors[key] for key in keys])
            elif kind.online.encodes and group.members:
                try:
                    with self._report_failures(ENCODER):
                        used = self.encoder.encode_for(release.id, kind.online, target, texts, deadline)
                except Exception as error:  # the error concerns only the queries with this source
                    used = UsableQueries(None, [], {})
                    for number, _ in group.members:
                        states[number].query_error = error
                _record_unusable(group, used.unusable, states)
                group.queries, group.members = used.result, [group.members[position] for position in used.numbers]
        return [group for group in groups if group.members]

    def _encode_queries(
        self, release: Release, queries: Mapping[int, PendingQuery], states: list[QueryState], deadline: float
    ) -> dict[tuple[str, str], np.ndarray]:
        """Returns the vectors of queries by task and text; queries without a finite vector get an error."""
        if not queries:
            return {}
        keys = list(dict.fromkeys((query.task.name, query.text) for query in queries.values()))
        tasks, texts = zip(*keys, strict=True)
        encoded = self._encode(release, texts, tasks, "query", deadline)
        unusable = {keys[number]: reason for number, reason in encoded.unusable.items()}
        vectors = dict(zip(keys, encoded.vectors, strict=True))
        for number, query in queries.items():
            key = query.task.name, query.text
            if not are_finite(vectors[key]):
                states[number].query_error = unusable_text_error(query.task.name, unusable.get(key))
        return vectors

    def _search_leaves(
        self, release: Release, groups: Sequence[QueryGroup], states: list[QueryState], deadline: float
    ) -> None:
        """Sends all groups to all leaves, in one call per leaf, and merges the hits."""
        if not groups:
            return
        sources = [
            SourceQueries(
                group.source.kind.name, group.source.target, group.queries, group.depth, group.filter, group.effort
            )
            for group in groups
        ]
        replies = self.ask_leaves("search", HitsRequest(release.id, deadline, sources))
        erased_rows = self.erased_rows(release)
        for group, results in zip(groups, self._results_of_groups(replies, groups, states, deadline), strict=True):
            leaf_hits, num_hits = list[Hits](), np.zeros(len(group.members), np.int64)
            for source_hits in results:
                leaf_hits.append(without_rows(source_hits.hits, erased_rows))
                num_hits += (source_hits.hits.rows >= 0).sum(axis=1)
                _record_unusable(group, source_hits.unusable, states)
            no_hits = empty_hits(len(group.members), group.depth)
            scores, rows = merge_hits(leaf_hits, group.depth) if leaf_hits else no_hits
            for row, (number, label) in enumerate(group.members):
                if label not in states[number].hits_by_label:  # otherwise a deeper search repeats the query
                    states[number].searchers += len(replies)
                states[number].hits_by_label[label] = Hits(scores[row : row + 1], rows[row : row + 1])
                states[number].may_have_more[label] = bool(num_hits[row] >= group.depth)

    def _results_of_groups(
        self, replies: Sequence[Reply[Any]], groups: Sequence[QueryGroup], states: Sequence[QueryState], deadline: float
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
                self._report(group.source.kind.online.name, result, leaf)
                for number, label in group.members:
                    states[number].count_lost(leaf, [label], result)
        return results

    def _find_documents(
        self,
        release: Release,
        queries: Sequence[PendingQuery],
        groups: Sequence[QueryGroup],
        states: list[QueryState],
        fused_hits: list[Hits | None],
        deadline: float,
    ) -> None:
        """Reduces the hits of queries by document to the best passage of each document and the passages to re-rank.

        Queries whose passages have fewer than k documents are searched again, DEEPER times as deep each time.
        """
        pending = [number for number, query in enumerate(queries) if query.by_document]
        while pending := [number for number in pending if fused_hits[number] is not None]:
            rows = np.unique(
                np.concatenate([hits.rows[0] for number in pending if (hits := fused_hits[number]) is not None])
            )
            replies, errors = self._ask_about_passages("documents", release, rows, deadline)
            document_of = {
                row: number for reply in replies for row, number in zip(*(each.tolist() for each in reply), strict=True)
            }
            for number in list(pending):
                query, state, hits = queries[number], states[number], fused_hits[number]
                assert hits is not None
                documents = np.array([[document_of.get(row, -1) for row in hits.rows[0].tolist()]], np.int64)
                if errors and ((hits.rows >= 0) & (documents < 0)).any():
                    state.count_all_lost(errors, query.search.labels)
                has_all_hits = hits.rows[0, -1] < 0 and not any(state.may_have_more.values())
                is_enough = has_enough_documents(documents, query.k)[0] or has_all_hits
                if is_enough or state.depth >= MAX_PASSAGES or errors:
                    fused_hits[number] = passages_to_rerank(hits, documents, query.k, query.rerank)
                    state.documents = dict(zip(hits.rows[0].tolist(), documents[0].tolist(), strict=True))
                    pending.remove(number)
            again = {number: states[number] for number in pending}
            for state in again.values():
                state.depth = min(DEEPER * state.depth, MAX_PASSAGES)
            self._search_leaves(
                release, [deeper for group in groups for deeper in group.deeper_groups(again)], states, deadline
            )
            for number in pending:
                fused_hits[number] = _fuse_hits(queries[number], states[number])

    def _ask_about_passages(
        self, method: str, release: Release, rows: np.ndarray, deadline: float
    ) -> tuple[list[Any], dict[int, Exception]]:
        """Calls a method of all leaves about passages; returns the results, and the errors by number of the leaf."""
        request = PassagesRequest(release.id, deadline, rows[rows >= 0])
        results, errors = list[Any](), dict[int, Exception]()
        for leaf, reply in enumerate(self.ask_leaves(method, request) if len(request.rows) else ()):
            try:
                results.append(wait_for_reply(reply, deadline))
            except Exception as error:
                self._report(PASSAGES, error, leaf)
                errors[leaf] = error
        return results, errors

    def _fetch_passages(
        self,
        release: Release,
        queries: Sequence[PendingQuery],
        fused_hits: list[Hits | None],
        states: list[QueryState],
        deadline: float,
    ) -> dict[int, Passage]:
        """Returns, by row, the passages of hits that are returned or re-ranked; removes hits of lost leaves."""
        wanted = [
            hits.rows[0, : _num_needed(query)]
            for query, hits in zip(queries, fused_hits, strict=True)
            if hits is not None
        ]
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *wanted]))
        replies, errors = self._ask_about_passages("fetch", release, rows, deadline)
        passages = {passage[0]: passage for reply in replies for passage in reply}
        for number, hits in enumerate(fused_hits if errors else ()):
            if hits is None:
                continue
            rows = hits.rows[0, : _num_needed(queries[number])]
            is_kept = np.isin(rows, [-1, *passages])
            if not is_kept.all():
                fused_hits[number] = Hits(hits.scores[:, : len(rows)][:, is_kept], rows[None, is_kept])
                states[number].count_all_lost(errors, queries[number].search.labels)
        return passages

    def _rerank(
        self,
        release: Release,
        queries: Sequence[PendingQuery],
        fused_hits: list[Hits | None],
        passages: dict[int, Passage],
        states: Sequence[QueryState],
        answers: Sequence[QueryAnswer],
    ) -> None:
        """Re-ranks the first hits of queries with `rerank` by probability; deeper hits keep their order below them."""
        numbers = [n for n, (query, hits) in enumerate(zip(queries, fused_hits, strict=True)) if query.rerank and hits]
        pairs = [(n, int(row)) for n in numbers for row, _ in _rows_and_scores(fused_hits[n], queries[n].rerank)]
        if not pairs:
            return
        deadline = max(queries[number].deadline for number in numbers)
        query_texts = [queries[number].text for number, _ in pairs]
        titles, bodies = [passages[row][2] for _, row in pairs], [passages[row][3] for _, row in pairs]
        try:
            with self._report_failures(RERANKER):
                scores = self.reranker.score(release.id, query_texts, titles, bodies, deadline)
        except Exception as error:
            for number in numbers:
                answers[number].error = error
            return
        by_query: dict[int, list[float]] = defaultdict(list)
        for (number, _), score in zip(pairs, scores, strict=True):
            by_query[number].append(score)
        for number, probabilities in by_query.items():
            hits = fused_hits[number]
            assert hits is not None
            fused_hits[number] = hits = reorder_hits(hits, np.array([probabilities], np.float32))
            if queries[number].by_document:
                documents = np.array([[states[number].documents[row] for row in hits.rows[0].tolist()]])
                fused_hits[number] = reranked_documents(hits, documents, queries[number].k)

    def _explain(
        self,
        release: Release,
        queries: Sequence[PendingQuery],
        groups: Sequence[QueryGroup],
        states: Sequence[QueryState],
        answers: Sequence[QueryAnswer],
        deadline: float,
    ) -> None:
        """Adds explanations to the hits of queries with `explain`.

        If a leaf fails, these queries get an error; if they allow partial answers, their hits lack terms and lists.
        """
        numbers = {number for number, query in enumerate(queries) if query.explain and answers[number].hits}
        rows = {number: [hit.row for hit in answers[number].hits] for number in numbers}
        explained, sources = list[QueryGroup](), list[SourceHitRows]()
        for group in groups:
            hit_rows = {
                position: source_rows
                for position, (number, label) in enumerate(group.members)
                if number in numbers
                and (source_rows := rows_to_explain(rows[number], states[number].hits_by_label[label]))
            }
            if hit_rows:
                part = group.select(list(hit_rows))
                explained.append(part)
                names = part.source.kind.name, part.source.target
                sources.append(SourceHitRows(*names, part.queries, list(hit_rows.values()), part.effort))
        replies = self.ask_leaves("explain", ExplainRequest(release.id, deadline, sources)) if sources else []
        parts: dict[tuple[int, str], dict[int, ScoreParts]] = defaultdict(dict)
        by_group = self._results_of_groups(replies, explained, states, deadline)
        for group, results in zip(explained, by_group, strict=True):
            for by_query in results:
                for member, by_row in zip(group.members, by_query, strict=True):
                    parts[member].update(by_row)
        for number in numbers:
            query, state, hits = queries[number], states[number], answers[number].hits
            answers[number].shards = state.shards
            if not query.allow_partial and (error := state.answer_error(allow_partial=False)) is not None:
                answers[number].hits, answers[number].error = [], error
                continue
            source_results = [
                SourceResult(label, state.hits_by_label[label], parts[number, label]) for label in query.search.labels
            ]
            reranked = [hit.scores.get("reranker") for hit in hits]
            explanations = explain_hits(
                rows[number], source_results, query.search.weights, state.depth, reranked, query.filter
            )
            pairs = zip(hits, explanations, strict=True)
            answers[number].hits = [hit._replace(explanation=explanation) for hit, explanation in pairs]

    @contextlib.contextmanager
    def _report_failures(self, part: str) -> Iterator[None]:
        """Context that reports the failure of a part and raises it again."""
        try:
            yield
        except Exception as error:
            self._report(part, error)
            raise

    def _report(self, part: str, error: Exception, leaf: int = 0) -> None:
        if not isinstance(error, ExpiredError):
            log.warning("%s of leaf %d failed: %r", part, leaf, error)
        if isinstance(error, StoreError | LostError):
            self.on_failure(part, error)


def without_rows(hits: Hits, rows: np.ndarray) -> Hits:
    """Returns hits without some rows (int64, ascending): later hits move up, the ends have scores -inf and rows -1."""
    if not len(rows):
        return hits
    is_left_out = rows[np.minimum(np.searchsorted(rows, hits.rows), len(rows) - 1)] == hits.rows
    if not is_left_out.any():
        return hits
    order = np.argsort(is_left_out, axis=1, kind="stable")
    scores = np.where(is_left_out, np.float32(-np.inf), hits.scores)
    kept_rows = np.where(is_left_out, -1, hits.rows)
    return Hits(np.take_along_axis(scores, order, 1), np.take_along_axis(kept_rows, order, 1))


def _record_unusable(group: QueryGroup, unusable: Mapping[int, str], states: list[QueryState]) -> None:
    """Records the reasons why a source cannot use queries of a group. unusable: reasons by position in the group."""
    for position, reason in unusable.items():
        number, label = group.members[position]
        states[number].query_error = RequestError(f"source {label}: {reason}")


@contextlib.contextmanager
def _measure_stage(stage_seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Context that measures the seconds of a stage."""
    start = time.perf_counter()
    yield
    stage_seconds[stage] = time.perf_counter() - start


def _fuse_hits(query: PendingQuery, state: QueryState) -> Hits | None:
    """Fuses the hits of the sources as a search job does; if a source failed, fuses those of the other sources.

    None: there is no answer.
    """
    if state.answer_error(query.allow_partial) is not None:
        return None
    return fuse([state.hits_by_label[label] for label in query.search.labels], state.depth, query.search.weights)


def _rows_and_scores(hits: Hits | None, k: int) -> Iterable[tuple[int, float]]:
    """Returns (row, score) of the first k hits."""
    if hits is None:
        return []
    rows, scores = hits.rows[0, :k].tolist(), hits.scores[0, :k].tolist()
    return [(row, score) for row, score in zip(rows, scores, strict=True) if row >= 0]


def _make_hits(query: PendingQuery, hits: Hits, state: QueryState, passages: dict[int, Passage]) -> list[AnswerHit]:
    """Returns the hits of an answer, each with its passage and the scores of all sources that found it."""
    by_source = {
        source: dict(_rows_and_scores(hits, hits.rows.shape[1])) for source, hits in state.hits_by_label.items()
    }
    output = []
    for row, score in _rows_and_scores(hits, query.k):
        scores = (
            {"reranker": score} if query.rerank and score >= 0 else {}
        )  # deeper hits have their negative rank as score
        scores |= {source: by_row[row] for source, by_row in by_source.items() if row in by_row}
        _, id, title, text, metadata, *span = passages[row]
        output.append(AnswerHit(row, id, title, text, metadata, score, scores, tuple(span) if span else None))
    return output


def _first_depth(query: PendingQuery) -> int:
    """Returns the number of passages that the first search of a query requests."""
    if query.by_document:
        return min(first_search_depth(query.k, query.rerank, len(query.search.sources)), MAX_PASSAGES)
    return max(query.k, query.rerank)


def _num_needed(query: PendingQuery) -> int:
    """Returns the maximum number of hits per query whose passages are fetched."""
    return query.k + query.rerank if query.by_document else max(query.k, query.rerank)


def _too_large_error(query: PendingQuery, size: int) -> RequestError:
    return RequestError(
        f"a query has a result of {size:,} bytes, expected up to {query.max_bytes:,}: ask for fewer hits (k), or send "
        "fewer queries at once"
    )


def _result_json(text: str, answer: QueryAnswer) -> bytes:
    """Returns the JSON of a query's result in the response of a search (`protocol.ResultOut`)."""
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
        for rank, hit in enumerate(answer.hits, 1)
    ]
    return orjson.dumps({"query": text, "hits": hits, "shards": answer.shards._asdict()})
