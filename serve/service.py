"""A service in one process: the live release, the queues in front of the engine, and how the one follows the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from indexing.filters import Filter
from indexing.store import Store
from retriever.errors import InputError
from serve.batching import Batcher, OverloadedError
from serve.engine import Answer, Engine, Query
from serve.live import Live
from serve.protocol import SearchRequest
from serve.registry import take_prompt
from serve.release import BASE, Release, Task, current, discard, make_current, renewed
from serve.work import Asked, Pairs, Vectors, embed_all, rerank_all, search_all

log = logging.getLogger("riptide.serve")

LOOK = 2.0  # seconds between looks at which release is live
TRIES = 20  # to make a release the live one, where others do so too
CHANGES = 8  # of what is served that are on their way; each holds what was sent


class UnknownTaskError(Exception):
    """A task that the live release does not have."""

    def __init__(self, name: str):
        super().__init__(f"no task {name!r}")


async def nobody() -> None:
    """There is nobody to be told."""


class ConflictError(Exception):
    """Others changed what is served at the same time, again and again."""


@dataclass(frozen=True)
class Limits:
    """batch: questions that run together. bound: questions that wait, before more are refused. workers: batches that
    run side by side."""

    batch: int = 32
    bound: int = 256
    workers: int = 1


class Service:
    """prepare, retire: have every part open a release, or let go of it; called in a thread. linger: seconds for which
    one that was live is kept at least, where others have requests that are pinned to it. One event loop's own."""

    def __init__(
        self, store: Store, engine: Engine, *, prepare: Callable[[str], object], retire: Callable[[str], object],
        limits: Limits = Limits(), linger: float = 0.0,
    ):  # fmt: skip
        self.store, self.engine, self.limits = store, engine, limits
        self._prepare, self._retire, self._linger = prepare, retire, linger
        self.live: Live | None = None
        self.announce = nobody  # has others that serve the same store look which release is live
        self._users: Counter[str] = Counter()  # of each release: requests on their way, and what runs for them
        self._old: dict[str, float] = {}  # releases that are not live, and until when they are kept at least
        self._changing = asyncio.Lock()
        self._changes = 0
        self._admin = ThreadPoolExecutor(1, thread_name_prefix="admin")
        queue: dict[str, Any] = {"most": limits.batch, "bound": limits.bound, "workers": limits.workers,
                                 "watch": lambda asked, by: self._use(asked.release.id, by)}  # fmt: skip
        self.searches: Batcher[Asked, Answer] = Batcher(
            partial(search_all, engine), weigh=partial(_weight, limits.bound // 4), **queue
        )
        self.embeddings: Batcher[Vectors, tuple[np.ndarray, int]] = Batcher(
            partial(embed_all, engine), weigh=lambda asked: len(asked.texts), **queue
        )
        self.reranks: Batcher[Pairs, np.ndarray] = Batcher(
            partial(rerank_all, engine), weigh=lambda asked: len(asked.documents), **queue
        )
        self.draining = False

    @property
    def queues(self) -> dict[str, Batcher[Any, Any]]:
        """By what waits in them."""
        return {"search": self.searches, "embeddings": self.embeddings, "rerank": self.reranks}

    @property
    def ready(self) -> bool:
        return self.live is not None and not self.draining

    async def follow(self) -> None:
        """Serve what `serving/current.json` names, for ever; errors are logged, and what is served stays."""
        while True:
            try:
                await self.refresh()
            except Exception as error:
                log.error("the live release cannot be served: %s", error)
            await asyncio.sleep(LOOK)

    async def refresh(self) -> None:
        """Look which release is live, and serve that. Raises InputError where it cannot be."""
        found = await self._aside(current, self.store)
        if found is None or (self.live is not None and found[0] == self.live.release.id):
            return
        async with self._changing:
            if found := await self._aside(current, self.store):  # it may be another one by now
                await self._adopt(await self._aside(Release.load, self.store, found[0]))

    async def search(self, request: SearchRequest) -> tuple[Live, list[tuple[Answer, float]]]:
        """An answer for each question of a request, and the seconds that it waited; pinned to one release.

        Raises NotReadyError, UnknownTaskError, InputError, OverloadedError, ExpiredError.
        """
        live = self._now()
        task = self._task(live, request.task)
        self._check(live, task, request)
        chosen = None if not request.filter else Filter.parse(request.filter, live.columns).text
        deadline = time.time() + request.timeout_ms / 1000
        queries = [
            Query(text, task, request.k, request.mode, deadline, chosen, request.rerank, request.allow_partial)
            for text in request.texts
        ]
        with self._held(live):
            return live, await self.searches.submit_all([Asked(live.release, query) for query in queries], deadline)

    async def embed(self, texts: Sequence[str], task: str, side: str, timeout_s: float) -> tuple[np.ndarray, int]:
        """Vectors of texts by a task's prompt, float32 [n, dim], and their tokens. Raises as `search` does."""
        live = self._now()
        self._task(live, task)
        deadline = time.time() + timeout_s
        with self._held(live):
            asked = Vectors(live.release, list(texts), task, side, deadline)
            found, _ = await self.embeddings.submit(asked, deadline)
            return found

    async def rerank(self, query: str, documents: Sequence[str], timeout_s: float) -> tuple[Live, np.ndarray]:
        """The probability of each document: float32 [n]. Raises as `search` does."""
        live = self._now()
        if live.release.reranker is None:
            raise InputError("this release has no re-ranker")
        deadline = time.time() + timeout_s
        with self._held(live):
            scores, _ = await self.reranks.submit(Pairs(live.release, query, list(documents), deadline), deadline)
            return live, scores

    async def put_task(self, name: str, weights: bytes, settings: bytes, index: str | None) -> Task:
        """Serve a prompt under a name; done once every part has it. Raises InputError, ConflictError."""

        def change(release: Release) -> Release:
            return take_prompt(self.store, release, name, weights, settings, index)

        release = await self._change(change)
        found = release.task(name)
        assert found is not None
        return found

    async def drop_task(self, name: str) -> None:
        """Raises UnknownTaskError, InputError for the backbone's own, ConflictError."""
        if name == BASE:
            raise InputError(f"task {BASE!r} is the backbone's own, and stays")

        def change(release: Release) -> Release:
            if release.task(name) is None:
                raise UnknownTaskError(name)
            return release.without_task(name)

        await self._change(change)

    async def switch(self, id: str | None) -> Release:
        """Make an earlier release the live one, or (None) one of the same tasks over what the store holds now.

        Raises InputError where that is not there or does not fit, ConflictError.
        """

        def change(release: Release) -> Release:
            return renewed(self.store, release) if id is None else Release.load(self.store, id)

        return await self._change(change)

    async def drain(self) -> None:
        """Take no more requests, and return once those that came are answered."""
        self.draining = True
        for queue in self.queues.values():
            await queue.drain()

    def close(self) -> None:
        for queue in self.queues.values():
            queue.close()
        self._old.clear()  # all goes with the process
        self._admin.shutdown(wait=False, cancel_futures=True)

    async def _change(self, change: Callable[[Release], Release]) -> Release:
        """Make another release of the live one, have all prepare it, and make it the live one."""
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
            found = await self._aside(current, self.store)
            assert found is not None
            release = await self._aside(change, await self._aside(Release.load, self.store, found[0]))
            if await self._made_current(release, found[1]):
                await self._adopt(release)
                return release
        raise ConflictError("others change the tasks at the same time; try again")

    async def _made_current(self, release: Release, tag: str) -> bool:
        """Have all prepare a release, and make it the live one; where that fails nothing of it is left."""
        made = False
        try:
            await self._aside(release.save, self.store)
            await self._aside(self._prepare, release.id)
            made = await self._aside(make_current, self.store, release, tag)
        finally:
            if not made and self.live is not None and release.id != self.live.release.id:
                self._outdate(release.id)
                await self._aside(discard, self.store, release.id)
        return made

    async def _adopt(self, release: Release) -> None:
        """Serve a release from the next request on; the one before goes once its last request is answered."""
        if self.live is not None and self.live.release.id == release.id:
            return
        self._old.pop(release.id, None)
        try:
            await self._aside(self._prepare, release.id)
            live = await self._aside(Live, self.store, release)
        except BaseException:
            self._outdate(release.id)
            raise
        before, self.live = self.live, live
        log.info("release %s is live: %d tasks", release.id, len(release.tasks))
        if before is not None:
            self._outdate(before.release.id)

    def _outdate(self, release_id: str) -> None:
        """A release is not the live one: it goes once nobody uses it, and has lingered."""
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
        """Let go of a release; what cannot be let go of is told, and costs memory alone."""
        try:
            self._retire(release_id)
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

    def _check(self, live: Live, task: Task, request: SearchRequest) -> None:
        """Raises InputError where a task cannot be searched in that way."""
        if request.mode in ("bm25", "hybrid") and task.bm25 is None:
            raise InputError(f"task {task.name!r} has no BM25: build one (build_bm25), and serve it")
        if request.rerank and live.release.reranker is None:
            raise InputError("this release has no re-ranker: serve one, or leave rerank out")

    @contextlib.contextmanager
    def _held(self, live: Live) -> Iterator[None]:
        """A release stays open while a request that is pinned to it is on its way."""
        self._use(live.release.id, 1)
        try:
            yield
        finally:
            self._use(live.release.id, -1)

    def _use(self, release_id: str, by: int) -> None:
        """So many more (or fewer) use a release."""
        self._users[release_id] += by
        if not self._users[release_id]:
            del self._users[release_id]
            self._let_go()

    async def _aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run what reads files or opens models in the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._admin, function, *arguments)


def _weight(most: int, asked: Asked) -> int:
    """Of a question in the queue: one, and its documents to re-rank, up to `most` (so that it is taken at all)."""
    return 1 + min(asked.query.rerank, most)


class NotReadyError(Exception):
    """No release is being served yet, or none any more."""
