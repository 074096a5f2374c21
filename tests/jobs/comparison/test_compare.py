"""The job `compare`: values by hand, tests against exhaustive and scipy's own ones, files, and bad input."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from samples import write_beir, write_queries
from scipy import stats

from riptide import Store
from riptide.base.errors import InputError
from riptide.jobs.api.stored_run import Run
from riptide.jobs.comparison.shown_passages import ShownPassage

Done = Callable[..., str]

TEXTS = ["the Nile", "the Rhine", "the Po", "the Don", "the Elbe", "the Tiber"]
JUDGED = [
    *(("q0", "d0", 1), ("q1", "d1", 2), ("q1", "d2", 1), ("q1", "d3", 0)),
    *(("q2", "d4", 1), ("q3", "d5", 1), ("q4", "d0", 0)),  # q4 has no relevant passage
]
FIRST = {"q0": "d9 d0", "q1": "d2 d3 d1", "q2": "d4 d0", "q4": "d1"}  # q3 has no hits
SECOND = {"q0": "d0 d1", "q1": "d1 d2", "q2": "d0 d1 d4", "q3": "d1 d2", "q4": "d2"}


def write_trec(path: Path, ranked: Mapping[str, str | Sequence[str]]) -> Path:
    lines = []
    for query, hits in ranked.items():
        ids = hits.split() if isinstance(hits, str) else hits
        lines += [f"{query} Q0 {id} {rank} {1 / rank} x\n" for rank, id in enumerate(ids, 1)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path: Path, done: Done) -> tuple:
    """The arguments of a comparison of two TREC files over six passages and five judged queries."""
    passages = [{"_id": f"d{n}", "title": f"River {n}", "text": text} for n, text in enumerate(TEXTS)]
    queries = [{"_id": f"q{n}", "text": f"which river {n}"} for n in range(6)]
    source = write_beir(tmp_path / "raw", passages, queries, {"test": JUDGED})
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    first, second = write_trec(tmp_path / "a.trec", FIRST), write_trec(tmp_path / "b.trec", SECOND)
    return ("compare", first, second, "--store", tmp_path / "s", "--json", tmp_path / "out/c.json")


def test_values_are_those_worked_out_by_hand(small: tuple, done: Done, tmp_path: Path) -> None:
    """RR@10 of the first run: 1/2, 1, 1, 0, 0; of the second one: 1, 1, 1/3, 0, 0."""
    out = done(*small, "--metrics", "RR@10", "R@1")
    document = json.loads((tmp_path / "out/c.json").read_text())
    assert (document["queries"], document["split"], document["num_queries"]) == ("queries/raw", "test", 5)
    rows = document["per_query"]
    assert [(row["id"], row["difference"]) for row in rows] == [
        *(("q0", 0.5), ("q1", 0), ("q3", 0), ("q4", 0), ("q2", pytest.approx(1 / 3 - 1))),
    ]
    ranks = {row["id"]: (row["first"]["relevant_rank"], row["second"]["relevant_rank"]) for row in rows}
    assert ranks == {"q0": (2, 1), "q1": (1, 1), "q2": (1, 3), "q3": (None, None), "q4": (None, None)}
    tops = {row["id"]: [row[run]["top"] and row[run]["top"]["id"] for run in ("first", "second")] for row in rows}
    assert tops == {
        "q0": ["d9", "d0"],
        "q1": ["d2", "d1"],
        "q2": ["d4", "d0"],
        "q3": [None, "d1"],
        "q4": ["d1", "d2"],
    }
    of_q1 = rows[1]
    assert of_q1["relevant"] == [{"id": "d1", "grade": 2}, {"id": "d2", "grade": 1}]
    assert of_q1["first"]["values"] == {"RR@10": 1, "R@1": 0.5}
    assert rows[0]["first"]["top"] == {"id": "d9", "grade": None}
    assert rows[0]["second"]["top"] == {"id": "d0", "grade": 1}
    [rr, r1] = document["metrics"]
    assert (rr["first"], rr["second"]) == (pytest.approx(2.5 / 5), pytest.approx((2 + 1 / 3) / 5))
    assert rr["difference"] == pytest.approx(rr["second"] - rr["first"])
    assert (rr["won"], rr["equal"], rr["lost"]) == (1, 3, 1)
    assert (r1["won"], r1["equal"], r1["lost"]) == (1, 3, 1)
    # Of the relevant passages, the first run has at depths 1, 2, 3: of q0 0 1 1, of q1 1 1 2 of 2, of q2 1 1 1.
    assert document["recall"]["first"] == pytest.approx([1.5 / 5, 2.5 / 5, 3 / 5])
    assert document["recall"]["second"] == pytest.approx([1.5 / 5, 2 / 5, 3 / 5])
    lines = out.splitlines()
    assert lines[0] == (f"warning: {small[1]}: 1 of the 5 judged queries are missing from the run, and count as 0")
    assert "most won by" in out
    assert re.search(r"\+0\.5000 +0\.5000 +1\.0000 +2 > 1  q0 which river 0", out)
    assert re.search(r"-0\.6667 +1\.0000 +0\.3333 +1 > 3  q2 which river 2", out)


def test_values_and_tests_are_those_of_evaluate(world, done: Done, tmp_path: Path) -> None:
    files = random_runs(world, tmp_path)
    at = ("--store", world.store)
    done("evaluate", *at, "--run", *files, "--json", tmp_path / "e.json")
    done("compare", *files, *at, "--json", tmp_path / "c.json")
    evaluation, comparison = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ec")
    for each in comparison["metrics"]:
        assert [each["first"], each["second"]] == [evaluation["mean"][str(file)][each["metric"]] for file in files]
        assert each["p_value"] == evaluation["p_against_first"][each["metric"]][str(files[1])]
    by_id = {row["id"]: row for row in comparison["per_query"]}
    for side, file in zip(("first", "second"), files, strict=True):
        for metric, values in evaluation["per_query"][str(file)].items():
            assert [by_id[id][side]["values"][metric] for id in evaluation["query_ids"]] == values
        assert comparison["recall"][side][-1] == pytest.approx(evaluation["mean"][str(file)]["R@100"])
    differences = [row["difference"] for row in comparison["per_query"]]
    assert differences == sorted(differences, reverse=True)


def test_recall_at_each_depth_is_that_of_ir_measures(world, tmp_path: Path) -> None:
    files = random_runs(world, tmp_path)
    metrics = [f"R@{depth}" for depth in range(1, 21)]
    comparison = Store(world.store).compare(*files, metrics=metrics)
    assert comparison.recall_first == pytest.approx([each.first for each in comparison.metrics])
    assert comparison.recall_second == pytest.approx([each.second for each in comparison.metrics])


def random_runs(world, folder: Path) -> list[Path]:
    """Returns two TREC files of 20 random hits per query; the second one has the relevant passage higher."""
    draw = random.Random(3)
    ids = [passage["_id"] for passage in world.passages]
    judged = world.judged[:30]
    ranked: list[dict[str, list[str]]] = [{}, {}]
    for query, relevant, _ in judged:
        for run, deepest in zip(ranked, (20, 5), strict=True):
            hits = draw.sample([id for id in ids if id != relevant], 19)
            hits.insert(draw.randrange(deepest), relevant)
            run[query] = hits
    return [write_trec(folder / f"{name}.trec", run) for name, run in zip(("first", "second"), ranked, strict=True)]


def exhaustive_p(differences: np.ndarray) -> float:
    """Returns the two-sided p-value over all sign patterns, in float64."""
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(differences))))
    means, observed = signs @ differences / len(differences), differences.mean()
    tails = [(means >= observed - 1e-12).mean(), (means <= observed + 1e-12).mean()]
    return float(min(1.0, 2 * min(tails)))


def holm_by_hand(p_values: Sequence[float]) -> list[float]:
    """Returns the adjusted p-values: each is the largest of those before it in the order of p, times their number."""
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    products = [min(1.0, p_values[number] * (len(p_values) - rank)) for rank, number in enumerate(order)]
    return [max(products[: order.index(number) + 1]) for number in range(len(p_values))]


def test_significance_of_few_queries_is_that_of_all_sign_patterns(small: tuple, tmp_path: Path, done: Done) -> None:
    second = write_trec(tmp_path / "b.trec", {"q0": "d0", "q1": "d1 d2", "q2": "d1 d4", "q3": "d1 d2 d3 d5"})
    done(*small[:2], second, *small[3:], "--metrics", "nDCG@10", "RR@10")
    document = json.loads((tmp_path / "out/c.json").read_text())
    p_values = []
    for each in document["metrics"]:
        values = [[row[run]["values"][each["metric"]] for row in document["per_query"]] for run in ("first", "second")]
        expected = exhaustive_p(np.subtract(values[1], values[0]))
        assert each["p_value"] == pytest.approx(expected, abs=0.02)  # 9,999 random patterns: 2 sd are 0.01 per tail
        p_values.append(each["p_value"])
    assert [each["adjusted_p_value"] for each in document["metrics"]] == pytest.approx(holm_by_hand(p_values))


def test_significance_of_many_queries_is_that_of_scipy(world, tmp_path: Path) -> None:
    files = random_runs(world, tmp_path)
    comparison = Store(world.store).compare(*files, metrics=["RR@10", "R@5", "AP"])
    for each in comparison.metrics:
        first, second = (
            np.array([getattr(row, run).values[each.metric] for row in comparison.rows]) for run in ("first", "second")
        )
        options = {"permutation_type": "samples", "n_resamples": 20_000, "vectorized": True, "rng": 5}
        test = stats.permutation_test((second, first), lambda a, b, axis: (a - b).mean(axis), **options)
        assert each.p_value == pytest.approx(test.pvalue, abs=0.02)
        interval = stats.bootstrap((second - first,), np.mean, method="percentile", n_resamples=20_000, rng=5)
        width = each.high - each.low
        assert [each.low, each.high] == pytest.approx(list(interval.confidence_interval), abs=0.08 * width)
        assert each.difference == pytest.approx((second - first).mean())
        assert each.low < each.difference < each.high
    assert comparison.metrics[0].p_value < 0.05 < comparison.metrics[0].second


def test_grades_from_which_a_passage_is_relevant_are_those_of_the_metric(small: tuple, tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    comparison = store.compare(*small[1:3], metrics=["AP(rel=2)"])
    rows = {row.id: row for row in comparison.rows}
    assert [passage.id for passage in rows["q1"].relevant] == ["d1"]
    assert (rows["q1"].first.relevant_rank, rows["q0"].second.relevant_rank) == (3, None)


def test_passages_have_their_titles_and_texts(small: tuple, tmp_path: Path) -> None:
    comparison = Store(tmp_path / "s").compare(*small[1:3], metrics=["RR@10"])
    [row] = comparison.won(10)
    assert row.first.top == ShownPassage("d9", None, None, None)
    assert row.second.top == ShownPassage("d0", 1, "River 0", "the Nile")
    assert row.relevant == (row.second.top,)
    assert [row.id for row in comparison.lost(10)] == ["q2"]
    assert (comparison.won(0), comparison.lost(0)) == ((), ())


def test_hits_of_split_documents_are_documents_with_their_best_passage(tmp_path: Path, done: Done) -> None:
    """The passages of d0 are "one two", "three four" and "five six": d0#0, d0#1, d0#2."""
    passages = [{"_id": "d0", "text": "one two three four five six"}, {"_id": "d1", "text": "seven eight"}]
    queries = [{"_id": "q", "text": "x"}, {"_id": "p", "text": "y"}]
    source = write_beir(tmp_path / "raw", passages, queries, {"test": [("q", "d0", 1), ("p", "d1", 1)]})
    split = ("--split-words", 2, "--overlap", 0)
    done("import_corpus", "--store", tmp_path / "s", "--source", source, *split)
    of_passages = write_trec(tmp_path / "passages.trec", {"q": "d1#0 d0#2 d0#1", "p": "d0#1"})
    of_documents = write_trec(tmp_path / "documents.trec", {"q": "d0 d1", "p": "d1 d0"})
    comparison = Store(tmp_path / "s").compare(of_passages, of_documents, metrics="RR@10")
    rows = {row.id: row for row in comparison.rows}
    assert (rows["q"].first.relevant_rank, rows["q"].second.relevant_rank) == (2, 1)
    tops = {id: [(row.first.top.id, row.first.top.text), row.second.top.text] for id, row in rows.items()}
    assert tops == {
        "q": [("d1", "seven eight"), "one two"],  # a file of documents names no passage: the first one is shown
        "p": [("d0", "three four"), "seven eight"],
    }
    assert comparison.recall_first == pytest.approx([0, 0.5])


