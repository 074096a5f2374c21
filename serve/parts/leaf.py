"""A leaf of a service, which searches the sources in a range of the corpus' rows and reads the passages of the range.

A service in one process has one leaf, of all rows. With row ranges it has several, each in a separate process. All
requests and results are plain arrays, strings and numbers, so they can be sent to another process. A shard or segment
belongs to the leaf whose range has its middle row; a passage is fetched from the leaf whose range has its row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from riptide.indexing.corpus.corpus import Corpus, OpenPassages, passage_parts
from riptide.indexing.corpus.filters import Filter, prepare_filters
from riptide.indexing.exact import Hits, empty_hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.hit_sources.online_search import OnlineSearch, SearcherScope, SearchTarget
from riptide.indexing.hit_sources.registry import find_kind, online_searches
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowRange, split_range
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store
from riptide.serve.parts.part import (
    ServicePart,
    SharedObjects,
    call_with_usable_texts,
    check_deadline,
    raises_store_errors,
)
from riptide.serve.parts.part_states import PASSAGES
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.service_errors import ExpiredError

Result = TypeVar("Result", covariant=True)
Source = TypeVar("Source")
Answer = TypeVar("Answer")
LATE = 0.05  # seconds after the deadline in which a reply still counts; the parts themselves drop late work
Passage = tuple[Any, ...]  # the tuple that `OpenPassages.fetch` returns: row, id, title, text, …


@dataclass(frozen=True)
class SourceQueries:
    """Queries for one source.

    Attributes:
        kind: Name of the source's kind.
        target: The target of the source, which the leaf has opened.
        queries: Texts, vectors float32 [q, dim], or what the source's encoder returned.
        k: Number of hits per query.
        filter: The text of a Filter; None: no filter.
    """

    kind: str
    target: SearchTarget
    queries: Any
    k: int
    filter: str | None = None


@dataclass(frozen=True)
class SourceHitRows:
    """Hits of one source to explain.

    Attributes:
        kind, target, queries: As for `SourceQueries`.
        rows: The rows of the hits, for each query.
    """

    kind: str
    target: SearchTarget
    queries: Any
    rows: RowsOfQueries


@dataclass(frozen=True)
class LeafRequest:
    """A request to a leaf, which travels with the remaining seconds: clocks of nodes differ.

    So the time between pickling and unpickling is not counted.

    Attributes:
        release: Id of the release.
        deadline: Time of `time.monotonic()` in seconds, in the process that has the request.
    """

    release: str
    deadline: float

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state["remaining_s"] = state.pop("deadline") - time.monotonic()  # another key than that of a time
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["deadline"] = state.pop("remaining_s") + time.monotonic()
        vars(self).update(state)


@dataclass(frozen=True)
class HitsRequest(LeafRequest):
    """A request for the hits of several sources."""

    sources: Sequence[SourceQueries]


class SourceHits(NamedTuple):
    """The hits of one source for the queries of a request.

    Attributes:
        hits: The hits of each query; none of an unusable query.
        unusable: Why a query cannot be answered, by its number in the request.
    """

    hits: Hits
    unusable: dict[int, str]


@dataclass(frozen=True)
class ExplainRequest(LeafRequest):
    """A request for the parts of the scores of hits of several sources."""

    sources: Sequence[SourceHitRows]


@dataclass(frozen=True)
class PassagesRequest(LeafRequest):
    """A request for passages or for their documents. rows: int64 [n]; a leaf answers for the rows in its range."""

    rows: np.ndarray


@dataclass(frozen=True)
class SliceRequest(LeafRequest):
    """A request for the exact hits among the rows [first_row, end) of a source that searches query vectors."""

    queries: SourceQueries
    first_row: int
    end: int


class SliceHits(NamedTuple):
    """The exact hits in a slice of rows.

    Attributes:
        hits: The hits of each query.
        num_rows: Number of rows that match the filter and are not deleted.
        cpu_s: CPU seconds that the search took.
    """

    hits: Hits
    num_rows: int
    cpu_s: float


class Reply(Protocol[Result]):
    """A handle to a result that may still be pending."""

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the result. Raises TimeoutError, LostError, or the exception of the leaf."""


def wait_for_reply(reply: Reply[Result], deadline: float) -> Result:
    """Waits for the reply of a leaf. Raises ExpiredError if it does not arrive in time."""
    try:
        return reply.result(timeout=max(0.0, deadline - time.monotonic()) + LATE)
    except TimeoutError as error:
        raise ExpiredError from error


