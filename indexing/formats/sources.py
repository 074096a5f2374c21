"""Raw corpora and queries: detect the format of a folder or file, and cut its rows into chunks.

    source = detect("data/scifact")                 # local or s3://bucket/prefix
    for chunk in chunks(source, rows_per_chunk=50_000):
        table = parse_corpus(source.format, chunk)  # indexing/formats/parse.py, on any worker

Formats: BEIR, MS MARCO, DPR and KILT, which have fixed columns; CSV, TSV, JSON lines and Parquet with any columns
(indexing/tables). A chunk holds complete raw rows (for Parquet a range of rows that its worker reads), so cutting is
cheap and the workers do the parsing. A chunk ends at a number of rows or of bytes, whichever comes first, so that
memory is bounded regardless of the length of the rows. Lines end with LF or CRLF; U+2028 and similar characters are
text.
"""

import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import orjson
import pyarrow.fs as pafs

from indexing.formats import limits
from indexing.formats.columns import (
    ID_NAMES,
    QUERY_ID_NAMES,
    QUERY_NAMES,
    RELEVANT_NAMES,
    TEXT_NAMES,
    TITLE_NAMES,
    PassageColumns,
    PassageNames,
    QueryColumns,
    QueryNames,
    choose_passage_columns,
    choose_query_columns,
    describe_passage_columns,
    describe_query_columns,
    is_header,
)
from indexing.formats.delimited import DelimitedRows
from indexing.formats.parquet import ParquetRows
from indexing.formats.raw import (
    Lines,
    Piece,
    check_path,
    clip,
    filesystem_of,
    no_rows,
    refuse_irregular,
    tsv_fields,
    unreadable,
)
from indexing.formats.schema import (
    TABLE_FORMATS,
    has_beir_names,
    is_beir,
    read_table,
    refuse_json_array,
    refuse_unreadable,
)
from indexing.formats.titles import TITLE_FILES, Titles
from retriever.errors import InputError, printable

Format = Literal["beir", "msmarco", "dpr", "kilt", "parquet", "csv", "tsv", "jsonl"]
FORMATS: tuple[Format, ...] = get_args(Format)
FIRST_CHUNK_ROWS = 512
CHUNKS_PER_SIZE = 16
CHUNK_BYTES = 256 << 20  # raw text: a chunk ends with the row that reaches it; the parts depend on this number
DPR_HEADER = ["id", "text", "title"]
BEIR_FIELDS = {"_id", "title", "text", "metadata"}
ENDINGS = "expected .jsonl, .json, .tsv, .csv (each also .gz) or .parquet"
# Files of a folder that are the corpus of a format. The formats of NAMED_FIRST are looked for first.
CORPUS_FILES: dict[Format, tuple[str, ...]] = {
    "beir": ("corpus.jsonl", "corpus.jsonl.gz"),
    "msmarco": ("collection.tsv", "collection.tsv.gz"),
    "dpr": ("psgs_w100.tsv", "psgs_w100.tsv.gz"),
    "kilt": ("kilt_knowledgesource.json", "kilt_knowledgesource.json.gz"),
    "parquet": ("*.parquet",),
    "csv": tuple(f"{name}.csv{gz}" for name in ("corpus", "passages", "documents") for gz in ("", ".gz")),
    "tsv": tuple(f"{name}.tsv{gz}" for name in ("corpus", "passages", "documents") for gz in ("", ".gz")),
    "jsonl": tuple(f"{name}.jsonl{gz}" for name in ("corpus", "passages", "documents") for gz in ("", ".gz")),
}
NAMED_FIRST: tuple[Format, ...] = ("beir", "msmarco", "dpr", "kilt", "parquet")
# The format of the same file if the caller names its columns.
NAMED_AS: dict[Format, Format] = {"beir": "jsonl", "kilt": "jsonl", "msmarco": "tsv", "dpr": "tsv"}
# DPR's and KILT's query files name no split and repeat ids, so they must be given as files; see detect_queries.
QUERY_FILES: dict[Format, tuple[str, ...]] = {
    "beir": ("queries.jsonl", "queries.jsonl.gz"),
    "msmarco": ("queries.*.tsv", "queries.*.tsv.gz", "queries.tsv", "queries.tsv.gz"),
    "dpr": (),
    "kilt": (),
    "parquet": ("queries.parquet", "queries.*.parquet"),
    "csv": ("queries.csv", "queries.*.csv", "queries.csv.gz", "queries.*.csv.gz"),
    "tsv": ("queries.tsv", "queries.*.tsv", "queries.tsv.gz", "queries.*.tsv.gz"),
    "jsonl": ("queries.jsonl", "queries.*.jsonl", "queries.jsonl.gz", "queries.*.jsonl.gz"),
}
DEFAULT_SPLIT = "test"  # for judgements in a file whose name has no split: queries.csv


