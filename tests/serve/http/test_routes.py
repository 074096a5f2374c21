"""Bodies of requests: large ones are parsed in another thread than the event loop, and their structure is bounded."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import orjson
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.testclient import TestClient
from pydantic import AfterValidator, BaseModel, Field

from riptide.base.wording import MAX_MESSAGE
from riptide.serve.http import routes
from riptide.serve.http.http_errors import add_errors, response_to
from riptide.serve.http.routes import (
    MAX_CONTAINERS,
    MAX_STRUCTURE,
    SMALL,
    WHOLE,
    DirectRoutes,
    JsonRoute,
    json_list_response,
    parse_json,
)
from riptide.serve.protocol import SearchRequest

WAITING_S = 30

validated = threading.Event()  # the text of a request is being validated
answered = threading.Event()  # another request was answered meanwhile


def wait_for_answer(text: str) -> str:
    """Waits, while a long text is validated, until another request is answered."""
    if len(text) > SMALL:
        validated.set()
        if not answered.wait(WAITING_S):
            raise ValueError("no other request was answered meanwhile")
    return text


class TextRequest(BaseModel):
    text: Annotated[str, Field(max_length=1_000_000), AfterValidator(wait_for_answer)] = ""
    items: list[int] = []


@pytest.fixture
def client() -> Iterator[TestClient]:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/length")
    async def length(request: TextRequest, http: Request) -> Response:
        return Response(str(len(request.text)))

    @router.put("/v1/search")
    async def search(request: SearchRequest, http: Request) -> Response:
        return Response(str(len(request.texts)))

    app = FastAPI()
    add_errors(app)
    app.include_router(router)
    with TestClient(app) as client:
        yield client


def test_others_are_answered_while_a_large_body_is_parsed(client: TestClient) -> None:
    statuses = []
    large = threading.Thread(target=lambda: statuses.append(client.post("/length", json={"text": "x" * 100_000}).text))
    large.start()
    assert validated.wait(WAITING_S)
    assert client.post("/length", json={"text": "short"}).text == "5"
    assert not statuses
    answered.set()
    large.join()
    assert statuses == ["100000"]


def test_the_body_of_a_client_that_has_disconnected_is_not_parsed(client: TestClient) -> None:
    go_on = threading.Event()
    messages = [{"type": "http.request", "body": b" " * (SMALL + 1)}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    async def post() -> None:
        earlier = asyncio.get_running_loop().run_in_executor(routes._PARSER, go_on.wait, WAITING_S)
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/length", "query_string": b"", "headers": headers}
        await asyncio.wait_for(client.app(scope, receive, send), WAITING_S)
        assert not earlier.done()
        go_on.set()

    asyncio.run(post())


def random_value(draw: random.Random, depth: int = 3) -> Any:
    """Returns a random JSON value, whose strings have escapes and characters of all lengths."""
    kind = draw.randrange(6 if depth else 4)
    if kind == 0:
        return draw.choice([0, -1, 2.5, 1e-7, True, False, None])
    if kind < 4:
        return "".join(draw.choices('a"\\/\nb\té深😀,:[]{}', k=draw.randint(0, 12)))
    items = [random_value(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    return items if kind == 4 else {f'{draw.choice("ab")}"\\{number}': item for number, item in enumerate(items)}


@pytest.mark.parametrize("piece", [2, 3, 64])
def test_json_has_the_value_that_python_reads(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PIECE", piece)
    draw = random.Random(piece)
    for _ in range(500):
        value = random_value(draw)
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 2])).encode()
        assert parse_json(bytearray(text)) == value


def test_text_that_is_no_json_is_refused() -> None:
    draw = random.Random(0)
    for _ in range(2_000):
        text = bytes(draw.choices(b'"\\a,[{}]:1 ', k=draw.randint(0, 12)))
        try:
            value = json.loads(text)
        except ValueError:
            with pytest.raises(RequestValidationError, match="Invalid JSON"):
                parse_json(bytearray(text))
        else:
            assert parse_json(bytearray(text)) == value


def test_each_call_of_the_parser_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call holds the GIL, which the event loop needs several times for a response."""
    sizes = []

    def from_json(text: bytearray, **options: Any) -> Any:
        sizes.append(len(text))
        return original(text, **options)

    original = routes.from_json
    monkeypatch.setattr(routes, "from_json", from_json)
    document = {"input": ["深" * 65_536] * 10}
    assert parse_json(bytearray(json.dumps(document).encode())) == document
    assert max(sizes) < 500_000


LISTS = b'{"query":"a","filter":{"x":[' + b"[]," * MAX_CONTAINERS + b"[]]}}"
FIELDS = json.dumps({f"{number:05d}": 0 for number in range(MAX_CONTAINERS)}).encode()


@pytest.mark.parametrize(
    ("case", "body"),
    [
        ("a search with 4,096 lists in its filter", LISTS),
        ("a search with 4,096 unknown fields", FIELDS),
        ("a search with a text of 1 MiB", b'{"query":"' + b"a" * (1 << 20) + b'"}'),
        ("a search with spaces without end", b'{"query":"a"' + b" " * MAX_STRUCTURE + b"}"),
    ],
)
def test_more_structure_than_any_request_needs_is_refused(
    case: str, body: bytes, client: TestClient, documented: Callable[..., None]
) -> None:
    answer = client.put("/v1/search", content=body, headers={"Content-Type": "application/json"})
    documented("HTTP", case, answer.json()["error"]["message"], answer.status_code)
    assert answer.status_code == 422