AskLeaves = Callable[[str, Any], Sequence[Reply[Any]]]
"""Sends a request to a method of all leaves of a service, and returns their replies, in the order of their ranges."""


class Leaf:
    """The parts that search one range of rows, and the part that reads its passages.

    Args:
        store: Where the artifacts are.
        number: Number of the range, from 0.
        num_ranges: Number of ranges.
        threads: Threads of one search; None: one for each core.
    """

    def __init__(self, store: Store, number: int = 0, num_ranges: int = 1, *, threads: int | None = None):
        def range_of(corpus: Corpus) -> RowRange:
            return split_range(0, corpus.num_rows, num_ranges)[number]

        self.store = store
        self.sources = {online.name: SourcePart(store, range_of, online, threads) for online in online_searches()}
        self.passages = PassagesPart(store, range_of)
        self.parts: dict[str, ServicePart] = {**self.sources, PASSAGES: self.passages}

    def search(self, request: HitsRequest) -> list[SourceHits | Exception]:
        """Returns the hits of each source in the range, or the exception of a source that failed."""
        return _answers_of_sources(
            request, lambda queries: self._part_of(queries.kind).search(request.release, queries), request.sources
        )

    def search_slice(self, request: SliceRequest) -> SliceHits:
        """Returns the exact hits among those requested rows that are in the range."""
        check_deadline(request.deadline)
        return self._part_of(request.queries.kind).search_slice(request)

    def explain(self, request: ExplainRequest) -> list[list[dict[int, ScoreParts]] | Exception]:
        """Returns the parts of the scores of those passages that are in the range, for each source and query.

        Instead of those of a source that failed, returns its exception.
        """
        return _answers_of_sources(
            request, lambda source: self._part_of(source.kind).explain(request.release, source), request.sources
        )

    def fetch(self, request: PassagesRequest) -> list[Passage]:
        """Returns the passages of those requested rows that are in the range."""
        return self.passages.fetch(request)

    def documents(self, request: PassagesRequest) -> tuple[np.ndarray, np.ndarray]:
        """Returns those requested rows that are in the range, and the numbers of their documents: int64 [n] each."""
        return self.passages.documents(request)

    def _part_of(self, kind_name: str) -> SourcePart:
        """Returns the part that searches the sources of a kind."""
        kind = find_kind(kind_name)
        assert kind is not None, kind_name
        return self.sources[kind.online.name]


def _answers_of_sources(
    request: LeafRequest, answer: Callable[[Source], Answer], sources: Iterable[Source]
) -> list[Answer | Exception]:
    """Returns the answer for each source of a request, or the exception that `answer` raised for it."""
    answers = list[Answer | Exception]()
    for source in sources:
        try:
            check_deadline(request.deadline)
            answers.append(answer(source))
        except Exception as error:
            answers.append(error)
    return answers


def ask_local_leaves(leaves: Sequence[Leaf], method: str, request: Any) -> list[Reply[Any]]:
    """Calls a method of leaves in this process, one after the other."""
    replies = list[Reply[Any]]()
    for leaf in leaves:
        reply: Future[Any] = Future()
        try:
            reply.set_result(getattr(leaf, method)(request))
        except Exception as error:
            reply.set_exception(error)
        replies.append(reply)
    return replies


