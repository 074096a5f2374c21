"""The JSON Lines format with any fields: one object per line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.files.columns import PassageColumns, QueryColumns, TableColumns
from riptide.indexing.files.raw import FilePiece, Lines, no_rows_error, short_repr
from riptide.indexing.files.rows import Row, json_objects
from riptide.indexing.files.start import refuse_json_array
from riptide.indexing.formats.tables import QueryRow, TableFormat, named_passages

ENDINGS = ("jsonl", "json", "ndjson")
SAMPLE_LINES, SAMPLE_BYTES = 1_000, 1 << 20  # first lines whose fields are the columns


class JsonLines(TableFormat):
    """The JSON Lines format; the columns are the fields of the first lines."""

    name = "jsonl"
    title = "JSON lines"
    endings = ENDINGS
    corpus_files = ("corpus.jsonl", "passages.jsonl", "documents.jsonl")
    query_files = ("queries.jsonl", "queries.*.jsonl")
    is_generic = True
    section = r"""
One JSON object per line (`.jsonl`, `.ndjson` or `.json`). The columns are the fields of the first 1,000 lines. This
file has no ids:

`notes.jsonl`
```json
{"body": "Ebb tide.", "year": 2020, "tags": ["x"]}
{"body": "Flood tide.", "year": 2021, "tags": []}
{"body": "Riptide.", "year": null, "metadata": {"coast": "east"}}
```
```bash
riptide import-corpus --store data/notes --source notes.jsonl
```
```text
columns of …/notes.jsonl: id = a hash of title and text, title = none, text = body, metadata = year, tags, coast
```

Passages:
```json
{"id": "a0a3dfb87aa05fe848afd2b9d76b217a", "title": "", "text": "Ebb tide.", "metadata": {"year": 2020, "tags": ["x"]}}
{"id": "7c590cae8fe26139d1ae8544fb652c4e", "title": "", "text": "Flood tide.", "metadata": {"year": 2021, "tags": []}}
{"id": "2647cc99fadd2de2941b0223ddeed900", "title": "", "text": "Riptide.", "metadata": {"coast": "east"}}
```

Fields of nested objects are named by their paths. A field whose own name has these dots counts first. Metadata that are
named by a path have it as their name:

`packages.jsonl`
```json
{"pkg": {"name": "tides", "about": {"summary": "Tide tables."}, "version": "1.0"}, "stars": 3}
{"pkg": {"name": "sails", "about": {"summary": "Sail plans."}}, "stars": 5}
```
```bash
riptide import-corpus --store data/packages --source packages.jsonl \
    --id pkg.name --text pkg.about.summary --metadata pkg.version stars --filters pkg.version string
```
```text
columns of …/packages.jsonl: id = pkg.name, title = none, text = pkg.about.summary, metadata = pkg.version, stars
```

Passages:
```json
{"id": "tides", "title": "", "text": "Tide tables.", "metadata": {"pkg.version": "1.0", "stars": 3}}
{"id": "sails", "title": "", "text": "Sail plans.", "metadata": {"stars": 5}}
```

A title that is missing or null is empty; a text must be a string. Null fields are no metadata. The fields of an
object `metadata` count as fields of the line. A file whose first line has `_id` and `text` is [BEIR](#beir)'s.

Queries with their judgements, a row per query with a list, and other names:

`asked.jsonl`
```json
{"number": 1, "asked": "how long can I return it", "answered_by": ["1"], "topic": "orders"}
{"number": 2, "asked": "how fast do you answer", "answered_by": 2, "topic": "support"}
{"number": 3, "asked": "when will it be dealt with", "answered_by": ["1", "2"], "topic": null}
```
```bash
riptide import-queries --store data/faq --source asked.jsonl --queries numbered \
    --id number --text asked --relevant answered_by
```

Judgements of `test`:
```json
{"query": "1", "passage": "1", "score": 1}
{"query": "2", "passage": "2", "score": 1}
{"query": "3", "passage": "1", "score": 1}
{"query": "3", "passage": "2", "score": 1}
```
"""

    def read_table(self, file: str) -> TableColumns:
        return read_json_table(file)

    def read_passages(self, block: FilePiece, columns: PassageColumns | None) -> Iterator[Row]:
        assert columns is not None
        return named_passages(block, json_objects(block), columns)

    def query_rows(self, block: FilePiece, table: TableColumns, columns: QueryColumns) -> Iterator[QueryRow]:
        for line, row in json_objects(block):
            yield line, {name: value for name, value in row.items() if value is not None}


JSONL = JsonLines()


def read_json_table(file: str) -> TableColumns:
    """Returns the fields of the JSON objects in the first lines as columns, including fields of the object `metadata`.

    Raises:
        InputError: If the file is a JSON array, or if no line is an object with fields.
    """
    refuse_json_array(file)
    sample = Lines(file).take(SAMPLE_LINES, SAMPLE_BYTES)
    if sample is None:
        raise no_rows_error(file)
    names: dict[str, None] = {}
    paths: dict[str, None] = {}
    has_nested = False
    for number, line in enumerate((sample.data or b"").split(b"\n"), 1):
        try:
            limits.check_value_count(f"{file}:{number}", line)
            document = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(document, dict):
            names.update(dict.fromkeys(document))
            if isinstance(nested := document.get("metadata"), dict):
                has_nested = True
                names.update(dict.fromkeys(nested))
                document = nested | {name: value for name, value in document.items() if name != "metadata"}
            if len(paths) < limits.MAX_COLUMNS:
                paths.update(dict.fromkeys(_nested_paths(document)))
    if not names:
        first = (sample.data or b"").partition(b"\n")[0]
        raise InputError(f"{file}:1: found {short_repr(first)}, expected one JSON object per line; name another format")
    columns = tuple(name for name in names if not (has_nested and name == "metadata"))
    return TableColumns(
        columns, nested=tuple(path for path in paths if not (has_nested and path.startswith("metadata.")))
    )


def _nested_paths(value: dict[str, Any], path: str = "", depth: int = 0) -> Iterator[str]:
    """Yields the paths of the fields of nested objects; omits fields with a dot in a key."""
    for key, field in value.items():
        if "." in key:
            continue
        if type(field) is dict and field and depth < limits.MAX_DEPTH:
            yield from _nested_paths(field, f"{path}{key}.", depth + 1)
        elif path:
            yield f"{path}{key}"
