"""Bytes to Arrow: a chunk of a raw corpus, or a file of queries or judgements, checked row by row.

What is refused is refused with file and line. Text passes through as it is: an empty text is accepted (BEIR's
TREC-COVID has them), and so is every character that UTF-8 can hold. An id is a string that is not empty; an integer
becomes its decimal string. Integers beyond 64 bits in metadata become floats. Ids that come twice are found later,
where all rows meet.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from typing import Any

import orjson
import pyarrow as pa

from indexing.formats import CORPUS_READERS, QUERY_READERS, bad, text_lines
from indexing.raw import Lines, Piece, clip, no_rows, tsv_fields
from indexing.sources import Chunk, Format, Source
from retriever.errors import InputError

# metadata is JSON text of all other fields, "" when there are none.
CORPUS_SCHEMA = pa.schema(
    [("id", pa.string()), ("title", pa.large_string()), ("text", pa.large_string()), ("metadata", pa.large_string())]
)
QUERIES_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("metadata", pa.large_string())])
QRELS_SCHEMA = pa.schema(
    [("query_id", pa.string()), ("corpus_id", pa.string()), ("score", pa.int32()), ("line", pa.int64())]
)
FILTER_TYPES = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
QRELS_HEADER = ["query-id", "corpus-id", "score"]
QUERIES_PER_TABLE = 65_536


def parse_corpus(format: Format, chunk: Chunk, filters: Mapping[str, str] | None = None) -> pa.Table:
    """A chunk's passages: CORPUS_SCHEMA, then a typed column "filter.NAME" for each of `filters` (name -> type).

    A filter's values are those of the metadata field NAME, null where it is missing or null: "int64", "float64"
    (integers are taken too), "string", "bool", "timestamp" (ISO 8601, UTC where it names no zone; microseconds).
    InputError: anything unfit, with file and line.
    """
    filters = filters or {}
    for name, kind in filters.items():
        if kind not in FILTER_TYPES:
            raise InputError(
                f"filter {name}: found type {kind!r}, expected one of {', '.join(FILTER_TYPES)}; choose one"
            )
    ids, titles, texts, metadata = [], [], [], []
    typed: dict[str, list[Any]] = {name: [] for name in filters}
    for piece in chunk.pieces:
        for line, id, title, text, fields in CORPUS_READERS[format](piece):
            ids.append(id)
            titles.append(title)
            texts.append(text)
            metadata.append(_dumps(piece, line, fields) if fields else "")
            for name, kind in filters.items():
                typed[name].append(_filter_value(piece, line, name, kind, fields.get(name)))
    table = pa.table([ids, titles, texts, metadata], schema=CORPUS_SCHEMA)
    for name, kind in filters.items():
        table = table.append_column(f"filter.{name}", pa.array(typed[name], FILTER_TYPES[kind]))
    return table


def read_queries(source: Source) -> Iterator[pa.Table]:
    """The source's questions in tables of some ten thousand rows: QUERIES_SCHEMA, in the order of the files.

    Metadata of DPR questions: {"answers": [...]}, their ids are q0, q1, …; of KILT's: {"answers": [...], "provenance":
    [the page ids of each output that has some]} and the task's other fields. MS MARCO's files overlap (dev.small is of
    dev): a question that an earlier file has with the same text is left out. InputError: anything unfit, with its line.
    """
    if not source.queries:
        raise InputError(f"{source.name}: found no queries, expected a file of them; name the file")
    reader = QUERY_READERS[source.format]
    earlier: dict[str, str] = {}
    for number, file in enumerate(source.queries):
        lines = Lines(file)
        seen: dict[str, str] = {}
        while piece := lines.take(QUERIES_PER_TABLE):
            ids, texts, metadata = [], [], []
            for line, id, _, text, fields in reader(piece):
                if id in earlier:
                    if earlier[id] != text:
                        raise bad(piece, line, f"query {id!r} with a text of its own", "an earlier file's", "rename it")
                    continue
                ids.append(id)
                texts.append(text)
                metadata.append(_dumps(piece, line, fields) if fields else "")
            if number + 1 < len(source.queries):
                seen.update(zip(ids, texts, strict=True))
            if ids:
                yield pa.table([ids, texts, metadata], schema=QUERIES_SCHEMA)
        if lines.line == 1:
            raise no_rows(file)
        earlier.update(seen)


def read_qrels(file: str) -> pa.Table:
    """Judgements: QRELS_SCHEMA, `line` the 1-based line of each, .gz or not. InputError: an unfit line.

    BEIR's three columns (with their header, quoted as by Python's csv module) or TREC's four (query, ignored, passage,
    grade; by tabs or spaces).
    """
    lines = Lines(file)
    query_ids, corpus_ids, scores, numbers = [], [], [], []
    num_fields = 0
    while piece := lines.take(QUERIES_PER_TABLE):
        for line, row in text_lines(piece):
            if "\t" not in row:
                fields = [field for field in row.split(" ") if field]
            else:
                fields = tsv_fields(row) if '"' in row else row.split("\t")
            if line == 1:
                num_fields = len(fields)
                if fields == QRELS_HEADER:
                    continue
            if len(fields) != num_fields or num_fields not in (3, 4):
                expected = str(num_fields) if num_fields in (3, 4) else "3 (BEIR) or 4 (TREC)"
                raise bad(piece, line, f"{len(fields)} columns ({clip(row)})", expected, "mend the line")
            if not fields[0] or not fields[-2]:
                raise bad(piece, line, f"an empty id ({clip(row)})", "a query and a passage id", "mend the line")
            if not re.fullmatch(r"-?[0-9]{1,9}", fields[-1]):
                expected = "an integer" if line > 1 else "an integer, or the header query-id<TAB>corpus-id<TAB>score"
                raise bad(piece, line, f"score {clip(fields[-1])}", expected, "mend the line")
            query_ids.append(fields[0])
            corpus_ids.append(fields[-2])
            scores.append(int(fields[-1]))
            numbers.append(line)
    if not query_ids:
        raise no_rows(file)
    return pa.table([query_ids, corpus_ids, scores, numbers], schema=QRELS_SCHEMA)


def _filter_value(piece: Piece, line: int, name: str, kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "timestamp":
        try:
            moment = datetime.fromisoformat(value.isoformat() if isinstance(value, date) else value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (TypeError, ValueError, OverflowError):
            pass
    elif kind == "int64":
        if type(value) is int and -(2**63) <= value < 2**63:
            return value
    elif kind == "float64":
        if type(value) in (int, float):
            return float(value)
    elif type(value) is {"string": str, "bool": bool}[kind]:
        return value
    wanted = "an ISO 8601 timestamp" if kind == "timestamp" else kind
    found = f"{name} {clip(value)} ({type(value).__name__})"
    raise bad(piece, line, found, f"{wanted}, as its filter says", "mend the value or give the filter another type")


def _dumps(piece: Piece, line: int, fields: dict[str, Any]) -> str:
    try:
        return orjson.dumps(fields, default=_plain).decode()
    except orjson.JSONEncodeError as error:
        raise bad(piece, line, f"metadata that JSON cannot hold ({error})", "text or numbers", "drop it") from None


def _plain(value: Any) -> Any:
    """Parquet's decimals, durations and the like as text; not bytes."""
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)
