"""Further question sets over one corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import Judgement, files_of, make_queries, write_lines

from indexing.queries import Queries
from indexing.store import Store

Done = Callable[..., str]


def question_folder(folder: Path, queries: list[dict], judged: list[Judgement]) -> Path:
    """A BEIR folder without a corpus."""
    write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir(exist_ok=True)
    rows = "".join(f"{query}\t{passage}\t{grade}\n" for query, passage, grade in judged)
    (folder / "qrels/dev.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    return folder


@pytest.fixture
def asked(world) -> tuple[list[dict], list[Judgement]]:
    return make_queries(world.passages, 8, seed=5)


def test_a_folder_and_files_of_each_form(tmp_path: Path, world, done: Done, asked) -> None:
    queries, judged = asked
    at = ("import_queries", "--store", world.store)
    folder = question_folder(tmp_path / "more", queries, judged)
    assert f"{world.store}/queries/more: 8 queries (dev)" in done(*at, "--source", folder)
    (tmp_path / "dev.tsv").write_text("1\twho?\n2\twhy?\n")
    assert "queries/marco: 2 queries (no qrels)" in done(*at, "--source", tmp_path / "dev.tsv", "--queries", "marco")
    (tmp_path / "nq.qa.csv").write_text("who wrote it\t['Ann', \"O'Hara\"]\n")
    done(*at, "--source", tmp_path / "nq.qa.csv", "--queries", "nq")
    task = {"id": "k1", "input": "where", "output": [{"answer": "there", "provenance": [{"wikipedia_id": "12"}]}]}
    write_lines(tmp_path / "fever.jsonl", [task])
    done(*at, "--source", tmp_path / "fever.jsonl")

    store = Store(str(world.store))
    assert store.names("queries") == ["fever", "marco", "more", "nq", "tiny"]
    assert Queries.open(store, "more").split("dev") == ([q["_id"] for q in queries], [q["text"] for q in queries])
    assert Queries.open(store, "marco").split("all") == (["1", "2"], ["who?", "why?"])
    assert json.loads(Queries.open(store, "nq").table["metadata"][0].as_py()) == {"answers": ["Ann", "O'Hara"]}
    assert json.loads(Queries.open(store, "fever").table["metadata"][0].as_py()) == {
        "answers": ["there"],
        "provenance": [["12"]],
    }


def test_a_set_is_found_done_and_another_of_its_name_is_refused(
    tmp_path: Path, world, done: Done, refused, asked
) -> None:
    queries, judged = asked
    command = (
        "import_queries",
        "--store",
        world.store,
        "--source",
        question_folder(tmp_path / "more", queries, judged),
    )
    done(*command)
    before = files_of(world.store, but=())
    done(*command)
    question_folder(tmp_path / "more", queries[:5], judged[:5])
    line = refused(*command)
    assert f"{world.store}/queries/more was imported otherwise (source" in line
    assert files_of(world.store, but=()) == before


def test_limit_names_the_set_and_plan_makes_none(tmp_path: Path, world, done: Done, asked) -> None:
    queries, judged = asked
    command = (
        "import_queries",
        "--store",
        world.store,
        "--source",
        question_folder(tmp_path / "more", queries, judged),
    )
    before = files_of(world.store, but=())
    assert "splits with qrels: dev" in done(*command, "--plan")
    assert files_of(world.store, but=()) == before
    done(*command, "--limit", 3)
    limited = Queries.open(Store(str(world.store)), "more-limit3")
    assert limited.split("dev").ids == limited.split("all").ids == ["q0", "q1", "q2"]


def test_bad_input_is_named_leaves_nothing_and_can_be_mended(tmp_path: Path, world, done: Done, refused, asked) -> None:
    queries, judged = asked
    before = files_of(world.store, but=())
    folder = tmp_path / "more"
    command = ("import_queries", "--store", world.store, "--source", folder)
    bad = [
        (queries, [*judged[:2], ("q0", "nobody", 1)], "qrels/dev.tsv:4: judges passage 'nobody'"),
        (queries, [("nobody", "p1", 1), *judged], "qrels/dev.tsv:2: judges query 'nobody'"),
        ([*queries, queries[2]], judged, "query id 'q2' comes a second time (as query 9, first as 3)"),
        ([*queries, {"_id": "x"}], judged, "queries.jsonl:9: found no text"),
        ([*queries, {"text": "x"}], judged, "queries.jsonl:9: found no _id"),
        ([], judged, "queries.jsonl: found no rows"),
        (queries, [], "qrels/dev.tsv: found no rows"),
    ]
    for some_queries, some_judged, expected in bad:
        question_folder(folder, some_queries, some_judged)
        assert expected in refused(*command)
        assert files_of(world.store, but=()) == before
    assert f"{tmp_path}/none: found nothing" in refused(*command[:-1], tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "found no queries" in refused(*command[:-1], tmp_path / "empty")
    question_folder(folder, queries, judged)
    assert "name 'a b'" in refused(*command, "--queries", "a b")
    done(*command)
    assert Queries.open(Store(str(world.store)), "more").splits == ["dev"]


def test_without_a_corpus_there_is_nothing_to_ask(tmp_path: Path, refused, asked) -> None:
    folder = question_folder(tmp_path / "more", *asked)
    line = refused("import_queries", "--store", tmp_path / "none", "--source", folder)
    assert f"{tmp_path}/none: there is no store here" in line
    assert not (tmp_path / "none").exists()
