"""uvicorn's HTTP/1.1 protocol with bounds on heads, connections and unread responses.

This is the only file that depends on uvicorn's protocol class. It adds to `HttpToolsProtocol`:

- Bytes are parsed in pieces that end with a head. So a head is refused before more of it is in memory, and pipelined
  requests wait as bytes, with one parsed ahead at a time.
- Headers and trailers are counted by the parser's callbacks. Bytes that lead to no callback (an unfinished header, a
  chunk extension) are counted when they arrive.
- Each connection reports its state to `Connections`, which closes the ones whose time has passed.
"""

from __future__ import annotations

import uuid
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serve.http.connections import Connections, State
from serve.http.limits import HEALTH_PATHS, SURPLUS_HEAD_S

HEAD_END = b"\r\n\r\n"
BODY_PIECE = 1 << 10  # bytes of a body that are parsed without looking for the end of a later head
PIECE = 16 << 10  # bytes per call of the parser: as many may be in memory beyond max_header_bytes


def bounded_protocol(connections: Connections) -> type[BoundedProtocol]:
    """Returns a protocol class for `uvicorn.Config(http=...)` that registers its connections in `connections`."""

    class Protocol(BoundedProtocol):
        registry = connections

    return Protocol


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `registry` is set by `bounded_protocol`."""

    registry: Connections

    def __init__(self, *arguments: Any, **options: Any):
        self.state = State.CLOSED
        self._limits = self.registry.limits
        self._refusal: bytes | None = None  # the response to send once earlier requests are answered
        self._in_head = False  # a head has begun and is not complete
        self._in_message = False  # a head has begun, and its body is not complete
        self._url_bytes = self._header_bytes = self._headers = 0
        self._events = 0  # number of the parser's callbacks
        self._silent_bytes = 0  # bytes parsed since the last callback
        self._pending: bytes | None = None  # bytes that are received and not parsed yet
        super().__init__(*arguments, **options)

    # Connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.registry.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.registry.remove(self)
        self._unset_keepalive_if_required()
        self._pending = None
        super().connection_lost(error)

    def expire(self) -> None:
        """Closes a connection whose head is late; a client that has sent part of it gets 408."""
        if self._in_head and self._refusal is None:
            seconds = SURPLUS_HEAD_S if self.state is State.SURPLUS else self._limits.head_timeout_s
            self._refuse(408, "timeout_error", f"expected the whole head within {seconds:g} s")
        else:
            self.transport.close()

    def drop(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def unread_bytes(self) -> int:
        """Returns the bytes of responses that the client has not read yet."""
        return int(self.transport.get_write_buffer_size())

    # Bytes

    def data_received(self, data: bytes) -> None:
        if self._pending is not None:
            self._pending += data
            self.flow.pause_reading()  # the running request resumes it whenever it receives
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
        if self.state is State.IDLE:
            self.registry.move(self, State.HEAD)
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
        self._header_bytes += len(name) + len(value) + 4  # ": " and the end of the line
        self._headers += 1
        if self._header_bytes > self._limits.max_header_bytes or self._headers > self._limits.max_headers:
            self._refuse_headers()
        if self._refusal is None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._events += 1
        self._in_head = False
        if self._refusal is not None:
            return
        if self.state is State.BUSY or self.registry.admit(self):  # busy: a pipelined request
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
            if self.state is State.HEAD and self.cycle.response_complete:  # answered before its body came
                self.registry.move(self, State.IDLE)

    # Responses

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.response_complete:  # no pipelined request, which would run now
            if self._refusal is not None:
                self._send_refusal()
                return
            self.registry.move(self, State.HEAD if self._in_message else State.IDLE)
        elif self._refusal is not None and self._is_current():
            self._send_refusal()
            return
        if self._pending is not None:
            data, self._pending = self._pending, None
            self._parse(data)

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not valid HTTP, in the format of all other errors."""
        self._refuse(400, "invalid_request_error", msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Does nothing: an unsupported upgrade is answered as a plain request, which needs no line in the log."""

    def _refuse_headers(self) -> None:
        limits = self._limits
        expected = f"expected up to {limits.max_headers} headers of {limits.max_header_bytes:,} bytes in all"
        self._refuse(431, "invalid_request_error", expected)

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Answers the request that is being received with an error, after earlier ones, and closes the connection."""
        if self._refusal is not None or self.transport.is_closing():
            return
        error = {"message": message, "type": kind, "request_id": uuid.uuid4().hex}
        body = orjson.dumps({"error": error})
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        self._refusal = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b" % (
            STATUS_LINE[status],
            len(body),
            retry,
            body,
        )
        self.registry.refused(status)
        self.flow.pause_reading()
        if self._is_current() or self.cycle is None or self.cycle.response_complete:
            self._send_refusal()

    def _is_current(self) -> bool:
        """Whether the request that is being answered is also the one that is being received."""
        return self.cycle is not None and self.cycle.scope is self.scope and not self.pipeline

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:  # the cycle of the refused request
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
