"""The registry of the connections of one HTTP server: which are served, which wait, and which are closed first.

A connection is in one of these states:

fresh   accepted, and the head of its first request is incomplete
head    it was served before, and the head of its next request has begun
idle    it was served before, and waits for its next request
busy    a request is being received or answered
surplus accepted over the limit, and its head is incomplete
refused an error has been sent; later bytes are discarded for a moment, so that the client can read the error

If a request comes on a connection over the limit, the connection that has waited longest is closed for it: first one
whose head is incomplete (fresh, head), then an idle one, each only after SURPLUS_HEAD_S. Half-open connections
therefore never take the place of a request, and never close an idle connection of another client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum
from itertools import chain
from typing import Protocol

from serve.http.limits import SURPLUS_HEAD_S, HttpLimits

LINGER_S = 2.0  # seconds for which bytes of a refused connection are still read
SWEEP_S = 0.5  # seconds between two checks of the deadlines
READ_RATE = 16 << 10  # minimum bytes per second that a client must read, over write_timeout_s


class State(Enum):
    """The current state of a connection."""

    FRESH = "fresh"
    HEAD = "head"
    IDLE = "idle"
    BUSY = "busy"
    SURPLUS = "surplus"
    REFUSED = "refused"
    CLOSED = "closed"


class Connection(Protocol):
    """The interface of a connection that the registry uses."""

    state: State

    def expire(self) -> None:
        """Closes it because its time has passed; a client that has sent part of a head gets an error."""

    def drop(self) -> None:
        """Closes it at once."""

    def unread_bytes(self) -> int:
        """Returns the bytes of responses that the client has not read yet."""


class Connections:
    """The connections of one server. Not thread-safe: all calls come from one event loop.

    Args:
        limits: Bounds on the connections.
        most: Connections that are served at once; as many more are accepted over the limit.
        clock: Returns the time in seconds.

    Attributes:
        refused: Called with the status of each error that is sent before the application runs.
        closed: Called with the reason for which a connection is closed.
        served: Connections within the limit.
        over: Connections over the limit.
    """

    def __init__(self, limits: HttpLimits, most: int, clock: Callable[[], float] = time.monotonic):
        self.limits, self.most, self.clock = limits, most, clock
        self.refused: Callable[[int], object] = lambda status: None
        self.closed: Callable[[str], object] = lambda why: None
        self.served: set[Connection] = set()
        self.over: set[Connection] = set()
        # The time since which each connection waits, oldest first: entries are only added at the end.
        self._waiting: dict[State, dict[Connection, float]] = {
            state: {} for state in State if state not in (State.BUSY, State.CLOSED)
        }
        self._unread: dict[Connection, tuple[float, int]] = {}
        self._timeouts = {
            State.FRESH: limits.head_timeout_s,
            State.HEAD: limits.head_timeout_s,
            State.IDLE: limits.idle_timeout_s,
            State.SURPLUS: SURPLUS_HEAD_S,
            State.REFUSED: LINGER_S,
        }
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.served) + len(self.over)

    def add(self, connection: Connection) -> None:
        """Adds a new connection, as a surplus if it is over the limit; if too many are, the oldest is closed."""
        if len(self.served) < self.most:
            self.served.add(connection)
            self.move(connection, State.FRESH)
        else:
            if len(self.over) >= self.most:
                oldest = next(chain(self._waiting[State.REFUSED], self._waiting[State.SURPLUS]), None)
                self.close(connection if oldest is None else oldest)
                if oldest is None:
                    return
            self.over.add(connection)
            self.move(connection, State.SURPLUS)
        if self._sweeping is None:
            self._sweep_later()

    def move(self, connection: Connection, state: State) -> None:
        """Sets the state of a connection."""
        if (waiting := self._waiting.get(connection.state)) is not None:
            waiting.pop(connection, None)
        connection.state = state
        if (waiting := self._waiting.get(state)) is not None:
            waiting[connection] = self.clock()

    def admit(self, connection: Connection) -> bool:
        """Returns whether a connection with a complete head is served; another one may be closed for it."""
        self._unread.pop(connection, None)  # a client that sends a new request has read the previous response
        if connection in self.over:
            if len(self.served) >= self.most and not self._make_room():
                self.move(connection, State.BUSY)
                return False
            self.over.discard(connection)
            self.served.add(connection)
        self.move(connection, State.BUSY)
        return True

    def refuse(self, connection: Connection) -> None:
        """Releases the place of a connection to which an error has been sent; it is closed soon."""
        self.served.discard(connection)
        if connection not in self.over and len(self.over) >= self.most:
            self.close(connection)
            return
        self.over.add(connection)
        self.move(connection, State.REFUSED)

    def remove(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self.move(connection, State.CLOSED)
        self.served.discard(connection)
        self.over.discard(connection)
        self._unread.pop(connection, None)

    def close(self, connection: Connection) -> None:
        """Closes a connection at once."""
        self.remove(connection)
        connection.drop()

    def sweep(self) -> None:
        """Closes the connections whose time has passed, and those whose clients do not read."""
        now = self.clock()
        for state, waiting in self._waiting.items():
            latest_start = now - self._timeouts[state]
            while waiting and next(iter(waiting.values())) <= latest_start:
                connection = next(iter(waiting))
                del waiting[connection]  # it is closed only once; its place is free when that is done
                self.closed(f"{state.value} timeout")
                connection.expire()
        for connection in [*self.served, *self.over]:
            size = connection.unread_bytes()
            if not size:
                self._unread.pop(connection, None)
                continue
            since, earlier_size = self._unread.setdefault(connection, (now, size))
            if now - since >= self.limits.write_timeout_s:
                if earlier_size - size < READ_RATE * self.limits.write_timeout_s:
                    self.closed("unread response")
                    self.close(connection)
                else:
                    self._unread[connection] = (now, size)

    def _make_room(self) -> bool:
        """Closes the connection that has waited longest, if it has waited SURPLUS_HEAD_S; returns whether it did."""
        latest_start = self.clock() - SURPLUS_HEAD_S
        for waiting in (self._waiting[state] for state in (State.FRESH, State.HEAD, State.IDLE)):
            if waiting and next(iter(waiting.values())) <= latest_start:
                self.closed("room for a request")
                self.close(next(iter(waiting)))
                return True
        return False

    def _sweep_later(self) -> None:
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_again)

    def _sweep_again(self) -> None:
        self._sweeping = None
        self.sweep()
        if len(self):
            self._sweep_later()
