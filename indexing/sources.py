"""Raw corpora as people have them: which format a folder or file is in, and its rows cut into chunks.

    source = detect("data/scifact")                 # BEIR, MS MARCO, DPR, KILT or Parquet; local or s3://bucket/prefix
    for chunk in chunks(source, rows_per_chunk=50_000):
        table = parse_corpus(source.format, chunk)  # indexing/parse.py, on any worker

A chunk carries whole raw lines (or, for Parquet, a row range that its worker reads itself), so cutting is cheap and
parsing is what is spread over workers. It ends at a number of rows or of bytes, whichever comes first, so that memory
is bounded however long the rows are. Lines end with LF alone (CRLF is tolerated): U+2028 and its like are text.
"""

import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import orjson
import pyarrow.fs as pafs

from indexing.raw import Lines, ParquetRows, Piece, clip, filesystem_of, no_rows, tsv_fields, unreadable
from retriever.errors import InputError

Format = Literal["beir", "msmarco", "dpr", "kilt", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)
CHUNK_BYTES = 256 << 20  # of raw text: the row that reaches it is the chunk's last; which rows share a part hangs on it
DPR_HEADER = ["id", "text", "title"]
# In a folder, a format's corpus is the files that match one of these.
CORPUS_FILES: dict[Format, tuple[str, ...]] = {
    "beir": ("corpus.jsonl", "corpus.jsonl.gz"),
    "msmarco": ("collection.tsv", "collection.tsv.gz"),
    "dpr": ("psgs_w100.tsv", "psgs_w100.tsv.gz"),
    "kilt": ("kilt_knowledgesource.json", "kilt_knowledgesource.json.gz"),
    "parquet": ("*.parquet",),
}
# DPR's and KILT's question files name no split and repeat ids, so they are given as files; see detect_queries.
QUERY_FILES: dict[Format, tuple[str, ...]] = {
    "beir": ("queries.jsonl", "queries.jsonl.gz"),
    "msmarco": ("queries.*.tsv", "queries.*.tsv.gz", "queries.tsv", "queries.tsv.gz"),
    "dpr": (),
    "kilt": (),
    "parquet": (),
}


@dataclass(frozen=True)
class Source:
    """Where a corpus, its queries and its judgements lie. Files are paths or s3:// addresses, in reading order."""

    format: Format
    name: str  # of the folder, or of the file without its endings
    corpus: tuple[str, ...]
    queries: tuple[str, ...]
    qrels: dict[str, str]  # split -> file


@dataclass(frozen=True)
class Chunk:
    """Rows [first_row, first_row + rows) of the files in their order: a function of source, rows_per_chunk and limit.

    KILT alone turns a line (a page) into several passages or none: there `rows` counts lines, `first_row` is None, and
    the number of passages is known after the parse.
    """

    index: int
    first_row: int | None
    rows: int
    pieces: tuple[Piece, ...]  # one, or several where the chunk runs over the end of a file


def detect(path: str, format: str = "auto") -> Source:
    """Find the corpus at `path`, a folder or file, local or s3://, with the folder's queries and qrels if it has any.

    A file that is named directly may have any name; "auto" then looks at its ending and its first line.
    InputError: nothing there, no known format, or more than one.
    """
    path, names = _listing(path, format)
    if names is None:
        return Source(_file_format(path, format), _stem(path), (path,), (), {})
    found = {each: _matching(names, CORPUS_FILES[each]) for each in FORMATS if format in ("auto", each)}
    found = {each: files for each, files in found.items() if files}
    if not found:
        wanted = ", ".join(
            f"{'[.gz] or '.join(_plain(CORPUS_FILES[each]))} ({each})" for each in FORMATS if format in ("auto", each)
        )
        raise InputError(
            f"{path}: found no corpus among {_some(names)}, expected one of {wanted}; name its folder or file"
        )
    if len(found) > 1:
        raise InputError(
            f"{path}: found several corpora ({', '.join(f'{each}: {_some(files)}' for each, files in found.items())}), "
            "expected one; say which format, or name the file itself"
        )
    [(chosen, files)] = found.items()
    if chosen == "parquet":
        files = [name for name in files if name.startswith("corpus")] or files  # queries may lie beside it
    elif len(files) > 1:
        raise InputError(f"{path}: found {' and '.join(files)}, expected one of them; remove or rename the other")
    return Source(chosen, _name(path), tuple(f"{path}/{name}" for name in files), *_questions(path, names, chosen))


def detect_queries(path: str, format: str = "auto") -> Source:
    """Find the queries at `path`: a BEIR or MS MARCO folder (with or without its corpus), or a file of queries.

    Files: BEIR queries.jsonl, MS MARCO tsv (id, text), DPR questions (question, list of answers), KILT task jsonl, each
    also .gz; "auto" looks at the first line. `corpus` of the result is empty. InputError: no queries there.
    """
    path, names = _listing(path, format)
    if names is None:
        return Source(_query_file_format(path, format), _stem(path), (), (path,), {})
    for each in FORMATS:
        queries, qrels = _questions(path, names, each)
        if queries and format in ("auto", each):
            return Source(each, _name(path), (), queries, qrels)
    raise InputError(
        f"{path}: found no queries among {_some(names)}, expected queries.jsonl[.gz] (beir) or queries.SPLIT.tsv[.gz] "
        "(msmarco); name a file of DPR or KILT questions itself"
    )


