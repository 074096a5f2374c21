"""The monitor passes on messages in their order, tells workers to stop, and ends the listener; all without Ray."""

from __future__ import annotations

import asyncio
import threading

import pytest

from riptide.indexing.training.messages import InvalidInput, ProgressUpdate, WorkerStarted, to_json
from riptide.indexing.training.monitor import Listener, Monitor
from riptide.retriever.training.hooks import StartMeasured, StepDone


def step(number: int) -> StepDone:
    return StepDone(number, 1.0, 0.1, None, "cpu")


def test_updates_arrive_in_order_until_it_is_closed() -> None:
    async def run() -> None:
        monitor = Monitor()
        waiting = asyncio.create_task(monitor.next_updates())
        await monitor.send(to_json(WorkerStarted(0)))
        assert await waiting == [ProgressUpdate(is_start=True)]
        await monitor.send(to_json(step(1)))
        await monitor.send(to_json(step(2)))
        state = await monitor.close()
        await monitor.send(to_json(step(3)))  # of a worker that has not heard of the end
        assert [update.shown for update in await monitor.next_updates()] == [step(1), step(2), step(3)]
        assert await monitor.next_updates() == []
        assert state.last_step == 2

    asyncio.run(run())


@pytest.mark.parametrize("bad", [True, False])
def test_workers_stop_after_bad_input_and_on_request(bad: bool) -> None:
    """Bad input ends workers that start; a request ends those that run too."""

    async def run() -> None:
        monitor = Monitor()
        request = asyncio.create_task(monitor.stop_requested())
        assert not await monitor.must_stop()
        await (monitor.send(to_json(InvalidInput("a.json: bad"))) if bad else monitor.stop())
        assert await monitor.must_stop()
        await asyncio.sleep(0)
        assert request.done() == (not bad)
        request.cancel()
        assert (await monitor.close()).error == ("a.json: bad" if bad else "")

    asyncio.run(run())


def test_a_listener_reports_what_it_hears() -> None:
    measured = StartMeasured(0.5)
    updates = [
        [ProgressUpdate(is_start=True), ProgressUpdate(shown=measured)],
        [ProgressUpdate(steps=1, shown=step(1)), ProgressUpdate(steps=2, is_reused=True)],
        [],
    ]
    counted: list[tuple[int, bool]] = []
    shown: list[object] = []
    stopped: list[bool] = []

    def next_updates() -> list[ProgressUpdate]:
        assert listener.has_stepped == (step(1) in shown)
        return updates.pop(0)

    listener = Listener(
        next_updates,
        lambda: stopped.append(True),
        lambda *steps: counted.append(steps),
        shown.append,
        threading.Event(),
    )
    listener.follow()
    assert (counted, shown) == ([(1, False), (2, True)], [measured, step(1)])
    assert listener.started.is_set()
    assert (stopped, listener.error) == ([], None)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_broken_listener_ends_the_workers(is_gone: bool) -> None:
    """Also if the monitor is gone, which then cannot be told."""
    stopped: list[bool] = []

    def stop() -> None:
        stopped.append(True)
        if is_gone:
            raise ConnectionError("the monitor is gone")

    def show(done: object) -> None:
        raise ValueError("cannot show it")

    listener = Listener(
        lambda: [ProgressUpdate(steps=1, shown=step(1))], stop, lambda *_: None, show, threading.Event()
    )
    listener.follow()
    assert stopped == [True]
    assert str(listener.error) == "cannot show it"
