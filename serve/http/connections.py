"""The connections of one HTTP server: which of them are served, which wait, and which are closed first.

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
import uuid
from collections.abc import Callable
from enum import Enum
from itertools import chain
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from riptide.serve.http.connection_limits import HEALTH_PATHS, SURPLUS_HEAD_S, HttpLimits

LINGER_S = 2.0  # seconds for which the bytes of a refused connection are still read
SWEEP_S = 0.5  # seconds between two checks of the deadlines
HEAD_END = b"\r\n\r\n"
# Minimum bytes of a body per call of the parser: a piece ends after the next HEAD_END, of which a body may have many.
BODY_PIECE = 1 << 10
PIECE = 16 << 10  # maximum bytes per call of the parser; memory may exceed max_header_bytes by as many
READ_RATE = 16 << 10  # minimum rate in bytes per second at which a client must read, measured over write_timeout_s


class ConnectionState(Enum):
    """The state of a connection."""

    FRESH = "fresh"
    HEAD = "head"
    IDLE = "idle"
    BUSY = "busy"
    SURPLUS = "surplus"
    REFUSED = "refused"
    CLOSED = "closed"


class Connections:
    """Keeps track of the connections of one server. Not thread-safe: all calls come from one event loop.

    Args:
        limits: Bounds on the connections.
        max_served: Connections that are served at once; as many more are accepted over the limit.
        clock: Returns the time in seconds.

    Attributes:
        on_refusal: Called with the status of each error that is sent before the application runs.
        on_close: Called with the reason for which a connection is closed.
        served: Connections within the limit.
        excess: Connections over the limit.
    """

    def __init__(self, limits: HttpLimits, max_served: int, clock: Callable[[], float] = time.monotonic):
        self.limits, self.max_served, self.clock = limits, max_served, clock
        self.on_refusal: Callable[[int], object] = lambda status: None
        self.on_close: Callable[[str], object] = lambda reason: None
        self.served: set[BoundedProtocol] = set()
        self.excess: set[BoundedProtocol] = set()
        # The time at which each connection began to wait, in ascending order, as entries are only added at the end.
        self._waiting: dict[ConnectionState, dict[BoundedProtocol, float]] = {
            state: {} for state in ConnectionState if state not in (ConnectionState.BUSY, ConnectionState.CLOSED)
        }
        self._unread: dict[BoundedProtocol, tuple[float, int]] = {}
        self._timeouts = {
            ConnectionState.FRESH: limits.head_timeout_s,
            ConnectionState.HEAD: limits.head_timeout_s,
            ConnectionState.IDLE: limits.idle_timeout_s,
            ConnectionState.SURPLUS: SURPLUS_HEAD_S,
            ConnectionState.REFUSED: LINGER_S,
        }
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.served) + len(self.excess)

    def add(self, connection: BoundedProtocol) -> None:
        """Adds a new connection, as a surplus one if it is over the limit; if too many are, closes the oldest one."""
        if len(self.served) < self.max_served:
            self.served.add(connection)
            self.set_state(connection, ConnectionState.FRESH)
        else:
            if len(self.excess) >= self.max_served:
                oldest = next(
                    chain(self._waiting[ConnectionState.REFUSED], self._waiting[ConnectionState.SURPLUS]), None
                )
                self.close(connection if oldest is None else oldest)
                if oldest is None:
                    return
            self.excess.add(connection)
            self.set_state(connection, ConnectionState.SURPLUS)
        if self._sweeping is None:
            self._sweep_later()

    def set_state(self, connection: BoundedProtocol, state: ConnectionState) -> None:
        """Sets the state of a connection and the start of its waiting time."""
        if (waiting := self._waiting.get(connection.state)) is not None:
            waiting.pop(connection, None)
        connection.state = state
        if (waiting := self._waiting.get(state)) is not None:
            waiting[connection] = self.clock()

    def admit(self, connection: BoundedProtocol) -> bool:
        """Returns whether a connection with a complete head is served. May close another connection to free a slot."""
        self._unread.pop(connection, None)  # a client that sends another request has read the previous response
        if connection in self.excess:
            if len(self.served) >= self.max_served and not self._make_room():
                self.set_state(connection, ConnectionState.BUSY)
                return False
            self.excess.discard(connection)
            self.served.add(connection)
        self.set_state(connection, ConnectionState.BUSY)
        return True

    def refuse(self, connection: BoundedProtocol) -> None:
        """Frees the slot of a refused connection, which is closed after LINGER_S, or at once if too many are open."""
        self.served.discard(connection)
        if connection not in self.excess and len(self.excess) >= self.max_served:
            self.close(connection)
            return
        self.excess.add(connection)
        self.set_state(connection, ConnectionState.REFUSED)

    def remove(self, connection: BoundedProtocol) -> None:
        """Removes a closed connection and frees its slot."""
        self.set_state(connection, ConnectionState.CLOSED)
        self.served.discard(connection)
        self.excess.discard(connection)
        self._unread.pop(connection, None)

    def close(self, connection: BoundedProtocol) -> None:
        """Closes a connection at once."""
        self.remove(connection)
        connection.drop()

    def sweep(self) -> None:
        """Closes the connections whose deadlines have passed, and those whose clients do not read."""
        now = self.clock()
        for state, waiting in self._waiting.items():
            latest_start = now - self._timeouts[state]
            while waiting and next(iter(waiting.values())) <= latest_start:
                connection = next(iter(waiting))
                # Deleted first, so that the connection expires only once; `remove` frees its slot when it is closed.
                del waiting[connection]
                self.on_close(f"{state.value} timeout")
                connection.expire()
        for connection in [*self.served, *self.excess]:
            size = connection.unsent_bytes()
            if not size:
                self._unread.pop(connection, None)
                continue
            since, earlier_size = self._unread.setdefault(connection, (now, size))
            if now - since >= self.limits.write_timeout_s:
                if earlier_size - size < READ_RATE * self.limits.write_timeout_s:
                    self.on_close("unread response")
                    self.close(connection)
                else:
                    self._unread[connection] = (now, size)

    def _make_room(self) -> bool:
        """Closes the connection that has waited longest, if for at least SURPLUS_HEAD_S. Returns whether it did."""
        latest_start = self.clock() - SURPLUS_HEAD_S
        for waiting in (
            self._waiting[state] for state in (ConnectionState.FRESH, ConnectionState.HEAD, ConnectionState.IDLE)
        ):
            if waiting and next(iter(waiting.values())) <= latest_start:
                self.on_close("room for a request")
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


def _announces_body(header: tuple[bytes, bytes]) -> bool:
    """Returns whether a header is one of a request with a body. Some clients send `Content-Length: 0` without one."""
    name, value = header
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")


def bounded_protocol(connections: Connections) -> type[BoundedProtocol]:
    """Returns a protocol class for `uvicorn.Config(http=...)` whose connections are registered in `connections`."""

    class Protocol(BoundedProtocol):
        registry = connections

    return Protocol


class BoundedProtocol(HttpToolsProtocol):
    """The uvicorn protocol of one connection with limits. `bounded_protocol` sets `registry`."""

    registry: Connections

    def __init__(self, *arguments: Any, **options: Any):
        self.state = ConnectionState.CLOSED
        self._limits = self.registry.limits
        self._refusal: bytes | None = None  # the error response to send after the responses to earlier requests
        self._in_head = False  # whether a request head has begun and is incomplete
        self._in_message = False  # whether a request has begun and its body is incomplete
        self._url_bytes = self._header_bytes = self._headers = 0
        self._events = 0  # number of callbacks from the parser
        self._silent_bytes = 0  # bytes parsed since the last callback
        self._pending: bytes | None = None  # received bytes that are not yet parsed
        super().__init__(*arguments, **options)

    # Callbacks of the connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.registry.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.registry.remove(self)
        self._unset_keepalive_if_required()
        self._pending = None
        super().connection_lost(error)

    def expire(self) -> None:
        """Closes a connection whose head is late; a client that has sent a part of the head gets 408."""
        if self._in_head and self._refusal is None:
            seconds = SURPLUS_HEAD_S if self.state is ConnectionState.SURPLUS else self._limits.head_timeout_s
            self._refuse(408, "timeout_error", f"expected the whole head within {seconds:g} s")
        else:
            self.transport.close()

    def drop(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def unsent_bytes(self) -> int:
        """Returns the number of response bytes that the client has not read yet."""
        return int(self.transport.get_write_buffer_size())

    # Bytes

    def data_received(self, data: bytes) -> None:
        if self._pending is not None:
            self._pending += data
            self.flow.pause_reading()  # the running request resumes reading whenever it receives
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        start, size = 0, len(data)
        while start < size and self._refusal is None and not self.transport.is_closing():
            if self.pipeline:
                self._pending = data[start:]
                self.flow.pause_reading()
                return
            in_body = self._in_message and not self._in_head
            end = data.find(HEAD_END, start + BODY_PIECE if in_body else start, start + PIECE)
            end = min(start + PIECE, size) if end < 0 else end + len(HEAD_END)
            events = self._events
            super().data_received(data if end - start == size else data[start:end])
            self._silent_bytes = 0 if self._events != events else self._silent_bytes + end - start
            if self._silent_bytes + self._header_bytes > self._limits.max_header_bytes:
                self._refuse_headers()
            start = end

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._events += 1
        if self._refusal is not None:
            return
        self._in_head = self._in_message = True
        self._url_bytes = self._header_bytes = self._headers = 0
        if self.state is ConnectionState.IDLE:
            self.registry.set_state(self, ConnectionState.HEAD)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._events += 1
        self._url_bytes += len(url)
        if self._url_bytes > self._limits.max_url_bytes:
            limit = self._limits.max_url_bytes
            self._refuse(414, "invalid_request_error", f"expected a URL of up to {limit:,} bytes")
        if self._refusal is None:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._events += 1
        self._header_bytes += len(name) + len(value) + 4  # 4: ": " and the end of the line
        self._headers += 1
        if self._header_bytes > self._limits.max_header_bytes or self._headers > self._limits.max_headers:
            self._refuse_headers()
        if self._refusal is None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._events += 1
        self._in_head = False
        if self._refusal is None and self.parser.should_upgrade() and any(map(_announces_body, self.headers)):
            # The parser takes the body of such a request for the next request.
            self._refuse(400, "invalid_request_error", "expected no Upgrade in a request with a body: send HTTP/1.1")
        if self._refusal is not None:
            return
        # A pipelined request is admitted with the connection.
        if self.state is ConnectionState.BUSY or self.registry.admit(self):
            super().on_headers_complete()
        else:
            if self.url.partition(b"?")[0] not in HEALTH_PATHS:
                self._refuse(503, "overloaded_error", "too many connections; try again in a moment")
                return
            super().on_headers_complete()
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._events += 1
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._events += 1
        self._in_message = False
        if self._refusal is None:
            super().on_message_complete()
            # The response was sent before the body arrived.
            if self.state is ConnectionState.HEAD and self.cycle.response_complete:
                self.registry.set_state(self, ConnectionState.IDLE)

    # Responses

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.response_complete:  # otherwise a pipelined request runs now
            if self._refusal is not None:
                self._send_refusal()
                return
            self.registry.set_state(self, ConnectionState.HEAD if self._in_message else ConnectionState.IDLE)
        elif self._refusal is not None and self._is_current():
            self._send_refusal()
            return
        if self._pending is not None:
            data, self._pending = self._pending, None
            self._parse(data)

    def send_400_response(self, msg: str) -> None:
        """Answers an invalid HTTP request with 400, in the format of all other errors."""
        self._refuse(400, "invalid_request_error", msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: a request with an unsupported upgrade is answered like any other."""

    def _refuse_headers(self) -> None:
        limits = self._limits
        expected = f"expected up to {limits.max_headers} headers of {limits.max_header_bytes:,} bytes in all"
        self._refuse(431, "invalid_request_error", expected)

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Answers the incoming request with an error, after the responses to earlier ones; closes the connection."""
        if self._refusal is not None or self.transport.is_closing():
            return
        error = {"message": message, "type": kind, "request_id": uuid.uuid4().hex}
        body = orjson.dumps({"error": error})
        retry_header = b"retry-after: 1\r\n" if status == 503 else b""
        self._refusal = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b" % (
            STATUS_LINE[status],
            len(body),
            retry_header,
            body,
        )
        self.registry.on_refusal(status)
        self.flow.pause_reading()
        if self._is_current() or self.cycle is None or self.cycle.response_complete:
            self._send_refusal()

    def _is_current(self) -> bool:
        """Returns whether the request that is being answered is the one that is being received."""
        return self.cycle is not None and self.cycle.scope is self.scope and not self.pipeline

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:  # the cycle belongs to the refused request
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.drop()
                return
        self._unset_keepalive_if_required()
        self.transport.write(self._refusal)
        self.transport.write_eof()
        self.flow.resume_reading()
        self.registry.refuse(self)
