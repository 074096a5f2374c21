"""Batches that form by themselves: what arrives while the last batch runs is the next one. Bounded, with deadlines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from serve.parts import ExpiredError

Item = TypeVar("Item")
Result = TypeVar("Result")


class OverloadedError(Exception):
    """The queue is full. retry_after: seconds until it should not be."""

    def __init__(self, retry_after: int):
        super().__init__(f"too many requests; try again in {retry_after} s")
        self.retry_after = retry_after


class _Entry(NamedTuple):
    item: object
    deadline: float
    entered: float
    future: asyncio.Future[tuple[object, float]]


class Batcher(Generic[Item, Result]):
    """Hands waiting items, up to `most` at a time, to `run` in one of `workers` threads; more than `bound` are refused.

    No item waits for company: a free thread takes what is there. What is past its deadline, or whose asker has gone,
    is dropped before it runs. Belongs to one event loop.
    """

    def __init__(
        self, run: Callable[[list[Item]], Sequence[Result]], *, most: int = 64, bound: int = 256, workers: int = 1
    ):
        self.run, self.most, self.bound, self.workers = run, most, bound, workers
        self._waiting: deque[_Entry] = deque()
        self._running = 0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batch")
        self._rate = 0.0  # items a second, of late
        self.batches, self.items = 0, 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def submit(self, item: Item, deadline: float) -> tuple[Result, float]:
        """The item's result, and the seconds that it waited. deadline: a time of day.

        Raises OverloadedError, ExpiredError, or what `run` raised.
        """
        if len(self._waiting) >= self.bound:
            raise OverloadedError(max(1, min(60, round(len(self._waiting) / max(self._rate, 1.0)))))
        future: asyncio.Future[tuple[object, float]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Entry(item, deadline, time.perf_counter(), future))
        self._start()
        return await future  # type: ignore[return-value]

    async def drain(self) -> None:
        """Return once nothing waits or runs."""
        while self._waiting or self._running:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._waiting and self._running < self.workers:
            batch: list[_Entry] = []
            while self._waiting and len(batch) < self.most:
                entry = self._waiting.popleft()
                if entry.future.done():
                    continue
                if time.time() > entry.deadline:
                    entry.future.set_exception(ExpiredError())
                    continue
                batch.append(entry)
            if batch:
                self._running += 1
                task = asyncio.get_running_loop().run_in_executor(self._pool, self._work, batch)
                task.add_done_callback(lambda done, batch=batch: self._end(batch, done))  # type: ignore[misc]

    def _work(self, batch: list[_Entry]) -> tuple[float, float, Sequence[Result]]:
        begun = time.perf_counter()
        results = self.run([entry.item for entry in batch])  # type: ignore[misc]
        return begun, time.perf_counter() - begun, results

    def _end(self, batch: list[_Entry], done: asyncio.Future[tuple[float, float, Sequence[Result]]]) -> None:
        self._running -= 1
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            begun, seconds, results = done.result()
            self.batches += 1
            self.items += len(batch)
            self._rate += 0.2 * (self.workers * len(batch) / max(seconds, 1e-6) - self._rate)
            for entry, result in zip(batch, results, strict=True):
                if not entry.future.done():
                    entry.future.set_result((result, begun - entry.entered))
        else:
            for entry in batch:
                if not entry.future.done():
                    entry.future.set_exception(error)
        self._start()
