"""Queries and judgements from tables: rows of one query are joined, splits are named, contradictions refused."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_files import jsonl, write
from small_stores import build_corpus

from riptide.base.errors import InputError
from riptide.indexing.files.columns import QueryNames
from riptide.indexing.formats.parse import read_queries
from riptide.indexing.formats.sources import detect_query_source, detect_source
from riptide.indexing.queries.queries import QueryImportOptions, import_queries
from riptide.indexing.store.store import Store

ROWS = [
    {"query_id": "q1", "query": 'what, "is" it?', "passage_id": "a", "score": 2, "kind": "x"},
    {"query_id": "q2", "query": "who\nwas it?", "passage_id": "b", "score": 0, "kind": "y"},
    {"query_id": "q1", "query": 'what, "is" it?', "passage_id": "c", "score": 1, "kind": "x"},
]


def read(path: Path, names: QueryNames | None = None, split: str | None = None) -> tuple[list[dict], dict]:
    queries, qrels = read_queries(detect_query_source(str(path), names=names, split=split))
    return queries.to_pylist(), {
        split: [tuple(row.values())[:3] for row in table.to_pylist()] for split, table in qrels.items()
    }


def as_csv(rows: list[dict], delimiter: str = ",") -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def test_a_row_per_judgement_is_the_same_in_every_format(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    files = [
        write(tmp_path / "a.csv", as_csv(ROWS)),
        write(tmp_path / "a.tsv.gz", as_csv(ROWS, "\t")),
        jsonl(tmp_path / "a.jsonl", ROWS),
        tmp_path / "a.parquet",
    ]
    for file in files:
        queries, qrels = read(file)
        assert queries == [
            {"id": "q1", "text": 'what, "is" it?', "metadata": '{"kind":"x"}'},
            {"id": "q2", "text": "who\nwas it?", "metadata": '{"kind":"y"}'},
        ]
        assert qrels == {"test": [("q1", "a", 2), ("q2", "b", 0), ("q1", "c", 1)]}


def test_a_row_per_query_has_one_passage_or_several(tmp_path: Path) -> None:
    """Ids are hashes of the query, so that rows of the same query are joined; the same judgement counts once."""
    lists = [{"query": "x", "relevant": ["a", 7]}, {"query": "y", "relevant": "b c"}, {"query": "z", "relevant": None}]
    hashed = {name: hashlib.sha256(name.encode()).hexdigest()[:32] for name in "xyz"}
    queries, qrels = read(jsonl(tmp_path / "a.jsonl", lists))
    assert [query["id"] for query in queries] == list(hashed.values())
    assert qrels == {"test": [(hashed["x"], "a", 1), (hashed["x"], "7", 1), (hashed["y"], "b c", 1)]}
    text = 'query,relevant\nx,a 7\ny,"[""b c""]"\nz,\nx,a\nx,8\n'
    _, qrels = read(write(tmp_path / "a.csv", text), split="dev")
    assert qrels == {"dev": [*[(hashed["x"], p, 1) for p in "a7"], (hashed["y"], "b c", 1), (hashed["x"], "8", 1)]}


def test_columns_of_other_names(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "n,asked,answer,grade of it,id\n1,what?,a b,3,z\n")
    names = QueryNames(id="n", text="asked", relevant="answer", score="grade of it", metadata=())
    queries, qrels = read(file, names)
    assert (queries, qrels) == (
        [{"id": "1", "text": "what?", "metadata": ""}],
        {"test": [("1", "a", 3), ("1", "b", 3)]},
    )
    assert read(file, QueryNames(text="asked"))[1] == {}
    with pytest.raises(InputError, match=r"a\.csv: found the columns n, asked, .* expected one called query, question"):
        read(file)
    with pytest.raises(InputError, match=r"parameter relevant x: \S+a\.csv has the columns n, asked, answer"):
        read(file, QueryNames(text="asked", relevant="x"))
    with pytest.raises(InputError, match=r"parameter score grade of it: .* name the column of the relevant passages"):
        read(file, QueryNames(text="asked", score="grade of it"))
    beir = jsonl(tmp_path / "b.jsonl", [{"_id": "q", "text": "x"}])
    with pytest.raises(InputError, match=r"parameter split dev: .* has the format beir"):
        detect_query_source(str(beir), split="dev")


def test_splits_of_a_folder(tmp_path: Path) -> None:
    """Splits are named after files, with BEIR's qrels if tables have no judgements; two of one split are refused."""
    folder = tmp_path / "f"
    for name, id in (("queries.dev.csv", "q1"), ("queries.csv", "q2"), ("queries.a.b.csv.gz", "q1")):
        write(folder / name, f"qid,query,docid\n{id},text of {id},a\n")
    write(folder / "corpus.csv", "id,text\na,x\n")
    source = detect_source(str(folder))
    assert source.query_source == detect_query_source(str(folder))
    queries, qrels = read(folder)
    assert [query["id"] for query in queries] == ["q1", "q2"]
    assert qrels == {"a.b": [("q1", "a", 1)], "dev": [("q1", "a", 1)], "test": [("q2", "a", 1)]}
    write(folder / "qrels/test.tsv", "query-id\tcorpus-id\tscore\nq2\ta\t1\n")
    with pytest.raises(InputError, match=r"queries\.csv: found judgements of the split 'test', which \S+test\.tsv has"):
        detect_query_source(str(folder))
    write(folder / "queries.jsonl", '{"qid": 1, "query": "x"}\n')
    with pytest.raises(InputError, match=r"found queries\.a\.b\.csv\.gz and queries\.jsonl, expected one of them"):
        detect_query_source(str(folder))
    plain = tmp_path / "plain"
    write(plain / "queries.jsonl", '{"qid": "q2", "query": "x"}\n')
    write(plain / "qrels/test.tsv", "query-id\tcorpus-id\tscore\nq2\ta\t1\n")
    source = detect_query_source(str(plain))
    assert (source.format.name, source.qrels) == ("jsonl", {"test": str(plain / "qrels/test.tsv")})


