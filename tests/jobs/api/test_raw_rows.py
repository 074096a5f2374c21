"""Rows of Python as the source of an import: every library makes the same source, and nothing bad is half imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from samples import files_of

from riptide import Store
from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.work.local_runner import LocalRunner

ROWS = [
    {"number": 7, "head": "Sails", "body": "Hoist.", "year": 1901, "tags": ["a", "b"]},
    {"number": 8, "head": None, "body": "Reef.", "year": 1902, "tags": []},
    {"number": 9, "head": "Ropes", "body": "Coil.", "year": None, "tags": ["b"]},
]
COLUMNS = {"id": "number", "title": "head", "text": "body"}
PASSAGES = [
    ("7", "Sails", "Hoist.", '{"year":1901,"tags":["a","b"]}'),
    ("8", "", "Reef.", '{"year":1902,"tags":[]}'),
    ("9", "Ropes", "Coil.", '{"tags":["b"]}'),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def passages(corpus: Corpus) -> list[tuple]:
    return [tuple(passage)[1:5] for passage in corpus.passages(range(corpus.num_rows))]


def frame_with_an_index() -> pd.DataFrame:
    frame = pd.DataFrame(ROWS, index=["x", "y", "z"])
    frame["year"] = frame["year"].astype("Int64")
    return frame


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "generator": lambda: (row for row in ROWS),
    "pandas": frame_with_an_index,
    "polars": lambda: pl.DataFrame(ROWS),
    "lazy": lambda: pl.LazyFrame(ROWS),
    "pyarrow": lambda: pa.Table.from_pylist(ROWS),
    "chunks": lambda: pa.concat_tables(
        [pa.Table.from_pylist([row], pa.Table.from_pylist(ROWS).schema) for row in ROWS]
    ),
    "batch": lambda: pa.RecordBatch.from_pylist(ROWS),
    "reader": lambda: pa.Table.from_pylist(ROWS).to_reader(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_of_every_library_are_the_same_source(store: Store, kind: str, tmp_path: Path) -> None:
    """The second import, of the same rows as a list, finds that it is complete."""
    corpus = store.import_corpus(SOURCES[kind](), **COLUMNS, filters={"year": "int64"})
    assert passages(corpus) == PASSAGES
    [source] = store.open("corpus", "g0000").config["source"]
    assert source["file"].startswith("rows of a table ")
    assert source["file"].endswith(".parquet")
    before = files_of(Path(store.url), but=())
    assert store.import_corpus(ROWS, **COLUMNS, filters={"year": "int64"}).num_rows == 3
    assert files_of(Path(store.url), but=()) == before


def test_texts_of_pandas_and_categories(store: Store) -> None:
    """Missing texts of pandas are none, and a categorical column is one of its values."""
    frame = pd.DataFrame({"id": ["a", "b"], "title": ["T", None], "text": ["x", "y"], "kind": ["k", "l"]})
    frame["kind"] = frame["kind"].astype("category")
    assert passages(store.import_corpus(frame)) == [("a", "T", "x", '{"kind":"k"}'), ("b", "", "y", '{"kind":"l"}')]


def test_categories_of_polars(store: Store) -> None:
    """A column of categories is one of texts, inside of lists too."""
    kinds = pl.Series(["k", None], dtype=pl.Categorical)
    lists = pl.Series([["l"], []], dtype=pl.List(pl.Enum(["l"])))
    corpus = store.import_corpus(pl.DataFrame({"id": ["a", "b"], "text": ["x", "y"], "kind": kinds, "of": lists}))
    assert passages(corpus) == [("a", "", "x", '{"kind":"k","of":["l"]}'), ("b", "", "y", '{"of":[]}')]


def test_rows_of_other_columns_each_and_their_metadata(store: Store) -> None:
    """Objects of metadata may differ in fields and types; other columns are those of all rows."""
    rows = [
        {"_id": "a", "text": "x", "metadata": {"n": 1}},
        {"_id": "b", "text": "y", "metadata": {"n": "one", "deep": {"k": [1]}}, "title": "T"},
        {"_id": "c", "text": "z", "metadata": {}, "empty": {}},
    ]
    imported = passages(store.import_corpus(rows))
    assert [each[:3] for each in imported] == [("a", "", "x"), ("b", "T", "y"), ("c", "", "z")]
    assert [each[3] for each in imported] == ['{"n":1}', '{"n":"one","deep":{"k":[1]}}', ""]


def test_rows_are_appended_and_deleted(store: Store, tmp_path: Path) -> None:
    store.import_corpus(ROWS, **COLUMNS)
    corpus = store.import_corpus(pl.DataFrame([{"number": 10, "body": "Knot."}]), append=True)
    assert [each[0] for each in passages(corpus)] == ["7", "8", "9", "10"]
    (tmp_path / "ids").write_text("8\n")
    assert len(store.import_corpus(delete=tmp_path / "ids").deleted) == 1


def test_files_are_imported_as_the_job_does(store: Store, world: Any, tmp_path: Path) -> None:
    corpus = store.import_corpus(world.source, part_size=60)
    assert corpus.num_rows == 240
    assert files_of(Path(store.url) / "corpus") == files_of(world.store / "corpus")
    assert store.names("queries") == ["tiny"]
    source = tmp_path / "asked.csv"
    source.write_text(f"query,passage_id\n{world.queries[0]['text']},p3\n")
    assert store.import_queries(str(source)).artifact.key == "queries/asked"


def test_queries_are_rows_too(store: Store) -> None:
    store.import_corpus(ROWS, **COLUMNS)
    rows = [
        {"query_id": 1, "query": "how?", "passage_id": [7]},
        {"query_id": 1, "query": "how?", "passage_id": [8, 9]},
    ]
    queries = store.import_queries(rows, name="mine", split="dev")
    assert isinstance(queries, Queries)
    assert (queries.artifact.key, queries.splits) == ("queries/mine", ["dev"])
    assert queries.qrels("dev")["corpus_id"].to_pylist() == ["7", "8", "9"]
    with pytest.raises(
        InputError, match=r"^import_queries: name= is required with rows, which have no name of a file$"
    ):
        store.import_queries(rows)
    with pytest.raises(InputError, match=r"^rows of a table:1: judges passage '?12'?, which is not in the corpus"):
        store.import_queries([{"query": "how?", "passage_id": "12"}], name="other")
    assert store.names("queries") == ["mine"]


BAD: list[tuple[Any, dict, str]] = [
    (
        ROWS,
        {"text": "bdy"},
        "text=bdy: rows of a table has the columns number, head, body, year, tags; give one of these",
    ),
    (pd.DataFrame(ROWS), {"id": "n", "text": "body"}, "id=n: rows of a table has the columns number, head, body, "),
    (pl.DataFrame(ROWS).rename({"body": "b"}), {}, "rows of a table: found the columns number, head, b, year, tags, "),
    ([], {}, "rows of a table: found no rows, expected at least one"),
    (pl.DataFrame(), {}, "rows of a table: found no rows, expected at least one"),
    ([{"text": "x"}, {"text": 3}], {}, "rows of a table row 2: column text: "),
    ([{"text": "x"}, "y"], {}, "rows of a table row 2: found 'y', expected a dict of columns by name"),
    (["a.csv", "b.csv"], {}, "source: found a list with the path a.csv, expected one path: a file or a folder"),
    (7, {}, "source: found int, expected a path, an iterable of dicts, or a table of pandas, polars or pyarrow"),
    ({"text": ["x"]}, {}, "source: found dict, expected a path, "),
    (pd.DataFrame({"text": ["x", 3]}), {}, "rows of a table: "),
    (pd.DataFrame([["x", "y"]], columns=["text", "text"]), {}, "rows of a table: found two columns text, expected one"),
    (pd.DataFrame([["x", "y"]], columns=["1", 1]), {}, "rows of a table: found two columns 1, expected one"),
    (
        pa.table([pa.array(["x"]), pa.array(["y"])], names=["text", "text"]),
        {},
        "rows of a table: found two columns text, expected one of each name; rename or drop one",
    ),
    (
        pa.table({"text": pa.array(["x"], pa.string_view()).dictionary_encode()}),
        {},
        "rows of a table: column text: Function 'array_take' has no kernel",
    ),
    ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}], {}, "rows of a table"),
    ([{"id": "a", "text": "x"}, {"id": "b"}], {}, "rows of a table row 2: found no text, "),
]


@pytest.mark.parametrize(("source", "columns", "expected"), BAD, ids=range(len(BAD)))
def test_bad_rows_are_one_line_and_leave_nothing(store: Store, source: Any, columns: dict, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        store.import_corpus(source, **columns)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)
    assert "/tmp" not in str(caught.value)
    assert store.keys() == []
    store.import_corpus([{"text": "the corrected rows"}])


def test_ctrl_c_leaves_parts_that_the_same_call_resumes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": f"p{number}", "text": f"text {number}"} for number in range(60)]
    original = LocalRunner.run

    def run(runner: LocalRunner, *arguments: Any, **options: Any) -> Iterator[Any]:
        for number, result in enumerate(original(runner, *arguments, **options), 1):
            yield result
            if number == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalRunner, "run", run)
        with pytest.raises(KeyboardInterrupt) as caught:
            store.import_corpus(iter(rows), part_size=10)
    assert any("again" in note for note in caught.value.__notes__)
    assert store.incomplete_keys() == ["corpus/g0000"]
    records = {path: path.read_bytes() for path in Path(store.url).rglob("part-*.json")}
    assert records
    with pytest.raises(InputError, match="rows of a table"):
        store.import_corpus(rows[:50], part_size=10)
    assert store.import_corpus(iter(rows), part_size=10).num_rows == 60
    assert {path: path.read_bytes() for path in records} == records
    whole = Store(str(tmp_path / "whole"))
    whole.import_corpus(rows, part_size=10)
    made, expected = (files_of(Path(each.url), but=("provenance.json",)) for each in (store, whole))
    parts = [path for path in expected if path.endswith(".arrow")]  # the records name the temporary folders
    assert len(parts) >= 6
    assert {path: made[path] for path in parts} == {path: expected[path] for path in parts}


def test_warnings_name_the_rows_and_no_temporary_file(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.import_corpus(ROWS, **COLUMNS)
    capsys.readouterr()
    store.import_queries([{"id": "q1", "query": "who?"}], name="mine")
    assert capsys.readouterr().err.startswith("warning: no judgements in rows of a table; ")


def test_a_value_that_contains_itself_is_refused(store: Store) -> None:
    """pyarrow would overflow the stack of the process."""
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    rows = [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}]
    for name in ("kind", "metadata"):
        broken = [rows[0] | {name: {}}, rows[1] | {name: {"again": cycle}}]
        for source in (broken, pd.DataFrame(broken)):
            with pytest.raises(InputError) as error:
                store.import_corpus(source)
            assert str(error.value) == (
                f"rows of a table row 2: column {name}: expected up to 100 levels of lists and dicts, found more, or a "
                "list or dict that contains itself"
            )
    with pytest.raises(InputError, match=r"^import_corpus: metadata: expected up to 100 levels of lists and dicts"):
        store.import_corpus(rows, metadata=cycle)
    assert not Path(store.url).exists()


def test_metadata_may_have_values_of_other_libraries(store: Store) -> None:
    metadata = {"day": date(2020, 1, 3), "count": np.int64(3), "sizes": np.array([1.5, 2.5])}
    corpus = store.import_corpus([{"id": "a", "text": "x", "metadata": metadata}])
    assert corpus["a"].metadata == {"day": "2020-01-03", "count": 3, "sizes": [1.5, 2.5]}


def test_an_import_says_what_it_took_and_a_second_one_how_to_begin_again(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.import_corpus(ROWS, text="body", filters={"year": "int64"}, drop_duplicates=True)
    assert capsys.readouterr() == (
        "",
        "imported 3 passages: id = a hash of title and text, title = none, text = body, metadata = number, head, year, "
        "tags; filters = year (int64)\n",
    )
    with pytest.raises(InputError) as error:
        store.import_corpus(ROWS, **COLUMNS)
    assert str(error.value).endswith(
        "; append to it, import into another store, or remove it first: store.remove('corpus')"
    )
    store.build_bm25()
    with pytest.raises(InputError, match=r"corpus is needed by bm25/bm25/g0000: .*, or give with_dependents=, which"):
        store.remove("corpus")
    assert store.remove("corpus", with_dependents=True) > 0
    capsys.readouterr()
    assert passages(store.import_corpus(ROWS, **COLUMNS)) == PASSAGES
    line = "imported 3 passages: id = number, title = head, text = body, metadata = year, tags\n"
    assert capsys.readouterr() == ("", line)
    store.import_corpus(ROWS, **COLUMNS)
    assert capsys.readouterr() == ("", ""), "nothing was imported again"
    with pytest.raises(InputError, match="no such artifact"):
        store.remove("nothing")


def test_judgements_are_a_dict_a_table_or_a_file(store: Store, tmp_path: Path) -> None:
    store.import_corpus([{"id": id, "text": id} for id in ("7", 'a "b"\tc')])
    queries = [{"id": "q 1", "query": "who?"}, {"id": "q2", "query": "why?"}]
    rows = [("q 1", "7", 2), ("q 1", 'a "b"\tc', 0), ("q2", "7", 1)]
    (tmp_path / "a.qrels").write_text("q2\t0\t7\t1\n")
    frame = pd.DataFrame(rows, columns=["query_id", "corpus_id", "score"])
    given = [{"q 1": {7: 2, 'a "b"\tc': 0}, "q2": {"7": 1}}, frame, pl.DataFrame(frame), frame.to_dict("records")]
    for number, qrels in enumerate(given):
        made = store.import_queries(queries, name=f"n{number}", qrels=qrels, split="dev")
        assert [tuple(row.values()) for row in made.qrels("dev").to_pylist()] == rows
        assert store.import_queries(queries, name=f"n{number}", qrels=qrels, split="dev").splits == ["dev"]
    assert len(store.import_queries(queries, name="file", qrels=tmp_path / "a.qrels").qrels("test")) == 1
    for qrels, message in [
        (frame.rename(columns={"score": "grade"}), "found the columns query_id, corpus_id, grade, expected score too"),
        ({"q2": {"8": 1}}, r"^rows of judgements:1: judges passage '8', .* leave such judgements out by skip_unknown"),
        ({"q2": {"7": 1.5}}, r"^rows of judgements:1: found score '1\.5', expected an integer"),
        ({"q2": {"7\n": 1}}, r"^rows of judgements row 1: found \('q2', '7\\n', 1\), expected two ids of one line"),
        ({}, "rows of judgements: found no rows"),
        (7, "found int, expected"),
    ]:
        with pytest.raises(InputError, match=message):
            store.import_queries(queries, name="bad", qrels=qrels)
    assert "bad" not in store.names("queries")
