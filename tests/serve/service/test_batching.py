"""Batches that form by themselves, without a clock in any expectation."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from riptide.indexing.store.store import Store
from riptide.serve.one_process import open_local
from riptide.serve.service.batch_queues import Batcher
from riptide.serve.service.service_options import ServiceOptions
from riptide.serve.service_errors import ExpiredError, OverloadedError

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
        batcher: Batcher[int, int] = Batcher(work, max_batch=4)
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
        batcher: Batcher[int, int] = Batcher(work, max_batch=1, max_waiting=2)
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
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        work = Doubling()
        batcher: Batcher[int, int] = Batcher(work, max_batch=8)
        first = asyncio.ensure_future(batcher.submit(0, LATER))
        await asyncio.sleep(0)
        await began(work)
        late = asyncio.ensure_future(batcher.submit(1, time.monotonic() - 1))
        gone = asyncio.ensure_future(batcher.submit(2, LATER))
        kept = asyncio.ensure_future(batcher.submit(3, LATER))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        # Its time passes while the cancellation is on its way to the queue.
        late_and_gone = asyncio.ensure_future(batcher.submit_all([4, 5], time.monotonic() - 1))
        await asyncio.sleep(0)
        late_and_gone.cancel()
        await asyncio.wait([late_and_gone])
        work.go.set()
        assert (await first)[0] == 0
        assert (await kept)[0] == 6
        with pytest.raises(ExpiredError):
            await late
        assert work.batches == [[0], [3]]
        assert not failures

    scenario(run)


def test_an_error_reaches_every_asker_of_its_batch_and_no_other() -> None:
    async def run() -> None:
        work = Doubling()
        work.go.set()
        batcher: Batcher[int, int] = Batcher(work, max_batch=1)
        with pytest.raises(ValueError, match="minus one"):
            await batcher.submit(-1, LATER)
        assert (await batcher.submit(4, LATER))[0] == 8

    scenario(run)


def test_items_of_a_request_are_taken_together_or_not_at_all() -> None:
    async def run() -> None:
        work = Doubling()
        batcher: Batcher[int, int] = Batcher(work, max_batch=4, max_waiting=3, weigh=abs)
        first = asyncio.ensure_future(batcher.submit(1, LATER))
        await began(work)
        second = asyncio.ensure_future(batcher.submit_all([2, 3], LATER))  # more than its bound, but nothing waits
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await batcher.submit_all([1, 1], LATER)
        assert len(batcher) == 2
        work.go.set()
        assert [[result for result, _ in await second], (await first)[0]] == [[4, 6], 2]
        assert work.batches == [[1], [2], [3]]  # 2 and 3 together are more than a batch holds

    scenario(run)


def test_an_exception_among_the_results_is_its_askers_alone() -> None:
    async def run() -> None:
        batcher: Batcher[int, int] = Batcher(lambda items: [item or ValueError("nought") for item in items])
        found = await asyncio.gather(*(batcher.submit(item, LATER) for item in (1, 0, 2)), return_exceptions=True)
        assert [one if isinstance(one, Exception) else one[0] for one in found][::2] == [1, 2]
        assert isinstance(found[1], ValueError)

    scenario(run)


def test_who_waits_for_what_runs_too_long_is_told_at_the_deadline() -> None:
    async def run() -> None:
        work = Doubling()
        batcher: Batcher[int, int] = Batcher(work, max_batch=1)
        asked = [asyncio.ensure_future(batcher.submit(item, time.monotonic() + 0.1)) for item in (1, 2)]
        for one in asked:
            with pytest.raises(ExpiredError):
                await one
        assert len(batcher) == 0
        work.go.set()
        assert (await batcher.submit(3, LATER))[0] == 6
        assert work.batches == [[1], [3]]

    scenario(run)


def test_items_of_one_batch_have_equal_keys_and_the_oldest_item_decides() -> None:
    async def run() -> None:
        work = Doubling()
        batcher: Batcher[int, int] = Batcher(work, max_batch=3, key=lambda item: item % 2)
        first = asyncio.ensure_future(batcher.submit(0, LATER))
        await asyncio.sleep(0)
        await began(work)
        rest = [asyncio.ensure_future(batcher.submit(number, LATER)) for number in (1, 2, 3, 4, 5, 7)]
        await asyncio.sleep(0)
        work.go.set()
        results = await asyncio.gather(first, *rest)
        assert [result for result, _ in results] == [0, 2, 4, 6, 8, 10, 14]
        assert work.batches == [[0], [1, 3, 5], [2, 4], [7]]

    scenario(run)


def test_each_thread_is_prepared_before_its_first_batch() -> None:
    prepared: set[int] = set()

    def work(items: list[int]) -> list[bool]:
        return [threading.get_ident() in prepared] * len(items)

    async def run() -> None:
        batcher: Batcher[int, bool] = Batcher(
            work, workers=2, max_batch=1, prepare_thread=lambda: prepared.add(threading.get_ident())
        )
        results = await asyncio.gather(*(batcher.submit(number, LATER) for number in range(8)))
        assert all(is_prepared for is_prepared, _ in results)
        assert threading.get_ident() not in prepared

    scenario(run)


def test_each_thread_of_a_service_computes_alone(tmp_path: Path) -> None:
    """So that its encoder computes a lone query in this thread; other threads keep their number of threads."""
    before = torch.get_num_threads()
    service = open_local(Store(str(tmp_path)), ServiceOptions(threads=2), device="cpu")
    for name, queue in service.queues.items():
        if name == "filters":
            continue  # computes nothing
        assert queue._pool.submit(torch.get_num_threads).result() == 1
    service.close()
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == before