@dataclass(frozen=True)
class Source:
    """A corpus with its queries and judgements. Files are paths or s3:// addresses, in reading order.

    Attributes:
        format: The format of the corpus, or of the queries if there is no corpus.
        name: The name of the folder, or of the file without its endings.
        corpus: The files of the corpus.
        queries: The files of queries.
        qrels: Split -> file of judgements.
        columns: The columns of the corpus tables; None: the fixed columns of the format.
        query_columns: The columns of the query tables; None: the fixed columns of the format.
        query_source: The queries in the same folder as a corpus, if they have another format than the corpus.
        titles: The file of the titles of MS MARCO's passages; None: they have no titles.
    """

    format: Format
    name: str
    corpus: tuple[str, ...]
    queries: tuple[str, ...]
    qrels: dict[str, str]
    columns: PassageColumns | None = None
    query_columns: QueryColumns | None = None
    query_source: "Source | None" = None
    titles: str | None = None


@dataclass(frozen=True)
class Chunk:
    """Rows [first_row, first_row + rows) of the files in order: a function of source, rows_per_chunk and limit.

    Only in KILT does a line (a page) become several passages or none: then `rows` counts lines, `first_row` is None,
    and the number of passages is known after parsing.
    """

    index: int
    first_row: int | None
    rows: int
    pieces: tuple[Piece, ...]  # several if the chunk continues in the next file
    columns: PassageColumns | None = None
    titles: tuple[str, ...] | None = None  # of each row, if they are in a separate file


def detect(path: str, format: str = "auto", names: PassageNames | None = None) -> Source:
    """Finds the corpus at a path, with the queries and judgements of the folder if it has any.

    Args:
        path: A folder or file, local or s3://. A file may have any name.
        format: One of FORMATS, or "auto" to detect it from the names in a folder, or a file's ending and first line.
        names: Columns of a CSV, TSV, JSON lines or Parquet file; columns without a name are recognised.

    Raises:
        InputError: If nothing, no known format or more than one corpus is found, or if a column cannot be chosen.
    """
    names = names or PassageNames()
    _check_fixed(format, names)
    path, listing = _listing(path, format)
    if listing is None:
        source = Source(_file_format(path, format, names), _stem(path), (path,), (), {})
        return _with_columns(_with_titles(source, _title_files(path)), names)
    chosen, files = _corpus_files(path, listing, format)
    corpus = tuple(f"{path}/{name}" for name in files)
    if format == "auto" and chosen in NAMED_AS:
        first = _first_object(corpus[0]) if chosen == "beir" else {}
        if names != PassageNames() or (first and not is_beir(first)):
            chosen = NAMED_AS[chosen]
    source = Source(chosen, _name(path), corpus, *_queries(path, listing, chosen))
    if chosen in TABLE_FORMATS:
        source = replace(source, queries=(), qrels={}, query_source=_queries_beside(path, listing))
    return _with_columns(_with_titles(source, [f"{path}/{name}" for name in listing]), names)


