"""MS MARCO's passages with RocketQA's titles: what is joined, said and refused, and a resume after other titles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.store import Store

Done = Callable[..., str]

BAD = {
    "a title file with a line of three columns": (b"0\ta\n1\tb\tc\n", "2: found 3 columns"),
    "a title file with a line without an id": (b"0\ta\n\tb\n", "2: found no id"),
    "a title file that is not UTF-8": (b"0\ta\n1\tb\xe9\n", "2: found invalid UTF-8 (byte 0xe9"),
    "a title of a passage that the collection lacks": (b"0\ta\n9\tb\n", "2: found a title for passage '9'"),
    "titles in another order than the passages": (b"1\ta\n0\tb\n", "2: found a title for passage '0'"),
}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "collection.tsv").write_text("0\tx\n1\ty\n2\tz\n")
    return folder


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_and_the_corrected_import_joins_the_titles(
    tmp_path: Path, raw: Path, done: Done, refused: Done, documented: Callable[..., None], case: str
) -> None:
    lines, expected = BAD[case]
    (raw / "para.title.txt").write_bytes(lines)
    command = ("import_corpus", "--store", tmp_path / "store", "--source", raw)
    line = refused(*command)
    assert line.startswith(f"error: {raw}/para.title.txt:{expected}")
    documented("Importing", case, line, 1)
    (raw / "para.title.txt").write_text("0\ta\n2\t\n")
    assert f"{raw}/para.title.txt: 1 of 3 passages have a title" in done(*command)
    passages = Corpus.open(Store(str(tmp_path / "store"))).passages([0, 1, 2])
    assert [(passage.title, passage.text) for passage in passages] == [("a", "x"), ("", "y"), ("", "z")]


def test_other_titles_are_another_corpus(tmp_path: Path, raw: Path, done: Done, refused: Done) -> None:
    command = ("import_corpus", "--store", tmp_path / "store", "--source", raw)
    assert "titles of" not in done(*command, "--plan")
    done(*command)
    (raw / "para.title.txt").write_text("1\tb\n")
    other = ("import_corpus", "--store", tmp_path / "other", "--source", raw, "--plan")
    assert f"titles of {raw}/collection.tsv: joined from {raw}/para.title.txt" in done(*other)
    for plan in ((), ("--plan",)):
        assert 'was imported otherwise (titles unset, now ["para.title.txt of 4 bytes"])' in refused(*command, *plan)


def test_a_repeated_import_after_an_appended_source_counts_its_own_titles(
    tmp_path: Path, raw: Path, done: Done
) -> None:
    (raw / "para.title.txt").write_text("0\ta\n")
    command = ("import_corpus", "--store", tmp_path / "store", "--source", raw)
    done(*command)
    other = tmp_path / "other"
    other.mkdir()
    (other / "corpus.jsonl").write_text('{"_id": "9", "text": "w"}\n')
    done("import_corpus", "--store", tmp_path / "store", "--source", other, "--append")
    assert f"{raw}/para.title.txt: 1 of 3 passages have a title" in done(*command)
