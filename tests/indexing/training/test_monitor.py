"""The monitor passes on messages as JSON in their order, tells workers to stop, and ends the listener; without Ray."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from riptide.indexing.training.messages import (
    InvalidInput,
    RunFinished,
    RunState,
    TrainingResult,
    WorkerStarted,
    from_json,
    to_json,
)
from riptide.indexing.training.monitor import Listener, Monitor
from riptide.retriever.training.hooks import RunResumed, StartMeasured, StepDone

RESULT = TrainingResult(
    steps=3, workers=2, numerics="cpu", loss=0.5, curve=[[1, 0.5, 0.1, None]], best=0.5, best_step=3
)


def step(number: int) -> StepDone:
    return StepDone(number, 1.0, 0.1, None, "cpu")


def test_messages_arrive_as_json_in_their_order_until_it_is_closed() -> None:
    """Nothing that leaves the monitor's process needs pickle."""

    async def run() -> None:
        monitor = Monitor()
        waiting = asyncio.create_task(monitor.next_messages())
        await monitor.send(to_json(WorkerStarted(0)))
        first = await waiting
        assert [from_json(text) for text in first] == [WorkerStarted(0)]
        await monitor.send(to_json(step(1)))
        await monitor.send(to_json(RunFinished(RESULT)))
        closed = await monitor.close()
        await monitor.send(to_json(step(3)))  # of a worker that has not heard of the end
        others = await monitor.next_messages()
        assert [from_json(text) for text in others] == [step(1), RunFinished(RESULT), step(3)]
        assert await monitor.next_messages() == []
        answers = [first, others, closed, await monitor.must_stop()]
        assert json.loads(json.dumps(answers)) == answers

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
        await monitor.close()

    asyncio.run(run())


def test_a_listener_reports_messages_and_keeps_the_state() -> None:
    measured = StartMeasured(0.5)
    messages = [[WorkerStarted(0), RunResumed(2), measured], [step(3), InvalidInput("a.json: bad")], []]
    counted: list[tuple[int, bool]] = []
    shown: list[object] = []
    stopped: list[bool] = []

    def next_messages() -> list[str]:
        assert listener.has_stepped == (step(3) in shown)
        return [to_json(message) for message in messages.pop(0)]

    listener = Listener(
        next_messages,
        lambda: stopped.append(True),
        lambda *steps: counted.append(steps),
        shown.append,
        threading.Event(),
    )
    listener.follow()
    assert (counted, shown) == ([(2, True), (1, False)], [measured, step(3)])
    assert listener.started.is_set()
    assert (stopped, listener.error) == ([], None)
    assert listener.state == RunState(last_step=3, is_start_measured=True, problem="a.json: bad")


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

    listener = Listener(lambda: [to_json(step(1))], stop, lambda *_: None, show, threading.Event())
    listener.follow()
    assert stopped == [True]
    assert str(listener.error) == "cannot show it"
