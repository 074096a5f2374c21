"""JSONTestSuite as values of JSON lines, of filters and of HTTP bodies: JSON is read, anything else is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from foreign_suites import json_texts, parse_source, refusal
from pydantic import BaseModel

from riptide.indexing.corpus.filters import Filter
from riptide.indexing.files.rows import BadRows
from riptide.indexing.formats.registry import find_format
from riptide.indexing.formats.sources import ImportSource
from riptide.serve.http.routes import SMALL, read_body

JSON_TEXTS = json_texts()
REPEATED = {"y_object_duplicated_key", "y_object_duplicated_key_and_value"}  # HTTP bodies and filters refuse them


class AnyValue(BaseModel):
    value: Any = None


def test_the_suite_is_complete() -> None:
    assert {kind: sum(name.startswith(kind) for name in JSON_TEXTS) for kind in "yni"} == {"y": 95, "n": 188, "i": 35}


def test_json_lines(tmp_path: Path) -> None:
    """Each text is the value of a field. A line feed, which would end the line, becomes a space in valid texts."""
    texts = {name: text.replace(b"\n", b" ") if name[0] == "y" else text for name, text in JSON_TEXTS.items()}
    lines = {name: b'{"_id":"%s","text":"x","v":%s}' % (name.encode(), text) for name, text in texts.items()}
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(b"\n".join(lines.values()) + b"\n")
    source = ImportSource(find_format("beir"), "x", (str(file),), (), {})
    bad = BadRows()
    rows = {row["id"]: row["metadata"] for row in parse_source(source, bad).to_pylist()}
    for name, text in texts.items():
        assert {"y": True, "n": False, "i": name in rows}[name[0]] == (name in rows), name
        if name in rows:
            value = json.loads(rows[name] or "{}").get("v")
            assert value == (json.loads(text) if name[0] == "y" else orjson.loads(text)), name
    assert bad.count == sum(line.count(b"\n") + 1 for name, line in lines.items() if name not in rows)
    assert not [problem for problem in bad.problems if "\n" in problem]


def test_filters() -> None:
    columns = {"v": pa.string()}
    for name, text in JSON_TEXTS.items():
        for document in (b'{"v":%s}' % text, text):
            message = refusal(Filter.parse, document.decode("utf-8", "surrogateescape"), columns)
            assert message or name[0] != "n", name
            if name[0] == "y" and name not in REPEATED and document is not text:
                assert "expected JSON" not in str(message), name


async def statuses(padding: int) -> dict[str, tuple[str, str]]:
    """Returns by the name of each text how a body with it as a value, and one of it alone, are answered."""

    async def status(body: bytes) -> str:
        messages = [{"type": "http.request", "body": body + b" " * padding}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Future()  # the client does not disconnect

        headers = [(b"content-type", b"application/json")]
        try:
            await read_body(Request({"type": "http", "method": "POST", "headers": headers}, receive), AnyValue)
        except RequestValidationError:
            return "refused"
        return "read"

    return {name: (await status(b'{"value":%s}' % text), await status(text)) for name, text in JSON_TEXTS.items()}


@pytest.mark.parametrize("padding", [0, SMALL])
def test_http_bodies(padding: int) -> None:
    for name, (as_value, alone) in asyncio.run(statuses(padding)).items():
        if name[0] != "i":
            assert as_value == ("read" if name[0] == "y" and name not in REPEATED else "refused"), name
        assert alone == "refused" or (JSON_TEXTS[name].lstrip(b"\xef\xbb\xbf")[:1] == b"{" and name[0] != "n"), name