def test_a_data_frame_has_a_row_per_query(small: tuple, tmp_path: Path) -> None:
    comparison = Store(tmp_path / "s").compare(*small[1:3], metrics=["RR@10"])
    frame = comparison.to_pandas()
    assert list(frame.index) == ["q0", "q1", "q3", "q4", "q2"]
    assert frame.loc["q0"].drop("first_top_text").to_dict() == {
        "text": "which river 0",
        "difference": 0.5,
        "first RR@10": 0.5,
        "second RR@10": 1.0,
        "first_rank": 2,
        "first_top": "d9",
        "second_rank": 1,
        "second_top": "d0",
        "second_top_text": "the Nile",
        "relevant": ["d0"],
    }
    assert frame["first_top_text"].isna().tolist() == [True, False, True, False, False]
    assert frame["first_rank"].isna().tolist() == [False, False, True, True, False]


def test_the_queries_and_the_split_are_those_of_the_runs(
    world, done: Done, refused, documented, tmp_path: Path
) -> None:
    at = ("--store", world.store)
    for name, mode in (("one", "exact"), ("two", "dense")):
        done("search", *at, "--mode", mode, "--split", "train", "--k", 5, "--name", name)
    other = write_queries(tmp_path / "other", world.queries[:3], {"test": world.judged[:3]})
    done("import_queries", *at, "--source", other)
    out = done("compare", "one", "two", *at, "--json", tmp_path / "c.json")
    assert "queries/tiny train; all values in" in out
    document = json.loads((tmp_path / "c.json").read_text())
    assert {row["id"] for row in document["per_query"]} == {query for query, _, _ in world.judged[30:]}
    assert "one and two: 10 queries of queries/tiny train, 10 judgements: R@5" in done(
        "compare", "one", "two", *at, "--metrics", "R@5", "--plan"
    )
    line = refused("compare", "exact", "one", *at)
    assert line == (
        "error: runs/exact is a run of queries/tiny test and runs/one is a run of queries/tiny train: expected two "
        "runs of the same queries; search the same split of a query set for both"
    )
    documented("Evaluating", "compare: runs of two splits", line, 1)
    done("search", *at, "--mode", "exact", "--queries", "other", "--k", 5, "--name", "far")
    line = refused("compare", "exact", "far", *at)
    assert "runs/far is a run of queries/other test: expected two runs of the same queries" in line
    assert "not of queries/tiny train: name those with --queries and --split" in refused(
        "compare", "exact", "dense", *at, "--split", "train"
    )


