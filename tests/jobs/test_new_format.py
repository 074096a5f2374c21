"""A new corpus format, once it is registered, is imported, detected and named as any other."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_format import Toy, toy_format

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.formats.format import CorpusFormat
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store

Done = Callable[..., str]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with toy_format():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "paints"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.toy").write_text("p1: Blue paint\np2: Red paint\n")
    (folder / "queries.toy").write_text("q1: something blue\nq2: any paint\n")
    (folder / "qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\tp1\t1\nq2\tp2\t2\n")
    return folder


def test_a_folder_is_imported_with_its_queries_and_judgements(folder: Path, done: Done, tmp_path: Path) -> None:
    done("import_corpus", "--store", tmp_path / "store", "--source", folder, "--filters", "line", "int64")
    store = Store(str(tmp_path / "store"))
    corpus = Corpus.open(store)
    assert [(p.id, p.text, p.metadata_json) for p in corpus.passages([0, 1])] == [
        ("p1", "Blue paint", '{"line":1}'),
        ("p2", "Red paint", '{"line":2}'),
    ]
    assert corpus.generations[0].config["format"] == "toy"
    queries = Queries.open(store, "paints")
    assert queries.split("dev") == (["q1", "q2"], ["something blue", "any paint"])
    assert [tuple(row.values()) for row in queries.qrels("dev").to_pylist()] == [("q1", "p1", 1), ("q2", "p2", 2)]


def test_files_of_any_name_are_detected_by_their_ending(folder: Path, done: Done, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "x.toy.gz").write_bytes(gzip.compress((folder / "corpus.toy").read_bytes()))
    done("import_corpus", "--store", store, "--source", tmp_path / "x.toy.gz")
    done("import_queries", "--store", store, "--source", folder / "queries.toy", "--queries", "asked")
    assert Corpus.open(Store(str(store))).num_rows == 2
    assert Queries.open(Store(str(store)), "asked").table["id"].to_pylist() == ["q1", "q2"]


def test_bad_input_is_refused_with_its_line_and_the_known_formats(
    folder: Path, done: Done, refused: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "corpus.toy").rename(folder / "other.toy")
    (folder / "corpus.toy").write_text("p1: Blue paint\nRed paint\n")
    command = ("import_corpus", "--store", tmp_path / "store", "--source")
    assert "corpus.toy:2: found the line 'Red paint', expected ID: TEXT; fix the line" in refused(*command, folder)
    assert "expected ID: TEXT" in refused(*command, folder / "corpus.toy")
    line = refused(*command, folder / "corpus.toy", "--text", "a")
    assert "found the ending .toy, expected .csv[.gz], .tsv[.gz]" in line
    assert ".toy[.gz]" not in line
    (tmp_path / "none").mkdir()
    assert "kilt, documents, toy; name the file" in refused(*command, tmp_path / "none")
    (tmp_path / "a.doc").write_text("x")
    assert ".toy[.gz]" in refused(*command, tmp_path / "a.doc")
    monkeypatch.setattr(Toy, "read_queries", CorpusFormat.read_queries)
    done(*command, folder / "other.toy")
    line = refused("import_queries", "--store", tmp_path / "store", "--source", folder / "queries.toy")
    assert "found the format toy, which has no queries; name another format" in line
