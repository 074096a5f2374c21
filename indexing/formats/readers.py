"""Readers of the raw formats: they parse blocks of pieces into rows, and refuse a bad row with its file and line."""

import ast
import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import orjson

from indexing.formats import limits
from indexing.formats.columns import Table, shortened
from indexing.formats.delimited import delimited_blocks
from indexing.formats.parquet import parquet_blocks
from indexing.formats.raw import Piece, allow_long_fields, clip, one_line
from indexing.formats.sources import Format
from retriever.errors import InputError

# One passage or query: its line, id, title ("" for a query), text and metadata fields. A plain tuple is created twice
# as fast as a named tuple.
Row = tuple[int, str, str, str, dict[str, Any]]


def blocks(piece: Piece, table: Table | None = None, columns: Sequence[str] | None = None) -> Iterator[Piece]:
    """Yields the rows of a piece in blocks that are small enough for Python objects, each a piece of its own.

    Args:
        piece: Whole rows.
        table: The columns of a table; None: a format with fixed columns.
        columns: The columns of Parquet to read; None: all.

    Raises:
        InputError: If a row of Parquet cannot be read or is too long.
    """
    if piece.data is None:
        yield from parquet_blocks(piece, columns)
    elif table is not None and table.delimiter:
        yield from delimited_blocks(piece, table)
    elif len(piece.data) <= limits.BLOCK_BYTES:
        yield piece
    else:
        data, start, line = piece.data, 0, piece.first_line
        while start <= len(data):
            end = data.find(b"\n", start + limits.BLOCK_BYTES)
            end = len(data) if end < 0 else end
            rows = data.count(b"\n", start, end) + 1
            yield Piece(piece.file, line, rows, end - start, data[start:end])
            start, line = end + 1, line + rows


def _beir(piece: Piece) -> Iterator[Row]:
    for line, doc in objects(piece):
        yield _passage(piece, line, doc, "_id")


def _passage(piece: Piece, line: int, doc: dict[str, Any], id_name: str, *, titled: bool = True) -> Row:
    id, text, title = doc.pop(id_name, None), doc.pop("text", None), doc.pop("title", "") if titled else ""
    if type(id) is not str or not id:
        id = integer_id(piece, line, id, id_name)
    if type(text) is not str:
        raise wrong_text(piece, line, "text", text)
    if type(title) is not str:
        if title is not None:
            raise wrong_text(piece, line, "title", title)
        title = ""
    return line, id, title, text, flatten(piece, line, doc) if doc else doc