def detect_queries(
    path: str, format: str = "auto", names: QueryNames | None = None, split: str | None = None
) -> Source:
    """Finds the queries at a path; `corpus` of the result is empty.

    Args:
        path: A folder with query files (with or without a corpus), or a file: BEIR queries.jsonl, MS MARCO tsv (id,
            text), DPR queries (query, list of answers), KILT task jsonl, or a table. Each also .gz, except Parquet.
        format: One of FORMATS, or "auto" to detect it from the file's ending and first line.
        names: Columns of a CSV, TSV, JSON lines or Parquet file; columns without a name are recognised.
        split: The split of a table's judgements; None: SPLIT of a file named queries.SPLIT.csv, otherwise "test".

    Raises:
        InputError: If there are no queries, or a column cannot be chosen.
    """
    names = names or QueryNames()
    _check_fixed(format, names)
    path, listing = _listing(path, format)
    if listing is None:
        chosen = _query_file_format(path, format, names)
        return _with_query_columns(Source(chosen, _stem(path), (), (path,), {}), names, split)
    for candidate in FORMATS:
        queries, qrels = _queries(path, listing, candidate)
        if queries and (candidate == format or (format == "auto" and candidate in NAMED_FIRST[:-1])):
            chosen = candidate if format != "auto" else _query_file_format(queries[0], "auto", names)
            if chosen in TABLE_FORMATS and candidate not in TABLE_FORMATS:
                break
            return _with_query_columns(Source(chosen, _name(path), (), queries, qrels), names, split)
    source = _query_tables(path, listing, format, names, split)
    if source is None:
        raise InputError(
            f"{path}: found no queries among {_some(listing)}, expected queries.jsonl[.gz] (beir), "
            "queries.SPLIT.tsv[.gz] (msmarco), or queries.SPLIT with the ending .csv, .tsv, .jsonl (each also .gz) or "
            ".parquet; or name a file of queries itself"
        )
    return source


def describe_columns(source: Source) -> list[str]:
    """Returns one line per table that describes the role of each column; no lines for formats with fixed columns.

    A BEIR file is described if it has additional fields, since those become metadata.
    """
    lines = []
    if source.columns is not None:
        lines.append(describe_passage_columns(source.corpus[0], source.columns))
    elif source.format == "parquet" and source.corpus:
        table = read_table("parquet", source.corpus[0])
        id, title = ("_id" if "_id" in table.names else "id"), ("title" if "title" in table.names else None)
        lines.append(describe_passage_columns(source.corpus[0], PassageColumns(table, "text", id, title)))
    elif source.format == "beir" and source.corpus and _first_object(source.corpus[0]).keys() - BEIR_FIELDS:
        table = read_table("jsonl", source.corpus[0])
        title = "title" if "title" in table.names else None
        lines.append(describe_passage_columns(source.corpus[0], PassageColumns(table, "text", "_id", title)))
    if source.titles is not None:
        lines.append(f"titles of {source.corpus[0]}: joined from {source.titles}")
    if source.query_columns is not None:
        table = read_table(source.format, source.queries[0])
        lines.append(describe_query_columns(source.queries[0], table, source.query_columns))
    return lines + (describe_columns(source.query_source) if source.query_source else [])


def chunks(source: Source, rows_per_chunk: int, *, limit: int | None = None) -> Iterator[Chunk]:
    """Cuts the corpus into chunks, as a stream: it holds a chunk or two in memory, regardless of the file sizes.

    Args:
        source: A corpus.
        rows_per_chunk: Rows per chunk at most (KILT: lines). The first chunks have fewer, see `chunk_rows`, and so has
            a chunk that reaches CHUNK_BYTES of raw text.
        limit: Number of rows (KILT: lines) to take from the start; None: all.

    Raises:
        InputError: If a file is unreadable or the corpus has no rows.
    """
    if rows_per_chunk < 1 or (limit is not None and limit < 1):
        raise InputError(f"found {rows_per_chunk=} and {limit=}, expected at least 1; raise them")
    index = first = held = size = 0
    full = chunk_rows(0, rows_per_chunk)
    pieces: list[Piece] = []
    titles = None if source.titles is None else Titles(source.titles)

    def chunk() -> Chunk:
        return Chunk(
            index,
            None if source.format == "kilt" else first,
            held,
            tuple(pieces),
            source.columns,
            None if titles is None else titles.take(pieces),
        )

    for file in source.corpus:
        rows = _rows(source, file)
        while wanted := (full if limit is None else min(full, limit - first)) - held:
            piece = rows.take(wanted, CHUNK_BYTES - size)
            if piece is None:
                break
            pieces.append(piece)
            held, size = held + piece.rows, size + piece.size
            if held == full or size >= CHUNK_BYTES:
                yield chunk()
                index, first, held, size, pieces = index + 1, first + held, 0, 0, []
                full = chunk_rows(index, rows_per_chunk)
    if pieces:
        yield chunk()
    elif first == 0:
        raise no_rows(*source.corpus)
    if titles is not None and limit is None:
        titles.check_end()


