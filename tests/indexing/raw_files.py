"""What the tests of raw files share: odd texts, files written from rows, and their parse."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pytest

from riptide.base.errors import InputError
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.registry import find_format
from riptide.indexing.formats.sources import ImportSource

DATA = Path(__file__).parents[2].parent / "shared/data"
ODD = [
    "e\u0301",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u202e",
    "\x00",
    "\u2028",
    "\u2029",
    "\x85",
    "\x1e",
    "\x0b",
    "\ufeff",
    "\ufffd",
    "𝔘",
    "👩\u200d🚀",
]
ODD += ["'", '"', '""', "\\", "a", " ", ",", "{", "\ud7ff", "\U0010ffff", "\u00a0", "<b>"]


def odd_text(generator: random.Random, extra: tuple[str, ...] = ()) -> str:
    return "".join(generator.choices([*ODD, *extra], k=generator.randrange(12)))


def passages(format: str, files: Path | list[Path], rows_per_chunk: int = 1000, **filters: str) -> pa.Table:
    files = files if isinstance(files, list) else [files]
    source = ImportSource(find_format(format), "x", tuple(map(str, files)), (), {})
    return pa.concat_tables(
        [parse_corpus(source.format, chunk, filters) for chunk in cut_into_chunks(source, rows_per_chunk)]
    )


def write(path: Path, data: str | bytes) -> Path:
    """A file of these bytes, zipped where its name ends with .gz."""
    data = data if isinstance(data, bytes) else data.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def jsonl(path: Path, docs: list[dict], ensure_ascii: bool = False) -> Path:
    text = "".join(json.dumps(doc, ensure_ascii=ensure_ascii) + "\n" for doc in docs)
    return write(path, text)


def refused(path: Path, data: str | bytes, format: str, pattern: str, rows_per_chunk: int = 2, **filters: str):
    """The file is refused in one line that matches, whatever the chunk."""
    write(path, data)
    with pytest.raises(InputError, match=pattern) as error:
        passages(format, path, rows_per_chunk, **filters)
    assert len(str(error.value).splitlines()) == 1
    assert str(path) in str(error.value)
