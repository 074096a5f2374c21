"""Test suites that others wrote, packed in tests/jobs/foreign; its README names sources and licences."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from riptide.base.errors import InputError
from riptide.indexing.files.rows import BadRows
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.sources import ImportSource

FOLDER = Path(__file__).with_name("foreign")


def load_suite(name: str) -> Any:
    """Returns the content of a packed suite."""
    return json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))


def json_texts() -> dict[str, bytes]:
    """Returns the texts of JSONTestSuite by name: y_ is JSON, n_ is not, i_ may be refused."""
    return {name: text.encode("latin-1") for name, text in load_suite("json_test_suite").items()}


def refusal(function: Callable[..., Any], *arguments: Any) -> str | None:
    """Returns the message of the InputError that a call raises, which must be one line; None if it raises none."""
    try:
        function(*arguments)
    except InputError as error:
        message = str(error)
        if len(message.splitlines()) != 1:
            raise AssertionError(f"a message of several lines: {message!r}") from error
        return message
    return None


def parse_source(source: ImportSource, bad_rows: BadRows | None = None, rows_per_chunk: int = 1_000) -> pa.Table:
    """Returns the passages of a source."""
    chunks = cut_into_chunks(source, rows_per_chunk)
    return pa.concat_tables([parse_corpus(source.format, chunk, bad_rows=bad_rows) for chunk in chunks])
