"""The raw formats: how a piece of each is read row by row, and what is said of a row that is not as it should be."""

import ast
import csv
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from indexing.raw import Piece, allow_long_fields, clip, one_line, open_input
from indexing.sources import CHUNK_BYTES, Format
from retriever.errors import InputError

PARQUET_BATCH = 16_384
PARQUET_BUFFER = 8 << 20  # bytes of a column that are read at a time where a row group is large
# One passage or question: its line, id, title ("" for a question), text and the fields for its metadata. A plain tuple,
# which is twice as fast to make as a named one.
Row = tuple[int, str, str, str, dict[str, Any]]


def _beir(piece: Piece) -> Iterator[Row]:
    for line, doc in _objects(piece):
        yield _passage(piece, line, doc, "_id")


def _passage(piece: Piece, line: int, doc: dict[str, Any], id_name: str, *, titled: bool = True) -> Row:
    id, text, title = doc.pop(id_name, None), doc.pop("text", None), doc.pop("title", "") if titled else ""
    if type(id) is not str or not id:
        id = _id(piece, line, id, id_name)
    if type(text) is not str:
        raise _wrong(piece, line, "text", text)
    if type(title) is not str:
        if title is not None:
            raise _wrong(piece, line, "title", title)
        title = ""
    return line, id, title, text, _flat(piece, line, doc) if doc else doc


def _flat(piece: Piece, line: int, doc: dict[str, Any]) -> dict[str, Any]:
    """The fields of the object `metadata` and of the line's own top level, as one object."""
    nested = doc.pop("metadata", None)
    if nested is None:
        return doc
    if type(nested) is not dict:
        raise bad(piece, line, f"metadata {clip(nested)}", "an object", "put it into one, or rename the field")
    for name in nested.keys() & doc.keys():
        if nested[name] != doc[name]:
            raise bad(piece, line, f"field {name!r} in metadata and beside it", "one of them", "rename the other")
    return nested | doc


def _msmarco(piece: Piece) -> Iterator[Row]:
    for line, row in text_lines(piece):
        fields = row.split("\t")
        if len(fields) != 2:
            raise _columns(piece, line, row, fields, "2: id<TAB>text")
        yield (line, fields[0] or _id(piece, line, "", "id"), "", fields[1], {})


def _dpr(piece: Piece) -> Iterator[Row]:
    for line, fields in _csv_rows(piece, "3: id<TAB>text<TAB>title", 3):
        yield (line, fields[0] or _id(piece, line, "", "id"), fields[2], fields[1], {})


def _kilt(piece: Piece) -> Iterator[Row]:
    """A passage for each paragraph of a page that holds text, with id PAGE-PARAGRAPH as KILT's provenance counts them.

    As in KILT's own passages, paragraph 0 (the title) and the "Section::::" headings are no passages; a heading is kept
    as its paragraphs' metadata. Anchors, categories and history of the page are left out.
    """
    for line, page in _objects(piece):
        page_id = page.get("wikipedia_id", page.get("_id"))
        if type(page_id) is not str or not page_id:
            page_id = _id(piece, line, page_id, "wikipedia_id")
        title, paragraphs = page.get("wikipedia_title"), page.get("text")
        if type(title) is not str:
            raise _wrong(piece, line, "wikipedia_title", title)
        if type(paragraphs) is not list or not all(type(each) is str for each in paragraphs):
            raise bad(piece, line, f"text {clip(paragraphs)}", "a list of strings", "use KILT's knowledge source")
        section = ""
        for index, paragraph in enumerate(paragraphs[1:], 1):
            if paragraph.startswith("Section::::"):
                section = paragraph.removeprefix("Section::::").strip()
            elif paragraph.strip():
                text = paragraph.rstrip("\n")  # offsets into the paragraph, as in KILT's anchors, stay right
                fields = {"wikipedia_id": page_id, "paragraph": index}
                yield (line, f"{page_id}-{index}", title, text, fields | {"section": section} if section else fields)


