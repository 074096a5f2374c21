"""Titles that are joined to MS MARCO's passages, compared with a dictionary."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from riptide.base.errors import InputError
from riptide.indexing.formats.chunking import cut_into_chunks
from riptide.indexing.formats.parse import parse_corpus
from riptide.indexing.formats.sources import detect_source


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("named", ["folder", "file"])
def test_titles_are_those_of_a_dictionary(tmp_path: Path, ending: str, named: str) -> None:
    """Some passages have no line, some an empty title; the chunks are small, and lines end with CR LF."""
    draw = random.Random(0)
    titles = {str(number): draw.choice(["", "A title", "É  x"]) for number in range(400) if draw.random() < 0.7}
    (tmp_path / "collection.tsv").write_text("".join(f"{number}\ttext {number}\n" for number in range(400)))
    lines = "".join(f"{id}\t{title}\r\n" for id, title in titles.items()).encode()
    (tmp_path / f"para.title.txt{ending}").write_bytes(gzip.compress(lines) if ending else lines)
    source = detect_source(str(tmp_path if named == "folder" else tmp_path / "collection.tsv"))
    tables = [parse_corpus(source.format, chunk) for chunk in cut_into_chunks(source, 37)]
    assert len(tables) == 11
    found = {line["id"]: line["title"] for table in tables for line in table.to_pylist()}
    assert found == {str(number): titles.get(str(number), "") for number in range(400)}
    first = [parse_corpus(source.format, chunk) for chunk in cut_into_chunks(source, 37, limit=5)]
    assert first[0].equals(tables[0].slice(0, 5))


def test_only_a_collection_has_titles_beside_it(tmp_path: Path) -> None:
    (tmp_path / "other.tsv").write_text("0\ttext\n")
    (tmp_path / "para.title.txt").write_text("0\ttitle\n")
    assert detect_source(str(tmp_path / "other.tsv")).titles is None
    (tmp_path / "collection.tsv").write_text("0\ttext\n")
    assert detect_source(str(tmp_path)).titles == f"{tmp_path}/para.title.txt"
    (tmp_path / "para.title.txt.gz").write_bytes(gzip.compress(b"0\ttitle\n"))
    with pytest.raises(InputError, match=r"para\.title\.txt: found para\.title\.txt\.gz too, expected one of them"):
        detect_source(str(tmp_path))
