"""The columns that a file has: a CSV or TSV header, the fields of the first JSON lines, a Parquet schema."""

from __future__ import annotations

import orjson

from indexing.formats import limits
from indexing.formats.columns import Table
from indexing.formats.delimited import read_header
from indexing.formats.parquet import parquet_names
from indexing.formats.raw import Lines, clip, no_rows, read_blocks
from retriever.errors import InputError

SAMPLE_LINES, SAMPLE_BYTES = 1_000, 1 << 20  # of JSON lines, whose fields are taken as the columns
TABLE_FORMATS = ("csv", "tsv", "jsonl", "parquet")
# Endings that are refused, and the conversion that makes a file of them readable.
CONVERSIONS = {
    **dict.fromkeys(("xlsx", "xls", "ods"), "save the sheet as CSV in UTF-8"),
    **dict.fromkeys(("zip", "bz2", "xz", "zst", "7z", "tar", "tgz", "lz4"), "decompress it, or compress it as .gz"),
    **dict.fromkeys(("feather", "arrow", "ipc", "orc", "avro", "pkl", "npy"), "write the table as Parquet"),
    **dict.fromkeys(("xml", "html", "pdf", "doc", "docx"), "write one JSON object per passage into a .jsonl file"),
}


def read_table(format: str, file: str) -> Table:
    """Returns the columns of a file in a format of TABLE_FORMATS. Raises InputError if it has none."""
    if format == "parquet":
        return Table(parquet_names(file))
    if format == "jsonl":
        return Table(_json_names(file))
    return read_header(file, "\t" if format == "tsv" else "")


def refuse_unreadable(file: str) -> None:
    """Raises InputError for a file in a known format that is not read here, with the conversion to do."""
    ending = file.rpartition("/")[2].lower().rpartition(".")[2]
    if conversion := CONVERSIONS.get(ending):
        raise InputError(
            f"{file}: found a file that ends with .{ending}, expected .csv, .tsv, .jsonl (each also .gz) or .parquet; "
            f"{conversion}"
        )
    if file.lower().endswith(".parquet.gz"):
        raise InputError(f"{file}: found a compressed Parquet file, expected .parquet; decompress it by gunzip")


def refuse_json_array(file: str) -> None:
    """Raises InputError if a file of JSON begins with an array. Reads one block of it."""
    if next(read_blocks(file), b"").lstrip().startswith(b"["):
        raise InputError(
            f"{file}:1: found a JSON array, expected one JSON object per line; convert the file, for example by "
            "jq -c '.[]' OLD.json > NEW.jsonl"
        )


def is_beir(document: dict) -> bool:
    """True if a JSON object has BEIR's fields."""
    return "_id" in document and "text" in document


def has_beir_names(table: Table) -> bool:
    """True if Parquet columns are named as BEIR's fields: id or _id, and text."""
    return "text" in table.names and ("id" in table.names or "_id" in table.names)


def _json_names(file: str) -> tuple[str, ...]:
    """The fields of the first lines, those of the object `metadata` too. Lines that are no objects are left out."""
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
    return tuple(name for name in names if not (has_nested and name == "metadata"))