def test_bad_input_is_one_line(world, refused, documented, tmp_path: Path) -> None:
    command = ("compare", "exact", "dense", "--store", world.store, "--json", tmp_path / "c.json")
    line = refused("compare", "exact", "mine", "--store", world.store)
    assert "runs/mine: there is no such artifact (complete runs: dense, exact); riptide search makes one" in line
    documented("Evaluating", "compare: a run that is missing", line, 1)
    assert refused("compare", "exat", "dense", "--store", world.store).endswith("; did you mean exact?")
    line = refused(*command, "--split", "all")
    assert "--split all: the split all has no judgements, which a comparison needs; name a split with" in line
    documented("Evaluating", "compare: the split without judgements", line, 1)
    assert "no split 'dev' with qrels; it has test, train" in refused(*command, "--split", "dev")
    line = refused(*command, "--metrics", "nDCG@ten")
    assert line.startswith("error: --metrics 'nDCG@ten': not one of ir-measures'")
    assert "did you mean" not in line
    line = refused(*command, "--metrics")
    assert line == "error: --metrics: expected at least one metric, which orders the queries; name one"
    line = refused("compare", "exact", "exact", "--store", world.store)
    assert line == "error: exact: the same run twice, expected two runs to compare; name another one"
    documented("Evaluating", "compare: one run twice", line, 1)
    assert refused(*command, "--examples", 0) == "error: --examples 0: expected at least 1"
    assert not (tmp_path / "c.json").exists()