def chunks(source: Source, rows_per_chunk: int, *, limit: int | None = None) -> Iterator[Chunk]:
    """Cut the corpus into chunks of `rows_per_chunk` rows (KILT: lines), of the first `limit` rows (lines) if given.

    One that has CHUNK_BYTES of raw text ends with fewer. Streams: memory is a chunk or two, whatever the size of the
    files. InputError: unreadable file or no rows at all.
    """
    if rows_per_chunk < 1 or (limit is not None and limit < 1):
        raise InputError(f"found {rows_per_chunk=} and {limit=}, expected at least 1; raise them")
    index = first = held = size = 0
    pieces: list[Piece] = []
    for file in source.corpus:
        rows = ParquetRows(file) if source.format == "parquet" else Lines(file)
        if source.format == "dpr":
            _skip_header(rows)
        while wanted := (rows_per_chunk if limit is None else min(rows_per_chunk, limit - first)) - held:
            piece = rows.take(wanted, CHUNK_BYTES - size)
            if piece is None:
                break
            pieces.append(piece)
            held, size = held + piece.rows, size + piece.size
            if held == rows_per_chunk or size >= CHUNK_BYTES:
                yield Chunk(index, None if source.format == "kilt" else first, held, tuple(pieces))
                index, first, held, size, pieces = index + 1, first + held, 0, 0, []
    if pieces:
        yield Chunk(index, None if source.format == "kilt" else first, held, tuple(pieces))
    elif first == 0:
        raise no_rows(*source.corpus)


def _skip_header(rows: Any) -> None:
    header = rows.take(1)
    if header and tsv_fields(header.data.decode("utf-8", "replace")) != DPR_HEADER:
        raise InputError(
            f"{header.file}:1: found {clip(header.data)}, expected DPR's header id<TAB>text<TAB>title; "
            "add it or name another format"
        )


def _listing(path: str, format: str) -> tuple[str, list[str] | None]:
    """The path, made absolute (a worker may stand elsewhere), and the names below it, those of qrels as "qrels/NAME".

    The names are None where the path is a file.
    """
    if format not in ("auto", *FORMATS):
        raise InputError(f"found format {format!r}, expected auto, {', '.join(FORMATS)}; choose one of these")
    path = path.rstrip("/") if path.startswith("s3://") else os.path.abspath(path)
    filesystem, key = filesystem_of(path)
    try:
        info = filesystem.get_file_info(key)
        if info.type == pafs.FileType.NotFound:
            raise InputError(
                f"{path}: found nothing, expected a folder or a file with a corpus or queries; check the path"
            )
        if info.type == pafs.FileType.File:
            return path, None
        below = filesystem.get_file_info(pafs.FileSelector(key))
        below += filesystem.get_file_info(pafs.FileSelector(f"{key}/qrels", allow_not_found=True))
    except OSError as error:
        raise unreadable(path, error) from None
    return path, sorted(each.path[len(key) :].lstrip("/") for each in below if each.type == pafs.FileType.File)


def _questions(path: str, names: list[str], format: Format) -> tuple[tuple[str, ...], dict[str, str]]:
    """A folder's query files and its qrels by split."""
    queries = tuple(f"{path}/{name}" for name in _matching(names, QUERY_FILES[format]))
    prefix = {"beir": "qrels/", "msmarco": "qrels."}.get(format)
    splits = {
        name.removeprefix(prefix).removesuffix(".gz").removesuffix(".tsv"): f"{path}/{name}"
        for name in names
        if prefix and name.startswith(prefix) and name.removesuffix(".gz").endswith(".tsv")
    }
    return queries, splits


def _file_format(path: str, format: str) -> Format:
    """A corpus file's format, by its ending and first line."""
    if format != "auto":
        return cast(Format, format)
    ending = path.removesuffix(".gz").rpartition(".")[2]
    if ending == "parquet":
        return "parquet"
    if ending in ("jsonl", "json"):
        return "kilt" if "wikipedia_title" in _first_object(path) else "beir"
    if ending == "tsv":
        return "dpr" if _first_fields(path) == DPR_HEADER else "msmarco"
    raise InputError(
        f"{path}: found the ending .{ending}, expected .jsonl, .json, .tsv (each also .gz) or .parquet; name the format"
    )


def _query_file_format(path: str, format: str) -> Format:
    """A query file's format, by its first line."""
    if format == "parquet":
        raise InputError(
            f"{path}: found format parquet, expected beir, msmarco, dpr or kilt for queries; convert the file to jsonl"
        )
    if format != "auto":
        return cast(Format, format)
    ending = path.removesuffix(".gz").rpartition(".")[2]
    if ending in ("jsonl", "json"):
        return "kilt" if "input" in _first_object(path) else "beir"
    if ending in ("tsv", "csv"):
        answers = _first_fields(path)[-1]
        return "dpr" if answers.startswith("[") and answers.endswith("]") else "msmarco"
    raise InputError(
        f"{path}: found the ending .{ending}, expected .jsonl, .json, .tsv or .csv (each also .gz); say which format"
    )


def _first_line(path: str) -> bytes:
    first = Lines(path).take(1)
    if first is None:
        raise no_rows(path)
    return first.data or b""


def _first_object(path: str) -> dict[str, Any]:
    """The first line as a JSON object, {} for anything else: the parse says what is wrong with it."""
    try:
        first = orjson.loads(_first_line(path))
    except orjson.JSONDecodeError:
        return {}
    return first if isinstance(first, dict) else {}


def _first_fields(path: str) -> list[str]:
    return tsv_fields(_first_line(path).decode("utf-8", "replace"))


def _matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def _plain(patterns: tuple[str, ...]) -> list[str]:
    return [each for each in patterns if not each.endswith(".gz")]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    """A file's name without its endings."""
    name = _name(path).removesuffix(".gz")
    return name.rpartition(".")[0] or name


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "no files"
