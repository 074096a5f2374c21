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
ANSWERS = {"500": "InternalError", "503": "SlowDown"}
HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}


class FaultyS3(ThreadingHTTPServer):
    """The proxy.

    Attributes:
        slow_down: Share of the requests that get 503 SlowDown.
        slow_down_every: Each request whose number is a multiple of it gets 503 SlowDown; 0: none.
        lost: Share of the requests that are carried out, and whose answer is lost.
        refusal: Status and code of the answer to each conditional write; None: that of the server.
        ignores_conditions: Whether conditions of writes are removed.
        fault: Number of a request, from 1, and what happens to it: "500" and "503" are answered, "cut" (half of the
            answer is sent) and "lost" (none) are carried out. None: no request.
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
        self.fault: tuple[int, str] | None = None
        self.delay_s = 0.0
        self.requests = self.faults = 0

    def next_fault(self) -> str:
        """Counts a request, and returns what happens to it, as in `fault`; "": nothing."""
        with self.lock:
            self.requests += 1
            fault = self.fault[1] if self.fault and self.fault[0] == self.requests else ""
            if self.slow_down_every and self.requests % self.slow_down_every == 0:
                fault = "503"
            self.faults += bool(fault)
        return fault or ("503" if self.draw(self.slow_down) else "lost" if self.draw(self.lost) else "")

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
        fault = self.server.next_fault()
        if fault in ANSWERS:
            return self.answer(int(fault), ERROR.format(code=ANSWERS[fault]).encode())
        if self.server.ignores_conditions:
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        connection = http.client.HTTPConnection(self.server.target, timeout=30)
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        self.close_connection = fault in ("lost", "cut")
        if fault == "lost":
            return None
        sent = content[: len(content) // 2] if fault == "cut" else content
        return self.answer(response.status, sent, dict(response.getheaders()), len(content))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    def answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, size: int | None = None
    ) -> None:
        """Answers with a body. size: the length that the headers state; None: that of `content`."""
        headers, size = headers or {}, len(content) if size is None else size
        length = {name.lower(): value for name, value in headers.items()}.get("content-length")
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(size))
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
