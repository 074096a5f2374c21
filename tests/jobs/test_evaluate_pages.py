"""KILT's R-precision of pages: values against a plain function over the task file, worked examples, bad input."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from samples import write_beir, write_lines

Done = Callable[..., str]
Ranking = Mapping[str, Sequence[str]]


def outputs(*sets: str) -> list[dict]:
    """Returns the outputs of a task: a provenance set of space-separated pages each; "": an answer without one."""
    return [
        {"answer": "a", "provenance": [{"wikipedia_id": page} for page in pages.split()]} if pages else {"answer": "a"}
        for pages in sets
    ]


def plain_r_precision(task: Mapping, hits: Sequence[str]) -> float:
    """Returns KILT's R-precision of the pages of hits, which are PAGE-PARAGRAPH, from a line of the task file."""
    pages: list[str] = []
    for hit in hits:
        page = hit.split("-")[0]
        if page not in pages:
            pages.append(page)
    best = 0.0
    for output in task["output"]:
        gold = {entry["wikipedia_id"] for entry in output.get("provenance", [])}
        if gold:
            best = max(best, sum(page in gold for page in pages[: len(gold)]) / len(gold))
    return best


@pytest.fixture
def kilt(tmp_path: Path, done: Done) -> Callable[[Sequence[Mapping], Ranking], tuple]:
    """Imports 12 pages of 15 paragraphs and a task file; returns the arguments that evaluate a run."""

    def prepare(tasks: Sequence[Mapping], ranking: Ranking) -> tuple:
        store = ("--store", tmp_path / "s")
        text = ["Title\n", *("A paragraph.\n" for _ in range(15))]
        pages = [{"wikipedia_id": str(n), "wikipedia_title": f"T{n}", "text": text} for n in range(10, 22)]
        done("import_corpus", *store, "--source", write_lines(tmp_path / "kilt_knowledgesource.json", pages))
        done("import_queries", *store, "--source", write_lines(tmp_path / "nq-dev.jsonl", tasks), "--queries", "nq")
        run = tmp_path / "r.trec"
        lines = [f"{q} Q0 {id} {n} {1 / n} x\n" for q, ids in ranking.items() for n, id in enumerate(ids, 1)]
        run.write_text("".join(lines))
        options = ("--queries", "nq", "--split", "all", "--metrics", "PageRprec", "--json", tmp_path / "e.json")
        return ("evaluate", *store, "--run", run, *options)

    return prepare


def values_of(file: Path) -> dict[str, float]:
    document = json.loads(file.read_text(encoding="utf-8"))
    [run] = document["per_query"].values()
    assert [*run] == ["PageRprec"]
    [mean] = document["mean"].values()
    assert mean["PageRprec"] == pytest.approx(sum(run["PageRprec"]) / document["num_queries"])
    return dict(zip(document["query_ids"], run["PageRprec"], strict=True))


def test_values_are_those_worked_out_by_hand(kilt, done: Done, tmp_path: Path, documented) -> None:
    tasks = {
        "one-page": (outputs("10"), ["10-3", "11-1"], 1),
        "second": (outputs("10"), ["11-1", "10-3"], 0),
        "two-pages": (outputs("10 11"), ["10-1", "10-2", "11-1"], 1),  # a page ranks by its first passage
        "one-of-two": (outputs("10 11"), ["10-1", "12-1", "11-1"], 1 / 2),
        "best-set": (outputs("15 16", "10 11 12", "", "17"), ["10-1", "12-1", "15-1"], 2 / 3),
        "page-named-twice": (outputs("10 10 11"), ["10-1", "11-1"], 1),
        "few-hits": (outputs("10 11 12 13"), ["12-1"], 1 / 4),
        "behind-a-long-page": (outputs("10 11"), [*(f"12-{n}" for n in range(1, 16)), "11-1", "10-1"], 1 / 2),
        "unknown-passage": (outputs("10"), ["99-1", "10-1"], 0),
        "no-hits": (outputs("10"), [], 0),
        "no-provenance": (outputs(""), ["10-1"], 0),
    }
    lines = [{"id": id, "input": "x", "output": output} for id, (output, _, _) in tasks.items()]
    out = done(*kilt(lines, {id: hits for id, (_, hits, _) in tasks.items()}))
    assert values_of(tmp_path / "e.json") == pytest.approx({id: value for id, (_, _, value) in tasks.items()})
    warning = "warning: 1 of the 11 queries of queries/nq have no provenance, and count as 0 in PageRprec"
    assert out.splitlines()[0] == warning
    documented("Evaluating", "PageRprec over some queries without provenance", warning, 0)


def test_values_are_those_of_a_plain_function(kilt, done: Done, tmp_path: Path) -> None:
    """600 queries, more than a block, with up to 40 hits and provenance sets of up to 4 pages."""
    draw = random.Random(3)
    pages = [str(page) for page in range(10, 22)]
    passages = [f"{page}-{n}" for page in pages for n in range(1, 16)]
    tasks, ranking = [], {}
    for number in range(600):
        sets = [" ".join(draw.choices(pages, k=draw.randint(0, 4))) for _ in range(draw.randint(1, 4))]
        tasks.append({"id": f"q{number}", "input": "x", "output": outputs(*sets)})
        first = draw.sample(passages, draw.randint(1, 40))
        ranking[f"q{number}"] = sorted(first, key=lambda id: id.split("-")[0]) if number % 2 else first
    done(*kilt(tasks, ranking))
    expected = {task["id"]: plain_r_precision(task, ranking[task["id"]]) for task in tasks}
    assert len(set(expected.values())) > 4
    assert values_of(tmp_path / "e.json") == pytest.approx(expected)


def test_bad_input_is_one_line(tmp_path: Path, done: Done, refused: Done, documented) -> None:
    """Passages of BEIR name no page. Queries have no provenance, or one that is not a list per output."""
    passages = [{"_id": "d0", "text": "x", "metadata": {"wikipedia_id": 12}}, {"_id": "d1", "text": "x"}]
    queries = [
        {"_id": "a", "text": "x", "metadata": {"provenance": [["12"]]}},
        {"_id": "b", "text": "x", "metadata": {"provenance": ["12"]}},
        {"_id": "c", "text": "x"},
    ]
    judged = {name: [(name, "d0", 1)] for name in "abc"}
    source = write_beir(tmp_path / "raw", passages, queries, judged)
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    run = tmp_path / "r.trec"
    run.write_text("".join(f"{query} Q0 d0 1 0.5 x\n" for query in "abc"))
    command = ("evaluate", "--store", tmp_path / "s", "--run", run, "--metrics", "PageRprec", "RR", "--split")
    done(*command, "a", "--json", tmp_path / "e.json")
    assert json.loads((tmp_path / "e.json").read_text())["mean"][str(run)] == {"PageRprec": 1, "RR": 1}
    line = refused(*command, "b")
    assert "query 'b' has the provenance ['12'], expected a list of page ids for each output" in line
    documented("Evaluating", "PageRprec over a query whose provenance is not a list per output", line, 1)
    line = refused(*command, "c")
    assert "--metrics PageRprec: no query of queries/raw has provenance" in line
    documented("Evaluating", "PageRprec over queries without provenance", line, 1)
    run.write_text("a Q0 d1 1 0.5 x\n")
    line = refused(*command, "a")
    assert "--metrics PageRprec: passage 'd1' names no page: its metadata has wikipedia_id None" in line
    documented("Evaluating", "PageRprec over passages without a page", line, 1)
