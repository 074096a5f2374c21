"""Reads the start of a file, by which its format is detected, and refuses files that no format reads."""

from __future__ import annotations

import functools
from typing import Any

import orjson

from riptide.base.errors import InputError
from riptide.indexing.files import limits
from riptide.indexing.files.raw import Lines, no_rows_error, split_tsv_line

START_LINES, START_BYTES = 100, 1 << 20  # limits of the search for the first JSON object

# File extensions that no format reads -> the conversion that makes such a file readable.
CONVERSIONS = {
    **dict.fromkeys(("xlsx", "xls", "ods"), "save the sheet as CSV in UTF-8"),
    **dict.fromkeys(("zip", "bz2", "xz", "zst", "7z", "tar", "tgz", "lz4"), "decompress it, or compress it as .gz"),
    **dict.fromkeys(("feather", "arrow", "ipc", "orc", "avro", "pkl", "npy"), "write the table as Parquet"),
    **dict.fromkeys(("xml", "pdf", "doc", "docx"), "write one JSON object per passage into a .jsonl file"),
    **dict.fromkeys(("txt", "md", "html", "htm"), "name its folder, each of whose documents is then a passage"),
}


class FileStart:
    """The file extension and the first lines of a file, which are read when they are first needed.

    Attributes:
        path: The file.
        is_compressed: Whether the name ends with .gz.
        ending: The ending of the name without .gz, for example "csv"; "": none.
    """

    def __init__(self, path: str):
        self.path = path
        self.is_compressed = path.endswith(".gz")
        _, dot, ending = path.rpartition("/")[2].removesuffix(".gz").rpartition(".")
        self.ending = ending if dot else ""

    @functools.cached_property
    def line(self) -> bytes:
        """The first line. Raises InputError if the file has none."""
        first = Lines(self.path).take(1)
        if first is None:
            raise no_rows_error(self.path)
        return first.data or b""

    @functools.cached_property
    def fields(self) -> list[str]:
        """The tab-separated fields of the first line."""
        return split_tsv_line(f"{self.path}:1", self.line.decode("utf-8", "replace"))

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """The first JSON object among the first lines; {} without one. Invalid lines are skipped; parsing reports them.

        Raises InputError if the file is a JSON array.
        """
        refuse_json_array(self.path)
        start = Lines(self.path).take(START_LINES, START_BYTES)
        lines = (start.data or b"").split(b"\n") if start else []
        for number, line in enumerate(lines, 1):
            limits.check_value_count(f"{self.path}:{number}", line)
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(value, dict):
                return value
        return {}


def refuse_unreadable(file: str, expected: str) -> None:
    """Raises InputError for a file that no format reads; the message names the necessary conversion.

    Args:
        file: The file.
        expected: The endings of files that are read, for the message.
    """
    ending = file.rpartition("/")[2].lower().rpartition(".")[2]
    if conversion := CONVERSIONS.get(ending):
        raise InputError(f"{file}: found a file that ends with .{ending}, expected {expected}; {conversion}")
    if file.lower().endswith(".parquet.gz"):
        raise InputError(f"{file}: found a compressed Parquet file, expected .parquet; decompress it by gunzip")


def refuse_json_array(file: str) -> None:
    """Raises InputError if a JSON file begins with an array; reads one block of the file."""
    if Lines(file).next_block().lstrip().startswith(b"["):
        raise InputError(
            f"{file}:1: found a JSON array, expected one JSON object per line; convert the file, for example by "
            "jq -c '.[]' OLD.json > NEW.jsonl"
        )