@pytest.mark.parametrize("padding", [0, SMALL])
@pytest.mark.parametrize(
    ("case", "body", "place"),
    [
        ("a field twice", '{"query":"a","k":3,"k":5}', "body: found 'k'"),
        ("a field twice in its filter", '{"query":"a","filter":{"year":1,"year":2}}', "body.filter: found 'year'"),
        (
            "an operator twice in a nested filter",
            '{"query":"a","filter":{"or":[{"lang":"en"},{"year":{"gte":1,"\\u0067te":2}}]}}',
            "body.filter.or.1.year: found 'gte'",
        ),
    ],
)
def test_a_name_that_comes_twice_in_an_object_is_refused(
    padding: int, case: str, body: str, place: str, client: TestClient, documented: Callable[..., None]
) -> None:
    answer = client.put("/v1/search", content=body + " " * padding, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    documented("HTTP", f"a search with {case}", message, 422)
    assert message.startswith(f"{place} twice in one object, expected distinct names")


def test_an_unknown_field_is_refused_with_the_one_that_is_meant(
    client: TestClient, documented: Callable[..., None]
) -> None:
    def message(body: dict[str, Any]) -> str:
        answer = client.put("/v1/search", json=body)
        assert answer.status_code == 422
        return str(answer.json()["error"]["message"])

    unknown = message({"query": "a", "top_k": 3})
    documented("HTTP", "a search with an unknown field", unknown, 422)
    assert unknown == "body.top_k: unknown field; did you mean k?"
    assert message({"query": "a", "filtr": {}}) == "body.filtr: unknown field; did you mean filter?"


@pytest.mark.parametrize("size", [10, 200_000])
def test_errors_are_short_and_name_one_field(size: int, client: TestClient) -> None:
    answer = client.put("/v1/search", json={"query": "a", "x" * size: 1, "k": 0})
    assert answer.status_code == 422
    assert len(answer.json()["error"]["message"]) <= MAX_MESSAGE
    answer = client.put("/v1/search", json={f"{number:05d}": 0 for number in range(4_000)})
    assert answer.json()["error"]["message"].startswith("body.00000: unknown field; expected ")
    answer = client.post("/length", json={"items": ["a"] * 20_000})
    assert "items.0" in answer.json()["error"]["message"]


def test_the_largest_requests_have_less_structure() -> None:
    """Of the most and longest texts, and of filters with ten thousand values, indented."""
    for document in (
        {"input": ["é" * 40_000] * 256},
        {"input": ["😀" * 65_536] * 5},
        {"documents": ['a "quote"\n' * 1_500] * 1_000},
        {"filter": {f"field{n}": [*range(10**8, 10**8 + 1_000)] for n in range(10)}},
        {"filter": {f"field{n}": {"gte": n, "lt": n + 1} for n in range(1_000)}},
    ):
        assert parse_json(bytearray(json.dumps(document, indent=4).encode())) == document


@pytest.mark.parametrize("padding", [0, SMALL])
def test_small_and_large_bodies_have_the_same_answers(padding: int, client: TestClient) -> None:
    """A byte order mark is skipped, and no position is wrong."""
    json_type = {"Content-Type": "application/json"}
    for body, status in ((b'\xef\xbb\xbf{"query":"a"}', 200), (b'{"query":"a","filter":{"x":NaN}}', 422)):
        assert client.put("/v1/search", content=body + b" " * padding, headers=json_type).status_code == status
    answer = client.put("/v1/search", content=b'{"query":"abc",}' + b" " * padding, headers=json_type)
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert message.startswith("body: Invalid JSON: trailing comma")
    assert ("line" in message) == (padding == 0)


def test_the_bodies_that_wait_to_be_parsed_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"query": "a" * (2 * SMALL)}
    monkeypatch.setattr(routes, "MAX_WAITING", SMALL)
    answer = client.put("/v1/search", json=text)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    monkeypatch.setattr(routes, "MAX_WAITING", 3 * SMALL)
    for _ in range(3):  # a place is free again
        assert client.put("/v1/search", json=text).status_code == 200


@pytest.mark.parametrize("size", [1, WHOLE])
def test_a_response_in_pieces_is_one_document(size: int) -> None:
    items = [orjson.dumps({"n": number, "text": "x" * size}) for number in range(3)]
    response = json_list_response({"object": "list"}, "data", items)
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(response({"type": "http"}, None, send))  # type: ignore[arg-type]
    body = b"".join(message["body"] for message in messages[1:])
    assert dict(messages[0]["headers"])[b"content-length"] == str(len(body)).encode()
    assert json.loads(body) == {"object": "list", "data": [json.loads(item) for item in items]}
    assert [message.get("more_body", False) for message in messages[1:]][-1] is False


@pytest.mark.parametrize("body", [b'{"text": "ab"}', b'{"text": "raise"}', b'{"txet": 1}', b"{"])
@pytest.mark.parametrize("path", ["/length", "/length%0A", "/other"])
def test_a_request_has_the_same_answer_with_and_without_the_layers_of_fastapi(body: bytes, path: str) -> None:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/length")
    async def length(request: TextRequest, http: Request) -> Response:
        if request.text == "raise":
            raise ValueError("a fault")
        return Response(str(len(request.text)))

    app = FastAPI()
    add_errors(app)
    app.include_router(router)
    answers = []
    for direct in (app, DirectRoutes(app, router.routes, response_to)):
        client = TestClient(direct, raise_server_exceptions=False)
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        answers.append(
            (answer.status_code, re.sub('"request_id":"[^"]*"', "", answer.text), client.get(path).status_code)
        )
    assert answers[0] == answers[1]