def test_a_set_from_a_table_is_kept_and_resumed(tmp_path: Path) -> None:
    build_corpus(tmp_path / "s", [[["a", "b", "c"]]], {})
    store = Store(str(tmp_path / "s"))
    file = write(tmp_path / "queries.dev.csv", as_csv(ROWS))
    queries = import_queries(store, detect_query_source(str(file)), "x")
    assert queries.splits == ["dev"]
    assert queries.split("dev").ids == ["q1", "q2"]
    assert (
        import_queries(store, detect_query_source(str(file)), "x").artifact.fingerprint == queries.artifact.fingerprint
    )
    with pytest.raises(InputError, match=r"imported otherwise .*columns.score"):
        import_queries(store, detect_query_source(str(file), names=QueryNames(score="")), "x")
    bad = write(tmp_path / "a.csv", "query,relevant\nx,a\ny,z\n")
    with pytest.raises(InputError, match=r"a\.csv:3: judges passage 'z', which is not in the corpus"):
        import_queries(store, detect_query_source(str(bad)), "y")
    limited = import_queries(store, detect_query_source(str(file)), "one", QueryImportOptions(limit=1))
    assert limited.qrels("dev")["corpus_id"].to_pylist() == ["a", "c"]


BAD_TABLES = {
    "a query table with another text for the same id": ("q1,other,b,1,", "query 'q1' with the text 'other', expected"),
    "a query table with another score for the same passage": ("q1,what?,a,0,x", "the score 0 of passage 'a' for query"),
    "a query table with a score that is no integer": (
        "q3,who?,a,high,",
        "a.csv:3: found score 'high', expected an int",
    ),
    "a query table with a passage and no score": ("q3,who?,a,,", "a.csv:3: found no score, expected an integer"),
    "a query table with a score and no passage": ("q3,who?,,1,", "a.csv:3: found score 1 without a passage"),
    "a query table with other metadata for the same query": ("q1,what?,b,1,y", "query 'q1' with the metadata"),
    "a query table without a query id": (",who?,a,1,", "a.csv:3: found no query_id"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_of_queries_is_refused_with_its_line(
    tmp_path: Path, documented: Callable[..., None], case: str
) -> None:
    bad, expected = BAD_TABLES[case]
    file = write(tmp_path / "a.csv", f"query_id,query,passage_id,score,kind\nq1,what?,a,1,x\n{bad}\n")
    with pytest.raises(InputError) as error:
        read(file)
    assert f"{file}:3: found " in str(error.value)
    assert expected in str(error.value)
    if "parameter" not in str(error.value):
        documented("Importing", case, str(error.value), 1)


def test_a_query_twice_without_judgements_is_refused(tmp_path: Path, documented: Callable[..., None]) -> None:
    file = write(tmp_path / "a.csv", "query\nx\ny\nx\n")
    with pytest.raises(InputError, match=r"a\.csv:4: found the query 'x' a second time, expected it once") as error:
        read(file)
    documented("Importing", "a table without judgements with the same query twice", str(error.value), 1)
    assert [query["text"] for query in read(write(tmp_path / "b.csv", "query\nx\ny\n"))[0]] == ["x", "y"]


def test_columns_are_fields_of_nested_objects(tmp_path: Path) -> None:
    rows = [
        {"ask": {"key": "q1", "text": "what?", "by": "ann"}, "answer": {"doc": "a", "grade": 2}},
        {"ask": {"key": "q1", "text": "what?", "by": "ann"}, "answer": {"doc": "b", "grade": 1}},
    ]
    path = jsonl(tmp_path / "x.jsonl", rows)
    names = QueryNames("ask.key", "ask.text", "answer.doc", "answer.grade")
    queries, qrels = read(path, names)
    assert queries == [{"id": "q1", "text": "what?", "metadata": '{"ask":{"by":"ann"}}'}]
    assert qrels == {"test": [("q1", "a", 2), ("q1", "b", 1)]}
    with pytest.raises(InputError, match=r"parameter text ask\.txt: .* has the columns ask\.key, ask\.text, ask\.by, "):
        read(path, QueryNames(text="ask.txt"))
