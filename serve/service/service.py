"""The service of one process: its live release, and the queues in front of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.hit_sources.source_kind import check_explains
from riptide.indexing.search.document_search import is_by_document
from riptide.indexing.store.store import Store
from riptide.process.memory import return_freed_memory
from riptide.retriever.forward.packing import compute_alone
from riptide.retriever.options import Side
from riptide.serve.callers import ANONYMOUS, Caller
from riptide.serve.parts.engine import REST_S, Engine
from riptide.serve.parts.leaf import AskLeaves
from riptide.serve.parts.part import PartControl
from riptide.serve.parts.part_states import ENCODER, RERANKER, PartStates, parts_of
from riptide.serve.parts.query_states import EmbedTextsRequest, PendingQuery, QueryAnswer, ScorePairsRequest
from riptide.serve.parts.service_models import EncoderPart, RerankPart
from riptide.serve.protocol import MAX_RESPONSE_BYTES, SearchRequest
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import (
    ServedSource,
    ServedTask,
    SourceSearch,
    find_source_search,
    search_of_mode,
)
from riptide.serve.service.batch_queues import Batcher
from riptide.serve.service.certification import Certifier
from riptide.serve.service.erased_rows import ErasedRows
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service.staleness import Staleness
from riptide.serve.service.warm_up import WarmUp
from riptide.serve.service_errors import (
    STORE,
    ConflictError,
    ExpiredError,
    NotReadyError,
    OverloadedError,
    RefusedPromptError,
    RequestError,
    StoreError,
    UnknownTaskError,
    client_error,
    is_store_error,
    reason_of,
    request_errors,
    store_error,
)

log = logging.getLogger("riptide.serve")

LOOK_S = 2.0  # seconds between two checks which release is live, and between checks while a part fails
CERTIFY_S = 0.25  # seconds between two checks for sampled searches
CHECK_S = 10.0  # seconds between two checks of the parts
ERASURES_S = 10.0  # seconds between two checks for erasures
DRAIN_S = 0.01  # seconds between two checks whether all requests are answered
FREE_S = 10.0  # seconds between two looks for memory that large requests have freed


class PendingFilter(NamedTuple):
    """A filter to parse.

    Attributes:
        document: The filter of a request.
        columns: The types of the fields.
        weight: Weight of the request's queries.
    """

    document: dict[str, Any] | str
    columns: Mapping[str, pa.DataType]
    weight: int


class Service:
    """Serves the live release with queues in front of an engine, and switches when another release becomes live.

    Not thread-safe: all coroutines run in one event loop.

    Args:
        store: Where releases and artifacts are.
        options: The options of the service.
        ask_leaves: Asks all leaves.
        leaf_parts: The parts of all leaves, by name.
        device: Device of the models, which this process runs: "cpu" or "cuda".
        num_leaves: Number of leaves.
        workers: Batches that run concurrently.
        linger: Minimum seconds that a release stays open after it was live, as other processes have requests of it.
        is_local: Whether the leaves share this process's memory.
        examples: Queries that the page offers to try.
    """

    def __init__(
        self,
        store: Store,
        options: ServiceOptions,
        ask_leaves: AskLeaves,
        leaf_parts: Mapping[str, PartControl],
        *,
        device: str,
        num_leaves: int = 1,
        workers: int = 1,
        linger: float = 0.0,
        is_local: bool = True,
        examples: Sequence[str] = (),
    ):
        encoder = EncoderPart(store, device=device, threads=options.threads, compile=options.compile)
        reranker = RerankPart(store, device=device, threads=options.threads, dtype=options.rerank_dtype)
        self.store, self.num_leaves, self._linger = store, num_leaves, linger
        self.parts: dict[str, PartControl] = {ENCODER: encoder, **leaf_parts, RERANKER: reranker}
        self.engine = engine = Engine(encoder, reranker, ask_leaves)
        self.engine.on_failure = self._record_failure
        self.erased_rows = ErasedRows(store)
        self.live: ReleaseArtifacts | None = None
        self.states = PartStates()
        self.staleness = Staleness(store)
        self.examples = list(examples)
        # A separate engine, whose queries are not in the metrics.
        warm_up_engine = Engine(encoder, reranker, ask_leaves)
        self.warm_up = WarmUp(store, warm_up_engine, self.parts, is_local=is_local, total_s=options.warm_up_s)
        self.on_live: Callable[[], object] = lambda: None  # called once, when the first release is live
        self._phase = "waiting for a release"  # state of all parts until the first release is live
        self._users: Counter[str] = Counter()  # by release: number of running requests and of background work for them
        self._num_requests = 0  # that the service has accepted and not yet answered
        # By release that is not live: the earliest time at which it may be closed.
        self._close_after: dict[str, float] = {}
        self._admin = ThreadPoolExecutor(1, thread_name_prefix="admin")
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="checks")
        self._checked_s = time.monotonic()  # when the parts were last checked
        self._has_freed_memory = False  # since the last return of freed memory
        queue: dict[str, Any] = {
            "max_batch": options.batch,
            "max_waiting": options.queue,
            "workers": workers,
            "on_run": lambda item, change: self._change_users(item.release.id, change),
            "prepare_thread": compute_alone,  # the encoder then computes a lone query in the thread that has it
        }
        self.searches: Batcher[PendingQuery, QueryAnswer] = Batcher(
            engine.search, weigh=partial(_weight, options.queue // 4), key=_batch_key, **queue
        )
        # Parsing a filter may take long, as it may have thousands of values.
        self.filters: Batcher[PendingFilter, str] = Batcher(
            _parse_filters, max_batch=1, max_waiting=options.queue, weigh=lambda item: item.weight
        )
        self.embeddings: Batcher[EmbedTextsRequest, tuple[np.ndarray, Cuts]] = Batcher(
            engine.embed, weigh=lambda item: len(item.texts), key=lambda item: (item.release.id, item.side), **queue
        )
        self.reranks: Batcher[ScorePairsRequest, np.ndarray] = Batcher(
            engine.rerank, weigh=lambda item: len(item.documents), key=lambda item: item.release.id, **queue
        )
        self.draining = False
        self.certifier: Certifier | None = None
        if options.certify:
            self.certifier = Certifier(
                options.certify,
                options.certify_recall,
                options.certify_raise,
                ask_leaves,
                lambda: self.live,
                lambda: self.is_idle,
                lambda release: engine.erased_rows(release),
            )
            engine.on_searched = self.certifier.offer

    def open_release(self, release_id: str) -> None:
        """Opens a release in every part. Blocks. Raises InputError if a part cannot open it."""
        for part, control in self.parts.items():
            try:
                control.open_release(release_id)
            except Exception as error:
                if self.live is None:  # later, the parts still serve the live release, so the phase stays
                    self.states.mark_failed(part, reason_of(error), str(error))
                raise
            if self.live is None:
                self.states.mark_working(part)
        if self.live is None:
            self._close_after[release_id] = 0.0  # closed when another release becomes the first live one

    def close_release(self, release_id: str) -> None:
        """Closes a release in every part. Blocks."""
        for control in self.parts.values():
            control.close_release(release_id)

    @property
    def queues(self) -> dict[str, Batcher[Any, Any]]:
        """The queues by kind of work; a search with a filter waits first in that of filters."""
        return {
            "filters": self.filters,
            "search": self.searches,
            "embeddings": self.embeddings,
            "rerank": self.reranks,
        }

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return all(queue.is_idle for queue in self.queues.values())

    @property
    def is_ready(self) -> bool:
        """Whether a release is live and all of its parts work; False once the service ends."""
        live = self.live
        return live is not None and not self.draining and not self.states.failures(parts_of(live.release))

    @property
    def newer_artifacts(self) -> list[str] | None:
        """Keys of artifacts in the store that are newer than the live release, as of the last look; None: unknown."""
        return None if self.live is None else self.staleness.newer_artifacts(self.live.release)

    @property
    def stored_similarities(self) -> dict[str, float]:
        """The similarity of the live encoder's vectors to stored ones; see `EncoderPart.stored_similarities`."""
        return {} if self.live is None else self.engine.encoder.stored_similarities(self.live.release.id)

    async def describe(self, live: ReleaseArtifacts) -> dict[str, Any]:
        """Returns the fields of `/v1/info` that describe the vectors and the shards."""
        if live.release.encoder is None:
            return {"shards": self.num_leaves}
        with self._keep_open(live):
            known = await asyncio.to_thread(self.engine.encoder.describe, live.release.id)
        return {**known, "shards": self.num_leaves}

    def readiness(self) -> dict[str, Any]:
        """Returns the JSON document of `/readyz`: {"ready", "parts": {part: {"state", "reason" if it has failed}}}."""
        if self.live is None:
            return {"ready": False, "parts": self.states.report(self.parts, self._phase)}
        return {"ready": self.is_ready, "parts": self.states.report(parts_of(self.live.release), "ready")}

    async def look_for_newer(self) -> None:
        """Looks for artifacts in the store that are newer than the live release."""
        if self.live is not None:
            await asyncio.to_thread(self.staleness.look, self.live.release)

    async def look_for_erasures(self) -> None:
        """Looks for erasures of passages; from then on, no answer has them."""
        if await asyncio.to_thread(self.erased_rows.refresh):
            self.engine.erased_rows = self.erased_rows.rows_of

    def note_large_request(self) -> None:
        """Marks that a large request has ended; `return_freed_memory` returns its memory later."""
        self._has_freed_memory = True

    async def return_freed_memory(self) -> None:
        """Returns the memory of large requests that have ended to the system, which the C library would keep."""
        if self._has_freed_memory:
            self._has_freed_memory = False
            await asyncio.to_thread(return_freed_memory)

    async def certify(self) -> None:
        """Certifies the next sampled searches of the live release, if there are any."""
        if self.certifier is not None and (live := self.live) is not None:
            with self._keep_open(live):
                await self.certifier.step()

    async def check_if_due(self) -> None:
        """Checks the parts of the live release if one has failed, or if the last check is CHECK_S seconds old."""
        is_due = time.monotonic() > self._checked_s + CHECK_S or self.states.failures(self.parts)
        if (live := self.live) is not None and is_due:
            with self._keep_open(live):
                await asyncio.get_running_loop().run_in_executor(self._checks, self.check_parts, live.release)
            self._checked_s = time.monotonic()

    def check_parts(self, release: Release) -> None:
        """Checks the files of each part of a release and sends it a small request; records the failures. Blocks."""
        for part in parts_of(release):
            try:
                self.parts[part].check(release.id)
            except (OverloadedError, ExpiredError):
                continue  # a busy part has not failed
            except Exception as error:
                live = self.live
                # A failure does not count if the release is not live (its files may be removed), or if the process ends
                # (it starts no threads then).
                if live is not None and live.release.id == release.id and not self.draining:
                    self.states.mark_failed(part, reason_of(error), str(error))
            else:
                self.states.mark_working(part)

    async def search(
        self,
        request: SearchRequest,
        timeout_s: float,
        caller: Caller = ANONYMOUS,
        raised_settings: Mapping[str, int] | None = None,
    ) -> tuple[ReleaseArtifacts, SourceSearch, list[tuple[QueryAnswer, float]]]:
        """Answers the queries of a request, all from the same release.

        Args:
            request: The request.
            timeout_s: Seconds that the request may take.
            caller: The client of the request.
            raised_settings: The search efforts of indexes in place of those that their builds measured, by source;
                None: those that the certification has raised.

        Returns:
            The release that answered, the sources that were searched, and for each query its answer and the seconds
            that it waited in queues.

        Raises:
            NotReadyError: If no release is live.
            UnknownTaskError: If the live release does not have the task.
            ConflictError: If the request names another release than the live one.
            InputError: If the task cannot answer the request.
            OverloadedError: If the queue is full, or the caller exceeds its rate or share.
            ExpiredError: If the request's time has passed.
        """
        live = self.require_live()
        if request.release not in (None, live.release.id):
            raise ConflictError(
                f"release {request.release}: this server's live release is {live.release.id}; leave release out, or "
                "replay the request by the job replay, which opens any release of the store"
            )
        task = self._find_task(live, request.task)
        if request.rerank and live.release.reranker is None:
            raise RequestError("this release has no re-ranker: serve one, or leave rerank out")
        search = find_source_search(task, request.source) if request.source else search_of_mode(task, request.mode)
        if request.explain:
            with request_errors():
                check_explains((source.kind, source.name) for source in search.sources)
        if efforts := self._efforts_of(task, search, raised_settings):
            search = replace(search, efforts=efforts)
        deadline = time.monotonic() + timeout_s
        with self._accept_request(live):
            query = PendingQuery(
                live.release,
                "",
                task,
                request.k,
                search,
                deadline,
                None,
                request.rerank,
                request.allow_partial,
                is_by_document(live.corpus, request.by),
                MAX_RESPONSE_BYTES // len(request.texts),
                request.explain,
            )
            waited_s = 0.0
            if request.filter not in (None, {}):
                weight = len(request.texts) * self.searches.weigh(query)
                item = PendingFilter(request.filter, live.columns, weight)
                filter_text, waited_s = await self.filters.submit(item, deadline, caller)
                query = replace(query, filter=filter_text)
            queries = [replace(query, text=text) for text in request.texts]
            is_counted = query.filter is not None
            answers = await self.searches.submit_all(queries, deadline, caller, is_counted=is_counted)
            return live, search, [(answer, waited_s + seconds) for answer, seconds in answers]

    def _efforts_of(
        self, task: ServedTask, search: SourceSearch, raised_settings: Mapping[str, int] | None
    ) -> dict[ServedSource, int]:
        """Returns the search efforts of sources that are not those of their builds."""
        if raised_settings is None:
            return {} if self.certifier is None else self.certifier.efforts(task.name, search)
        sources = (source for source in search.sources if source.source_text in raised_settings)
        return {source: raised_settings[source.source_text] for source in sources}

    async def embed(
        self, texts: Sequence[str], task: str, side: Side, timeout_s: float, caller: Caller = ANONYMOUS
    ) -> tuple[np.ndarray, Cuts]:
        """Returns the vectors of texts as a task encodes them, float32 [n, dim], and the counts of cut texts.

        Args:
            texts: Texts to encode.
            task: Name of the task.
            side: "query" or "passage".
            timeout_s: Seconds that the request may take.
            caller: The client of the request.

        Raises the exceptions of `search`.
        """
        live = self.require_live()
        self._find_task(live, task)
        if live.release.encoder is None:
            raise RequestError("this release has no dense embeddings, and no encoder of them: serve some")
        deadline = time.monotonic() + timeout_s
        with self._accept_request(live):
            item = EmbedTextsRequest(live.release, list(texts), task, side, deadline)
            result, _ = await self.embeddings.submit(item, deadline, caller)
            return result

    async def rerank(
        self, query: str, documents: Sequence[str], timeout_s: float, caller: Caller = ANONYMOUS
    ) -> tuple[ReleaseArtifacts, np.ndarray]:
        """Returns the release that answered, and the probability of each document, float32 [n].

        Args:
            query: The query.
            documents: Texts to score.
            timeout_s: Seconds that the request may take.
            caller: The client of the request.

        Raises the exceptions of `search`.
        """
        live = self.require_live()
        if live.release.reranker is None:
            raise RequestError("this release has no re-ranker: serve one")
        deadline = time.monotonic() + timeout_s
        with self._accept_request(live):
            scores, _ = await self.reranks.submit(
                ScorePairsRequest(live.release, query, list(documents), deadline), deadline, caller
            )
            return live, scores

    async def drain(self) -> None:
        """Refuses new requests, and returns when all earlier ones are answered."""
        self.draining = True
        while self._num_requests or not self.is_idle:
            await asyncio.sleep(DRAIN_S)

    def close(self) -> None:
        for queue in self.queues.values():
            queue.close()
        self._close_after.clear()  # nothing to close later: the end of the process closes all releases
        self.warm_up.stop()
        if self.certifier is not None:
            self.certifier.close()
        self._admin.shutdown(wait=False, cancel_futures=True)
        self._checks.shutdown(wait=False, cancel_futures=True)

    async def serve_release(self, release: Release) -> None:
        """Serves a release from the next request on. The previous one is closed when its last request is answered."""
        if self.live is not None and self.live.release.id == release.id:
            return
        self._close_after.pop(release.id, None)
        try:
            self._phase = "opening"
            await self.run_on_store(self.open_release, release.id)
            live = await self.run_on_store(ReleaseArtifacts, self.store, release)
            await self.run_on_store(live.read_columns_and_lengths)
            self._phase = "warming up"
            await self.run_on_store(self.warm_up.run, release)
        except BaseException:
            self.close_when_unused(release.id)
            raise
        self._close_after.pop(release.id, None)
        previous, self.live = self.live, live
        if self.certifier is not None:
            self.certifier.keep_raised(live)
        log.info("release %s is live: %d tasks", release.id, len(release.tasks))
        if previous is not None:
            self.close_when_unused(previous.release.id)
        else:
            self._close_unused_releases()
            self.on_live()

    def _record_failure(self, part: str, error: Exception) -> None:
        """Records that a part failed in a request, until it passes a check."""
        self.states.mark_failed(part, reason_of(error), error.detail if isinstance(error, StoreError) else str(error))

    async def run_on_store(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function that reads artifacts of the service, whose absence is not a mistake of the client.

        Raises StoreError. Raises InputError only if a client put or named something that this service cannot use: a
        prompt, or a release.
        """
        try:
            return await self.run_blocking(function, *arguments)
        except RefusedPromptError:
            raise
        except Exception as error:
            if isinstance(error, InputError) or is_store_error(error):
                raise store_error(STORE, error) from error
            raise

    def client_error(self, error: InputError) -> InputError:
        """Returns the error that a client gets if its change of the release raised `error`."""
        return client_error(error, self.store.url, str(self.store.cache.folder))

    def close_when_unused(self, release_id: str) -> None:
        """Closes a release that is not live as soon as no request uses it and its linger time has passed."""
        self._close_after[release_id] = time.monotonic() + self._linger
        if self._linger:
            asyncio.get_running_loop().call_later(self._linger + 0.1, self._close_unused_releases)
        self._close_unused_releases()

    def _close_unused_releases(self) -> None:
        """Closes the releases that are not live and unused, and whose linger time has passed."""
        now = time.monotonic()
        for release_id in [old for old, until in self._close_after.items() if until <= now and not self._users[old]]:
            del self._close_after[release_id]
            self._admin.submit(self._try_to_close_release, release_id)

    def _try_to_close_release(self, release_id: str) -> None:
        """Closes a release; logs a failure, which only costs memory."""
        try:
            self.close_release(release_id)
        except Exception:
            log.exception("release %s could not be closed", release_id)

    def require_live(self) -> ReleaseArtifacts:
        """Returns the live release. Raises NotReadyError before the first one and while the service ends."""
        if self.live is None or self.draining:
            raise NotReadyError
        return self.live

    def _find_task(self, live: ReleaseArtifacts, name: str) -> ServedTask:
        if name not in live.tasks:
            raise UnknownTaskError.for_name(name, live.tasks)
        return live.tasks[name]

    @contextlib.contextmanager
    def _accept_request(self, live: ReleaseArtifacts) -> Iterator[None]:
        """Context of a request, which `drain` waits for and whose release stays open."""
        self._num_requests += 1
        try:
            with self._keep_open(live):
                yield
        finally:
            self._num_requests -= 1

    @contextlib.contextmanager
    def _keep_open(self, live: ReleaseArtifacts) -> Iterator[None]:
        """Context that keeps a release open for a running request or background work."""
        self._change_users(live.release.id, 1)
        try:
            yield
        finally:
            self._change_users(live.release.id, -1)

    def _change_users(self, release_id: str, change: int) -> None:
        """Changes the number of users of a release, and closes releases that became unused."""
        self._users[release_id] += change
        if not self._users[release_id]:
            del self._users[release_id]
            self._close_unused_releases()

    async def run_blocking(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function that reads files or opens models, in the thread for such work."""
        return await asyncio.get_running_loop().run_in_executor(self._admin, function, *arguments)


def _parse_filters(filters: Sequence[PendingFilter]) -> list[str | Exception]:
    """Returns the canonical text of each filter, or the error for its client."""
    results = list[str | Exception]()
    for each in filters:
        try:
            with request_errors():
                results.append(Filter.parse(each.document, each.columns).text)
        except RequestError as error:
            results.append(error)
    return results


def _weight(max_rerank: int, query: PendingQuery) -> int:
    """Returns the weight of a query in the queue: 1 plus the documents to re-rank, at most `max_rerank`."""
    return 1 + min(query.rerank, max_rerank)


def _batch_key(query: PendingQuery) -> object:
    """Returns a key that is equal for queries of one batch.

    They have the same release, similar deadlines if they allow partial answers, and all or none are explained.
    """
    return query.release.id, int(query.deadline / REST_S) if query.allow_partial else None, query.explain
