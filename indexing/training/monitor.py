"""The monitor of a run on Ray: an actor that passes on the workers' messages, and a thread that reports progress.

Between processes, messages are JSON text (`to_json`), so none of them is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from riptide.indexing.training.messages import RunState, Show, from_json, receive, report_update
from riptide.retriever.training.hooks import StepDone
from riptide.telemetry.phases import add_measures


class Monitor:
    """An asyncio Ray actor: passes the workers' messages on to the driver, and tells workers when to stop."""

    def __init__(self) -> None:
        self._state = RunState()
        self._messages: asyncio.Queue[str | None] = asyncio.Queue()  # None: the monitor is closed
        self._stop = asyncio.Event()

    async def send(self, message: str) -> None:
        """Receives a worker's message, in the form of `to_json`."""
        self._state, _ = receive(self._state, from_json(message))
        self._messages.put_nowait(message)

    async def must_stop(self) -> bool:
        """Returns whether a worker that starts now must end at once."""
        return self._stop.is_set() or self._state.must_stop

    async def next_messages(self) -> list[str]:
        """Waits until there are messages and returns all of them; returns [] once the monitor is closed."""
        messages = [await self._messages.get()]
        while not self._messages.empty():
            messages.append(self._messages.get_nowait())
        if None in messages and len(messages) > 1:
            self._messages.put_nowait(None)  # makes the next call return []
        return [message for message in messages if message is not None]

    async def stop(self) -> None:
        """Requests all workers to save a checkpoint and end."""
        self._stop.set()

    async def stop_requested(self) -> None:
        """Waits until a stop is requested."""
        await self._stop.wait()

    async def close(self) -> None:
        """Makes `next_messages` return [] after the messages so far."""
        self._messages.put_nowait(None)


@dataclass
class Listener:
    """Reports the messages of a run to the user until there are no more.

    Attributes:
        next_messages: Returns the next messages, in the form of `to_json`; an empty list at the end.
        stop: Ends the workers. Called if a message cannot be reported.
        count: Called as count(steps, is_reused).
        show: Called with each message for the user.
        started: Set once rank 0 has started.
        state: The state of the run after these messages.
        has_stepped: Whether a step was done.
        error: The error that ended the listener; None without one.
    """

    next_messages: Callable[[], list[str]]
    stop: Callable[[], object]
    count: Callable[[int, bool], object]
    show: Show
    started: threading.Event
    state: RunState = field(default_factory=RunState)
    has_stepped: bool = False
    error: Exception | None = None

    def follow(self) -> None:
        """Reports messages until the monitor is closed or a report fails."""
        try:
            while messages := self.next_messages():
                for message in messages:
                    self.state, update = receive(self.state, from_json(message))
                    if update.is_start:
                        if self.started.is_set():
                            add_measures({"restarts": 1})
                        self.started.set()
                    self.has_stepped |= isinstance(update.shown, StepDone)
                    report_update(update, self.count, self.show)
        except Exception as error:
            self.error = error
            with contextlib.suppress(Exception):  # if the monitor is gone, the workers end anyway
                self.stop()


def start_monitor() -> Any:
    """Starts a Monitor actor on the driver's node, without a CPU, and returns its handle."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Monitor).options(num_cpus=0, scheduling_strategy=here).remote()
