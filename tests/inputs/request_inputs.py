"""Requests: their heads, bodies and uploads, filters, sources, and names and texts of options."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from file_inputs import JSON_PIECES, at, one_of
from linear_cost import Content, Input
from uvicorn.server import ServerState

from riptide.indexing.corpus.filter_text import parse_filter_text
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.hit_sources.grammar import parse_source, source_label
from riptide.indexing.measures import many_relevant
from riptide.indexing.measures.metrics import parse_metrics
from riptide.indexing.store.store import open_storage
from riptide.indexing.work.nodes import parse_labels
from riptide.jobs.pictures.measured import parse_rates
from riptide.serve import protocol
from riptide.serve.http.connection_limits import HttpLimits
from riptide.serve.http.connections import Connections, bounded_protocol
from riptide.serve.http.guard import Tokens
from riptide.serve.http.http_errors import add_errors
from riptide.serve.http.routes import JsonRoute, UploadRoute

COLUMNS = {
    "year": pa.int64(),
    "score": pa.float64(),
    "lang": pa.string(),
    "open": pa.bool_(),
    "at": pa.timestamp("us", "UTC"),
    "tags": pa.list_(pa.string()),
}
MODELS = {
    "/v1/search": protocol.SearchRequest,
    "/v1/embeddings": protocol.EmbeddingsRequest,
    "/v1/rerank": protocol.RerankRequest,
    "/v1/releases": protocol.ReleaseRequest,
}
BOUNDARY = "b"


class RefusedError(Exception):
    """A response with a status of 4xx."""


@functools.cache
def application() -> FastAPI:
    """Returns an application with the request models and the upload of the service, whose routes do nothing else."""
    routes, upload = APIRouter(route_class=JsonRoute), APIRouter(route_class=UploadRoute)

    def add(path: str, model: type) -> None:
        async def answer(request: Any, http: Request) -> Response:
            if isinstance(request, protocol.SearchRequest) and request.filter is not None:
                Filter.parse(request.filter, COLUMNS)
            return Response()

        answer.__annotations__["request"] = model
        routes.add_api_route(path, answer, methods=["POST"])

    for path, model in MODELS.items():
        add(path, model)

    @upload.put("/v1/tasks/{name}")
    async def put(name: protocol.Name, http: Request) -> Response:
        await http.form()
        return Response()

    app = FastAPI()
    add_errors(app)
    app.include_router(routes)
    app.include_router(upload)
    return app


def send(path: str, method: str = "POST", content_type: str = "application/json") -> Callable[[Content], None]:
    """Returns a function that sends a body to the application. It raises RefusedError for a status of 4xx."""

    def read(content: Content) -> None:
        body = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        messages = [
            {"type": "http.request", "body": body[at : at + (64 << 10)], "more_body": True}
            for at in range(0, len(body), 64 << 10)
        ]
        messages.append({"type": "http.request", "body": b"", "more_body": False})
        statuses = []

        async def receive() -> Any:
            return messages.pop(0) if messages else await asyncio.Event().wait()

        async def answer(message: Any) -> None:
            statuses.append(message.get("status", 0))

        headers = [(b"content-type", content_type.encode())]
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        asyncio.run(application()(scope, receive, answer))
        if 400 <= statuses[0] < 500:
            raise RefusedError
        assert statuses[0] < 400, statuses

    return read


def receive_head(content: Content) -> None:
    """Gives the bytes of a connection to the protocol of the server, in packets."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")

    async def receive() -> None:
        config = uvicorn.Config(no_answer, http=bounded_protocol(Connections(HttpLimits(), 10)), lifespan="off")
        config.load()
        connection = config.http_protocol_class(config, ServerState(), {}, asyncio.get_running_loop())
        transport = MagicMock()
        transport.is_closing.side_effect = lambda: transport.close.called or transport.abort.called
        connection.connection_made(transport)
        for start in range(0, len(data), 1460):
            if transport.is_closing():
                break
            connection.data_received(data[start : start + 1460])
        connection.connection_lost(None)

    asyncio.run(receive())


async def no_answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def texts(start: str, end: str) -> dict[str, Callable[[int], str]]:
    """Returns patterns of JSON that repeat a unit in a text."""
    units = {"a": "a", "line ends": "\\n", "quotes": '\\"', "backslashes": "\\\\", "texts": '","', "escapes": "\\u6df1"}
    return {name: (lambda n, unit=unit: start + unit * n + end) for name, unit in units.items()}


STRUCTURES: dict[str, Callable[[int], str]] = {
    "names": lambda n: "{" + ",".join(f'"{i:x}":1' for i in range(n)) + "}",
    "one name": lambda n: "{" + '"a":1,' * n + '"b":1}',
    "depth": lambda n: "[" * n + "]" * n,
    "numbers": lambda n: "[" + "1," * n + "1]",
    "digits": lambda n: "1" * n,
    "spaces": lambda n: " " * n,
    "halves of pairs": lambda n: '["' + '\\ud83d\\ude00","' * n + '"]',
}