class SourcePart(ServicePart):
    """Searches sources that share an `OnlineSearch` in a range of rows.

    Args:
        store: Where the artifacts are.
        range_of: Returns the range of rows in a corpus.
        online: How the sources are opened and searched.
        threads: Threads of one search; None: one for each core.
    """

    def __init__(self, store: Store, range_of: Callable[[Corpus], RowRange], online: OnlineSearch, threads: int | None):
        super().__init__(store)
        self.online, self.name, self.threads, self.range_of = online, online.name, threads, range_of
        self._searchers: SharedObjects[Any] = SharedObjects()

    @raises_store_errors
    def search(self, release_id: str, request: SourceQueries) -> SourceHits:
        """Returns the top k passages of each query in the range; an unusable query does not affect the others."""
        searcher, kind = self._get_content(release_id)[request.target], find_kind(request.kind)
        assert kind is not None, request.kind
        filter = None if request.filter is None else Filter(request.filter)
        usable = call_with_usable_texts(
            lambda queries: kind.search_online(searcher, queries, request.k, filter), request.queries
        )
        if usable.result is not None and not usable.unusable:
            return SourceHits(usable.result, {})
        width = request.k if usable.result is None else usable.result.rows.shape[1]
        hits = empty_hits(len(request.queries), width)
        if usable.result is not None:
            hits.scores[usable.numbers], hits.rows[usable.numbers] = usable.result
        return SourceHits(hits, usable.unusable)

    @raises_store_errors
    def search_slice(self, request: SliceRequest) -> SliceHits:
        """Returns the exact hits among those requested rows that are in the range, computed in this thread."""
        start, queries = time.thread_time(), request.queries
        searcher = self._get_content(request.release)[queries.target]
        filter = None if queries.filter is None else Filter(queries.filter)
        hits, num_rows = searcher.search_slice(queries.queries, queries.k, filter, request.first_row, request.end)
        return SliceHits(hits, num_rows, time.thread_time() - start)

    @raises_store_errors
    def explain(self, release_id: str, request: SourceHitRows) -> list[dict[int, ScoreParts]]:
        """Returns the parts of the scores of those passages that are in the range, by row, for each query."""
        kind = find_kind(request.kind)
        assert kind is not None, request.kind
        return kind.explain_online(self._get_content(release_id)[request.target], request.queries, request.rows)

    def _open(self, artifacts: ReleaseArtifacts) -> dict[SearchTarget, Any]:
        prepare_filters()
        release, scope = artifacts.release, self._scope(artifacts)
        searchers = {}
        for target, readers in self._targets(artifacts).items():
            start = partial(self.online.open, readers, artifacts.corpus, scope)
            searchers[target] = self._searchers.get(
                release.searched_fingerprints(self.online, target), release.id, start
            )
        return searchers

    def _scope(self, artifacts: ReleaseArtifacts) -> SearcherScope:
        return SearcherScope(self.range_of(artifacts.corpus), self.threads)

    def _used_files(self, artifacts: ReleaseArtifacts) -> Iterable[tuple[Artifact | Draft, ArtifactPart]]:
        scope = self._scope(artifacts)
        groups = [self.online.files(readers, scope) for readers in self._targets(artifacts).values()]
        for alike in itertools.zip_longest(*groups, fillvalue=()):
            for files in alike:
                yield from files

    def _targets(self, artifacts: ReleaseArtifacts) -> dict[SearchTarget, Any]:
        """Returns the readers of each target that this part searches."""
        return {target: readers for (online, target), readers in artifacts.readers.items() if online is self.online}

    def _answer_probe(self, release_id: str) -> None:
        for searcher in self._get_content(release_id).values():
            self.online.probe(searcher)

    def _forget(self, release_id: str) -> None:
        self._searchers.release(release_id)


class PassagesPart(ServicePart):
    """Reads passages of a range of rows: their ids, titles, texts and metadata.

    Args:
        store: Where the artifacts are.
        range_of: Returns the range of rows in a corpus.
    """

    name = PASSAGES

    def __init__(self, store: Store, range_of: Callable[[Corpus], RowRange]):
        super().__init__(store)
        self.range_of = range_of

    @raises_store_errors
    def fetch(self, request: PassagesRequest) -> list[Passage]:
        """Returns the passages of those requested rows that are in the range."""
        return self._passages_of_release(request).fetch(request.rows)

    @raises_store_errors
    def documents(self, request: PassagesRequest) -> tuple[np.ndarray, np.ndarray]:
        """Returns those requested rows that are in the range, and the numbers of their documents: int64 [n] each."""
        return self._passages_of_release(request).documents(request.rows)

    def _passages_of_release(self, request: PassagesRequest) -> OpenPassages:
        """Returns the open passages of a request's release. Raises ExpiredError if the request is late."""
        check_deadline(request.deadline)
        passages: OpenPassages = self._get_content(request.release)
        return passages

    def _open(self, artifacts: ReleaseArtifacts) -> OpenPassages:
        return OpenPassages(artifacts.corpus, self.range_of(artifacts.corpus))

    def _used_files(self, artifacts: ReleaseArtifacts) -> Iterable[tuple[Artifact | Draft, ArtifactPart]]:
        parts = passage_parts(artifacts.corpus, self.range_of(artifacts.corpus))
        return ((part.artifact, part.part) for part in parts)

    def _answer_probe(self, release_id: str) -> None:
        passages: OpenPassages = self._get_content(release_id)
        passages.fetch(np.array([passages.rows.first_row]))
