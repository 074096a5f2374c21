"""The client of a server behind a proxy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from riptide.base.errors import InputError
from riptide.serve.client import Client, ServerError


class Proxy(BaseHTTPRequestHandler):
    """Answers as Ray's HAProxy does if the replica of a request is lost, and then as the next replica does."""

    answers: ClassVar[list[tuple[int, str, bytes]]] = []
    headers_of: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        status, kind, content = self.answers.pop(0)
        if status:  # 0: closes the connection
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content) or 1))
            for name, value in self.headers_of.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


LOST = (500, "text/plain", b"Internal Server Error")
CLOSED = (0, "", b"")
CUT = (200, "application/json", b"")  # of a longer answer
MISSING = (404, "application/json", b'{"error": {"message": "no task \'law\'; the tasks are default"}}')
ANSWER = (200, "application/json", b'{"release": "r"}')


@pytest.fixture
def client() -> Iterator[Client]:
    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,)).start()
        yield Client(f"http://127.0.0.1:{proxy.server_port}")
        proxy.shutdown()


@pytest.mark.parametrize("lost", [LOST, CLOSED, CUT])
def test_a_request_whose_replica_is_lost_is_sent_once_more(
    client: Client, lost: tuple[int, str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Proxy, "answers", [lost, ANSWER])
    assert client.info() == {"release": "r"}


def test_a_task_that_a_lost_replica_has_deleted_is_deleted(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proxy, "answers", [CLOSED, MISSING])
    client.drop_task("law")
    monkeypatch.setattr(Proxy, "answers", [MISSING])
    with pytest.raises(ServerError, match=r"^404: no task 'law'; the tasks are default$"):
        client.drop_task("law")


def test_the_500_of_a_proxy_is_503(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proxy, "answers", [LOST, LOST])
    with pytest.raises(
        ServerError, match=r"^503: the proxy reaches no replica \(500: Internal Server Error\)$"
    ) as raised:
        client.info()
    assert raised.value.retry_after == 1.0


def test_a_fault_of_the_server_is_not_that_of_a_proxy(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proxy, "answers", [(500, "application/json", b'{"error": {"message": "a fault"}}'), ANSWER])
    with pytest.raises(ServerError, match=r"^500: a fault$"):
        client.info()


@pytest.mark.parametrize(
    ("answer", "headers", "message"),
    [
        (
            (302, "text/html", b"moved"),
            {"Location": "/elsewhere"},
            r"302: http://\S+ redirects to /elsewhere: expected",
        ),
        ((503, "application/json", MISSING[2]), {"Retry-After": "Mon, 30 Nov 2026 13:00:00 GMT"}, r"503: no task"),
        *(
            ((200, "text/html", content), {}, r"http://\S+ does not answer with a JSON object")
            for content in (b"<p>Log in</p>", b"5", b"[1]", b'"a"', b"\xff")
        ),
    ],
)
def test_answers_of_other_servers_are_one_error(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, str, bytes],
    headers: dict[str, str],
    message: str,
) -> None:
    """A redirect is not followed, as the token of the client would go there too."""
    monkeypatch.setattr(Proxy, "answers", [answer, ANSWER])
    monkeypatch.setattr(Proxy, "headers_of", headers)
    with pytest.raises(ServerError, match=message) as raised:
        client.info()
    assert raised.value.retry_after is None
    assert Proxy.answers == [ANSWER]


def test_a_url_without_a_host_name_is_one_error() -> None:
    with pytest.raises(InputError, match=r"^http://a\.\.b: no request can be sent to this URL: "):
        Client("http://a..b").info()
