"""Batches that form by themselves, without a clock in any expectation."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve.batching import Batcher, OverloadedError
from serve.parts import ExpiredError

LATER = math.inf


def scenario(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(run())


class Doubling:
    """Doubles numbers once it is let go; remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()
        self.begun = threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.begun.set()
        assert self.go.wait(30)
        if -1 in items:
            raise ValueError("minus one")
        return [2 * item for item in items]


async def began(work: Doubling) -> None:
    await asyncio.to_thread(work.begun.wait, 30)


def test_what_arrives_while_a_batch_runs_is_the_next_one() -> None:
    async def run() -> None:
        work = Doubling()
        batcher: Batcher[int, int] = Batcher(work, most=4)
        first = asyncio.ensure_future(batcher.submit(0, LATER))
        await asyncio.sleep(0)
        await began(work)
        rest = [asyncio.ensure_future(batcher.submit(number, LATER)) for number in range(1, 7)]
        await asyncio.sleep(0)
        assert len(batcher) == 6
        work.go.set()
        results = await asyncio.gather(first, *rest)
        assert [result for result, _ in results] == [0, 2, 4, 6, 8, 10, 12]
        assert all(waited >= 0 for _, waited in results)
        assert work.batches == [[0], [1, 2, 3, 4], [5, 6]]
        assert (batcher.batches, batcher.items, len(batcher)) == (3, 7, 0)
        await batcher.drain()
        batcher.close()

    scenario(run)


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    async def run() -> None:
        work = Doubling()
        batcher: Batcher[int, int] = Batcher(work, most=1, bound=2)
        running = [asyncio.ensure_future(batcher.submit(number, LATER)) for number in range(3)]
        await asyncio.sleep(0)
        await began(work)
        with pytest.raises(OverloadedError) as raised:
            await batcher.submit(9, LATER)
        assert raised.value.retry_after >= 1
        work.go.set()
        assert [result for result, _ in await asyncio.gather(*running)] == [0, 2, 4]

    scenario(run)


def test_what_is_late_or_no_longer_asked_for_never_runs() -> None:
    async def run() -> None:
        work = Doubling()
        batcher: Batcher[int, int] = Batcher(work, most=8)
        first = asyncio.ensure_future(batcher.submit(0, LATER))
        await asyncio.sleep(0)
        await began(work)
        late = asyncio.ensure_future(batcher.submit(1, time.time() - 1))
        gone = asyncio.ensure_future(batcher.submit(2, LATER))
        kept = asyncio.ensure_future(batcher.submit(3, LATER))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        work.go.set()
        assert (await first)[0] == 0
        assert (await kept)[0] == 6
        with pytest.raises(ExpiredError):
            await late
        assert work.batches == [[0], [3]]

    scenario(run)


def test_an_error_reaches_every_asker_of_its_batch_and_no_other() -> None:
    async def run() -> None:
        work = Doubling()
        work.go.set()
        batcher: Batcher[int, int] = Batcher(work, most=1)
        with pytest.raises(ValueError, match="minus one"):
            await batcher.submit(-1, LATER)
        assert (await batcher.submit(4, LATER))[0] == 8

    scenario(run)