def _parquet(piece: Piece) -> Iterator[Row]:
    with open_input(piece.file) as opened:
        try:
            footer = pq.read_metadata(opened)
            groups = [footer.row_group(number).total_byte_size for number in range(footer.num_row_groups)]
            # A row group is read whole, and ahead, which is fast, unless one is too large to be held.
            whole = max(groups, default=0) <= CHUNK_BYTES
            file = pq.ParquetFile(opened, metadata=footer, pre_buffer=whole, buffer_size=0 if whole else PARQUET_BUFFER)
            names = file.schema_arrow.names
            id_name = next((name for name in ("_id", "id") if name in names), None)
            if id_name is None or "text" not in names:
                raise InputError(
                    f"{piece.file}: found the columns {', '.join(names)}, expected id or _id, and text; rename them"
                )
            for first, batch in _batches(file, piece):
                for line, doc in enumerate(batch.to_pylist(), first):
                    doc = {name: value for name, value in doc.items() if value is not None}
                    if type(doc.get("metadata")) is str:
                        doc["metadata"] = _metadata_text(piece, line, doc["metadata"])
                    yield _passage(piece, line, doc, id_name)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{piece.file}: found invalid UTF-8 ({error}), expected UTF-8; write the file anew"
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{piece.file}: found damaged Parquet ({one_line(error)}); fetch the file again") from None


def _batches(file: Any, piece: Piece) -> Iterator[tuple[int, Any]]:
    """The piece's rows as (1-based first row, record batch), decoding only the row groups that it touches."""
    first, end = piece.first_line - 1, piece.first_line - 1 + piece.rows
    groups: list[int] = []
    row = start = 0
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if row < end and row + num_rows > first:
            start = start if groups else row
            groups.append(group)
        row += num_rows
    for batch in file.iter_batches(min(PARQUET_BATCH, piece.rows), row_groups=groups, use_threads=False):
        skip = max(first - start, 0)
        part = batch.slice(skip, max(min(end - start, len(batch)) - skip, 0))
        if len(part):
            yield start + skip + 1, part
        start += len(batch)
        if start >= end:
            return


def _metadata_text(piece: Piece, line: int, text: str) -> Any:
    """Parquet holds free-form metadata as a string column of JSON objects."""
    try:
        return orjson.loads(text) if text else None
    except orjson.JSONDecodeError as error:
        raise bad(piece, line, f"metadata {clip(text)} ({error.msg})", "a JSON object", "rename the column") from None


def _beir_queries(piece: Piece) -> Iterator[Row]:
    for line, doc in _objects(piece):
        yield _passage(piece, line, doc, "_id", titled=False)


def _dpr_questions(piece: Piece) -> Iterator[Row]:
    for line, (question, literal) in _csv_rows(piece, "2: question<TAB>['answer', ...]", 2):
        try:
            answers = ast.literal_eval(literal)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            answers = None
        if type(answers) is not list or not all(type(each) is str for each in answers):
            raise bad(piece, line, f"answers {clip(literal)}", "a Python list of strings", "mend the line")
        yield (line, f"q{line - 1}", "", question, {"answers": answers})


def _kilt_tasks(piece: Piece) -> Iterator[Row]:
    for line, doc in _objects(piece):
        id, text, outputs = doc.pop("id", None), doc.pop("input", None), doc.pop("output", None) or []
        if type(id) is not str or not id:
            id = _id(piece, line, id, "id")
        if type(text) is not str:
            raise _wrong(piece, line, "input", text)
        try:
            answers = list(dict.fromkeys(each["answer"] for each in outputs if each.get("answer") is not None))
            pages = [[str(page["wikipedia_id"]) for page in each.get("provenance") or []] for each in outputs]
            known = type(outputs) is list and all(type(each) is str for each in answers)
        except (TypeError, AttributeError, KeyError):
            known = False
        if not known:
            expected = "a list of {answer, provenance: [{wikipedia_id}]}"
            raise bad(piece, line, f"output {clip(outputs)}", expected, "mend the line")
        found = {"answers": answers, "provenance": [list(dict.fromkeys(each)) for each in pages if each]}
        yield (line, id, "", text, {name: value for name, value in found.items() if value} | doc)


def _objects(piece: Piece) -> Iterator[tuple[int, dict[str, Any]]]:
    """The piece's lines as JSON objects."""
    for line, data in enumerate((piece.data or b"").split(b"\n"), piece.first_line):
        try:
            doc = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise _not_json(piece, line, data, error) from None
        if type(doc) is not dict:
            raise bad(piece, line, f"JSON {clip(data.rstrip())}", "a JSON object", "write one document per line")
        yield line, doc