def chunk_rows(index: int, most: int) -> int:
    """Returns the rows of a chunk: 512 in each of the first 16, twice as many in each of the next 16, up to `most`.

    So a small corpus has several parts, of which an interrupted job keeps those that are done, and a large one few.
    """
    return min(most, FIRST_CHUNK_ROWS << min(index // CHUNKS_PER_SIZE, 30))


def _rows(source: Source, file: str) -> Any:
    """Returns a reader of the file's rows that starts after its header."""
    if source.format == "parquet":
        return ParquetRows(file)
    if source.format in ("csv", "tsv") and source.columns:
        rows = DelimitedRows(file, source.columns.table.delimiter)
        rows.take(1)
        return rows
    lines = Lines(file)
    if source.format == "dpr":
        _skip_header(lines)
    return lines


def _skip_header(rows: Lines) -> None:
    header = rows.take(1)
    if header and tsv_fields(f"{header.file}:1", (header.data or b"").decode("utf-8", "replace")) != DPR_HEADER:
        raise InputError(
            f"{header.file}:1: found {clip(header.data)}, expected DPR's header id<TAB>text<TAB>title; "
            "add it or name another format"
        )


def _check_fixed(format: str, names: PassageNames | QueryNames) -> None:
    """Raises InputError if columns are named for a format with fixed columns."""
    if format in ("beir", "msmarco", "dpr", "kilt") and names != type(names)():
        parameter = next(name for name, value in vars(names).items() if value is not None)
        raise InputError(
            f"parameter {parameter}: format {format} has fixed columns, expected one of {', '.join(TABLE_FORMATS)}; "
            "leave the name out or choose one of these by parameter format"
        )


def _listing(path: str, format: str) -> tuple[str, list[str] | None]:
    """Returns the path, absolute for workers, and the file names below it (qrels as "qrels/NAME"; None for a file)."""
    if format not in ("auto", *FORMATS):
        raise InputError(f"found format {format!r}, expected auto, {', '.join(FORMATS)}; choose one of these")
    check_path(path)
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
        if not path.startswith("s3://"):
            refuse_irregular(path)
            return path, _local_names(path)
        below = filesystem.get_file_info(pafs.FileSelector(key))
        below += filesystem.get_file_info(pafs.FileSelector(f"{key}/qrels", allow_not_found=True))
    except OSError as error:
        raise unreadable(path, error) from None
    return path, sorted(entry.path[len(key) :].lstrip("/") for entry in below if entry.type == pafs.FileType.File)


def _local_names(folder: str) -> list[str]:
    """Returns the regular files of a local folder and of its qrels/. pyarrow fails if a name is not UTF-8."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_file()]
    if os.path.isdir(f"{folder}/qrels"):
        with os.scandir(f"{folder}/qrels") as entries:
            names += [f"qrels/{entry.name}" for entry in entries if entry.is_file()]
    return sorted(names)


def _corpus_files(path: str, listing: list[str], format: str) -> tuple[Format, list[str]]:
    """Returns the format of a folder's corpus and the names of its files."""
    matches = {f: names for f in FORMATS if format in ("auto", f) and (names := _corpus_names(listing, f))}
    if format == "auto" and (first := {f: names for f, names in matches.items() if f in NAMED_FIRST}):
        matches = first
    if not matches:
        expected = ", ".join(
            f"{'[.gz] or '.join(_plain(CORPUS_FILES[f]))} ({f})" for f in FORMATS if format in ("auto", f)
        )
        raise InputError(
            f"{path}: found no corpus among {_some(listing)}, expected one of {expected}; name its folder or file"
        )
    if len(matches) > 1:
        raise InputError(
            f"{path}: found several corpora ({', '.join(f'{name}: {_some(files)}' for name, files in matches.items())})"
            ", expected one; say which format, or name the file itself"
        )
    [(chosen, files)] = matches.items()
    if chosen != "parquet" and len(files) > 1:
        raise InputError(f"{path}: found {' and '.join(files)}, expected one of them; remove or rename the other")
    return chosen, files


def _corpus_names(listing: list[str], format: Format) -> list[str]:
    names = _matching(listing, CORPUS_FILES[format])
    if format == "parquet":
        queries = _matching(names, QUERY_FILES["parquet"])
        names = [name for name in names if name.startswith("corpus")] or [x for x in names if x not in queries]
    return names


def _queries(path: str, listing: list[str], format: Format) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns a folder's query files of a format, and its qrels by split."""
    queries = tuple(f"{path}/{name}" for name in _matching(listing, QUERY_FILES[format]))
    prefix = {"dpr": "", "kilt": "", "msmarco": "qrels."}.get(format, "qrels/")
    splits: dict[str, str] = {}
    for name in listing:
        if prefix and name.startswith(prefix) and name.removesuffix(".gz").endswith(".tsv"):
            split = name.removeprefix(prefix).removesuffix(".gz").removesuffix(".tsv")
            if split in splits:
                raise InputError(
                    f"{path}/{name}: found a second file of judgements for the split {split!r}, beside "
                    f"{splits[split]}, expected one; remove or rename one"
                )
            splits[split] = f"{path}/{name}"
    return queries, splits


def _queries_beside(path: str, listing: list[str]) -> Source | None:
    """Returns the queries in the folder of a table; their columns can only be recognised, not named."""
    if not any(_matching(listing, QUERY_FILES[f]) for f in FORMATS):
        return None
    try:
        return detect_queries(path)
    except InputError as error:
        problem, _, remedy = str(error).partition("; ")
        if "parameter " in remedy:
            remedy = (
                "rename it, or import the corpus file by its own path, and then the queries with their columns named"
            )
        raise InputError(f"{problem}; {remedy}") from None


def _query_tables(path: str, listing: list[str], format: str, names: QueryNames, split: str | None) -> Source | None:
    """Returns the query tables of a folder; None if it has none."""
    matches = {f: _queries(path, listing, f) for f in cast(tuple[Format, ...], TABLE_FORMATS)}
    matches = {f: files for f, files in matches.items() if files[0] and format in ("auto", f)}
    if len(matches) > 1:
        tables = [_name(queries[0]) for queries, _ in matches.values()]
        raise InputError(f"{path}: found {' and '.join(tables)}, expected one of them; remove or rename the other")
    for chosen, (queries, qrels) in matches.items():
        return _with_query_columns(Source(chosen, _name(path), (), queries, qrels), names, split)
    return None


def _with_columns(source: Source, names: PassageNames) -> Source:
    """Returns the source with the columns of its corpus. Parquet with BEIR's names needs none."""
    if source.format not in TABLE_FORMATS:
        return source
    table = read_table(source.format, source.corpus[0])
    if source.format == "parquet" and names == PassageNames() and has_beir_names(table):
        return source
    columns = choose_passage_columns(source.corpus[0], table, names)
    return replace(source, columns=columns)


def _with_titles(source: Source, files: list[str]) -> Source:
    """Returns a corpus of MS MARCO with its file of titles, if one of `files` (those of its folder) is one."""
    title_files = [file for file in files if _name(file) in TITLE_FILES]
    if source.format != "msmarco" or not title_files:
        return source
    if len(title_files) > 1:
        raise InputError(
            f"{title_files[0]}: found {_name(title_files[1])} too, expected one of them; remove or rename the other"
        )
    return replace(source, titles=title_files[0])


def _title_files(path: str) -> list[str]:
    """Returns the files of titles in the folder of a file called collection.tsv."""
    if _name(path) not in CORPUS_FILES["msmarco"]:
        return []
    files = [f"{path.removesuffix(_name(path))}{name}" for name in TITLE_FILES]
    return [file for file in files if _is_file(file)]


def _is_file(path: str) -> bool:
    filesystem, key = filesystem_of(path)
    return filesystem.get_file_info(key).type == pafs.FileType.File


def _with_query_columns(source: Source, names: QueryNames, split: str | None) -> Source:
    """Returns the source with the columns of its queries; a table with judgements becomes the qrels of its split."""
    if source.format not in TABLE_FORMATS:
        if split is not None:
            raise InputError(
                f"parameter split {split}: {source.queries[0]} has the format {source.format}, whose judgements are in "
                "other files; leave the split out"
            )
        return source
    columns = choose_query_columns(source.queries[0], read_table(source.format, source.queries[0]), names)
    qrels = dict(source.qrels)
    for file in source.queries if columns.relevant else ():
        name = split or _split_of(file)
        if name in qrels:
            raise InputError(
                f"{file}: found judgements of the split {name!r}, which {qrels[name]} has too; expected one file per "
                "split; remove or rename one"
            )
        qrels[name] = file
    return replace(source, query_columns=columns, qrels=qrels)


def _split_of(file: str) -> str:
    """Returns SPLIT of a file named queries.SPLIT.csv, otherwise the default."""
    pieces = _name(file).removesuffix(".gz").split(".")
    return ".".join(pieces[1:-1]) if pieces[0] == "queries" and len(pieces) > 2 else DEFAULT_SPLIT


def _file_format(path: str, format: str, names: PassageNames) -> Format:
    """Returns the format of a corpus file, by its ending and first line."""
    if format != "auto":
        return cast(Format, format)
    refuse_unreadable(path)
    ending = _ending(path)
    if ending in ("parquet", "csv"):
        return cast(Format, ending)
    if ending in ("jsonl", "json", "ndjson"):
        return _json_format(path, names)
    if ending == "tsv":
        if names != PassageNames():
            return "tsv"
        fields = _first_fields(path)
        if fields == DPR_HEADER:
            return "dpr"
        return "tsv" if is_header(fields, TEXT_NAMES, (*ID_NAMES, *TITLE_NAMES)) else "msmarco"
    raise InputError(f"{path}: found the ending .{ending}, {ENDINGS}; name the format")


def _json_format(path: str, names: PassageNames) -> Format:
    """Detects BEIR, KILT or named fields by the first line. A line that is not an object counts as BEIR, whose reader
    refuses it."""
    if names != PassageNames():
        return "jsonl"
    refuse_json_array(path)
    first = _first_object(path)
    if "wikipedia_title" in first:
        return "kilt"
    return "beir" if is_beir(first) or not first else "jsonl"


def _query_file_format(path: str, format: str, names: QueryNames) -> Format:
    """Returns the format of a query file, by its ending and first line."""
    if format != "auto":
        return cast(Format, format)
    refuse_unreadable(path)
    ending, is_named = _ending(path), names != QueryNames()
    if ending == "parquet":
        return "parquet"
    if ending in ("jsonl", "json", "ndjson"):
        if is_named:
            return "jsonl"
        refuse_json_array(path)
        first = _first_object(path)
        return "kilt" if "input" in first else "beir" if is_beir(first) or not first else "jsonl"
    if ending in ("tsv", "csv"):
        table: Format = "csv" if ending == "csv" else "tsv"
        fields = _first_fields(path)
        if is_named or is_header(fields, QUERY_NAMES, (*QUERY_ID_NAMES, *RELEVANT_NAMES)):
            return table
        if len(fields) > 1 and fields[-1].startswith("[") and fields[-1].endswith("]"):
            return "dpr"
        return "msmarco" if ending == "tsv" or len(fields) > 1 else "csv"
    raise InputError(f"{path}: found the ending .{ending}, {ENDINGS}; say which format")


def _ending(path: str) -> str:
    return path.removesuffix(".gz").rpartition(".")[2]


def _first_line(path: str) -> bytes:
    first = Lines(path).take(1)
    if first is None:
        raise no_rows(path)
    return first.data or b""


def _first_object(path: str) -> dict[str, Any]:
    """Returns the first line as a JSON object; {} for anything else: parsing reports what is wrong with it."""
    line = _first_line(path)
    limits.check_values(f"{path}:1", line)
    try:
        first = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return first if isinstance(first, dict) else {}


def _first_fields(path: str) -> list[str]:
    return tsv_fields(f"{path}:1", _first_line(path).decode("utf-8", "replace"))


def _matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _plain(patterns: tuple[str, ...]) -> list[str]:
    return [pattern for pattern in patterns if not pattern.endswith(".gz")]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    """Returns a file's name without its endings."""
    name = _name(path).removesuffix(".gz")
    return name.rpartition(".")[0] or name


def _some(names: list[str]) -> str:
    names = [printable(name) for name in names]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "no files"
