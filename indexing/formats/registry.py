"""The registry of corpus formats. To add a format, write its module and add its object to FORMATS."""

from __future__ import annotations

from collections.abc import Sequence

from riptide.base.errors import InputError
from riptide.indexing.formats.beir import BEIR
from riptide.indexing.formats.csv_tsv import CSV, TSV
from riptide.indexing.formats.dpr import DPR
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.formats.jsonl import JSONL
from riptide.indexing.formats.kilt import KILT
from riptide.indexing.formats.msmarco import MSMARCO
from riptide.indexing.formats.parquet import PARQUET
from riptide.indexing.formats.text_folder import DOCUMENTS

# In the order of docs/data.md. If several formats detect a file, the last one counts, so a specific format comes after
# the more general ones that also accept its files.
FORMATS: list[CorpusFormat] = [CSV, TSV, JSONL, PARQUET, BEIR, MSMARCO, DPR, KILT, DOCUMENTS]


def format_names() -> list[str]:
    """Returns the valid values of the parameter `format`."""
    return ["auto", *(format.name for format in FORMATS)]


def find_format(name: str) -> CorpusFormat | None:
    """Returns the format with this name; None for "auto".

    Raises:
        InputError: If there is no such format.
    """
    if name not in format_names():
        raise InputError(f"found format {name!r}, expected {', '.join(format_names())}; choose one of these")
    return next((format for format in FORMATS if format.name == name), None)


def table_names() -> str:
    """Lists the formats whose columns the caller can name, for a message."""
    return ", ".join(format.name for format in FORMATS if format.has_columns)


def known_endings(formats: Sequence[CorpusFormat]) -> str:
    """Lists the file extensions of formats, for a message."""
    endings: dict[str, None] = {}
    for format in formats:
        gz = "[.gz]" if format.is_compressible else ""
        endings.update(dict.fromkeys(f".{ending}{gz}" for ending in format.endings))
    return ", ".join(endings)
