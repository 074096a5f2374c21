"""Query sets in the store: splits in the order of the file, judgements, and the effect of a limit."""

from pathlib import Path

import pytest
from raw_files import jsonl, write
from small_stores import build_corpus

from riptide.base.errors import InputError
from riptide.indexing.formats.sources import detect_query_source
from riptide.indexing.queries.queries import QueryImportOptions, import_queries
from riptide.indexing.store.store import Store

HEADER = "query-id\tcorpus-id\tscore\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    build_corpus(tmp_path / "s", [[["a", "b"]], [["c"]]], {1: [1]})
    return Store(str(tmp_path / "s"))


def folder(tmp_path: Path, **qrels: str) -> Path:
    docs = [{"_id": f"q{number}", "text": f"question {number}"} for number in range(4)]
    jsonl(tmp_path / "asked/queries.jsonl", docs)
    for split, rows in qrels.items():
        write(tmp_path / f"asked/qrels/{split}.tsv", HEADER + rows)
    return tmp_path / "asked"


def test_a_split_is_what_its_qrels_judge_in_the_order_of_the_file(tmp_path: Path, store: Store) -> None:
    source = folder(tmp_path, test="q3\ta\t1\nq0\tc\t2\nq3\tc\t0\n", dev="q1\ta\t1\n")
    queries = import_queries(store, detect_query_source(str(source)), "asked")
    assert queries.splits == ["dev", "test"]
    assert queries.split("test") == (["q0", "q3"], ["question 0", "question 3"])
    assert queries.split("test", 1).ids == ["q0"]
    assert queries.split("all").ids == ["q0", "q1", "q2", "q3"]
    assert queries.qrels("test").to_pylist() == [
        {"query_id": "q3", "corpus_id": "a", "score": 1},
        {"query_id": "q0", "corpus_id": "c", "score": 2},
        {"query_id": "q3", "corpus_id": "c", "score": 0},
    ]
    for call in (queries.split, queries.qrels):
        with pytest.raises(InputError, match=r"no split 'train' with qrels; it has dev, test \(and all"):
            call("train")


def test_a_deleted_passage_is_not_known(tmp_path: Path, store: Store) -> None:
    source = folder(tmp_path, test="q0\ta\t1\nq1\tb\t1\nq2\tb\t1\n")
    with pytest.raises(InputError, match=r"test\.tsv:3: judges passage 'b'.*and 1 more lines like it"):
        import_queries(store, detect_query_source(str(source)), "asked")
    assert store.names("queries") == store.incomplete_keys() == []


def test_a_finished_set_is_found_even_when_a_judged_passage_is_gone_since(tmp_path: Path) -> None:
    build_corpus(tmp_path / "s", [[["a", "b"]]], {})
    store = Store(str(tmp_path / "s"))
    source = detect_query_source(str(folder(tmp_path, test="q0\tb\t1\n")))
    import_queries(store, source, "asked")
    build_corpus(tmp_path / "s", [[["a", "b"]], [["c"]]], {1: [1]})
    assert import_queries(store, source, "asked").qrels("test").num_rows == 1


def test_with_a_limit_judgements_of_what_is_left_out_are_left_out(tmp_path: Path, store: Store) -> None:
    source = detect_query_source(str(folder(tmp_path, test="q0\ta\t1\nq3\ta\t1\n", dev="q3\ta\t1\n")))
    queries = import_queries(store, source, "two", QueryImportOptions(limit=2))
    assert queries.split("all").ids == ["q0", "q1"]
    assert queries.qrels("test")["query_id"].to_pylist() == ["q0"]
    assert queries.splits == ["test"]  # of dev nothing is left


def test_a_name_may_be_left_out_while_there_is_one(tmp_path: Path, store: Store) -> None:
    from riptide.indexing.queries.queries import Queries

    with pytest.raises(InputError, match="there is no such artifact"):
        Queries.open(store)
    source = detect_query_source(str(folder(tmp_path)))
    import_queries(store, source, "one")
    assert Queries.open(store).artifact.key == "queries/one"
    import_queries(store, source, "two")
    with pytest.raises(InputError, match="several queries: one, two; say which with parameter queries NAME"):
        Queries.open(store)
