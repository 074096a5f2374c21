"""JSON lines with any fields: one object per line."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from indexing.files import limits
from indexing.files.columns import PassageColumns, QueryColumns, Table
from indexing.files.raw import Lines, Piece, clip, no_rows
from indexing.files.rows import Row, objects
from indexing.files.start import refuse_json_array
from indexing.formats.tables import QueryRow, TableFormat, named_passages
from retriever.errors import InputError

ENDINGS = ("jsonl", "json", "ndjson")
SAMPLE_LINES, SAMPLE_BYTES = 1_000, 1 << 20  # of the first lines, whose fields are taken as the columns


class JsonLines(TableFormat):
    """JSON lines. The columns are the fields of the first lines."""

    name = "jsonl"
    title = "JSON lines"
    endings = ENDINGS
    corpus_files = ("corpus.jsonl", "passages.jsonl", "documents.jsonl")
    query_files = ("queries.jsonl", "queries.*.jsonl")
    is_generic = True
    section = r"""SECTION"""

    def read_table(self, file: str) -> Table:
        return read_json_table(file)

    def read_passages(self, block: Piece, columns: PassageColumns | None) -> Iterator[Row]:
        assert columns is not None
        return named_passages(block, objects(block), columns)

    def query_rows(self, block: Piece, table: Table, columns: QueryColumns) -> Iterator[QueryRow]:
        for line, row in objects(block):
            yield line, {name: value for name, value in row.items() if value is not None}


JSONL = JsonLines()


def read_json_table(file: str) -> Table:
    """Returns the fields of the first lines, with those of the object `metadata`. Other lines than objects are skipped.

    Raises:
        InputError: If the file is a JSON array, or if no line is an object with fields.
    """
    refuse_json_array(file)
    sample = Lines(file).take(SAMPLE_LINES, SAMPLE_BYTES)
    if sample is None:
        raise no_rows(file)
    names: dict[str, None] = {}
    has_nested = False
    for number, line in enumerate((sample.data or b"").split(b"\n"), 1):
        try:
            limits.check_values(f"{file}:{number}", line)
            document = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(document, dict):
            names.update(dict.fromkeys(document))
            if isinstance(nested := document.get("metadata"), dict):
                has_nested = True
                names.update(dict.fromkeys(nested))
    if not names:
        first = (sample.data or b"").partition(b"\n")[0]
        raise InputError(f"{file}:1: found {clip(first)}, expected one JSON object per line; name another format")
    return Table(tuple(name for name in names if not (has_nested and name == "metadata")))