def _not_json(piece: Piece, line: int, data: bytes, error: orjson.JSONDecodeError) -> InputError:
    data = data.rstrip()
    if not data:
        return _empty_line(piece, line)
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return _bad_byte(piece, line, data, wrong.start)
    if "surrogate" in error.msg:
        found = f"an unpaired surrogate escape at column {error.colno} ({error.msg})"
        return bad(piece, line, found, "Unicode text", "mend or remove the escape")
    found = f"no valid JSON ({error.msg} at column {error.colno} of {len(data.decode())}: {clip(data)})"
    return bad(piece, line, found, "one JSON object per line", "mend or remove the line")


def text_lines(piece: Piece) -> Iterable[tuple[int, str]]:
    """The piece's lines as text, without the CR of a CRLF."""
    data = piece.data or b""
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as wrong:
        start = data.rfind(b"\n", 0, wrong.start) + 1
        line = piece.first_line + data.count(b"\n", 0, wrong.start)
        raise _bad_byte(piece, line, data[start:], wrong.start - start) from None
    if b"\r" in data:
        lines = [line.removesuffix("\r") for line in lines]
    if "" in lines:
        raise _empty_line(piece, piece.first_line + lines.index(""))
    return enumerate(lines, piece.first_line)


def _csv_rows(piece: Piece, expected: str, num_columns: int) -> Iterator[tuple[int, list[str]]]:
    """The piece's lines as tab-separated fields, quoted as by Python's csv module, as DPR's reader does."""
    allow_long_fields()
    lines = [line for _, line in text_lines(piece)]
    rows = csv.reader([*lines, ""], delimiter="\t")  # the empty line shows a quote that the last line leaves open
    for number, line in enumerate(lines, piece.first_line):
        try:
            fields = next(rows)
        except csv.Error as error:
            raise bad(piece, number, f"a bad field ({error})", "a CR within quotes only", "remove it") from None
        if rows.line_num != number - piece.first_line + 1:
            found = f"a quoted field that does not end in its line ({clip(line)})"
            raise bad(piece, number, found, "one row per line, a quote in a quoted field doubled", "mend the line")
        if len(fields) != num_columns:
            raise _columns(piece, number, line, fields, expected)
        yield number, fields


def _id(piece: Piece, line: int, id: Any, name: str) -> str:
    """An integer id as a string; anything else that comes here is refused."""
    if type(id) is int:
        return str(id)
    found = f"no {name}" if id is None else f"{name} {clip(id)}"
    raise bad(piece, line, found, "a string that is not empty, or an integer", "give each row an id of its own")


def bad(piece: Piece, line: int, found: str, expected: str, remedy: str) -> InputError:
    where = f"{piece.file} row {line}" if piece.data is None else f"{piece.file}:{line}"
    return InputError(f"{where}: found {found}, expected {expected}; {remedy}")


def _wrong(piece: Piece, line: int, name: str, value: Any) -> InputError:
    found = f"no {name}" if value is None else f"{name} {clip(value)}"
    return bad(piece, line, found, f"{name} to be a string", "add it, or name another format")


def _columns(piece: Piece, line: int, row: str, fields: list[str], expected: str) -> InputError:
    return bad(piece, line, f"{len(fields)} columns ({clip(row)})", expected, "mend the line, or name another format")


def _empty_line(piece: Piece, line: int) -> InputError:
    return bad(piece, line, "an empty line", "empty lines at the end of the file only", "remove it")


def _bad_byte(piece: Piece, line: int, data: bytes, offset: int) -> InputError:
    found = f"invalid UTF-8 (byte 0x{data[offset]:02x} at byte offset {offset} of the line)"
    return bad(piece, line, found, "UTF-8", "convert the file")


Reader = Callable[[Piece], Iterator[Row]]
CORPUS_READERS: dict[Format, Reader] = {
    "beir": _beir, "msmarco": _msmarco, "dpr": _dpr, "kilt": _kilt, "parquet": _parquet,
}  # fmt: skip
QUERY_READERS: dict[Format, Reader] = {
    "beir": _beir_queries, "msmarco": _msmarco, "dpr": _dpr_questions, "kilt": _kilt_tasks,
}  # fmt: skip
