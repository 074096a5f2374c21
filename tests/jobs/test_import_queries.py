"""Further question sets over one corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from samples import Judgement, files_of, make_queries, write_beir, write_lines

from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store

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
    done(*at, "--source", tmp_path / "fever.jsonl", "--provenance", "none")

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
    assert done(*command, "--plan") == f"nothing to make: {world.store}/queries/more is complete\n"
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
    done(*command, "--limit", 3, "--queries", "three")
    limited = Queries.open(Store(str(world.store)), "three")
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
    assert "name 'a/b': expected a name without '/', as in queries/NAME" in refused(*command, "--queries", "a/b")
    done(*command)
    assert Queries.open(Store(str(world.store)), "more").splits == ["dev"]


def test_without_a_corpus_there_is_nothing_to_ask(tmp_path: Path, refused, asked) -> None:
    folder = question_folder(tmp_path / "more", *asked)
    line = refused("import_queries", "--store", tmp_path / "none", "--source", folder)
    assert f"{tmp_path}/none: there is no store here" in line
    assert not (tmp_path / "none").exists()


def test_held_out_queries_are_a_seeded_draw_of_the_judged_ones(tmp_path: Path, world, done: Done, asked) -> None:
    """Half of the queries move, with all their judgements; q7 has no relevant passage and stays."""
    queries, judged = asked
    judged = [*judged[:7], ("q7", judged[7][1], 0), *((query, judged[0][1], 2) for query, *_ in judged[1:4])]
    folder = question_folder(tmp_path / "more", queries, judged)
    command = ("import_queries", "--store", world.store, "--source", folder, "--hold-out-split", "dev")
    splits = {}
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        more = ("--queries", name, "--hold-out", 4, "--hold-out-seed", seed)
        assert f"queries/{name}: 8 queries (dev, held-out)" in done(*command, *more)
        made = Queries.open(Store(str(world.store)), name)
        splits[name] = {split: made.qrels(split).to_pylist() for split in made.splits}
        question_folder(folder, queries[::-1], judged[::-1])  # another order of the files, the same draw
    assert {*made.split("held-out").ids} | {*made.split("dev").ids} == {query["_id"] for query in queries}
    drawn = {name: {line["query_id"] for line in split["held-out"]} for name, split in splits.items()}
    assert drawn["one"] == drawn["two"] != drawn["three"]
    assert {len(ids) for ids in drawn.values()} == {4}
    for name, split in splits.items():
        assert "q7" not in drawn[name]
        assert not {line["query_id"] for line in split["dev"]} & drawn[name]
        every = {(line["query_id"], line["corpus_id"], line["score"]) for each in split.values() for line in each}
        assert every == {*judged}


@pytest.mark.parametrize(
    ("case", "more", "expected"),
    [
        ("as many held-out queries as the split has", ("--hold-out", 8), "--hold-out 8: the split 'dev' has 8 queries"),
        ("held-out queries of a split that is missing", ("--hold-out", 2, "--hold-out-split", "train"), "one of dev"),
        ("the split of held-out queries without their number", (), "--hold-out-split dev: found no --hold-out"),
        ("no held-out query", ("--hold-out", 0), "--hold-out 0: expected at least 1"),
    ],
)
def test_queries_that_cannot_be_held_out_are_refused(
    tmp_path: Path, world, done: Done, refused, documented: Callable[..., None], asked, case: str, more, expected: str
) -> None:
    folder = question_folder(tmp_path / "more", *asked)
    command = ("import_queries", "--store", world.store, "--source", folder)
    line = refused(*command, "--hold-out-split", "dev", *more)
    assert expected in line
    documented("Importing", case, line, 1)
    done(*command)
    assert "was imported otherwise (--hold-out unset, now 2" in refused(*command, "--hold-out", 2)


def test_an_import_of_a_corpus_holds_out_queries_of_its_folder(tmp_path: Path, done: Done, refused) -> None:
    passages = [{"_id": f"p{number}", "text": f"text {number}"} for number in range(6)]
    queries = [{"_id": f"q{number}", "text": f"text {number}"} for number in range(6)]
    source = write_beir(tmp_path / "raw", passages, queries, {"train": [(f"q{n}", f"p{n}", 1) for n in range(6)]})
    out = done("import_corpus", "--store", tmp_path / "s", "--source", source, "--hold-out", 2)
    assert "6 queries (held-out, train)" in out
    made = Queries.open(Store(str(tmp_path / "s")))
    assert (len(made.split("held-out").ids), len(made.split("train").ids)) == (2, 4)
    bare = write_beir(tmp_path / "bare", passages)
    line = refused("import_corpus", "--store", tmp_path / "t", "--source", bare, "--hold-out", 2)
    assert "--hold-out 2: expected queries in the folder of the source, found none" in line


QRELS = "q0 0 p1 2\nq1 0 p2 1\nq1 0 p3 0\n"


def test_judgements_in_a_file_of_their_own(tmp_path: Path, world, done: Done) -> None:
    """The same TREC file judges queries of every form, and replaces the judgements of the source."""
    rows = [{"_id": f"q{n}", "text": f"words {n}", "pid": "p9"} for n in range(2)]
    sources = {"csv": "csv", "jsonl": "jsonl", "beir": "jsonl", "parquet": "parquet"}
    for name in sources:
        (tmp_path / name).mkdir()
    (tmp_path / "csv/a.csv").write_text("_id,text,pid\n" + "".join(f"{r['_id']},{r['text']},p9\n" for r in rows))
    write_lines(tmp_path / "jsonl/a.jsonl", [{"qid": r["_id"], "query": r["text"]} for r in rows])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet/a.parquet")
    question_folder(tmp_path / "beir", rows, [("q0", "p9", 1)])
    (tmp_path / "trec.qrels").write_text(QRELS)
    for name in sources:
        source = tmp_path / name if name == "beir" else tmp_path / name / f"a.{sources[name]}"
        command = ("import_queries", "--store", world.store, "--source", source, "--queries", name)
        assert f"queries/{name}: 2 queries (fresh)" in done(
            *command, "--qrels", tmp_path / "trec.qrels", "--split", "fresh"
        )
        queries = Queries.open(Store(str(world.store)), name)
        assert [tuple(row.values()) for row in queries.qrels("fresh").to_pylist()] == [
            ("q0", "p1", 2),
            ("q1", "p2", 1),
            ("q1", "p3", 0),
        ], name
    assert "complete" in done(*command, "--qrels", tmp_path / "trec.qrels", "--split", "fresh", "--plan")


def test_unknown_judgements_are_refused_or_left_out_and_counted(
    tmp_path: Path, world, done: Done, refused, documented
) -> None:
    (tmp_path / "a.csv").write_text("query_id,query\nq0,what\nq1,why\n")
    (tmp_path / "a.qrels").write_text(QRELS + "q1 0 nobody 1\nq8 0 p1 1\nq9 0 p1 1\n")
    command = ("import_queries", "--store", world.store, "--source", tmp_path / "a.csv")
    command = (*command, "--qrels", tmp_path / "a.qrels")
    line = refused(*command)
    assert line == (
        f"error: {tmp_path}/a.qrels:5: judges query 'q8', which is not in the query file (and 1 more lines like it); "
        "add the query, remove the line, or leave such judgements out by --skip-unknown"
    )
    documented("Importing", "judgements of queries that are missing", line, 1)
    printed = done(*command, "--skip-unknown")
    assert "warning: left out 1 judgements of passages that the corpus lacks and 2 of queries that" in printed
    queries = Queries.open(Store(str(world.store)), "a")
    assert queries.artifact.notes["skipped_judgements"] == {"unknown_query": 2, "unknown_passage": 1}
    assert len(queries.qrels("test")) == 3
    assert "imported otherwise (--skip-unknown" in refused(*command)
    for arguments, expected in [
        (("--relevant", "query"), "--qrels: the judgements are in this file, expected no --relevant and no --score"),
        (("--qrels", tmp_path), f"--qrels {tmp_path}: found a folder, expected a file of judgements"),
        (("--qrels", tmp_path / "none"), f"{tmp_path}/none: found nothing"),
    ]:
        assert expected in refused(*command, "--queries", "b", *arguments)


def test_a_corpus_with_unknown_judgements_is_imported_without_them(tmp_path: Path, done: Done, refused) -> None:
    judged = {"test": [("q0", "p1", 1), ("q0", "p2", 1)]}
    write_beir(tmp_path / "more", [{"_id": "p1", "text": "words"}], [{"_id": "q0", "text": "x"}], judged)
    command = ("import_corpus", "--store", tmp_path / "s", "--source", tmp_path / "more")
    assert "judges passage 'p2'" in refused(*command)
    assert "left out 1 judgements of passages that the corpus lacks and 0 of" in done(*command, "--skip-unknown")
    assert "is complete" in done(*command, "--skip-unknown", "--plan")
