"""The monitor of a run on Ray: an actor that receives the workers' messages, and a thread that reports progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from riptide.indexing.training.messages import ProgressUpdate, RunState, Show, from_json, receive, report_update
from riptide.retriever.training.hooks import StepDone


class Monitor:
    """An asyncio Ray actor with the state of a run: workers send messages while the driver waits for updates."""

    def __init__(self) -> None:
        self._state = RunState()
        self._updates: asyncio.Queue[ProgressUpdate | None] = asyncio.Queue()  # None: the monitor is closed
        self._stop = asyncio.Event()

    async def send(self, message: str) -> None:
        """Updates the state by a worker's message, in the form of `to_json`."""
        self._state, update = receive(self._state, from_json(message))
        self._updates.put_nowait(update)

    async def must_stop(self) -> bool:
        """Returns whether a worker that starts now must end at once."""
        return self._stop.is_set() or self._state.must_stop

    async def next_updates(self) -> list[ProgressUpdate]:
        """Waits until there are updates and returns all of them; returns [] once the monitor is closed."""
        updates = [await self._updates.get()]
        while not self._updates.empty():
            updates.append(self._updates.get_nowait())
        if None in updates and len(updates) > 1:
            self._updates.put_nowait(None)  # makes the next call return []
        return [update for update in updates if update is not None]

    async def stop(self) -> None:
        """Requests all workers to save a checkpoint and end."""
        self._stop.set()

    async def stop_requested(self) -> None:
        """Waits until a stop is requested."""
        await self._stop.wait()

    async def close(self) -> RunState:
        """Makes `next_updates` return [] from now on, and returns the state."""
        self._updates.put_nowait(None)
        return self._state


@dataclass
class Listener:
    """Reports the updates of a run to the user until there are no more.

    Attributes:
        next_updates: Returns the next updates; an empty list at the end.
        stop: Ends the workers. Called if an update cannot be reported.
        count: Called as count(steps, is_reused).
        show: Called with each new step, and with the quality before the first one.
        started: Set once rank 0 has started.
        has_stepped: Whether a step was done.
        error: The error that ended the listener; None without one.
    """

    next_updates: Callable[[], list[ProgressUpdate]]
    stop: Callable[[], object]
    count: Callable[[int, bool], object]
    show: Show
    started: threading.Event
    has_stepped: bool = False
    error: Exception | None = None

    def follow(self) -> None:
        """Reports updates until the monitor is closed or a report fails."""
        try:
            while updates := self.next_updates():
                for update in updates:
                    if update.is_start:
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
