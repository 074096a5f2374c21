"""Evaluations of the API have the figures of the job; runs are data frames and TREC files."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from riptide import InputError, Store

METRICS = ["nDCG@10", "R@20"]


def test_the_figures_are_those_of_the_job(
    store: Store, done: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in ("exact", "bm25"):
        store.search_queries(source, k=20, name=source)
    result = store.evaluate(["exact", "bm25"], metrics=METRICS)
    assert capsys.readouterr() == ("", "")
    command = ("evaluate", "--store", store.url, "--run", "exact", "bm25", "--metrics", *METRICS)
    printed = done(*command, "--json", tmp_path / "e.json")
    document = json.loads((tmp_path / "e.json").read_text())
    assert {key: document[key] for key in result.document()} == result.document()
    assert str(result) in printed
    assert (result.queries, result.split, result.runs, result.metrics) == (
        "queries/mine",
        "test",
        ["exact", "bm25"],
        METRICS,
    )
    assert result.mean == document["mean"]
    assert result.p_values == document["p_against_first"]
    assert result.query_ids == sorted(store.queries().split("test").ids)
    assert result.per_query["bm25"]["R@20"].tolist() == document["per_query"]["bm25"]["R@20"]


def test_an_evaluation_is_two_data_frames(store: Store) -> None:
    result = store.evaluate(["exact", "bm25"], metrics=METRICS)
    means = result.to_pandas()
    assert (means.index.tolist(), means.columns.tolist(), means.index.name) == (["exact", "bm25"], METRICS, "run")
    assert means.loc["bm25", "R@20"] == result.mean["bm25"]["R@20"]
    values = result.to_pandas(per_query=True)
    assert values.index.tolist() == result.query_ids
    assert values["exact", "nDCG@10"].to_numpy().tolist() == result.per_query["exact"]["nDCG@10"].tolist()
    np.testing.assert_allclose(values.mean().to_numpy(), means.to_numpy().ravel())


def test_figures_are_data_frames_of_polars(store: Store, tmp_path: Path) -> None:
    result, frame = store.evaluate(["exact", "bm25"], metrics=METRICS), store.search_queries("bm25", k=3, name="three")
    assert result.to_polars().rows() == [tuple(row) for row in result.to_pandas().reset_index().to_numpy()]
    values = result.to_polars(per_query=True)
    assert values.columns == ["run", "query_id", *METRICS]
    of_run = values.filter(values["run"] == "bm25")
    assert of_run["query_id"].to_list() == result.query_ids
    assert of_run["R@20"].to_list() == result.per_query["bm25"]["R@20"].tolist()
    pandas = frame.to_pandas()
    assert frame.to_polars().columns == pandas.columns.tolist()
    assert frame.to_polars().rows() == list(pandas.itertuples(index=False, name=None))
    comparison = store.compare("three", store.search_queries("exact", k=3, name="vectors"), metrics=METRICS)
    compared, pandas = comparison.to_polars(), comparison.to_pandas().reset_index()
    assert compared.columns == pandas.columns.tolist()
    assert compared["relevant"].to_list() == pandas["relevant"].tolist()
    assert compared["first_rank"].to_list() == [None if pd.isna(rank) else rank for rank in pandas["first_rank"]]
    judging = store.judge("three", "vectors", measure="P@3", folder=str(tmp_path / "judging"))
    assert (judging.first, judging.second, judging.num_queries) == ("three", "vectors", len(result.query_ids))
    assert 0 < judging.num_pending == min(50, judging.num_deciding)
    with pytest.raises(TypeError, match=r"^to_polars: unknown parameter 'per_querry'; did you mean 'per_query'\?"):
        result.to_polars(per_querry=True)


def test_a_notebook_shows_figures_as_tables(store: Store) -> None:
    hostile = "<b>&'\"$x$"
    result = store.evaluate(["exact", "bm25"], metrics=METRICS)
    renamed = replace(result, per_query={hostile: result.per_query["exact"], "bm25": result.per_query["bm25"]})
    shown = renamed._repr_html_()
    assert "<th>run</th><th>nDCG@10</th><th>R@20</th><th>p of nDCG@10</th>" in shown
    assert f"<td>{result.mean['bm25']['R@20']:.4f}</td>" in shown
    assert "<td>" + f"{result.p_values['R@20']['bm25']:.4f}</td>" in shown
    runs = [store.search_queries(source, k=3, name=source) for source in ("bm25", "exact")]
    compared = replace(store.compare(*runs, metrics=METRICS), first=hostile)._repr_html_()
    assert f"<td>{store.compare(*runs, metrics=METRICS).metrics[0].difference:.4f}</td>" in compared
    for each in (shown, compared):
        assert "&lt;b&gt;&amp;&#x27;&quot;$x$" in each
        assert "<b>" not in each


def test_runs_files_and_sources_keep_their_names_and_their_order(store: Store, tmp_path: Path) -> None:
    """The first one is the baseline, whether it is a source, a run or a file."""
    run = store.search_queries("exact", k=20, name="vectors")
    run.write_trec(str(tmp_path / "file.trec"))
    run.write_json_lines(str(tmp_path / "file.jsonl"))
    with pytest.raises(InputError, match=r"x\.trec: expected the ending \.jsonl"):
        run.write_json_lines(str(tmp_path / "x.trec"))
    files = [tmp_path / "file.trec", tmp_path / "file.jsonl"]
    given = ["bm25", run, *files, "bm25+exact:enc"]
    names = ["bm25", "vectors", *map(str, files), "bm25+exact:enc"]
    result = store.evaluate(given, metrics="R@20")
    assert result.runs == names
    assert list(result.p_values["R@20"]) == names[1:]
    assert result.mean["vectors"] == result.mean[str(files[0])] == result.mean[str(files[1])]
    alone = store.evaluate("bm25", metrics=["R@20"])
    assert alone.mean == {"bm25": result.mean["bm25"]}
    assert alone.p_values == {"R@20": {}}
    store.search_queries("exact", k=20, name="bm25")
    assert store.evaluate("bm25", metrics="R@20").mean["bm25"] == result.mean["vectors"], "a run comes before a source"


def test_a_run_is_a_data_frame_and_a_file(store: Store, tmp_path: Path) -> None:
    run = store.search_queries("bm25", k=3, name="words")
    assert repr(run) == f"Run('words', 'bm25', split='test', {run.num_hits} hits)"
    frame = run.to_pandas()
    assert frame.columns.tolist() == ["query_id", "rank", "id", "row", "score"]
    assert len(frame) == run.num_hits
    assert (
        frame.groupby("query_id")["rank"].apply(list).map(lambda ranks: ranks == list(range(1, len(ranks) + 1))).all()
    )
    run.write_trec(str(tmp_path / "words.trec"))
    lines = [line.split() for line in (tmp_path / "words.trec").read_text().splitlines()]
    assert [(line[0], line[2]) for line in lines] == list(zip(frame["query_id"], frame["id"], strict=True))
    with pytest.raises(InputError, match="a file with other content is there"):
        store.search_queries("bm25", k=2, name="fewer").write_trec(str(tmp_path / "words.trec"))


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        (["nothing"], {}, r"'nothing': no run of .* \(runs: none\), no file, and no source 'nothing': expected a mode"),
        (["bm25", "bm25"], {}, "evaluate: 'bm25' is given twice; leave one of them out"),
        ([], {}, "evaluate: expected at least one run, file or source"),
        (["bm25"], {"metric": "R@3"}, "evaluate: unknown parameter metric; did you mean metrics"),
        (["bm25"], {"topk": 3}, "evaluate: unknown parameter topk; "),
        (["bm25"], {"metrics": "R@0"}, "metrics=.*'R@0': cutoff 0: expected 1 to"),
        (["bm25"], {"split": "dev"}, "no split 'dev' with qrels; it has test"),
        (["bm25"], {"run": ["exact"]}, "evaluate: unknown parameter run; "),
        (["bm25"], {"source": "exact"}, "evaluate: unknown parameter source; "),
        (5, {}, "evaluate: found int, expected a run: a name, a file or a Run"),
        ([None], {}, "evaluate: found NoneType, expected a run: a name, a file or a Run"),
        (["bm25"], {"task": "x"}, "task=x: bm25 has no use for it, it goes with vectors"),
        (["exact"], {"task": "x"}, "task=x: .* has no such prompt and no such model"),
        (["bm25"], {"median_length": 0}, "median_length=0: expected at least 1"),
        (["exact:x"], {}, r"embeddings/x: there is no such artifact \(complete embeddings: enc\); store.encode_corpus"),
    ],
)
def test_a_bad_evaluation_is_refused(shared: Store, runs: Any, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        shared.evaluate(runs, **options)
    assert "\n" not in str(error.value)
    assert "--" not in str(error.value)
    assert shared.names("runs") == []


def test_a_run_of_another_store_is_refused(store: Store, tmp_path: Path) -> None:
    """Its name may be that of another run of this store, whose values would stand for it."""
    run, filtered = (
        store.search_queries("bm25", name="a", k=9),
        store.search_queries("bm25", name="b", filter="year > 0"),
    )
    shutil.copytree(store.url, tmp_path / "other")
    other = Store(tmp_path / "other")
    assert other.evaluate(run).runs == other.evaluate("a").runs == ["a"]  # a copy has the same runs
    shutil.rmtree(tmp_path / "other/runs")
    foreign = other.search_queries("bm25", name="a", k=3)
    message = r"found a run of .*/other/runs/a: .*/store/runs/a is another one; give a run of this store, or"
    with pytest.raises(InputError, match=rf"^evaluate: {message}"):
        store.evaluate([foreign])
    with pytest.raises(InputError, match=rf"^compare: {message}"):
        store.compare(filtered, foreign)
    with pytest.raises(InputError, match=r"runs/b: there is no such artifact"):
        other.compare(foreign, filtered)
    with pytest.raises(InputError, match=r"^compare: found int, expected a run"):
        store.compare(run, 5)


def test_a_filter_of_a_run_may_be_a_dict(store: Store) -> None:
    run = store.search_queries("bm25", name="dict", filter={"year": {"gt": 0}})
    assert store.search_queries("bm25", name="dict", filter='{"year": {"gt": 0}}').artifact.key == run.artifact.key
    with pytest.raises(InputError, match=r"^filter: 'month' is no filter of this corpus"):
        store.search_queries("bm25", name="other", filter={"month": 3})


def test_a_bad_search_of_queries_is_refused(shared: Store) -> None:
    with pytest.raises(InputError, match="search_queries: unknown parameter query; "):
        shared.search_queries("bm25", query=["bama"])
    with pytest.raises(InputError, match="k=0: expected at least 1"):
        shared.search_queries("bm25", k=0)
    assert shared.names("runs") == []


def test_warnings_go_to_stderr_and_lines_only_with_verbose(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.search_queries("bm25", limit=3, name="few")
    store.evaluate("few", metrics="R@5")
    warning = "warning: few: 27 of the 30 judged queries are missing from the run, and count as 0\n"
    assert capsys.readouterr() == ("", warning)
    Store(store.url, verbose=True).search_queries("bm25", limit=3, name="few")
    assert "runs/few: " in capsys.readouterr().out


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_data_frame_without_its_library_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    result, hits = store.evaluate("bm25", metrics="R@5"), store.search("bm25")("bama")
    monkeypatch.setitem(sys.modules, library, None)
    line = f"a data frame needs {library}, which is not installed; run: pip install {library}"
    for each in (result, hits, store.search_queries("bm25", k=2, name="two")):
        with pytest.raises(InputError, match=line):
            getattr(each, f"to_{library}")()