def in_field(start: str) -> dict[str, Callable[[int], str]]:
    """Returns patterns of objects of which one field has a large value."""
    return {name: (lambda n, make=make: start + make(n) + "}") for name, make in STRUCTURES.items()}


def filter_json(text: str) -> None:
    Filter.parse(text, COLUMNS)


FILTERS: dict[str, Callable[[int], str]] = {
    "distinct names": lambda n: "{" + ",".join(f'"{i:x}":1' for i in range(n)) + "}",
    "the last name twice": lambda n: "{" + "".join(f'"{i:x}":1,' for i in range(n)) + f'"{n - 1:x}":1}}',
    "values": lambda n: '{"year":[' + "1," * n + "1]}",
    "groups": lambda n: '{"and":[' + '{"year":1},' * n + '{"year":1}]}',
    "levels": lambda n: '{"not":' * n + "{}" + "}" * n,
    "times": lambda n: '{"at":[' + '"2020-01-01",' * n + '"2020-01-01"]}',
    "a time": lambda n: '{"at":"' + "2020" * n + '"}',
}
FILTER_TEXTS: dict[str, Callable[[int], str]] = {
    "parentheses": lambda n: "(" * n,
    "not": lambda n: "not " * n,
    "conditions": lambda n: "year=1 and " * n + "year=1",
    "values": lambda n: "year in (" + "1," * n + "1)",
    "spaces": lambda n: "year" + " " * n + "=1",
    "a quote": lambda n: 'lang="' + "a" * n,
    "backslashes": lambda n: 'lang="' + "\\\\" * n + '"',
    "digits": lambda n: "year=" + "1" * n,
    "a word": lambda n: "a" * n,
    "signs": lambda n: "<" * n,
}
FILTER_PIECES = (
    *("year", "lang", "at", "tags", "open", "score", "=", "!=", "<", ">=", "(", ")", ",", " ", "and ", "or ", "not "),
    *(
        "in ",
        "null",
        "true",
        "1",
        "1.5",
        "1e400",
        "2020-01-01",
        '"',
        "'",
        "\\",
        "é",
        "\ud800",
        "a",
        "{",
        "}",
        "-",
        "9" * 30,
    ),
)
SOURCES: dict[str, Callable[[int], str]] = {
    "spaces": lambda n: "bm25" + " " * n + "x",
    "sources": lambda n: "bm25+" * n + "bm25",
    "weights": lambda n: "0.5*bm25+" * n + "0.5*bm25",
    "digits": lambda n: "1" * n + "*bm25+bm25",
    "signs": lambda n: "+" * n,
    "stars": lambda n: "1*" * n,
    "dots": lambda n: "." * n + "*bm25+.5*bm25",
}
HEADS: dict[str, Callable[[int], bytes]] = {
    "headers": lambda n: b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * n + b"\r\n",
    "a header": lambda n: b"GET / HTTP/1.1\r\na: " + b"b" * n + b"\r\n\r\n",
    "a name": lambda n: b"GET / HTTP/1.1\r\n" + b"a" * n,
    "a URL": lambda n: b"GET /" + b"a" * n + b" HTTP/1.1\r\n\r\n",
    "escapes in a URL": lambda n: b"GET /" + b"%41" * n + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "line ends": lambda n: b"\r\n" * n,
    "requests": lambda n: b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * n,
    "chunks": lambda n: b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * n,
    "extensions of a chunk": lambda n: b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a=b;" * n,
    "trailers": lambda n: b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * n,
}
PART = '--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
UPLOADS: dict[str, Callable[[int], str]] = {
    "parts": lambda n: (PART + "x\r\n") * n + "--b--\r\n",
    "line ends": lambda n: PART + "\r\n" * n + "--b--\r\n",
    "half boundaries": lambda n: PART.replace('"a"', '"a"; filename="f"') + "\r\n--" * n + "\r\n--b--\r\n",
    "headers": lambda n: "--b\r\n" + "a: b\r\n" * n + "\r\n",
    "a header": lambda n: "--b\r\nContent-Disposition: form-data" + "; a=b" * n + "\r\n\r\nx\r\n--b--\r\n",
    "quotes": lambda n: '--b\r\nContent-Disposition: form-data; name="' + '\\"' * n + '"\r\n\r\nx\r\n--b--\r\n',
    "a file": lambda n: PART.replace('"a"', '"a"; filename="f"') + "xxxx" * n + "\r\n--b--\r\n",
    "text before the first part": lambda n: "x" * n,
}