def test_a_missing_run_on_the_command_line_is_bad_usage(world, job) -> None:
    outcome = job("compare", "exact", "--store", world.store)
    assert (outcome.status, outcome.err) == (
        2,
        "error: second is required: The run that is compared with it.\n",
    )


def test_passages_that_the_corpus_lacks_are_shown_without_text(small, done, documented, tmp_path: Path) -> None:
    second = write_trec(tmp_path / "far.trec", {f"q{n}": "MED-1 MED-2" for n in range(5)})
    out = done(*small[:2], second, *small[3:], "--html", tmp_path / "c.html")
    [line] = [line for line in out.splitlines() if "are shown without text" in line]
    store = tmp_path / "s"
    assert line == (
        f"warning: 2 of 7 passages (such as 'MED-1') are not in the corpus of {store}, and are shown without text"
    )
    documented("Evaluating", "compare: hits that the corpus lacks", line, 0)
    page = (tmp_path / "c.html").read_text()
    assert page.count("The corpus lacks this passage.") == 4  # MED-1 of three lost queries, and d9
    assert "MED-1" in page


def test_files_are_kept_unless_they_are_to_be_replaced(small, done, refused, documented, tmp_path: Path) -> None:
    """If one of the two files is refused, the other one is not written either."""
    page, values = tmp_path / "out/c.html", tmp_path / "out/c.json"
    done(*small, "--html", page)
    before = {file: file.read_bytes() for file in (page, values)}
    done(*small, "--html", page)  # the same again
    assert {file: file.read_bytes() for file in (page, values)} == before
    line = refused(*small, "--html", page, "--metrics", "RR@10")
    assert "a file with other content is there, and is kept: name another file, or give --overwrite" in line
    values.unlink()
    line = refused(*small, "--html", page, "--metrics", "RR@10")
    assert line.startswith(f"error: {page}: a file with other content is there, and is kept")
    documented("Evaluating", "compare: another page under the same --html", line, 1)
    assert [file.name for file in page.parent.iterdir()] == ["c.html"]
    assert page.read_bytes() == before[page]
    done(*small, "--html", page, "--metrics", "RR@10", "--overwrite")
    assert page.read_bytes() != before[page]
    assert json.loads(values.read_text())["metrics"][0]["metric"] == "RR@10"


