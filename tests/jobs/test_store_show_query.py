"""store show runs/NAME --query-id: one query's hits and judgements, of the artifacts that the run pins."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from samples import make_passages, write_beir, write_lines

from riptide.indexing.exact import Hits
from riptide.indexing.search.runs import hits_table, write_parquet
from riptide.indexing.store.sealed_json import ArtifactReference
from riptide.indexing.store.store import Store

Done = Callable[..., str]
PASSAGES = [
    {"_id": "a", "title": "Stoker", "text": "Bram Stoker wrote Dracula."},
    {"_id": "b", "title": "Shelley", "text": "Mary Shelley wrote Frankenstein."},
    {"_id": "c", "title": "", "text": "Nothing of that kind."},
    {"_id": "d", "title": "Dracula", "text": "A novel of 1897."},
    {"_id": "e", "title": "Emma", "text": "A novel of 1815."},
]
JUDGED = [("q1", "d", 2), ("q1", "b", 0), ("q1", "e", 1), ("q1", "c", 0), ("q2", "a", 1)]
HITS = {"q1": [(0, 3.5), (1, 2.5), (3, 1.25)], "q2": []}  # rows and scores


@pytest.fixture
def store(tmp_path: Path, done: Done) -> Path:
    """Five passages, two queries and a run that was written by hand."""
    queries = [{"_id": "q1", "text": "Who wrote\tDracula?"}, {"_id": "q2", "text": "zzz"}, {"_id": "q3", "text": "y"}]
    source = write_beir(tmp_path / "tiny", PASSAGES, queries, {"test": JUDGED, "dev": [("q3", "e", 1)]})
    at = ("--store", tmp_path / "store")
    done("import_corpus", *at, "--source", source)
    done("import_queries", *at, "--source", source)
    commit_run(tmp_path / "store", "test")
    return tmp_path / "store"


def commit_run(folder: Path, split: str) -> None:
    store = Store(str(folder))
    inputs = {"queries": store.open("queries", "tiny"), "corpus": store.generations("corpus")[-1]}
    rows = np.array([[row for row, _ in hits] + [-1] * (3 - len(hits)) for hits in HITS.values()])
    scores = np.array([[s for _, s in hits] + [-np.inf] * (3 - len(hits)) for hits in HITS.values()], np.float32)
    names = np.array([*(passage["_id"] for passage in PASSAGES), ""], object)
    table = hits_table([*HITS], Hits(scores, rows), names[rows])
    config = {"source": "exact:enc", "split": split, "limit": None, "k": 3}
    with store.create("runs", f"hand-{split}", inputs=inputs, config=config) as draft:
        draft.commit("part-00000", ".parquet", lambda path: write_parquet(table, path), rows=len(table))


def test_hits_judgements_and_missing_passages(store: Path, done: Done) -> None:
    ideal = 2 + 1 / math.log2(3)
    ndcg = (2 / math.log2(4)) / ideal
    assert done("store", "show", "runs/hand-test", "--query-id", "q1", "--k", 2, "--store", store).splitlines() == [
        "q1  Who wrote Dracula?",
        f"runs/hand-test: 3 hits in exact:enc, split test, nDCG@10 {ndcg:.4f}, RR@10 {1 / 3:.4f}",
        "",
        "rank  score  relevance  id  title",
        "   1    3.5          -  a   Stoker",
        "      Bram Stoker **wrote** **Dracula**.",
        "   2    2.5          0  b   Shelley",
        "      Mary Shelley **wrote** Frankenstein.",
        "",
        "judged, below rank 2:",
        "rank  score  relevance  id  title",
        "   3   1.25          2  d   Dracula",
        "      A novel of 1897.",
        "",
        "missing from the run:",
        "rank  score  relevance  id  title",
        "   -      -          1  e   Emma",
        "      A novel of 1815.",
        "",
        "1 more judged passages are missing, with relevance 0 or less",
    ]


def test_a_query_without_hits_and_a_run_of_all_queries(store: Path, done: Done) -> None:
    out = done("store", "show", "runs/hand-test", "--query-id", "q2", "--store", store)
    assert "0 hits in exact:enc, split test, nDCG@10 0.0000, RR@10 0.0000" in out
    assert "   -      -          1  a   Stoker\n" in out
    commit_run(store, "all")
    found = done("store", "show", "runs/hand-all", "--query-id", "q1", "--store", store)
    assert "   3   1.25          2  d   Dracula" in found
    assert "   -      -          1  e   Emma" in done(
        "store", "show", "runs/hand-all", "--query-id", "q3", "--store", store
    )


def test_a_later_generation_does_not_change_what_a_run_shows(store: Path, done: Done, tmp_path: Path) -> None:
    """The passage at row 3 is replaced by another one of its id, at row 5, and the best hit is deleted."""
    before = done("store", "show", "runs/hand-test", "--query-id", "q1", "--store", store)
    write_lines(tmp_path / "more/corpus.jsonl", [{"_id": "d", "title": "New", "text": "Another text."}])
    (tmp_path / "gone").write_text("a\nd\n")
    done("import_corpus", "--store", store, "--source", tmp_path / "more", "--append", "--delete", tmp_path / "gone")
    after = done("store", "show", "runs/hand-test", "--query-id", "q1", "--store", store)
    remark = "  2 of these hits have been deleted from the corpus since the run\n"
    assert remark in after
    assert after.replace(remark, "") == before


def test_another_corpus_or_query_set_gives_no_texts(store: Path, done: Done, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(store, kept)
    shutil.rmtree(store / "corpus")
    command = ("store", "show", "runs/hand-test", "--query-id", "q1", "--store", store)
    gone = done(*command)
    assert "the corpus is no longer in the store (corpus/g0000 was " in gone
    assert "   1    3.5          -  a   -\n   2    2.5          0  b   -\n" in gone
    source = write_beir(tmp_path / "other", make_passages(5))
    done("import_corpus", "--store", store, "--source", source)
    other = done(*command)
    assert "the corpus has changed since the run (corpus/g0000 was " in other
    assert "   1    3.5          -  a   -\n   2    2.5          0  b   -\n   3   1.25          2  d   -\n" in other
    assert not any(passage["text"] in other for passage in make_passages(5))
    assert "nDCG@10" in other

    shutil.rmtree(kept / "queries")
    out = done(*command[:-1], kept)
    assert out.splitlines()[0] == "q1  -"
    assert "queries/tiny is no longer in the store: the query's text and its judgements are unknown" in out
    assert "   1    3.5          -  a   Stoker\n      Bram Stoker wrote Dracula.\n" in out


def test_rows_of_a_run_that_the_corpus_contradicts_are_not_shown(store: Path, done: Done) -> None:
    """A run whose ids and rows do not belong together, over the very corpus that it pins."""
    opened = Store(str(store))
    corpus = opened.open("corpus", "g0000")
    inputs = {"queries": opened.open("queries", "tiny"), "corpus": ArtifactReference(corpus.key, corpus.fingerprint)}
    table = hits_table(
        ["q1"], Hits(np.array([[2.0, 1.0]], np.float32), np.array([[1, 9]])), np.array([["a", "b"]], object)
    )
    with opened.create(
        "runs", "odd", inputs=inputs, config={"source": "bm25", "split": "test", "limit": None}
    ) as draft:
        draft.commit("part-00000", ".parquet", lambda path: write_parquet(table, path), rows=2)
    out = done("store", "show", "runs/odd", "--query-id", "q1", "--store", store)
    assert "2 hits are not at their rows of the corpus (a is the first)" in out
    assert "Shelley" not in out


@pytest.mark.parametrize(
    ("case", "arguments", "answer"),
    [
        (
            "store show of a query that the run does not have",
            ["show", "runs/hand-test", "--query-id", "q9"],
            "runs/hand-test: no query 'q9'; it has q1, q2",
        ),
        (
            "store show --query-id of another artifact than a run",
            ["show", "corpus/g0000", "--query-id", "q1"],
            "show corpus/g0000 --query-id q1: expected show runs/NAME",
        ),
        (
            "store show --query-id of a run that is not there",
            ["show", "runs/none", "--query-id", "q1"],
            "/runs/none: there is no such artifact (complete runs: hand-test)",
        ),
        ("store gc with --query-id", ["gc", "--query-id", "q1"], "gc  --query-id q1: expected show runs/NAME"),
        (
            "store show --k without --query-id",
            ["show", "runs/hand-test", "--k", "3"],
            "show --k 3: only show with --query-id prints hits",
        ),
        (
            "store show --query-id with --limit",
            ["show", "runs/hand-test", "--query-id", "q1", "--limit", "3"],
            "--query-id with --limit 3: --k N sets the number of hits",
        ),
        (
            "store show --query-id of no hits",
            ["show", "runs/hand-test", "--query-id", "q1", "--k", "0"],
            "--k 0: expected at least 1",
        ),
    ],
)
def test_bad_input_is_one_line(store: Path, refused, documented, case: str, arguments: list[str], answer: str) -> None:
    line = refused("store", *arguments, "--store", store)
    assert " ".join(answer.split()) in line
    documented("Searching", case, line, 1)


def test_without_a_query_the_artifact_itself_is_shown(store: Path, done: Done) -> None:
    out = done("store", "show", "runs/hand-test", "--store", store)
    assert out.startswith(f"{store}/runs/hand-test\nfingerprint  ")
    assert "input        queries: queries/tiny " in out