INPUTS = [
    *(
        Input(
            f"HTTP body: {path}",
            send(path),
            {**texts(f'{{"{field}":["', '"]}'), **structures},
            (*JSON_PIECES, f'"{field}"', '"filter":', '"k":', '"model":', '"year"'),
            refusals=(RefusedError,),
            frame=(f'{{{first}"FIELD":', "}"),
            fields=tuple(MODELS[path].model_fields),
            modules=modules,
        )
        for path, field, first, modules, structures in (
            ("/v1/search", "queries", '"query":"a",', ("serve.http.routes",), in_field('{"query":"a","filter":')),
            ("/v1/embeddings", "input", '"input":"a",', (), in_field('{"model":"a","input":')),
            ("/v1/rerank", "documents", '"query":"a",', (), in_field('{"query":"a","documents":')),
            ("/v1/releases", "release", "", (), in_field('{"release":')),
        )
    ),
    Input(
        "HTTP body: a filter as a text",
        lambda text: send("/v1/search")(json.dumps({"query": "a", "filter": text})),
        FILTERS | FILTER_TEXTS,
        FILTER_PIECES,
        refusals=(RefusedError,),
    ),
    Input(
        "HTTP head",
        receive_head,
        HEADS,
        (
            "GET",
            " ",
            "/",
            "HTTP/1.1",
            "\r\n",
            ":",
            "a",
            "\0",
            "\r",
            "\n",
            "é",
            "Host: a\r\n",
            "Content-Length: ",
            "1",
            "-",
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "Transfer-Encoding: chunked\r\n",
            "Expect: 100-continue\r\n",
            "Upgrade: websocket\r\n",
            "Connection: upgrade\r\n",
        ),
        max_bytes=1 << 20,
        modules=("serve.http.connections",),
    ),
    Input(
        "HTTP upload",
        send("/v1/tasks/a", "PUT", f"multipart/form-data; boundary={BOUNDARY}"),
        UPLOADS,
        (
            "--b",
            "--b--",
            "\r\n",
            "\r",
            "\n",
            'Content-Disposition: form-data; name="a"',
            '; filename="',
            '"',
            "x",
            ": ",
            "\0",
            "Content-Type: text/plain\r\n",
            "Content-Transfer-Encoding: base64\r\n",
            "é",
            PART,
        ),
        refusals=(RefusedError,),
        frame=(PART, "\r\n--b--\r\n"),
        max_bytes=16 << 20,  # a file of more than 1 MiB is written to disk, which a quarter of the largest must be too
    ),
    Input(
        "filter: JSON",
        filter_json,
        FILTERS,
        (*JSON_PIECES, '"year":', '"and":[', '"not":', '"lang":', '"at":', '"gte":', '"in"', '"2020-01-01"'),
        frame=('{"and":[{"FIELD":', "}]}"),
        fields=(*COLUMNS, "not", "or", "and", "other"),
        modules=("indexing.corpus.filters",),
    ),
    Input(
        "filter: text",
        one_of(lambda text: parse_filter_text(text, COLUMNS), filter_json),
        FILTER_TEXTS,
        FILTER_PIECES,
        modules=("indexing.corpus.filter_text",),
    ),
    Input(
        "source",
        lambda text: (source_label(text), parse_source(text)),
        SOURCES,
        ("bm25", "exact:", "index:", "a", "+", "*", " ", ".", "5", "splade:", "é", ":", "9" * 400, "\n"),
        max_bytes=1 << 18,
        modules=("indexing.hit_sources.grammar",),
    ),
    Input(
        "metric",
        one_of(lambda text: many_relevant.parse_metric(text), lambda text: parse_metrics([text])),
        {
            "a name": lambda n: "a" * n,
            "parameters": lambda n: "AP(" + "rel=2," * n + "rel=2)",
            "a cutoff": lambda n: "nDCG@" + "1" * n,
            "parentheses": lambda n: "AP" + "(" * n,
        },
        (
            "nDCG",
            "AP",
            "@",
            "10",
            "(",
            ")",
            "rel=2",
            "=",
            ",",
            ".",
            "-1",
            "é",
            "'",
            "MAP",
            "Acc@",
            "judged_only=True",
            "IPrec",
            "None",
        ),
        modules=("indexing.measures.metrics", "indexing.measures.many_relevant"),
    ),
    Input(
        "option: labels of nodes and rates",
        one_of(lambda text: parse_labels([text]), lambda text: parse_rates([text])),
        {"equal signs": lambda n: "=" * n, "dashes": lambda n: "a=b" + "-" * n, "a name": lambda n: "a" * n},
        ("a", "=", "-", ".", "1", "é", "\n", "nan", "1e400"),
        modules=("indexing.work.nodes",),
    ),
    Input(
        "option: address of a store",
        open_storage,
        {
            "letters": lambda n: "a" * n,
            "colons": lambda n: ":" * n,
            "slashes": lambda n: "/" * n,
            "s3": lambda n: "s3:" * n,
        },
        ("s3", "gs", ":", "/", "a", ".", "-", "é", "http"),
        max_bytes=1 << 20,
        modules=("indexing.store.store",),
    ),
    Input(
        "tokens of a server",
        lambda file: Tokens.read(str(file)),
        {
            "tokens": lambda n: '{"user":[' + ",".join(f'"{i:020x}"' for i in range(n)) + "]}",
            "depth": lambda n: "[" * n,
        },
        (*JSON_PIECES, '"user":', '"admin":', '"name":', '"0123456789abcdef"'),
        at("tokens.json"),
        frame=('{"user":', "}"),
        max_bytes=1 << 16,
        modules=("serve.http.guard",),
    ),
]
