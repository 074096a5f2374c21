"""The service of one process: its live release, the queues in front of the engine, and changes of the release."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from indexing.corpus.filters import Filter
from indexing.store.store import Store
from retriever.cuts import Cuts
from retriever.errors import InputError
from retriever.options import Side
from serve.errors import (
    STORE,
    RefusedPromptError,
    StoreError,
    is_store_error,
    reason_of,
    store_error,
    without_places,
)
from serve.parts.engine import Engine
from serve.parts.leaf import Ask
from serve.parts.models import EncoderPart, RerankPart
from serve.parts.part import ExpiredError, PartControl
from serve.parts.queries import Answer, Pairs, Query, Texts
from serve.parts.states import ENCODER, RERANKER, PartStates, parts_of
from serve.protocol import SearchRequest
from serve.release.live import Live
from serve.release.release import BASE, Opened, Release, current, discard, make_current
from serve.release.renewal import renewed
from serve.release.tasks import Search, Task, search_of, search_of_mode
from serve.release.uploads import CheckedPrompt, check_upload, take_prompt
from serve.service.batching import Batcher, OverloadedError
from serve.service.staleness import Staleness
from serve.service.warm_up import WarmUp, WarmUpLimits

log = logging.getLogger("riptide.serve")

LOOK = 2.0  # seconds between two reads of which release is live, and between checks while a part fails
CHECK_S = 10.0  # seconds between checks of the parts
REPEAT = 60.0  # seconds after which a repeated error is logged again
TRIES = 20  # attempts to make a release live while other servers do the same
SWITCH_S = 0.001  # seconds after which a thread releases the GIL
CHANGES = 8  # changes of the release at once, running or waiting
CHECKS = 2  # uploads that are checked at the same time
UPLOADS = 8  # uploads at once, checked, waiting for their check or for their change; each holds its request's data
UPLOAD_S = 20.0  # seconds in which an upload is checked, the wait included; less than `serve.local.GRACE`


class UnknownTaskError(Exception):
    """A task that the live release does not have."""

    def __init__(self, name: str):
        super().__init__(f"no task {name!r}")


async def nobody() -> None:
    """Announces nothing, for a service whose store no other process serves."""


def favour_event_loop() -> None:
    """Shortens the delays of the event loop by other threads, once libraries and the first release are loaded.

    The garbage collector ignores all objects that exist now (gc.freeze); a full collection would stop all threads for
    0.25 s. A thread releases the GIL after 1 ms instead of 5 ms, unless a call into C takes longer: beside four busy
    threads the 99th percentile of a small response falls from 210 to 54 ms.
    """
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def nothing_to_do() -> None:
    """Default of `Service.on_live`."""


class UploadExpiredError(ExpiredError):
    """The check of an upload took too long."""


class ConflictError(Exception):
    """Other servers changed the live release at the same time in every attempt."""


@dataclass(frozen=True)
class Limits:
    """Limits of the queues.

    Attributes:
        batch: Queries per batch at most.
        bound: Queries that may wait; more are refused.
        workers: Batches that run concurrently.
    """

    batch: int = 32
    bound: int = 256
    workers: int = 1


class Service:
    """Serves one live release, with queues in front of its engine, and replaces it when another one becomes live.

    Not thread-safe: all coroutines run in one event loop.

    Args:
        store: Where releases and artifacts are.
        encoder: The encoder of this process.
        reranker: The re-ranker of this process.
        ask: Asks all leaves.
        leaf_parts: The parts of all leaves, by name.
        num_leaves: Number of leaves.
        limits: Limits of the queues.
        linger: Minimum seconds that a release stays open after it was live, as other processes have requests of it.
        is_local: Whether the leaves share this process's memory.
        warm_up: Limits of the warm-up of a release; None: the default ones.
    """

    def __init__(
        self,
        store: Store,
        encoder: EncoderPart,
        reranker: RerankPart,
        ask: Ask,
        leaf_parts: Mapping[str, PartControl],
        *,
        num_leaves: int = 1,
        limits: Limits = Limits(),
        linger: float = 0.0,
        is_local: bool = True,
        warm_up: WarmUpLimits | None = None,
    ):
        self.store, self.limits, self.num_leaves, self._linger = store, limits, num_leaves, linger
        self.parts: dict[str, PartControl] = {ENCODER: encoder, **leaf_parts, RERANKER: reranker}
        self.engine = engine = Engine(encoder, reranker, ask)
        self.live: Live | None = None
        self.states = PartStates()
        self.staleness = Staleness(store)
        self.engine.failed = self._part_failed
        self.warm_up = WarmUp(
            Engine(encoder, reranker, ask), self._read_files, is_local=is_local, limits=warm_up or WarmUpLimits()
        )
        self.on_live: Callable[[], object] = nothing_to_do  # called once, when the first release is live
        self.announce = nobody  # tells other servers of the store that another release is live
        self._phase = "waiting for a release"  # state of all parts before the first release is live
        self._users: Counter[str] = Counter()  # by release: running requests, and work that runs for them
        self._old: dict[str, float] = {}  # by release that is not live: the earliest time at which it may close
        self._changing = asyncio.Lock()
        self._changes = 0
        self._upload_slots = threading.BoundedSemaphore(UPLOADS)
        self._admin = ThreadPoolExecutor(1, thread_name_prefix="admin")
        self._upload_checks = ThreadPoolExecutor(CHECKS, thread_name_prefix="uploads")
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="checks")
        queue: dict[str, Any] = {
            "most": limits.batch,
            "bound": limits.bound,
            "workers": limits.workers,
            "watch": lambda item, change: self._use(item.release.id, change),
        }
        self.searches: Batcher[Query, Answer] = Batcher(
            engine.search, weigh=partial(_weight, limits.bound // 4), **queue
        )
        self.embeddings: Batcher[Texts, tuple[np.ndarray, Cuts]] = Batcher(
            engine.embed, weigh=lambda item: len(item.texts), **queue
        )
        self.reranks: Batcher[Pairs, np.ndarray] = Batcher(
            engine.rerank, weigh=lambda item: len(item.documents), **queue
        )
        self.draining = False

    def open(self, release_id: str) -> None:
        """Opens a release in every part. Blocks. Raises InputError if a part cannot open it."""
        for part, control in self.parts.items():
            try:
                control.prepare(release_id)
            except Exception as error:
                if self.live is None:  # otherwise the parts still serve the live release
                    self.states.failed(part, reason_of(error), str(error))
                raise
            if self.live is None:
                self.states.works(part)
        if self.live is None:
            self._old[release_id] = 0.0  # is closed if another release becomes the first live one

    def forget(self, release_id: str) -> None:
        """Closes a release in every part. Blocks."""
        for control in self.parts.values():
            control.retire(release_id)

    @property
    def queues(self) -> dict[str, Batcher[Any, Any]]:
        """The queues by kind of request."""
        return {"search": self.searches, "embeddings": self.embeddings, "rerank": self.reranks}

    @property
    def ready(self) -> bool:
        """Whether a release is live and warm, and all of its parts work."""
        live = self.live
        return live is not None and not self.draining and not self.states.failures(parts_of(live.release))

    @property
    def newer(self) -> list[str] | None:
        """The artifacts of the store that are newer than the live release, as of the last look; None: not known."""
        return None if self.live is None else self.staleness.newer(self.live.release)

    def about(self, live: Live) -> dict[str, Any]:
        """Returns further fields of `/v1/info`."""
        known = {} if live.release.encoder is None else self.engine.encoder.describe(live.release.id)
        return {**known, "shards": self.num_leaves}

    def readiness(self) -> dict[str, Any]:
        """Returns what `/readyz` reports: {"ready", "parts": {part: {"state", "reason" if it has failed}}}."""
        if self.live is None:
            return {"ready": False, "parts": self.states.report(self.parts, self._phase)}
        return {"ready": self.ready, "parts": self.states.report(parts_of(self.live.release), "ready")}

    async def follow(self) -> None:
        """Serves the release that `serving/current.json` names, forever; errors are logged, the live release stays."""
        logged: tuple[str, float] = ("", 0.0)
        while True:
            try:
                await self.refresh()
                logged = ("", 0.0)
            except Exception as error:
                detail = error.detail if isinstance(error, StoreError) else str(error)
                if detail != logged[0] or time.monotonic() > logged[1] + REPEAT:
                    log.error("the release that is to be live cannot be served: %s", detail)
                    logged = (detail, time.monotonic())
            await asyncio.sleep(LOOK)

    async def watch(self) -> None:
        """Checks the parts every CHECK_S seconds, forever; every LOOK seconds while one has failed."""
        checked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            is_due = time.monotonic() > checked + CHECK_S or self.states.failures(self.parts)
            if (live := self.live) is not None and is_due:
                with self._held(live):
                    await asyncio.get_running_loop().run_in_executor(self._checks, self.check_parts, live.release)
                checked = time.monotonic()

    async def watch_store(self) -> None:
        """Looks now and then for artifacts of the store that are newer than the live release, forever."""
        while True:
            if (live := self.live) is not None and self.staleness.is_due(live.release):
                await asyncio.to_thread(self.staleness.look, live.release)
            await asyncio.sleep(LOOK)

    def check_parts(self, release: Release) -> None:
        """Has every part of a release check its files and answer a small request; records failures. Blocks."""
        for part in parts_of(release):
            try:
                self.parts[part].check(release.id)
            except (OverloadedError, ExpiredError):
                continue  # a busy part has not failed
            except Exception as error:
                live = self.live
                if live is not None and live.release.id == release.id:  # files of others may be removed
                    self.states.failed(part, reason_of(error), str(error))
            else:
                self.states.works(part)

    async def refresh(self) -> None:
        """Serves the release that `serving/current.json` names.

        Raises:
            StoreError: If the release cannot be read.
            InputError: If a part cannot use it.
        """
        live = await self._aside(current, self.store)
        if live is None or (self.live is not None and live[0] == self.live.release.id):
            return
        async with self._changing:
            if live := await self._aside(current, self.store):  # another release may have become live since
                await self._adopt(await self._aside(Release.load, self.store, live[0]))

    async def search(self, request: SearchRequest, timeout_s: float) -> tuple[Live, Search, list[tuple[Answer, float]]]:
        """Answers the queries of a request, all from one release.

        Args:
            request: The request.
            timeout_s: Seconds that the request may take.

        Returns:
            The release that answered, the sources that were searched, and for each query its answer and the seconds
            that it waited.

        Raises:
            NotReadyError: If no release is live.
            UnknownTaskError: If the live release does not have the task.
            InputError: If the task cannot answer the request.
            OverloadedError: If the queue is full.
            ExpiredError: If the request's time has passed.
        """
        live = self._now()
        task = self._task(live, request.task)
        if request.rerank and live.release.reranker is None:
            raise InputError("this release has no re-ranker: serve one, or leave rerank out")
        search = search_of(task, request.source) if request.source else search_of_mode(task, request.mode)
        deadline = time.time() + timeout_s
        with self._held(live):
            filter_text = None
            if request.filter:  # its conditions may have thousands of values
                filter_text = (await asyncio.to_thread(Filter.parse, request.filter, live.columns)).text
            queries = [
                Query(
                    live.release,
                    text,
                    task,
                    request.k,
                    search,
                    deadline,
                    filter_text,
                    request.rerank,
                    request.allow_partial,
                )
                for text in request.texts
            ]
            return live, search, await self.searches.submit_all(queries, deadline)

    async def embed(self, texts: Sequence[str], task: str, side: Side, timeout_s: float) -> tuple[np.ndarray, Cuts]:
        """Returns vectors of texts with a task's prompt, float32 [n, dim], and the counts of texts that were cut.

        Args:
            texts: Texts to encode.
            task: Name of the task.
            side: "query" or "passage".
            timeout_s: Seconds that the request may take.

        Raises the exceptions of `search`.
        """
        live = self._now()
        self._task(live, task)
        if live.release.encoder is None:
            raise InputError("this release has no dense embeddings, and no encoder of them")
        deadline = time.time() + timeout_s
        with self._held(live):
            item = Texts(live.release, list(texts), task, side, deadline)
            result, _ = await self.embeddings.submit(item, deadline)
            return result

    async def rerank(self, query: str, documents: Sequence[str], timeout_s: float) -> tuple[Live, np.ndarray]:
        """Returns the release that answered and the probability of each document, float32 [n].

        Args:
            query: The query.
            documents: Texts to score.
            timeout_s: Seconds that the request may take.

        Raises the exceptions of `search`.
        """
        live = self._now()
        if live.release.reranker is None:
            raise InputError("this release has no re-ranker")
        deadline = time.time() + timeout_s
        with self._held(live):
            scores, _ = await self.reranks.submit(Pairs(live.release, query, list(documents), deadline), deadline)
            return live, scores

    async def put_task(self, name: str, weights: BinaryIO, settings: BinaryIO, index: str | None) -> Task:
        """Serves a prompt under a name; returns when every part has it.

        The prompt is checked in a thread for that, so that changes of the release do not wait for the check.

        Args:
            name: Name of the task.
            weights: prompt.safetensors.
            settings: prompt.json.
            index: Name of the index of its passages, or of embeddings; None: those of the backbone's own task.

        Returns:
            The task.

        Raises:
            InputError: If the prompt cannot be used.
            OverloadedError: If too many uploads are in progress.
            UploadExpiredError: If the check took too long.
            ConflictError: If other servers kept changing the release at the same time.
            StoreError: If the store cannot be read.
        """
        live = self._now()
        deadline = time.time() + UPLOAD_S

        def check() -> CheckedPrompt:
            opened = self._open_artifacts(live.release)
            return check_upload(self.store, opened, name, weights, settings, index, deadline=deadline, checks=CHECKS)

        async with self._checked(check) as checked:

            def change(release: Release) -> Release:
                return take_prompt(self.store, self._open_artifacts(release), checked)

            release = await self._change(change)
        task = release.task(name)
        assert task is not None
        return task

    def _open_artifacts(self, release: Release) -> Opened:
        """Opens the artifacts of a release. Raises StoreError if one cannot be read: no mistake of the client."""
        try:
            return Opened(self.store, release)
        except Exception as error:
            raise store_error(STORE, error) from error

    @contextlib.asynccontextmanager
    async def _checked(self, check: Callable[[], CheckedPrompt]) -> AsyncIterator[CheckedPrompt]:
        """Runs the check of an upload in a thread for that; at the end of the context its files are removed.

        A check whose time is over before it began never runs. Otherwise its thread continues until its next step,
        counts as an upload until then, and removes the files, also if the event loop is closed by then.
        """
        if not self._upload_slots.acquire(blocking=False):
            raise OverloadedError(5)
        running = self._upload_checks.submit(check)
        waiting = asyncio.wrap_future(running)
        try:
            await asyncio.wait([waiting], timeout=UPLOAD_S)
            with self._client_errors():
                try:
                    if not waiting.done():
                        raise ExpiredError
                    checked = waiting.result()
                except ExpiredError as error:
                    problem = f"the prompt was not checked within {UPLOAD_S:g} s; try again later"
                    raise UploadExpiredError(problem) from error
            yield checked
        finally:
            waiting.cancel()
            running.cancel()
            await asyncio.to_thread(running.add_done_callback, self._end_upload)

    def _end_upload(self, check: Future[CheckedPrompt]) -> None:
        """Removes the files of an upload whose check has ended. Blocks."""
        if not check.cancelled() and check.exception() is None:
            check.result().close()
        self._upload_slots.release()

    async def drop_task(self, name: str) -> None:
        """Stops serving a task.

        Raises:
            UnknownTaskError: If the live release does not have the task.
            InputError: If the task is the backbone's own, or the only one.
            ConflictError: If other servers kept changing the release at the same time.
        """
        if name == BASE:
            raise InputError(f"task {BASE!r} is the backbone's own, and stays")

        def change(release: Release) -> Release:
            if release.task(name) is None:
                raise UnknownTaskError(name)
            if len(release.tasks) == 1:
                raise InputError(f"task {name!r} is the only one, and stays: put another one first")
            return release.without_task(name)

        await self._change(change)

    async def switch(self, id: str | None) -> Release:
        """Makes another release the live one.

        Args:
            id: Id of an earlier release; None: a new release of the same tasks over what the store holds now.

        Returns:
            The release.

        Raises:
            InputError: If the release does not exist or does not fit the store.
            ConflictError: If other servers kept changing the release at the same time.
        """

        def change(release: Release) -> Release:
            return renewed(self.store, release) if id is None else Release.load(self.store, id)

        return await self._change(change)

    async def drain(self) -> None:
        """Refuses new requests, and returns when all earlier ones are answered."""
        self.draining = True
        for queue in self.queues.values():
            await queue.drain()

    def close(self) -> None:
        for queue in self.queues.values():
            queue.close()
        self._old.clear()  # the end of the process closes all releases
        self.warm_up.stop()
        self._admin.shutdown(wait=False, cancel_futures=True)
        self._checks.shutdown(wait=False, cancel_futures=True)
        self._upload_checks.shutdown(wait=False, cancel_futures=True)

    async def _change(self, change: Callable[[Release], Release]) -> Release:
        """Derives a release from the live one, opens it in all parts, and makes it the live one."""
        if self._changes >= CHANGES:
            raise OverloadedError(5)
        self._changes += 1
        try:
            async with self._changing:
                release = await self._changed(change)
        finally:
            self._changes -= 1
        await self.announce()
        return release

    async def _changed(self, change: Callable[[Release], Release]) -> Release:
        for _ in range(TRIES):
            tagged = await self._from_store(current, self.store)
            if tagged is None:
                error = f"{self.store.url} has no live release any more: start the server again to make one"
                raise StoreError(STORE, "files are missing", error)
            before = await self._from_store(Release.load, self.store, tagged[0])
            with self._client_errors():
                release = await self._aside(change, before)
            if await self._made_current(release, tagged[1]):
                await self._adopt(release)
                return release
        raise ConflictError("others change the tasks at the same time; try again")

    async def _made_current(self, release: Release, tag: str) -> bool:
        """Opens and warms a release, and makes it the live one; discards it if that fails."""
        is_live = False
        try:
            await self._from_store(release.save, self.store)
            await self._from_store(self.open, release.id)
            await self._from_store(self._warm, release)
            is_live = await self._from_store(make_current, self.store, release, tag)
        finally:
            if not is_live and self.live is not None and release.id != self.live.release.id:
                self._outdate(release.id)
                await self._from_store(discard, self.store, release.id)
        return is_live

    async def _adopt(self, release: Release) -> None:
        """Serves a release from the next request on; the previous one is closed when its last request is answered."""
        if self.live is not None and self.live.release.id == release.id:
            return
        self._old.pop(release.id, None)
        try:
            self._phase = "opening"
            await self._from_store(self.open, release.id)
            live = await self._from_store(Live, self.store, release)
            self._phase = "warming up"
            await self._from_store(self._warm, release)
        except BaseException:
            self._outdate(release.id)
            raise
        self._old.pop(release.id, None)
        before, self.live = self.live, live
        log.info("release %s is live: %d tasks", release.id, len(release.tasks))
        if before is not None:
            self._outdate(before.release.id)
        else:
            self._let_go()
            self.on_live()

    def _warm(self, release: Release) -> None:
        """Reads a release's files into memory, and runs queries until they are quick. Blocks."""
        self.warm_up.run(release, lambda: Opened(self.store, release))

    def _read_files(self, part: str, release_id: str, budget: int | None, seconds: float) -> int:
        """Reads the files of a part in every replica, and returns the bytes read. Blocks."""
        return self.parts[part].read(release_id, budget, seconds)

    def _part_failed(self, part: str, error: Exception) -> None:
        """Records that a part failed in a request; the next check that it passes ends this state."""
        self.states.failed(part, reason_of(error), error.detail if isinstance(error, StoreError) else str(error))

    async def _from_store(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function that reads the service's own artifacts; a missing one is no mistake of the client.

        Raises StoreError. Raises InputError only if a client put or named something that this service cannot use: a
        prompt, or a release.
        """
        try:
            return await self._aside(function, *arguments)
        except RefusedPromptError as error:
            raise InputError(self._without_places(error)) from error
        except Exception as error:
            if isinstance(error, InputError) or is_store_error(error):
                raise store_error(STORE, error) from error
            raise

    @contextlib.contextmanager
    def _client_errors(self) -> Iterator[None]:
        """Converts failures of the store to StoreError, and takes locations out of the errors for clients."""
        try:
            yield
        except Exception as error:
            if is_store_error(error):
                raise store_error(STORE, error) from error
            if isinstance(error, InputError):
                raise InputError(self._without_places(error)) from error
            raise

    def _without_places(self, error: Exception) -> str:
        """Returns the message of an error for clients."""
        return without_places(str(error), self.store.url, str(self.store.cache.folder))

    def _outdate(self, release_id: str) -> None:
        """Closes a release that is not live, as soon as no request uses it and its linger time has passed."""
        self._old[release_id] = time.monotonic() + self._linger
        if self._linger:
            asyncio.get_running_loop().call_later(self._linger + 0.1, self._let_go)
        self._let_go()

    def _let_go(self) -> None:
        now = time.monotonic()
        for release_id in [old for old, until in self._old.items() if until <= now and not self._users[old]]:
            del self._old[release_id]
            self._admin.submit(self._forget, release_id)

    def _forget(self, release_id: str) -> None:
        """Closes a release; a failure is logged, and only costs memory."""
        try:
            self.forget(release_id)
        except Exception:
            log.exception("release %s could not be let go of", release_id)

    def _now(self) -> Live:
        if self.live is None or self.draining:
            raise NotReadyError
        return self.live

    def _task(self, live: Live, name: str) -> Task:
        if name not in live.tasks:
            raise UnknownTaskError(name)
        return live.tasks[name]

    @contextlib.contextmanager
    def _held(self, live: Live) -> Iterator[None]:
        """Keeps a release open while a request of it runs."""
        self._use(live.release.id, 1)
        try:
            yield
        finally:
            self._use(live.release.id, -1)

    def _use(self, release_id: str, change: int) -> None:
        """Changes the number of users of a release."""
        self._users[release_id] += change
        if not self._users[release_id]:
            del self._users[release_id]
            self._let_go()

    async def _aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function that reads files or opens models, in the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._admin, function, *arguments)


def _weight(most: int, query: Query) -> int:
    """Returns a query's weight in the queue: 1 plus its documents to re-rank, up to `most` (so that it can enter)."""
    return 1 + min(query.rerank, most)


class NotReadyError(Exception):
    """No release is served yet, or the service is shutting down."""
