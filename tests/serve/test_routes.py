"""Bodies of requests: large ones are parsed beside the event loop, and their structure is bounded."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import orjson
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.testclient import TestClient
from linear_cost import growth
from pydantic import AfterValidator, BaseModel, Field

from serve.errors import WHOLE, add_errors, as_json_list
from serve.http import routes
from serve.http.routes import MOST_STRUCTURE, SMALL, JsonRoute, check_structure
from serve.protocol import EmbeddingsRequest, SearchRequest

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


def outside_of_strings(text: bytes) -> int:
    """Returns the bytes outside of strings, character by character."""
    count, is_inside, is_escaped = 0, False, False
    for byte in text:
        if is_inside and (is_escaped or byte != ord('"')):
            is_escaped = not is_escaped and byte == ord("\\")
            continue
        is_inside ^= byte == ord('"')
        count += 1
    return count


@pytest.mark.parametrize("piece", [2, 3, 64])
def test_the_structure_is_what_is_outside_of_strings(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PIECE", piece)
    draw = random.Random(piece)
    for _ in range(500):
        text = bytes(draw.choices(b'"\\a,[', k=draw.randint(1, 60)))
        size = outside_of_strings(text)
        monkeypatch.setattr(routes, "MOST_STRUCTURE", size)
        check_structure(text)
        monkeypatch.setattr(routes, "MOST_STRUCTURE", size - 1)
        with pytest.raises(RequestValidationError):
            check_structure(text)


@pytest.mark.parametrize("unit", [b"a", b"\\n", b'\\"', b"\\\\"])
def test_the_time_to_check_the_structure_is_linear(unit: bytes) -> None:
    assert growth(check_structure, lambda count: b'{"input":"' + unit * count + b'"}', 1 << 17) < 2.5


LISTS = b'{"queries":["a"],"filter":{"x":[' + b"[]," * MOST_STRUCTURE + b"[]]}}"


@pytest.mark.parametrize(
    ("case", "body"),
    [
        ("a search with 128 Ki lists in its filter", LISTS),
        ("a search with spaces without end", b'{"query":"a"' + b" " * MOST_STRUCTURE + b"}"),
    ],
)
def test_more_structure_than_any_request_needs_is_refused(
    case: str, body: bytes, client: TestClient, documented: Callable[..., None]
) -> None:
    answer = client.put("/v1/search", content=body, headers={"Content-Type": "application/json"})
    documented("HTTP", case, answer.json()["error"]["message"], answer.status_code)
    assert answer.status_code == 422


@pytest.mark.parametrize("size", [10, 200_000])
def test_errors_are_short_and_name_one_field(size: int, client: TestClient) -> None:
    answer = client.put("/v1/search", json={"query": "a", "x" * size: 1, "k": 0})
    assert answer.status_code == 422
    assert len(answer.json()["error"]["message"]) <= 500
    answer = client.put("/v1/search", json={f"{number:05d}": 0 for number in range(16_000)})
    assert answer.json()["error"]["message"] == "body.00000: Extra inputs are not permitted"
    answer = client.post("/length", json={"items": ["a"] * 20_000})
    assert "items.0" in answer.json()["error"]["message"]


def test_the_largest_requests_have_less_structure() -> None:
    """Of the most and longest texts, and of filters with ten thousand values, indented."""
    check_structure(json.dumps({"input": ["é" * 60_000] * 256}, ensure_ascii=False).encode())
    check_structure(json.dumps({"documents": ['a "quote"\n' * 2_000] * 1_000}, indent=4).encode())
    check_structure(json.dumps({"filter": {f"field{n}": [*range(10**8, 10**8 + 1_000)] for n in range(10)}}).encode())
    assert EmbeddingsRequest.model_validate_json(b'{"input":"a"}').texts == ["a"]


@pytest.mark.parametrize("size", [1, WHOLE])
def test_a_response_in_pieces_is_one_document(size: int) -> None:
    items = [orjson.dumps({"n": number, "text": "x" * size}) for number in range(3)]
    response = as_json_list({"object": "list"}, "data", items)
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(response({"type": "http"}, None, send))  # type: ignore[arg-type]
    body = b"".join(message["body"] for message in messages[1:])
    assert dict(messages[0]["headers"])[b"content-length"] == str(len(body)).encode()
    assert json.loads(body) == {"object": "list", "data": [json.loads(item) for item in items]}
    assert [message.get("more_body", False) for message in messages[1:]][-1] is False
