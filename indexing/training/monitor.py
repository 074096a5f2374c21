"""The monitor of a run on Ray: an actor that receives the messages of all workers, and the thread that reports them."""

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
    """Holds the state of a run. An asyncio actor: workers send messages while the driver waits for updates."""

    def __init__(self) -> None:
        self._state = RunState()
        self._updates: asyncio.Queue[ProgressUpdate | None] = asyncio.Queue()  # None: closed
        self._stop = asyncio.Event()

    async def send(self, message: str) -> None:
        """Takes in a message of a worker, as `to_json` writes it."""
        self._state, update = receive(self._state, from_json(message))
        self._updates.put_nowait(update)

    async def must_stop(self) -> bool:
        """Returns whether a worker that starts now has to end at once."""
        return self._stop.is_set() or self._state.must_stop

    async def next_updates(self) -> list[ProgressUpdate]:
        """Waits for updates and returns all that there are; an empty list once the monitor is closed."""
        updates = [await self._updates.get()]
        while not self._updates.empty():
            updates.append(self._updates.get_nowait())
        if None in updates and len(updates) > 1:
            self._updates.put_nowait(None)  # for the next call
        return [update for update in updates if update is not None]

    async def stop(self) -> None:
        """Requests that workers save a checkpoint and end."""
        self._stop.set()

    async def stop_requested(self) -> None:
        """Returns once a stop is requested."""
        await self._stop.wait()

    async def close(self) -> RunState:
        """Ends the waiting for updates, and returns the state."""
        self._updates.put_nowait(None)
        return self._state


@dataclass
class Listener:
    """Follows a run: reports updates to the user until there are no more.

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
            with contextlib.suppress(Exception):  # the monitor may be gone, which also ends the workers
                self.stop()


def start_monitor() -> Any:
    """Returns the handle of a new Monitor actor on the node of the driver; it takes no CPU."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Monitor).options(num_cpus=0, scheduling_strategy=here).remote()
