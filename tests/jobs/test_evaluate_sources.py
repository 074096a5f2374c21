"""evaluate --source: the names and the depths of the runs that it makes, and the runs that it finds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import riptide
from riptide.indexing.dense.index import Index
from riptide.indexing.store.store import Store

Done = Callable[..., str]
EXACT, DENSE = "tiny-test-exact-enc", "tiny-test-dense-idx"


@pytest.fixture
def measured(world, done: Done, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """measured(*arguments) evaluates and returns the figures."""

    def evaluate(*more: object) -> dict[str, Any]:
        done("evaluate", "--store", world.store, "--json", tmp_path / "e.json", "--overwrite", *more)
        return json.loads((tmp_path / "e.json").read_text())

    return evaluate


def test_runs_are_named_after_the_source_and_as_deep_as_the_metrics_need(
    world, measured, done: Done, tmp_path: Path
) -> None:
    store = Store(str(world.store))
    figures = measured("--source", "exact:enc", "index:idx")["mean"]
    assert list(figures) == [f"{EXACT}-top100", f"{DENSE}-top100"]
    assert [store.open("runs", name).config["k"] for name in figures] == [100, 100]
    searched = measured("--run", "exact", "dense", "--metrics", "nDCG@10", "RR@10")["mean"]  # searched for 20 hits
    for name, run in zip(figures, searched, strict=True):
        assert {metric: figures[name][metric] for metric in searched[run]} == searched[run]
    for more, depth in [
        (("--metrics", "nDCG@3", "RR@7"), "top7"),
        (("--metrics", "nDCG@3", "AP"), "top1000"),
        (("--metrics", "nDCG@3", "--median-length", 5), "top5"),
        (("--metrics", "nDCG@3", "--limit", 4), "top3-first4"),
    ]:
        plan = done("evaluate", "--store", world.store, "--source", "exact:enc", *more, "--plan")
        assert f"source exact:enc: run {EXACT}-{depth}\n" in plan


def test_modes_are_sources(world, measured, done: Done, refused: Done, documented: Callable[..., None]) -> None:
    """hybrid is evaluated and mined as `search --mode hybrid` searches it."""
    figures = measured("--source", "exact", "dense", "--metrics", "RR@10")["mean"]
    assert list(figures) == [f"{EXACT}-top10", f"{DENSE}-top10"]
    command = ("evaluate", "--store", world.store, "--source")
    line = refused(*command, "dense", "index:idx")
    assert line == "error: --source index:idx: a source is given twice; leave one of them out"
    line = refused(*command, "hybrid")
    assert line.endswith("/bm25: there is no such artifact (complete bm25: none); riptide build-bm25 makes one")
    documented("Evaluating", "--source hybrid without BM25 in the store", line, 1)
    done("build_bm25", "--store", world.store)
    name = "tiny-test-0.5-bm25-0.5-dense-idx"
    assert list(measured("--source", "hybrid", "--metrics", "RR@10")["mean"]) == [f"{name}-top10"]
    done("search", "--store", world.store, "--mode", "hybrid")
    assert list(measured("--source", "hybrid", "--metrics", "RR@10")["mean"]) == [name]
    mine = ("mine_negatives", "--store", world.store, "--split", "test", "--sources")
    assert "up to" in done(*mine, "hybrid", "bm25", "--plan")
    assert "expected at least one, and each once" in refused(*mine, "dense", "index:idx", "--plan")
    done("build_index", "--store", world.store, "--name", "flat", "--factory", "Flat", "--shards", 1)
    line = refused(*command, "dense")
    assert line.endswith("has several indexes: flat, idx; say which with index:NAME")


def test_a_metric_may_be_deeper_than_the_corpus(world, measured, done: Done) -> None:
    """240 passages; memory for 10^9 hits of a query is not needed."""
    source = "exact:enc"
    deep, shallow = (measured("--source", source, "--metrics", f"RR@{depth}")["mean"] for depth in (10**9, 240))
    assert deep[f"{EXACT}-top1000000000"][f"RR@{10**9}"] == shallow[f"{EXACT}-top240"]["RR@240"]
    out = done("search", "--store", world.store, "--source", source, "--query", "bafa", "--k", 10**9)
    assert "(exact:enc, 240 hits)" in out


def test_a_file_of_the_same_name_is_not_read(world, measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{EXACT}-top3").write_text("no run\n")
    figures = measured("--source", "exact:enc", "--metrics", "RR@3")["mean"]
    assert figures[f"{EXACT}-top3"]["RR@3"] > 0


def test_the_run_that_search_makes_is_found(world, measured, done: Done, no_work: Callable[[], None]) -> None:
    done("search", "--store", world.store, "--mode", "exact")
    no_work()
    assert list(measured("--source", "exact:enc")["mean"]) == [EXACT]
    plan = done("evaluate", "--store", world.store, "--source", "exact:enc", "--plan")
    assert f"nothing to make: {world.store}/runs/{EXACT} is complete" in plan
    assert "stage " not in plan


def test_a_run_under_another_name_is_made_if_the_name_is_taken(
    world, measured, done: Done, no_work: Callable[[], None]
) -> None:
    taken = ("--mode", "dense", "--name", f"{EXACT}-top3")
    done("search", "--store", world.store, *taken)
    [name] = measured("--source", "exact:enc", "--metrics", "RR@3")["mean"]
    assert re.fullmatch(rf"{EXACT}-top3-[0-9a-f]{{8}}", name)
    no_work()
    assert list(measured("--source", "exact:enc", "--metrics", "RR@3")["mean"]) == [name]


def test_sources_that_cannot_be_told_apart_are_refused(
    world, refused: Done, documented: Callable[..., None], done: Done
) -> None:
    at = ("evaluate", "--store", world.store, "--source", "exact:enc")
    before = Store(str(world.store)).names("runs")
    line = refused(*at, "index:idx", "exact:enc")
    assert line == "error: --source exact:enc: a source is given twice; leave one of them out"
    documented("Evaluating", "a source given twice", line.removeprefix("error: "), 1)
    assert "--metrics 'nDCG@ten': not one of ir-measures'" in refused(*at, "--metrics", "nDCG@ten")
    assert Store(str(world.store)).names("runs") == before
    done(*at, "--metrics", "RR@3", "--json", world.store.parent / "a.json")
    line = refused(*at, "--metrics", "RR@3", "--run", f"{EXACT}-top3")
    assert f"--run {EXACT}-top3: the run of --source exact:enc has this name too; leave one of them out" in line


def test_the_recall_of_an_index_is_measured_without_judgements(
    world, measured, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    done("import_corpus", "--store", world.store, "--filters", "year", "int64")
    command = ("evaluate", "--store", world.store, "--split", "all", "--certify")
    filters = ("--certify-filters", "year >= 1950", "year > 5000")
    plan = done(*command, "dense", "--certify-k", 20, *filters, "--limit", 4, "--plan")
    assert "certify index:idx: recall@20 of exact:enc, 12 searches with 2 filters of all 240 vectors, in" in plan
    everything = ("--split", "all", "--certify", "index:idx", "--certify-k", 20, *filters)
    unfiltered, filtered = measured(*everything)["certified"]  # no passage matches the last filter
    store, texts = riptide.Store(world.store), [query["text"] for query in world.queries]
    with store.search("index:idx") as index, store.search("exact:enc") as exact:
        hits = [[{hit.id for hit in each} for each in source(texts, 20)] for source in (index, exact)]
    recalls = [len(found & true) / 20 for found, true in zip(*hits, strict=True)]
    assert unfiltered["recall"] == pytest.approx(sum(recalls) / len(recalls))
    assert (unfiltered["source"], unfiltered["class"], unfiltered["queries"]) == ("index:idx", "none", len(texts))
    assert unfiltered["lower"] < unfiltered["recall"] <= unfiltered["upper"]
    assert (filtered["recall"], filtered["class"]) == (1.0, ">10%")  # so few passages are all scored
    plan = done(*command, "dense", "--certify-k", 10**9, "--plan")  # More hits than passages would only take memory.
    assert "recall@240 of exact:enc" in plan
    line = refused(*command, "exact:enc")
    assert line.endswith("so exact search says nothing about it; give a source such as index:minilm, or dense")
    documented("Evaluating", "--certify of a source without an index", line, 1)
    for option in (filters, ("--certify-k", 5), ("--certify-filter-field", "f")):
        line = refused("evaluate", "--store", world.store, "--run", "dense", *option)
        assert line == f"error: {option[0]} {option[1]}: expected --certify too: name sources with an index"
    assert "--certify index:idx: a source is given twice" in refused(*command, "dense", "index:idx")


def test_the_queries_of_a_log_have_filters_of_their_own(
    world,
    measured,
    done: Done,
    refused: Done,
    documented: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log is a file of saved requests; its recall is that of each query with its own filter, by class of filters."""
    open_index = Index.__init__

    def open_poor_index(index: Index, *arguments: Any) -> None:
        open_index(index, *arguments)
        index.effort = 1  # of four lists

    monkeypatch.setattr(Index, "__init__", open_poor_index)
    done("import_corpus", "--store", world.store, "--filters", "year", "int64")
    filters = [None, "", "year >= 2020", {"year": {"gte": 2139}}, "year > 5000"]
    texts = [query["text"] for query in world.queries[:10]]
    rows = [{"request": {"query": text, "filter": filters[n % 5]}} for n, text in enumerate(texts)]
    rows[0]["request"].pop("filter")
    write_log = (tmp_path / "log.jsonl").write_text
    write_log("".join(json.dumps(row) + "\n" for row in rows))
    log = ("import_queries", "--store", world.store, "--source", tmp_path / "log.jsonl", "--text", "request.query")
    done(*log, "--metadata", "request.filter")
    command = ("--queries", "log", "--split", "all", "--certify", "index:idx", "--certify-k", 20)
    by_field = ("--certify-filter-field", "request.filter")
    plan = done("evaluate", "--store", world.store, *command, *by_field, "--plan")
    assert "certify index:idx: recall@20 of exact:enc, 10 searches with 3 filters of all 240 vectors" in plan
    measured_classes = measured(*command, *by_field)["certified"]
    with (
        riptide.Store(world.store).search("index:idx") as index,
        riptide.Store(world.store).search("exact:enc") as exact,
    ):
        hits = [[{hit.id for hit in each} for each in source(texts, 20)] for source in (index, exact)]
    recalls = [len(found & true) / 20 for found, true in zip(*hits, strict=True)]
    unfiltered = [recalls[number] for number in (0, 1, 5, 6)]
    assert max(recalls[2], recalls[7]) < 1  # without their filters
    assert [(each["class"], each["filter"], each["queries"], each["recall"]) for each in measured_classes] == [
        ("none", None, 4, pytest.approx(sum(unfiltered) / 4)),
        (">10%", None, 2, 1.0),  # so few passages are all scored
        ("<1%", None, 2, 1.0),  # those of the last filter match nothing
    ]

    at = ("evaluate", "--store", world.store, *command)
    line = refused(*at, "--certify-filter-field", "filters")
    documented("Evaluating", "--certify-filter-field of a field that the queries lack", line.removeprefix("error: "), 1)
    line = refused(*at, *by_field, "--certify-filters", "year > 1")
    assert (
        "--certify-filters year > 1 with --certify-filter-field request.filter: expected one of them; leave one out"
        in line
    )
    write_log(json.dumps({"query": "bafa", "filter": "yeer > 1"}))
    done("import_queries", "--store", world.store, "--source", tmp_path / "log.jsonl", "--queries", "bad")
    line = refused(*at, "--queries", "bad", "--certify-filter-field", "filter")
    documented("Evaluating", "a query whose own filter names no field", line.removeprefix("error: "), 1)