def flatten(piece: Piece, line: int, doc: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `metadata` and of the top level as one object; removes `metadata` from `doc`."""
    nested = doc.pop("metadata", None)
    if nested is None:
        return doc
    if type(nested) is not dict:
        raise bad(piece, line, f"metadata {clip(nested)}", "an object", "put it into one, or rename the field")
    if len(nested) + len(doc) > limits.MAX_COLUMNS:
        raise limits.too_many_columns(place(piece, line), len(nested) + len(doc))
    for name in nested.keys() & doc.keys():
        if nested[name] != doc[name]:
            raise bad(piece, line, f"field {name!r} in metadata and beside it", "one of them", "rename the other")
    return nested | doc


def _msmarco(piece: Piece) -> Iterator[Row]:
    for line, row in text_lines(piece):
        id, _, text = row.partition("\t")
        if row.count("\t") != 1:
            raise _columns(piece, line, row, row.count("\t") + 1, "2: id<TAB>text")
        yield (line, id or integer_id(piece, line, "", "id"), "", text, {})


def _dpr(piece: Piece) -> Iterator[Row]:
    for line, fields in _csv_rows(piece, "3: id<TAB>text<TAB>title", 3):
        yield (line, fields[0] or integer_id(piece, line, "", "id"), fields[2], fields[1], {})


def _kilt(piece: Piece) -> Iterator[Row]:
    """Yields one passage per paragraph with text, with the id PAGE-PARAGRAPH as in KILT's provenance.

    As in KILT's own passages, paragraph 0 (the title) and the "Section::::" headings are not passages; a heading
    becomes metadata of its paragraphs. Anchors, categories and history of the page are left out.
    """
    for line, page in objects(piece):
        page_id = page.get("wikipedia_id", page.get("_id"))
        if type(page_id) is not str or not page_id:
            page_id = integer_id(piece, line, page_id, "wikipedia_id")
        title, paragraphs = page.get("wikipedia_title"), page.get("text")
        if type(title) is not str:
            raise wrong_text(piece, line, "wikipedia_title", title)
        if type(paragraphs) is not list or not all(type(paragraph) is str for paragraph in paragraphs):
            raise bad(piece, line, f"text {clip(paragraphs)}", "a list of strings", "use KILT's knowledge source")
        headings = [len(paragraph) for paragraph in paragraphs if paragraph.startswith("Section::::")]
        repeated = (len(title) + len(page_id) + max(headings, default=0)) * len(paragraphs)
        if repeated > limits.MAX_ROW_BYTES:
            actual = f"a title, id and heading that take {repeated:,} characters in {len(paragraphs):,} paragraphs"
            raise bad(piece, line, actual, f"at most {limits.MAX_ROW_BYTES:,}", "shorten them")
        section = ""
        for index, paragraph in enumerate(paragraphs[1:], 1):
            if paragraph.startswith("Section::::"):
                section = paragraph.removeprefix("Section::::").strip()
            elif paragraph.strip():
                text = paragraph.rstrip("\n")  # offsets into the paragraph, as in KILT's anchors, stay valid
                fields = {"wikipedia_id": page_id, "paragraph": index}
                yield (line, f"{page_id}-{index}", title, text, fields | {"section": section} if section else fields)


def _parquet(block: Piece) -> Iterator[Row]:
    """Yields rows whose columns have the names of BEIR's fields; indexing/tables chooses columns with other names."""
    names = block.batch.schema.names
    id_name = next((name for name in ("_id", "id") if name in names), None)
    if id_name is None or "text" not in names:
        raise InputError(
            f"{block.file}: found the columns {shortened(names)}, expected id or _id, and text; rename them"
        )
    for line, document in documents(block):
        yield _passage(block, line, document, id_name)


def documents(block: Piece) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows of a block of JSON lines or Parquet as objects, each with its line or row number.

    A row of Parquet is without its nulls; a string in its column `metadata` is parsed as a JSON object.

    Raises:
        InputError: If a row is not an object, or not UTF-8.
    """
    if block.batch is None:
        yield from objects(block)
        return
    for line, row in enumerate(_python_rows(block), block.first_line):
        document = {name: value for name, value in row.items() if value is not None}
        if type(document.get("metadata")) is str:
            document["metadata"] = metadata_text(block, line, document["metadata"])
        yield line, document


def _python_rows(block: Piece) -> list[dict[str, Any]]:
    """Returns a block of Parquet as dicts. Raises InputError for values without a Python object: the year 10000."""
    try:
        return block.batch.to_pylist()
    except UnicodeDecodeError as error:
        raise InputError(f"{block.file}: found invalid UTF-8 ({error}), expected UTF-8; write the file anew") from None
    except (OverflowError, ValueError):
        for name, column in zip(block.batch.schema.names, block.batch.columns, strict=True):
            for line, value in enumerate(column, block.first_line):
                try:
                    value.as_py()
                except (OverflowError, ValueError) as error:
                    actual = f"a value of column {name!r} ({column.type}) that is out of range ({one_line(error)})"
                    raise bad(block, line, actual, "a time in the years 1 to 9999", "correct or drop it") from None
        raise


def metadata_text(piece: Piece, line: int, text: str) -> Any:
    """Returns the metadata in a string column: a JSON object, or None if the string is empty."""
    try:
        if len(text) > limits.MAX_VALUES:
            limits.check_values(place(piece, line), text)
        return orjson.loads(text) if text else None
    except orjson.JSONDecodeError as error:
        raise bad(piece, line, f"metadata {clip(text)} ({error.msg})", "a JSON object", "rename the column") from None


def _beir_queries(piece: Piece) -> Iterator[Row]:
    for line, doc in objects(piece):
        yield _passage(piece, line, doc, "_id", titled=False)


def _dpr_queries(piece: Piece) -> Iterator[Row]:
    for line, (question, literal) in _csv_rows(piece, "2: question<TAB>['answer', ...]", 2):
        try:
            answers = ast.literal_eval(literal) if len(literal) <= limits.MAX_ANSWERS else None
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            answers = None
        if type(answers) is not list or not all(type(answer) is str for answer in answers):
            raise bad(piece, line, f"answers {clip(literal)}", "a Python list of strings", "fix the line")
        yield (line, f"q{line - 1}", "", question, {"answers": answers})


def _kilt_tasks(piece: Piece) -> Iterator[Row]:
    for line, doc in objects(piece):
        id, text, outputs = doc.pop("id", None), doc.pop("input", None), doc.pop("output", None) or []
        if type(id) is not str or not id:
            id = integer_id(piece, line, id, "id")
        if type(text) is not str:
            raise wrong_text(piece, line, "input", text)
        try:
            answers = list(dict.fromkeys(entry["answer"] for entry in outputs if entry.get("answer") is not None))
            pages = [[str(page["wikipedia_id"]) for page in entry.get("provenance") or []] for entry in outputs]
            known = type(outputs) is list and all(type(answer) is str for answer in answers)
        except (TypeError, AttributeError, KeyError):
            known = False
        if not known:
            expected = "a list of {answer, provenance: [{wikipedia_id}]}"
            raise bad(piece, line, f"output {clip(outputs)}", expected, "fix the line")
        outcome = {"answers": answers, "provenance": [list(dict.fromkeys(page)) for page in pages if page]}
        yield (line, id, "", text, {name: value for name, value in outcome.items() if value} | doc)


def objects(piece: Piece) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the lines of a piece as JSON objects, each with its line number."""
    most = limits.MAX_COLUMNS
    for line, data in enumerate((piece.data or b"").split(b"\n"), piece.first_line):
        try:
            doc = orjson.loads(data) if len(data) <= most else _long_object(piece, line, data)
        except orjson.JSONDecodeError as error:
            raise _not_json(piece, line, data, error) from None
        if type(doc) is not dict:
            raise bad(piece, line, f"JSON {clip(data.rstrip())}", "a JSON object", "write one document per line")
        yield line, doc


def _long_object(piece: Piece, line: int, data: bytes) -> Any:
    """Returns a JSON value. Raises InputError if it has too many values or keys; a shorter text cannot have so many."""
    limits.check_values(place(piece, line), data)
    doc = orjson.loads(data)
    if type(doc) is dict and len(doc) > limits.MAX_COLUMNS:
        raise limits.too_many_columns(place(piece, line), len(doc))
    return doc


def _not_json(piece: Piece, line: int, data: bytes, error: orjson.JSONDecodeError) -> InputError:
    data = data.rstrip()
    if not data:
        return _empty_line(piece, line)
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return _bad_byte(piece, line, data, wrong.start)
    if "surrogate" in error.msg:
        actual = f"an unpaired surrogate escape at column {error.colno} ({error.msg})"
        return bad(piece, line, actual, "Unicode text", "fix or remove the escape")
    actual = f"no valid JSON ({error.msg} at column {error.colno} of {len(data.decode())}: {clip(data)})"
    return bad(piece, line, actual, "one JSON object per line", "fix or remove the line")


def text_lines(piece: Piece) -> Iterable[tuple[int, str]]:
    """Returns the lines of a piece as text without line ends, each with its line number."""
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
    """Yields lines as tab-separated fields; quoting follows Python's csv module, as in DPR's reader."""
    allow_long_fields()
    lines = [line for _, line in text_lines(piece)]
    rows = csv.reader([*lines, ""], delimiter="\t")  # the empty line reveals an unclosed quote in the last line
    for number, line in enumerate(lines, piece.first_line):
        if len(line) > limits.MAX_COLUMNS:
            limits.check_columns(place(piece, number), line, "\t")
        try:
            fields = next(rows)
        except csv.Error as error:
            raise bad(piece, number, f"a bad field ({error})", "a CR within quotes only", "remove it") from None
        if rows.line_num != number - piece.first_line + 1:
            problem = f"a quoted field that does not end in its line ({clip(line)})"
            raise bad(piece, number, problem, "one row per line, a quote in a quoted field doubled", "fix the line")
        if len(fields) != num_columns:
            raise _columns(piece, number, line, len(fields), expected)
        yield number, fields


def integer_id(piece: Piece, line: int, id: Any, name: str) -> str:
    """Returns an integer id as a string. Raises InputError for any other value."""
    if type(id) is int:
        return str(id)
    actual = f"no {name}" if id is None else f"{name} {clip(id)}"
    raise bad(piece, line, actual, "a string that is not empty, or an integer", "give each row its id")


def bad(piece: Piece, line: int, actual: str, expected: str, remedy: str) -> InputError:
    """Returns the error for a bad row."""
    return InputError(f"{place(piece, line)}: found {actual}, expected {expected}; {remedy}")


def place(piece: Piece, line: int) -> str:
    """Returns a row's file and line; of Parquet, its file and row."""
    return f"{piece.file} row {line}" if piece.data is None else f"{piece.file}:{line}"


def wrong_text(piece: Piece, line: int, name: str, value: Any) -> InputError:
    """Returns the error for a field that is missing or not a string."""
    actual = f"no {name}" if value is None else f"{name} {clip(value)}"
    return bad(piece, line, actual, f"{name} to be a string", "add it, or name another format")


def _columns(piece: Piece, line: int, row: str, count: int, expected: str) -> InputError:
    remedy = "fix the line, or add a header line that names other columns"
    return bad(piece, line, f"{count} columns ({clip(row)})", expected, remedy)


def _empty_line(piece: Piece, line: int) -> InputError:
    return bad(piece, line, "an empty line", "empty lines at the end of the file only", "remove it")


def _bad_byte(piece: Piece, line: int, data: bytes, offset: int) -> InputError:
    actual = f"invalid UTF-8 (byte 0x{data[offset]:02x} at byte offset {offset} of the line)"
    return bad(piece, line, actual, "UTF-8", "convert the file")


Reader = Callable[[Piece], Iterator[Row]]
CORPUS_READERS: dict[Format, Reader] = {
    "beir": _beir,
    "msmarco": _msmarco,
    "dpr": _dpr,
    "kilt": _kilt,
    "parquet": _parquet,
}
QUERY_READERS: dict[Format, Reader] = {
    "beir": _beir_queries,
    "msmarco": _msmarco,
    "dpr": _dpr_queries,
    "kilt": _kilt_tasks,
}
