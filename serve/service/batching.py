"""Batches that form by themselves: what arrives while the last batch runs is the next one. Bounded, with deadlines."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from serve.parts.part import ExpiredError

Item = TypeVar("Item")
Result = TypeVar("Result")

GRACE = 0.25  # seconds after the deadline in which an item that runs may end: parts drop late work themselves


class OverloadedError(Exception):
    """The queue is full. retry_after: seconds until it should not be."""

    def __init__(self, retry_after: int):
        super().__init__(f"too many requests; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False)
class _Entry:
    item: object
    deadline: float
    entered: float
    future: asyncio.Future[tuple[object, float]]
    timer: asyncio.TimerHandle | None = None
    waits: bool = True


class Batcher(Generic[Item, Result]):
    """Hands waiting items, up to `most` at a time, to `run` in one of `workers` threads; more than `bound` are refused.

    No item waits for company: a free thread takes what is there. Whoever asked is told at the deadline, at the latest
    GRACE after it where the item runs by then; one that still waits then, or whose asker has gone, never runs. An
    exception among the results is raised for its own asker alone. weigh: how much of `most` and `bound` an item takes.
    watch: told of each item that begins (1) and ends (-1) to run. Belongs to one event loop.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Result | Exception]],
        *,
        most: int = 64,
        bound: int = 256,
        workers: int = 1,
        weigh: Callable[[Item], int] = lambda _: 1,
        watch: Callable[[Item, int], object] = lambda item, by: None,
    ):
        self.run, self.most, self.bound, self.workers = run, most, bound, workers
        self.weigh, self.watch = weigh, watch
        self._waiting: deque[_Entry] = deque()
        self._weight = 0  # of all that wait
        self._running = 0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batch")
        self._rate = 0.0  # of weight a second, of late
        self.batches, self.items = 0, 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def submit(self, item: Item, deadline: float) -> tuple[Result, float]:
        """The item's result, and the seconds that it waited. deadline: a time of day.

        Raises OverloadedError, ExpiredError, or what `run` raised.
        """
        [found] = await self.submit_all([item], deadline)
        return found

    async def submit_all(self, items: Sequence[Item], deadline: float) -> list[tuple[Result, float]]:
        """As `submit`, of items that are taken together or not at all. Where nothing waits there is room for any."""
        weight = sum(map(self.weigh, items))
        if self._waiting and self._weight + weight > self.bound:
            raise OverloadedError(max(1, min(60, round(self._weight / max(self._rate, 1.0)))))
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        entries = [_Entry(item, deadline, now, loop.create_future()) for item in items]
        if math.isfinite(deadline):
            for entry in entries:
                entry.timer = loop.call_later(max(0.0, deadline - time.time()), self._expire, entry)
        self._waiting.extend(entries)
        self._weight += weight
        self._start()
        try:
            if len(entries) == 1:
                return [await entries[0].future]  # type: ignore[list-item]
            return list(await asyncio.gather(*(entry.future for entry in entries)))  # type: ignore[arg-type]
        finally:
            for entry in entries:
                self._leave(entry)

    async def drain(self) -> None:
        """Return once nothing waits or runs."""
        while self._waiting or self._running:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _expire(self, entry: _Entry) -> None:
        """At its deadline: it waits no longer; one that runs has a moment to come."""
        if entry.waits:
            self._remove(entry)
            entry.future.set_exception(ExpiredError())
        elif not entry.future.done():
            entry.timer = asyncio.get_running_loop().call_later(GRACE, _fail, [entry], ExpiredError())

    def _leave(self, entry: _Entry) -> None:
        """Nobody asks for it any more."""
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.waits:
            self._remove(entry)
        entry.future.cancel()

    def _remove(self, entry: _Entry) -> None:
        """Take one out that waits."""
        self._waiting.remove(entry)
        self._weight -= self.weigh(entry.item)  # type: ignore[arg-type]
        entry.waits = False

    def _start(self) -> None:
        while self._waiting and self._running < self.workers:
            batch: list[_Entry] = []
            weight = 0
            while self._waiting:
                own = self.weigh(self._waiting[0].item)  # type: ignore[arg-type]
                if batch and weight + own > self.most:
                    break
                entry = self._waiting[0]
                self._remove(entry)
                if time.time() > entry.deadline:
                    entry.future.set_exception(ExpiredError())
                    continue
                batch.append(entry)
                weight += own
            if batch:
                self._running += 1
                for entry in batch:
                    self.watch(entry.item, 1)  # type: ignore[arg-type]
                task = asyncio.get_running_loop().run_in_executor(self._pool, self._work, batch)
                task.add_done_callback(partial(self._end, batch, weight))

    def _work(self, batch: list[_Entry]) -> tuple[float, float, Sequence[Result | Exception]]:
        begun = time.perf_counter()
        results = self.run([entry.item for entry in batch])  # type: ignore[misc]
        return begun, time.perf_counter() - begun, results

    def _end(
        self, batch: list[_Entry], weight: int, done: asyncio.Future[tuple[float, float, Sequence[Result | Exception]]]
    ) -> None:
        self._running -= 1
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            _fail(batch, error)
        else:
            begun, seconds, results = done.result()
            self.batches += 1
            self.items += len(batch)
            self._rate += 0.2 * (self.workers * weight / max(seconds, 1e-6) - self._rate)
            for entry, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    _fail([entry], result)
                elif not entry.future.done():
                    entry.future.set_result((result, begun - entry.entered))
        for entry in batch:
            self.watch(entry.item, -1)  # type: ignore[arg-type]
        self._start()


def _fail(entries: Iterable[_Entry], error: BaseException) -> None:
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)
