"""A proxy in front of an S3 server that answers as busy, broken or simple servers do."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ERROR = "<Error><Code>{code}</Code><Message>{code}</Message></Error>"
HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}


class FaultyS3(ThreadingHTTPServer):
    """The proxy.

    Attributes:
        slow_down: Share of the requests that get 503 SlowDown.
        slow_down_every: Each request whose number is a multiple of it gets 503 SlowDown; 0: none.
        lost: Share of the requests that are carried out, and whose answer is lost.
        refusal: Status and code of the answer to each conditional write; None: that of the server.
        ignores_conditions: Whether conditions of writes are removed.
        delay_s: Seconds by which each answer is late.
        faults: Number of requests that were answered otherwise than by the server.
    """

    daemon_threads = True

    def __init__(self, endpoint: str, seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(endpoint).netloc
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.slow_down = self.lost = 0.0
        self.slow_down_every = 0
        self.refusal: tuple[int, str] | None = None
        self.ignores_conditions = False
        self.delay_s = 0.0
        self.requests = self.faults = 0

    def is_slowed_down(self) -> bool:
        """Returns whether the next request gets SlowDown, and counts it."""
        with self.lock:
            self.requests += 1
            is_faulty = bool(self.slow_down_every) and self.requests % self.slow_down_every == 0
            self.faults += is_faulty
        return is_faulty or self.draw(self.slow_down)

    def draw(self, share: float) -> bool:
        """Returns whether this request is one of a share of them, and counts it."""
        with self.lock:
            is_faulty = self.random.random() < share
            self.faults += is_faulty
            return is_faulty


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for an acknowledgement
    server: FaultyS3

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
        is_conditional = any(name.lower() in ("if-none-match", "if-match") for name in headers)
        if self.command == "PUT" and is_conditional and self.server.refusal:
            status, code = self.server.refusal
            return self.answer(status, ERROR.format(code=code).encode())
        time.sleep(self.server.delay_s)
        if self.server.is_slowed_down():
            return self.answer(503, ERROR.format(code="SlowDown").encode())
        if self.server.ignores_conditions:
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        connection = http.client.HTTPConnection(self.server.target, timeout=30)
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        if self.server.draw(self.server.lost):
            self.close_connection = True
            return None
        return self.answer(response.status, content, dict(response.getheaders()))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        headers = headers or {}
        length = {name.lower(): value for name, value in headers.items()}.get("content-length")
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def faulty_s3(endpoint: str) -> Iterator[FaultyS3]:
    """Runs a proxy in front of the server at an address."""
    proxy = FaultyS3(endpoint)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
