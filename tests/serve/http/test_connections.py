"""Bounds of the HTTP server, over real sockets, and which connections it closes first."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvicorn

from riptide.base.errors import InputError
from riptide.serve.http import connection_limits as limits_module
from riptide.serve.http.connection_limits import HttpLimits, allowed_connections
from riptide.serve.http.connections import Connections, ConnectionState, bounded_protocol

LIMITS = HttpLimits(max_header_bytes=4096, max_headers=20, max_url_bytes=512)
HEAD = b"Host: 127.0.0.1\r\n"
BIG = 32 << 20  # bytes of a response that no socket buffers


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def application(go_on: asyncio.Event, scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path and the bytes of the body. Reads no body of /early, and answers /wait after `go_on`."""
    if scope["type"] == "lifespan":
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})
        return
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/wait":
        watching = asyncio.create_task(receive())  # as the service watches for a client that disconnects
        await go_on.wait()
        watching.cancel()
    body = b"x" * BIG if scope["path"] == "/big" else f"{scope['path']} {size}".encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Counting(Connections):
    """Connections that are counted when they come."""

    accepted = 0

    def add(self, connection: Any) -> None:
        self.accepted += 1
        super().add(connection)


class Running:
    """A server in this event loop, and what its clients see."""

    def __init__(self, port: int, connections: Counting, clock: Clock, go_on: asyncio.Event):
        self.port, self.connections, self.clock, self.go_on = port, connections, clock, go_on
        self.writers: list[asyncio.StreamWriter] = []  # a writer that nobody holds is closed

    async def open(self, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which these pieces were sent, which the server has noticed."""
        before = self.connections.accepted
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        for piece in pieces:
            writer.write(piece)
        await until(lambda: self.connections.accepted > before)
        return reader, writer

    async def answers(self, request: bytes) -> list[tuple[int, bytes]]:
        """The responses to a request up to the end of the connection: statuses and bodies."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        found = await read_all(reader)
        writer.close()
        return found

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.connections.sweep()


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


async def read_one(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return int(head[9:12]), await reader.readexactly(int(length.split(b":")[1]))


async def read_all(reader: asyncio.StreamReader) -> list[tuple[int, bytes]]:
    found = []
    while True:
        try:
            found.append(await read_one(reader))
        except asyncio.IncompleteReadError:
            return found


def on_server(
    test: Callable[[Running], Awaitable[None]], *, max_served: int = 100, limits: HttpLimits = LIMITS
) -> None:
    """Run a test beside a server; nothing happens there by the passing of real time."""

    async def run() -> None:
        clock = Clock()
        connections = Counting(limits, max_served, clock)
        go_on = asyncio.Event()
        protocol = bounded_protocol(connections)
        answer = partial(application, go_on)
        config = uvicorn.Config(answer, interface="asgi3", http=protocol, ws="none", log_level="error")
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listening]))
            await until(lambda: server.started)
            try:
                await asyncio.wait_for(test(Running(listening.getsockname()[1], connections, clock, go_on)), 60)
            finally:
                server.should_exit = server.force_exit = True
                await serving

    asyncio.run(run())


CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HEAD + b"\r\n5\r\nhello\r\n"
INNER = b"GET /b HTTP/1.1\r\nHost: 0\r\n\r\n"  # a request, which is the body of another one
UPGRADE = b"POST /a HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n" + HEAD
REFUSED = {
    "one header without an end": (b"GET /a HTTP/1.1\r\nX: " + b"a" * 1_000_000, 431),
    "headers of more bytes than max_header_bytes": (b"GET /a HTTP/1.1\r\nX: " + b"a" * 4_200 + b"\r\n\r\n", 431),
    "more headers than max_headers": (b"GET /a HTTP/1.1\r\n" + b"X: 1\r\n" * 21 + b"\r\n", 431),
    "a URL longer than max_url_bytes": (b"GET /" + b"a" * 600 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", 414),
    "a URL without an end": (b"GET /" + b"a" * 1_000_000, 414),
    "more trailers than max_headers": (CHUNKED + b"0\r\n" + b"T: 1\r\n" * 30 + b"\r\n", 431),
    "one trailer without an end": (CHUNKED + b"0\r\nT: " + b"a" * 100_000, 431),
    "a chunk extension without an end": (CHUNKED + b"5;" + b"a" * 100_000, 431),
    "bytes that are no HTTP": (b"\x00\x01\r\n\r\n", 400),
    "HTTP/2 without an agreement": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a body with an upgrade to HTTP/2": (UPGRADE + b"Content-Length: %d\r\n\r\n%b" % (len(INNER), INNER), 400),
    "chunks with an upgrade": (UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n1c\r\n" + INNER + b"\r\n0\r\n\r\n", 400),
}


@pytest.mark.parametrize("case", REFUSED)
def test_oversized_and_malformed_heads_are_refused(case: str, documented: Callable[..., None]) -> None:
    request, status = REFUSED[case]
    messages = []

    async def test(server: Running) -> None:
        refused: list[int] = []
        server.connections.on_refusal = refused.append
        [(found, body)] = await server.answers(request)
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "request_id"}
        assert (found, refused) == (status, [status])
        messages.append(error["message"])

    on_server(test)
    documented("HTTP", case, messages[0], status)


def test_heads_within_the_limits_are_served() -> None:
    async def test(server: Running) -> None:
        old = b"GET /old HTTP/1.0\r\n" + b"X: 1\r\n" * 20 + b"\r\n"
        assert await server.answers(old) == [(200, b"/old 0")]
        reader, writer = await server.open(CHUNKED + b"0\r\nT: 1\r\n\r\n")
        assert await read_one(reader) == (200, b"/a 5")
        upgrade = b"GET /up HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + HEAD + b"\r\n"
        writer.write(upgrade)
        assert await read_one(reader) == (200, b"/up 0")
        writer.write(UPGRADE + b"Content-Length: 0\r\n\r\n" + INNER)  # as Java's HttpClient sends it
        assert await read_one(reader) == (200, b"/a 0")
        assert await read_one(reader) == (200, b"/b 0")
        writer.write(b"POST /c HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n" + HEAD + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(b"hello")
        assert await read_one(reader) == (200, b"/c 5")

    on_server(test)


def test_pipelined_requests_are_answered_in_order_and_those_before_a_refused_one_too() -> None:
    async def test(server: Running) -> None:
        bodies = [b"x" * (1 + 37 * number) for number in range(60)]
        requests = [
            b"POST /%d HTTP/1.1\r\nContent-Length: %d\r\n%b\r\n%b" % (number, len(body), HEAD, body)
            for number, body in enumerate(bodies)
        ]
        refused = b"GET /x HTTP/1.1\r\n" + b"X: 1\r\n" * 21 + b"\r\n"
        *answered, last = await server.answers(b"".join(requests) + refused)
        assert answered == [(200, b"/%d %d" % (number, len(body))) for number, body in enumerate(bodies)]
        assert last[0] == 431

    on_server(test)


def test_pipelined_bytes_are_not_read_without_end_while_a_request_is_answered() -> None:
    async def test(server: Running) -> None:
        get = b"GET /a HTTP/1.1\r\n" + HEAD + b"\r\n"
        await server.open(b"GET /wait HTTP/1.1\r\n" + HEAD + b"\r\n" + 2 * get)
        [connection] = server.connections.served
        protocol: Any = connection
        await until(lambda: len(protocol.pipeline) == 1)
        for _ in range(200):
            protocol.data_received(64 * get)
            assert protocol.flow.read_paused
        server.go_on.set()

    on_server(test)


@pytest.mark.parametrize(
    "refused",
    [b"GET http:// HTTP/1.1\r\n" + HEAD + b"\r\n", b"POST /b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)
@pytest.mark.parametrize("is_together", [True, False])
def test_a_malformed_pipelined_request_does_not_take_the_answer_of_the_one_before(
    refused: bytes, is_together: bool
) -> None:
    async def test(server: Running) -> None:
        head = b"POST /wait HTTP/1.1\r\nContent-Length: 5\r\n" + HEAD + b"\r\n"
        reader, writer = await server.open(head if is_together else head + b"hello")
        [connection] = server.connections.served
        protocol: Any = connection
        await until(lambda: protocol.cycle is not None)
        writer.write(b"hello" + refused if is_together else refused)
        await until(lambda: protocol._refusal is not None or len(protocol.pipeline) > 0)
        server.go_on.set()
        first, second = await read_all(reader)
        assert (first, second[0]) == ((200, b"/wait 5"), 400)

    on_server(test)


def test_a_connection_is_idle_once_the_body_of_an_answered_request_has_come() -> None:
    async def test(server: Running) -> None:
        reader, writer = await server.open(b"POST /early HTTP/1.1\r\nContent-Length: 5\r\n" + HEAD + b"\r\n")
        assert await read_one(reader) == (200, b"/early 0")
        writer.write(b"hello")
        await until(lambda: count(server, ConnectionState.IDLE) == 1)
        server.pass_time(LIMITS.head_timeout_s + 0.1)
        writer.write(b"GET /a HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert await read_one(reader) == (200, b"/a 0")

    on_server(test)


def test_heads_that_do_not_come_and_idle_connections_are_closed(documented: Callable[..., None]) -> None:
    messages = []

    async def test(server: Running) -> None:
        silent, _ = await server.open()
        slow, _ = await server.open(b"GET /a HTTP/1.1\r\nX: 1")
        idle, idle_writer = await server.open(b"GET /a HTTP/1.1\r\n" + HEAD + b"\r\n")
        early, _ = await server.open(b"POST /early HTTP/1.1\r\nContent-Length: 9\r\n" + HEAD + b"\r\n12")
        second, second_writer = await server.open(b"GET /a HTTP/1.1\r\n" + HEAD + b"\r\n")
        for reader in (idle, early, second):
            assert (await read_one(reader))[0] == 200
        second_writer.write(b"GET /b HT")
        states = {ConnectionState.FRESH: 2, ConnectionState.IDLE: 1, ConnectionState.HEAD: 2}
        await until(lambda: {state: count(server, state) for state in states} == states)
        server.pass_time(LIMITS.head_timeout_s + 0.1)
        assert await read_all(silent) == []
        for reader in (slow, second):
            [(status, body)] = await read_all(reader)
            assert (status, json.loads(body)["error"]["type"]) == (408, "timeout_error")
            messages.append(json.loads(body)["error"]["message"])
        assert await read_all(early) == []  # the rest of a body that nobody wants is not waited for
        idle_writer.write(b"GET /a HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert (await read_one(idle))[0] == 200
        await until(lambda: count(server, ConnectionState.IDLE) == 1)
        server.pass_time(LIMITS.idle_timeout_s + 0.1)
        assert await read_all(idle) == []

    on_server(test)
    documented("HTTP", "a head that is not complete after head_timeout_s", messages[0], 408)


def count(server: Running, state: ConnectionState) -> int:
    return sum(one.state is state for one in (*server.connections.served, *server.connections.excess))


def test_over_the_limit_only_health_is_answered_until_others_have_waited_too_long(
    documented: Callable[..., None],
) -> None:
    messages = []

    def get(path: bytes) -> bytes:
        return b"GET " + path + b" HTTP/1.1\r\n" + HEAD + b"\r\n"

    async def test(server: Running) -> None:
        half = [await server.open(b"GET /a HTTP/1.1\r\nX: 1") for _ in range(2)]
        idle, writer = await server.open(get(b"/a"))
        assert (await read_one(idle))[0] == 200
        await until(lambda: count(server, ConnectionState.IDLE) == 1)
        [(status, body)] = await server.answers(get(b"/a"))
        assert (status, json.loads(body)["error"]["type"]) == (503, "overloaded_error")
        messages.append(json.loads(body)["error"]["message"])
        assert await server.answers(get(b"/healthz?x=1")) == [(200, b"/healthz 0")]  # and is closed
        assert await server.answers(get(b"/readyz")) == [(200, b"/readyz 0")]
        await until(lambda: len(server.connections) == 3)
        surplus = [await server.open() for _ in range(3)]
        assert count(server, ConnectionState.SURPLUS) == 3
        server.connections.sweep()
        assert count(server, ConnectionState.SURPLUS) == 3
        server.clock.now += limits_module.SURPLUS_HEAD_S
        # A new request is served in the place of the half-open connection that has waited longest, not of the idle one.
        late, late_writer = await server.open(get(b"/late"))
        assert await read_one(late) == (200, b"/late 0")
        assert await read_all(half[0][0]) == []
        server.connections.sweep()
        for reader, _ in surplus:
            assert await read_all(reader) == []
        for path in (b"/one", b"/two"):
            late, late_writer = await server.open(get(path))
            assert await read_one(late) == (200, path + b" 0")
        assert await read_all(half[1][0]) == []
        assert await read_all(idle) == []  # idle connections are closed last
        writer.close()
        late_writer.close()

    on_server(test, max_served=3)
    documented("HTTP", "a request over max_connections", messages[0], 503)


def test_of_too_many_surplus_connections_the_oldest_is_closed() -> None:
    async def test(server: Running) -> None:
        first = [await server.open() for _ in range(4)]  # two within the limit, two over it
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await read_all(first[2][0]) == []
        assert len(server.connections) == 4
        writer.write(b"GET /healthz HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert await read_all(reader) == [(200, b"/healthz 0")]

    on_server(test, max_served=2)


def test_a_client_that_does_not_read_its_response_is_closed() -> None:
    async def test(server: Running) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.transport.pause_reading()
        writer.write(b"GET /big HTTP/1.1\r\n" + HEAD + b"\r\n")
        await until(lambda: any(one.unsent_bytes() for one in server.connections.served))
        server.connections.sweep()
        server.pass_time(LIMITS.write_timeout_s - 0.1)
        assert len(server.connections) == 1
        server.pass_time(0.2)
        assert len(server.connections) == 0

    on_server(test)


def test_the_default_limit_of_connections_fits_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"limit": (1024, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: found["limit"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: found.update(limit=limit))
    monkeypatch.setattr(limits_module, "_open_files", lambda: 44)
    assert allowed_connections(None) == (1024 - 300) // 2
    with pytest.raises(InputError, match=r"max_connections 1000: 2,300 open files are needed, the process may open 1,"):
        allowed_connections(1000)
    found["limit"] = (1024, 100_000)
    assert allowed_connections(None) == 1024
    assert found["limit"] == (2348, 100_000)  # the soft limit is raised, as far as is needed
