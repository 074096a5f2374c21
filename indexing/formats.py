"""Readers of the raw formats: they parse pieces into rows, and refuse a bad row with its file and line."""

import ast
import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from indexing.raw import Piece, allow_long_fields, clip, one_line, open_input
from indexing.sources import CHUNK_BYTES, Format
from retriever.errors import InputError

PARQUET_BATCH = 16_384
MAX_ANSWERS = 1 << 20  # characters of a list of answers: Python needs about a hundred times as many bytes to parse it
PARQUET_BUFFER = 8 << 20  # bytes of a column that are read at once if a row group is large
# One passage or query: its line, id, title ("" for a query), text and metadata fields. A plain tuple is created twice
# as fast as a named tuple.
Row = tuple[int, str, str, str, dict[str, Any]]


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
    for name in nested.keys() & doc.keys():
        if nested[name] != doc[name]:
            raise bad(piece, line, f"field {name!r} in metadata and beside it", "one of them", "rename the other")
    return nested | doc


def _msmarco(piece: Piece) -> Iterator[Row]:
    for line, row in text_lines(piece):
        fields = row.split("\t")
        if len(fields) != 2:
            raise _columns(piece, line, row, fields, "2: id<TAB>text")
        yield (line, fields[0] or integer_id(piece, line, "", "id"), "", fields[1], {})


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
        section = ""
        for index, paragraph in enumerate(paragraphs[1:], 1):
            if paragraph.startswith("Section::::"):
                section = paragraph.removeprefix("Section::::").strip()
            elif paragraph.strip():
                text = paragraph.rstrip("\n")  # offsets into the paragraph, as in KILT's anchors, stay valid
                fields = {"wikipedia_id": page_id, "paragraph": index}
                yield (line, f"{page_id}-{index}", title, text, fields | {"section": section} if section else fields)


def _parquet(piece: Piece) -> Iterator[Row]:
    """Yields rows whose columns have the names of BEIR's fields; indexing/tables chooses columns with other names."""
    for first, names, documents in parquet_batches(piece):
        id_name = next((name for name in ("_id", "id") if name in names), None)
        if id_name is None or "text" not in names:
            raise InputError(
                f"{piece.file}: found the columns {', '.join(names)}, expected id or _id, and text; rename them"
            )
        for line, document in enumerate(documents, first):
            yield _passage(piece, line, document, id_name)