def test_runs_of_python_are_compared_quietly(world, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(world.store)
    capsys.readouterr()
    comparison = store.compare(Run(store, store.open("runs", "exact")), "dense", metrics="RR@10", limit=7)
    assert (comparison.first, comparison.second, comparison.split, len(comparison.rows)) == (
        "exact",
        "dense",
        "test",
        7,
    )
    assert comparison.metric == "RR@10"
    assert tuple(capsys.readouterr()) == ("", "")


def test_values_and_page_cannot_be_one_file(small, refused, tmp_path: Path) -> None:
    line = refused(*small, "--html", small[-1])
    assert line == f"error: {small[-1]}: two results have this file; name another file for one of them"
    assert list((tmp_path / "out").iterdir()) == []


def test_the_page_of_python_is_that_of_the_job(small, done, tmp_path: Path) -> None:
    done(*small, "--html", tmp_path / "job.html", "--examples", 1)
    comparison = Store(tmp_path / "s").compare(*small[1:3])
    comparison.write_page(str(tmp_path / "python.html"), examples=1)
    for examples in (0, -1, "3", True):
        with pytest.raises(InputError, match=f"^examples={examples!r}: expected an integer of at least 1$"):
            comparison.write_page(str(tmp_path / "none.html"), examples=examples)
    assert not (tmp_path / "none.html").exists()
    assert (tmp_path / "python.html").read_bytes() == (tmp_path / "job.html").read_bytes()
    with pytest.raises(InputError, match="compare: unknown parameter html; "):
        Store(tmp_path / "s").compare(*small[1:3], html="x.html")


def test_each_comparison_has_its_own_file_by_default(small, done, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = small[:5]
    for more in ((), (), ("--metrics", "R@1"), ("--limit", 2)):  # the second one repeats the first
        done(*command, *more)
    done(command[0], command[2], command[1], *command[3:])
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert len(names) == 4
    assert all(re.fullmatch(r"comparison-test-(a-b|b-a)-[0-9a-f]{8}\.json", name) for name in names)


def test_limit_compares_the_first_queries(small, done, tmp_path: Path) -> None:
    done(*small, "--limit", 2)
    assert {row["id"] for row in json.loads((tmp_path / "out/c.json").read_text())["per_query"]} == {"q0", "q1"}
