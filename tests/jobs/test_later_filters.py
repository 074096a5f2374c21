"""Filters that an existing corpus gets without a new import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from samples import write_lines

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter, filter_columns
from riptide.indexing.store.store import Store
from riptide.serve.release.renewal import describe_generations

Done = Callable[..., str]


def test_a_corpus_gets_filters_after_its_import(done: Done, tmp_path: Path) -> None:
    """As if they had been given at import, for passages before and after; rows, vectors and indexes are not changed."""
    at = ("--store", tmp_path / "s")
    (tmp_path / "a.csv").write_text("id,text,year,open\na,x,2020,true\nb,y,,\nc,z,1999,FALSE\n")
    write_lines(tmp_path / "b.jsonl", [{"id": "d", "text": "w", "metadata": {"year": 2021, "tags": ["u", "v"]}}])
    (tmp_path / "gone").write_text("b\n")
    write_lines(tmp_path / "c.jsonl", [{"id": "e", "text": "v", "year": 2020, "tags": "u"}])
    done("import_corpus", *at, "--source", tmp_path / "a.csv", "--part-size", 2)
    done("build_bm25", *at)
    done("import_corpus", *at, "--source", tmp_path / "b.jsonl", "--append")
    filters = ("--filters", "year", "int64", "open", "bool", "tags", "list[string]")
    assert "from the metadata of 4 passages" in done("import_corpus", *at, *filters, "--plan")
    assert "corpus/g0002: filters year (int64), open (bool), tags (list[string])" in done(
        "import_corpus", *at, *filters
    )
    assert "nothing to make" in done("import_corpus", *at, *filters, "--plan")
    lines = describe_generations(Store(str(tmp_path / "s")), ["corpus/g0001", "corpus/g0002"])
    assert lines == ["corpus: g0001 to g0002, 1 passage added, 0 deleted, other filters"]
    assert "corpus/g0002: filters" in done("import_corpus", *at, *filters)
    done("import_corpus", *at, "--delete", tmp_path / "gone")
    done("import_corpus", *at, "--source", tmp_path / "c.jsonl", "--append")
    corpus = Corpus.open(Store(str(tmp_path / "s")))
    assert (corpus.num_rows, len(corpus.generations)) == (5, 5)
    columns = filter_columns(corpus)
    for text, rows in (
        ("year >= 2020", [0, 3, 4]),
        ("year = null or open = false", [2]),
        ("tags = u", [3, 4]),
        ("not tags = u", [0, 2]),
    ):
        assert Filter.parse(text, columns).rows(corpus).tolist() == rows
    done("build_bm25", *at)
    assert "1 hits" in done("search", *at, "--mode", "bm25", "--query", "v x", "--filter", "year = 2020 and tags = u")
    done("import_corpus", *at, "--filters", "year", "float64")  # in place of the earlier ones
    assert filter_columns(Corpus.open(Store(str(tmp_path / "s")))) == {"year": pa.float64()}


def test_filters_that_do_not_fit_an_existing_corpus_are_refused(
    done: Done, refused: Callable[..., str], tmp_path: Path
) -> None:
    at = ("--store", tmp_path / "s")
    assert "has no corpus yet" in refused("import_corpus", *at, "--filters", "year", "int64")
    for unused in (("--append",), ("--limit", 3), ("--split-words", 9)):
        line = refused("import_corpus", *at, "--filters", "year", "int64", *unused)
        assert f"{unused[0]} with --filters: expected --source PATH, which it is for" in line
    source = write_lines(
        tmp_path / "a.jsonl", [{"id": "a", "text": "x", "year": 1}, {"id": "b", "text": "x", "year": "?"}]
    )
    done("import_corpus", *at, "--source", source)
    line = refused("import_corpus", *at, "--filters", "year", "int64")
    assert "passage 'b': found year '?' (str), expected int64, as its filter says" in line
    line = refused("import_corpus", *at, "--filters", "yaer", "int64")
    assert "found no passage with a value in the metadata field 'yaer', expected one of the fields year" in line
    assert "corpus/g0000: 2 passages" in done("import_corpus", *at, "--source", source)  # nothing is left behind


def test_the_import_of_a_corpus_may_be_repeated_with_its_present_filters(
    done: Done, refused: Callable[..., str], tmp_path: Path
) -> None:
    at = ("--store", tmp_path / "s")
    source = ("--source", write_lines(tmp_path / "a.jsonl", [{"id": "a", "text": "x", "year": 1}]))
    done("import_corpus", *at, *source, "--filters", "year", "int64")
    done("import_corpus", *at, "--filters", "year", "float64")
    for kind in ("int64", "float64"):
        assert "corpus/g0001" in done("import_corpus", *at, *source, "--filters", "year", kind)
    line = refused("import_corpus", *at, *source, "--filters", "year", "bool")
    assert "corpus/g0001 has the filters {'year': 'float64'}; leave them out, or first run the import" in line