def parquet_batches(
    piece: Piece, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, list[str], list[dict[str, Any]]]]:
    """Yields the rows of a piece of Parquet, some thousands at a time.

    Args:
        piece: A range of rows.
        columns: The columns to read; None: all.

    Yields:
        The 1-based number of the first row, the names of all columns, and each row without its nulls. A string in the
        column `metadata` is parsed as a JSON object.

    Raises:
        InputError: If the file is damaged or not UTF-8.
    """
    with open_input(piece.file) as opened:
        try:
            footer = pq.read_metadata(opened)
            groups = [footer.row_group(number).total_byte_size for number in range(footer.num_row_groups)]
            # A row group is read whole and ahead, which is fast, unless a group is too large for memory.
            whole = max(groups, default=0) <= CHUNK_BYTES
            file = pq.ParquetFile(opened, metadata=footer, pre_buffer=whole, buffer_size=0 if whole else PARQUET_BUFFER)
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise InputError(
                    f"{piece.file}: found the columns {', '.join(names)}, expected names that differ; rename them"
                )
            for first, batch in _batches(file, piece, columns):
                documents = []
                for line, row in enumerate(_python_rows(piece, first, batch), first):
                    document = {name: value for name, value in row.items() if value is not None}
                    if type(document.get("metadata")) is str:
                        document["metadata"] = metadata_text(piece, line, document["metadata"])
                    documents.append(document)
                yield first, names, documents
        except UnicodeDecodeError as error:
            raise InputError(
                f"{piece.file}: found invalid UTF-8 ({error}), expected UTF-8; write the file anew"
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{piece.file}: found damaged Parquet ({one_line(error)}); fetch the file again") from None


def _batches(file: Any, piece: Piece, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a piece as (1-based first row, record batch); decodes only the row groups it touches."""
    first, end = piece.first_line - 1, piece.first_line - 1 + piece.rows
    groups: list[int] = []
    row = start = 0
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if row < end and row + num_rows > first:
            start = start if groups else row
            groups.append(group)
        row += num_rows
    rows_per_batch = min(PARQUET_BATCH, piece.rows)
    for batch in file.iter_batches(rows_per_batch, row_groups=groups, columns=columns, use_threads=False):
        skip = max(first - start, 0)
        part = batch.slice(skip, max(min(end - start, len(batch)) - skip, 0))
        if len(part):
            yield start + skip + 1, part
        start += len(batch)
        if start >= end:
            return


def _python_rows(piece: Piece, first: int, batch: Any) -> list[dict[str, Any]]:
    """Returns a record batch as dicts. Raises InputError for values without a Python object, such as the year 10000."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for line, value in enumerate(column, first):
                try:
                    value.as_py()
                except (OverflowError, ValueError) as error:
                    actual = f"a value of column {name!r} ({column.type}) that is out of range ({one_line(error)})"
                    raise bad(piece, line, actual, "a time in the years 1 to 9999", "correct or drop it") from None
        raise


def metadata_text(piece: Piece, line: int, text: str) -> Any:
    """Returns the metadata in a string column: a JSON object, or None if the string is empty."""
    try:
        return orjson.loads(text) if text else None
    except orjson.JSONDecodeError as error:
        raise bad(piece, line, f"metadata {clip(text)} ({error.msg})", "a JSON object", "rename the column") from None


def _beir_queries(piece: Piece) -> Iterator[Row]:
    for line, doc in objects(piece):
        yield _passage(piece, line, doc, "_id", titled=False)


def _dpr_queries(piece: Piece) -> Iterator[Row]:
    for line, (question, literal) in _csv_rows(piece, "2: question<TAB>['answer', ...]", 2):
        try:
            answers = ast.literal_eval(literal) if len(literal) <= MAX_ANSWERS else None
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
        try:
            fields = next(rows)
        except csv.Error as error:
            raise bad(piece, number, f"a bad field ({error})", "a CR within quotes only", "remove it") from None
        if rows.line_num != number - piece.first_line + 1:
            problem = f"a quoted field that does not end in its line ({clip(line)})"
            raise bad(piece, number, problem, "one row per line, a quote in a quoted field doubled", "fix the line")
        if len(fields) != num_columns:
            raise _columns(piece, number, line, fields, expected)
        yield number, fields


def integer_id(piece: Piece, line: int, id: Any, name: str) -> str:
    """Returns an integer id as a string. Raises InputError for any other value."""
    if type(id) is int:
        return str(id)
    actual = f"no {name}" if id is None else f"{name} {clip(id)}"
    raise bad(piece, line, actual, "a string that is not empty, or an integer", "give each row its id")


def bad(piece: Piece, line: int, actual: str, expected: str, remedy: str) -> InputError:
    """Returns the error for a bad row."""
    where = f"{piece.file} row {line}" if piece.data is None else f"{piece.file}:{line}"
    return InputError(f"{where}: found {actual}, expected {expected}; {remedy}")


def wrong_text(piece: Piece, line: int, name: str, value: Any) -> InputError:
    """Returns the error for a field that is missing or not a string."""
    actual = f"no {name}" if value is None else f"{name} {clip(value)}"
    return bad(piece, line, actual, f"{name} to be a string", "add it, or name another format")


def _columns(piece: Piece, line: int, row: str, fields: list[str], expected: str) -> InputError:
    remedy = "fix the line, or add a header line that names other columns"
    return bad(piece, line, f"{len(fields)} columns ({clip(row)})", expected, remedy)


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
