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

# In the order of docs/data.md. The format of a file with any name is the last one that detects it, so a format stands
# after those whose files it could be mistaken for.
FORMATS: list[CorpusFormat] = [CSV, TSV, JSONL, PARQUET, BEIR, MSMARCO, DPR, KILT, DOCUMENTS]


def format_names() -> list[str]:
    """Returns the values that the parameter `format` takes."""
    return ["auto", *(format.name for format in FORMATS)]


def find_format(name: str) -> CorpusFormat | None:
    """Returns the format of a name; None for "auto".

    Raises:
        InputError: If there is no such format.
    """
    if name not in format_names():
        raise InputError(f"found format {name!r}, expected {', '.join(format_names())}; choose one of these")
    return next((format for format in FORMATS if format.name == name), None)


def table_names() -> str:
    """Returns the names of the formats whose columns can be named, for a message."""
    return ", ".join(format.name for format in FORMATS if format.has_columns)


def known_endings(formats: Sequence[CorpusFormat]) -> str:
    """Returns the endings of the files of some formats, for a message."""
    endings: dict[str, None] = {}
    for format in formats:
        gz = "[.gz]" if format.is_compressible else ""
        endings.update(dict.fromkeys(f".{ending}{gz}" for ending in format.endings))
    return ", ".join(endings)
