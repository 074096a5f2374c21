"""Queues that form batches: items that arrive while a batch runs become the next batch."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from riptide.serve.callers import ANONYMOUS, Caller
from riptide.serve.service_errors import ExpiredError, OverloadedError

Item = TypeVar("Item")
Result = TypeVar("Result")

GRACE = 0.25  # seconds after the deadline in which a running item may end; the parts themselves drop late work


@dataclass(eq=False)
class _Entry:
    item: object
    deadline: float
    entered: float
    future: asyncio.Future[tuple[object, float]]
    weight: int
    key: object
    caller: Caller
    timer: asyncio.TimerHandle | None = None
    waits: bool = True


class Batcher(Generic[Item, Result]):
    """Runs waiting items in batches. No item waits for a batch to fill, as a free thread takes all waiting items.

    An item that still waits at its deadline, or whose caller has gone, never runs; one that runs by then has GRACE
    seconds more. Belongs to one event loop.

    Args:
        run: Returns the results of a batch; an exception among them is raised for its item alone.
        max_batch: Weight of a batch at most.
        max_waiting: Weight that may wait; more items are refused.
        workers: Batches that run concurrently.
        weigh: Returns the weight of an item.
        key: Returns a value that is equal for all items of a batch.
        on_run: Called for each item when it begins (1) and ends (-1) to run.
        prepare_thread: Called once in each thread that runs batches, before its first one.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Result | Exception]],
        *,
        max_batch: int = 64,
        max_waiting: int = 256,
        workers: int = 1,
        weigh: Callable[[Item], int] = lambda _: 1,
        key: Callable[[Item], object] = lambda _: None,
        on_run: Callable[[Item, int], object] = lambda item, by: None,
        prepare_thread: Callable[[], object] | None = None,
    ):
        self.run, self.max_batch, self.max_waiting, self.workers = run, max_batch, max_waiting, workers
        self.weigh, self.key, self.on_run = weigh, key, on_run
        self._waiting: deque[_Entry] = deque()
        self._weight = 0  # total weight of the waiting items
        self._caller_weights: Counter[Caller] = Counter()  # the same by caller
        self._running = 0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batch", initializer=prepare_thread)
        self._rate = 0.0  # recent throughput: weight of finished items per second
        self.batches, self.items = 0, 0

    def __len__(self) -> int:
        """Returns the number of waiting items."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no item waits or runs."""
        return not self._waiting and not self._running

    async def submit(self, item: Item, deadline: float, caller: Caller = ANONYMOUS) -> tuple[Result, float]:
        """Waits for an item's result; returns it and the seconds in the queue.

        Args:
            item: The item.
            deadline: Time of `time.monotonic()` in seconds.
            caller: The client of the request, with a rate and a share of the queue.

        Raises OverloadedError, ExpiredError, or the exception of `run`.
        """
        [result] = await self.submit_all([item], deadline, caller)
        return result

    async def submit_all(
        self, items: Sequence[Item], deadline: float, caller: Caller = ANONYMOUS, *, is_counted: bool = False
    ) -> list[tuple[Result, float]]:
        """Like `submit`, for items that are accepted or refused together.

        If nothing waits, all are accepted; of a caller with a share, if nothing of this caller waits. `is_counted`:
        whether another queue has counted them against the caller's rate and quota, which then get them back if they are
        refused.
        """
        weights = list(map(self.weigh, items))
        total, own = sum(weights), self._caller_weights[caller]
        retry_after = max(1, min(60, round(self._weight / max(self._rate, 1.0))))
        is_full = self._waiting and self._weight + total > self.max_waiting
        is_share_full = own and own + total > caller.share * self.max_waiting
        if is_counted and (is_full or is_share_full):
            caller.give_back(total)
        if is_full:
            raise OverloadedError(retry_after)
        if is_share_full:
            raise OverloadedError(retry_after, f"more than {caller.share:.0%} of the queue")
        if not is_counted:
            caller.take(total)
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        entries = [
            _Entry(item, deadline, now, loop.create_future(), weight, self.key(item), caller)
            for item, weight in zip(items, weights, strict=True)
        ]
        if math.isfinite(deadline):
            for entry in entries:
                entry.timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire, entry)
        self._waiting.extend(entries)
        self._weight += total
        self._caller_weights[caller] += total
        self._start()
        try:
            if len(entries) == 1:
                return [await entries[0].future]  # type: ignore[list-item]
            return list(await asyncio.gather(*(entry.future for entry in entries)))  # type: ignore[arg-type]
        finally:
            for entry in entries:
                self._leave(entry)

    async def drain(self) -> None:
        """Waits until no item waits or runs."""
        while not self.is_idle:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _expire(self, entry: _Entry) -> None:
        """Fails an item at its deadline if it waits, or GRACE seconds later if it runs."""
        if entry.waits:
            self._remove(entry)
            _fail([entry], ExpiredError())
        elif not entry.future.done():
            entry.timer = asyncio.get_running_loop().call_later(GRACE, _fail, [entry], ExpiredError())

    def _leave(self, entry: _Entry) -> None:
        """Removes an item when its caller has the result or has been cancelled."""
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.waits:
            self._remove(entry)
        entry.future.cancel()

    def _remove(self, entry: _Entry) -> None:
        """Removes an item from the waiting ones."""
        self._waiting.remove(entry)
        self._weight -= entry.weight
        self._caller_weights[entry.caller] -= entry.weight
        entry.waits = False

    def _start(self) -> None:
        while self._waiting and self._running < self.workers:
            batch: list[_Entry] = []
            weight = 0
            for entry in list(self._waiting):
                if batch and entry.key != batch[0].key:
                    continue
                if batch and weight + entry.weight > self.max_batch:
                    break
                self._remove(entry)
                if time.monotonic() > entry.deadline:
                    _fail([entry], ExpiredError())
                    continue
                batch.append(entry)
                weight += entry.weight
            if batch:
                self._running += 1
                for entry in batch:
                    self.on_run(entry.item, 1)  # type: ignore[arg-type]
                task = asyncio.get_running_loop().run_in_executor(self._pool, self._run_batch, batch)
                task.add_done_callback(partial(self._end, batch, weight))

    def _run_batch(self, batch: list[_Entry]) -> tuple[float, float, Sequence[Result | Exception]]:
        start = time.perf_counter()
        results = self.run([entry.item for entry in batch])  # type: ignore[misc]
        return start, time.perf_counter() - start, results

    def _end(
        self, batch: list[_Entry], weight: int, done: asyncio.Future[tuple[float, float, Sequence[Result | Exception]]]
    ) -> None:
        self._running -= 1
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            _fail(batch, error)
        else:
            start, seconds, results = done.result()
            self.batches += 1
            self.items += len(batch)
            self._rate += 0.2 * (self.workers * weight / max(seconds, 1e-6) - self._rate)
            for entry, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    _fail([entry], result)
                elif not entry.future.done():
                    entry.future.set_result((result, start - entry.entered))
        for entry in batch:
            self.on_run(entry.item, -1)  # type: ignore[arg-type]
        self._start()


def _fail(entries: Iterable[_Entry], error: BaseException) -> None:
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)
