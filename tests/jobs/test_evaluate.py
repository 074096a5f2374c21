"""Evaluation: measures worked out by hand, tests between runs, the table and the JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import ir_measures
import numpy as np
import pytest
from pyserini.eval.evaluate_dpr_retrieval import SimpleTokenizer, has_answers
from samples import files_of, write_beir, write_queries

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions

Done = Callable[..., str]


@pytest.fixture
def small(tmp_path: Path, done: Done) -> tuple:
    """Four judged queries, one of them graded; the arguments of an evaluation."""
    passages = [{"_id": f"d{n}", "text": "x"} for n in range(6)]
    queries = [{"_id": f"q{n}", "text": "x"} for n in range(5)]
    judged = [("q0", "d0", 1), ("q1", "d1", 2), ("q1", "d2", 1), ("q1", "d3", 0), ("q2", "d4", 1), ("q3", "d5", 1)]
    source = write_beir(tmp_path / "raw", passages, queries, {"test": judged})
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    return ("evaluate", "--store", tmp_path / "s", "--json", tmp_path / "out/e.json")


def write_run(path: Path, ranked: dict[str, str]) -> Path:
    lines = []
    for query, ids in ranked.items():
        lines += [f"{query} Q0 {id} {rank} {1 / rank} mine" for rank, id in enumerate(ids.split(), 1)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_values_are_those_worked_out_by_hand(small, done: Done, tmp_path: Path) -> None:
    """q0: found second. q1: grades 1 and 2 at ranks 1 and 3. q2: not found. q3: no hits at all. q4 is not judged."""
    run = write_run(tmp_path / "a.trec", {"q0": "d9 d0", "q1": "d2 d3 d1", "q2": "d0 d1", "q4": "d0"})
    metrics = ("nDCG@10", "RR@10", "R@1", "R@3")
    out = done(*small, "--run", run, "--metrics", " ".join(metrics))
    document = json.loads((tmp_path / "out/e.json").read_text())
    ndcg = [1 / math.log2(3), (1 + 2 / math.log2(4)) / (2 + 1 / math.log2(3)), 0, 0]
    expected = {"nDCG@10": ndcg, "RR@10": [1 / 2, 1, 0, 0], "R@1": [0, 1 / 2, 0, 0], "R@3": [1, 1, 0, 0]}
    assert document["query_ids"] == ["q0", "q1", "q2", "q3"]
    assert document["num_queries"] == 4
    assert (document["queries"], document["split"]) == ("queries/raw", "test")
    [values] = document["per_query"].values()
    for metric in metrics:
        assert values[metric] == pytest.approx(expected[metric])
        mean = sum(expected[metric]) / 4
        assert document["mean"][str(run)][metric] == pytest.approx(mean)
        assert f"{mean:.4f}" in out
    assert document["p_against_first"] == {metric: {} for metric in metrics}


def test_answer_accuracy_is_whether_some_hit_contains_an_answer(tmp_path: Path, done: Done, refused: Done) -> None:
    """q0: the second hit. q1: only as part of a longer word. q2: judged, but without known answers. q3: no hits."""
    texts = ["The Nile, in Egypt.", "of the AMAZON river", "amazonian", "nothing", "Rhine", "x"]
    passages = [{"_id": f"d{n}", "text": text} for n, text in enumerate(texts)]
    known = [["Amazon River", "Nile!"], ["amazon"], None, ["Rhine"]]
    queries = [{"_id": f"q{n}", "text": "x", "metadata": {"answers": a} if a else {}} for n, a in enumerate(known)]
    source = write_beir(tmp_path / "raw", passages, queries, {"test": [(f"q{n}", f"d{n}", 1) for n in range(4)]})
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    run = write_run(tmp_path / "a.trec", {"q0": "d3 d1 d0", "q1": "d2 gone", "q2": "d2"})
    asked = ("evaluate", "--store", tmp_path / "s", "--json", tmp_path / "e.json", "--run", run, "--metrics")
    out = done(*asked, "Answer@1", "RR@10", "Answer@2")
    found = json.loads((tmp_path / "e.json").read_text())["per_query"][str(run)]
    assert found == {"Answer@1": [0, 0, 0, 0], "RR@10": [pytest.approx(1 / 3), 0, 1, 0], "Answer@2": [1, 0, 0, 0]}
    assert out.splitlines()[:2] == [
        "warning: 1 of the 4 queries of queries/raw have no answers, and count as 0 in Answer@1",
        f"warning: {run}: 1 of the 4 judged queries are missing from the run, and count as 0",
    ]
    assert out.splitlines()[2].split() == ["run", "Answer@1", "RR@10", "Answer@2"]
    done(*asked, "Answer@2", "--overwrite")
    for cutoff in ("0", "100000000000000000000"):
        assert f"--metrics 'Answer@{cutoff}': cutoff {cutoff}: expected 1 to" in refused(*asked, f"Answer@{cutoff}")
    bare = write_queries(tmp_path / "bare", [{"_id": "q0", "text": "x"}], {"test": [("q0", "d0", 1)]})
    done("import_queries", "--store", tmp_path / "s", "--source", bare)
    assert "no query of queries/bare has answers" in refused(*asked, "Answer@2", "--queries", "bare")


def test_answer_ranks_are_reciprocal_ranks_where_the_relevant_passages_are_those_with_answers(
    tmp_path: Path, done: Done
) -> None:
    """Equal to ir-measures' RR, with DPR's decision which passages have an answer, for 60 random runs."""
    rng = np.random.default_rng(0)
    words = ["the", "Nile", "amazon", "river", "Po", "Don", "Rhine", "in", "of", "deep"]
    texts = [" ".join(rng.choice(words, 6)) for _ in range(80)]
    answers = {f"q{n}": [" ".join(rng.choice(words, 2)), " ".join(rng.choice(words, 3))] for n in range(60)}
    source = write_beir(
        tmp_path / "raw",
        [{"_id": f"d{n}", "text": text} for n, text in enumerate(texts)],
        [{"_id": id, "text": "x", "metadata": {"answers": of_query}} for id, of_query in answers.items()],
        {"test": [(id, "d0", 1) for id in answers]},
    )
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    ranked = {id: [f"d{n}" for n in rng.permutation(80)[: rng.integers(1, 30)]] for id in answers}
    run = write_run(tmp_path / "a.trec", {id: " ".join(hits) for id, hits in ranked.items()})
    metrics = ("AnswerRR@1", "AnswerRR@3", "AnswerRR@20")
    done("evaluate", "--store", tmp_path / "s", "--json", tmp_path / "e.json", "--run", run, "--metrics", *metrics)
    document = json.loads((tmp_path / "e.json").read_text())
    tokenizer = SimpleTokenizer()
    has_answer = [[has_answers(text, of_query, tokenizer) for text in texts] for of_query in answers.values()]
    assert 0 < np.mean(has_answer) < 0.5
    qrels = [
        ir_measures.Qrel(id, f"d{n}", int(has_answer[number][n]))
        for number, id in enumerate(answers)
        for n in range(80)
    ]
    scored = [ir_measures.ScoredDoc(id, hit, -rank) for id, hits in ranked.items() for rank, hit in enumerate(hits)]
    for name in metrics:
        measure = ir_measures.parse_measure(name.removeprefix("Answer"))
        expected = {metric.query_id: metric.value for metric in measure.iter_calc(qrels, scored)}
        values = dict(zip(document["query_ids"], document["per_query"][str(run)][name], strict=True))
        assert values == pytest.approx({id: expected.get(id, 0) for id in answers}), name


def test_answer_accuracy_of_all_queries_judged_or_not(
    tmp_path: Path, done: Done, refused: Done, documented: Callable[..., None]
) -> None:
    """Three queries of DPR's form without judgements. Of the two that have hits, one finds an answer."""
    passages = [{"_id": f"d{n}", "text": text} for n, text in enumerate(["the Nile", "the Rhine", "x"])]
    judged = [{"_id": "q", "text": "x"}]
    source = write_beir(tmp_path / "raw", passages, judged, {"test": [("q", "d0", 1)]})
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    rivers = "".join(f"river {n}\t['{name}']\n" for n, name in enumerate(("Nile", "Po", "Don")))
    (tmp_path / "nq-test.qa.csv").write_text(rivers)
    done("import_queries", "--store", tmp_path / "s", "--source", tmp_path / "nq-test.qa.csv", "--queries", "nq-test")
    run = write_run(tmp_path / "a.trec", {"q0": "d2 d0", "q1": "d1"})
    command = ("evaluate", "--store", tmp_path / "s", "--queries", "nq-test", "--split", "all", "--run", run)
    out = done(*command, "--metrics", "Answer@1", "Answer@2", "--json", tmp_path / "e.json")
    assert f"warning: {run}: 1 of the 3 queries are missing from the run, and count as 0" in out
    document = json.loads((tmp_path / "e.json").read_text())
    assert (document["num_queries"], document["query_ids"]) == (3, ["q0", "q1", "q2"])
    assert document["per_query"][str(run)] == {"Answer@1": [0, 0, 0], "Answer@2": [1, 0, 0]}
    assert document["mean"][str(run)]["Answer@2"] == pytest.approx(1 / 3)
    done(*command, "--metrics", "AnswerRR@1", "AnswerRR@10", "--json", tmp_path / "e.json", "--overwrite")
    document = json.loads((tmp_path / "e.json").read_text())
    assert document["per_query"][str(run)] == {"AnswerRR@1": [0, 0, 0], "AnswerRR@10": [0.5, 0, 0]}
    line = refused(*command, "--metrics", "Answer@2", "nDCG@10")
    assert "--split all, --metrics nDCG@10: the split all has no judgements" in line
    documented("Evaluating", "a metric that needs judgements, over all queries", line, 1)


def test_runs_side_by_side_with_a_test_against_the_first(small, done: Done, tmp_path: Path) -> None:
    good = write_run(tmp_path / "good.trec", {"q0": "d0", "q1": "d1", "q2": "d4", "q3": "d5"})
    again = write_run(tmp_path / "again.trec", {"q0": "d0", "q1": "d1", "q2": "d4", "q3": "d5"})
    bad = write_run(tmp_path / "bad.trec", {"q0": "d1", "q1": "d0", "q2": "d0", "q3": "d0"})
    out = done(*small, "--run", good, again, bad, "--metrics", "RR@10")
    found = json.loads((tmp_path / "out/e.json").read_text())["p_against_first"]["RR@10"]
    assert found[str(again)] == 1.0
    # All four differences point one way: 2 of 16 sign patterns are as extreme; twice that for two tests (Holm).
    assert found[str(bad)] == pytest.approx(2 * 2 / 16, abs=0.03)
    measures, tests = (table.splitlines() for table in out.split("\n\n"))
    assert [line.split()[0] for line in measures] == ["run", str(good), str(again), str(bad)]
    assert tests[0] == (
        f"p-values against {good}: two-sided paired randomisation test over the queries, adjusted for the number of "
        "tests in each column (Holm)"
    )
    assert [line.split() for line in tests[1:3]] == [["run", "RR@10"], [str(again), "1.0000"]]


def test_a_run_of_the_store_measures_as_its_trec_file(world, done: Done, tmp_path: Path) -> None:
    for mode in ("exact", "dense"):
        export = ("--run", tmp_path / f"{mode}.trec")
        done("search", "--store", world.store, "--mode", mode, "--k", 20, "--name", mode, *export)
    runs = ("exact", tmp_path / "exact.trec", "dense", tmp_path / "dense.trec")
    done("evaluate", "--store", world.store, "--run", *runs, "--json", tmp_path / "e.json")
    document = json.loads((tmp_path / "e.json").read_text())
    for mode in ("exact", "dense"):
        assert document["per_query"][mode] == document["per_query"][str(tmp_path / f"{mode}.trec")]
        assert set(document["per_query"][mode]) == {"nDCG@10", "R@100", "RR@10"}
    assert document["p_against_first"]["nDCG@10"][str(tmp_path / "exact.trec")] == 1.0
    assert 0 < document["mean"]["exact"]["RR@10"] <= 1


def test_limit_measures_the_first_queries_and_plan_nothing(world, done: Done, tmp_path: Path) -> None:
    command = ("evaluate", "--store", world.store, "--run", "exact", "--json", tmp_path / "e.json")
    before = files_of(world.store, but=())
    assert "1 runs x 5 queries, 5 judgements: nDCG@10, R@100, RR@10" in done(*command, "--limit", 5, "--plan")
    assert not (tmp_path / "e.json").exists()
    done(*command)
    full = json.loads((tmp_path / "e.json").read_text())
    done(*command, "--limit", 5, "--overwrite")
    limited = json.loads((tmp_path / "e.json").read_text())
    assert sorted(limited["query_ids"]) == sorted(query for query, _, _ in world.judged[:5])
    by_query = dict(zip(full["query_ids"], full["per_query"]["exact"]["RR@10"], strict=True))
    assert limited["per_query"]["exact"]["RR@10"] == [by_query[query] for query in limited["query_ids"]]
    assert limited["mean"]["exact"]["RR@10"] == pytest.approx(np.mean([by_query[q] for q in limited["query_ids"]]))
    assert files_of(world.store, but=()) == before


def test_a_run_with_fewer_hits_than_its_metrics_count_is_told(small, done, documented) -> None:
    at = small[1:3]
    done("build_bm25", *at)
    done("search", *at, "--source", "bm25", "--k", 2, "--name", "short")
    printed = done(*small, "--run", "short", "--metrics", "R@2", "R@5")
    [line] = [line for line in printed.splitlines() if line.startswith("warning")]
    documented("Evaluating", "a run with fewer hits per query than the metrics count", line, 0)


def test_bad_input_is_named(small, refused, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a.trec", {"q0": "d0"})
    for bad in ("nDCG@ten", "Precision!", "MRR_at_10", "os.system"):
        line = refused(*small, "--run", run, "--metrics", "RR@10", bad)
        assert f"--metrics '{bad}': not one of ir-measures'" in line
        assert ", and not Answer@K, AnswerRR@K or PageRprec" in line
    for bad, meant in {"answerr@5": "AnswerRR@5", "AnswerMRR@5": "AnswerRR@5", "pagerprec": "PageRprec"}.items():
        assert refused(*small, "--run", run, "--metrics", bad).endswith(f"; did you mean {meant}?")
    assert "did you mean" not in refused(*small, "--run", run, "--metrics", "Answer")
    assert "no split 'train' with qrels; it has test" in refused(*small, "--run", run, "--split", "train")
    assert "runs/missing: there is no such artifact" in refused(*small, "--run", "missing")
    cases = {
        "q0 Q0 d0 1 0.5": ":2: found 'q0 Q0 d0 1 0.5', expected `query Q0 passage rank score tag`; fix the line",
        "q0 Q0 d0 1 high mine": ":2: found 'q0 Q0 d0 1 high mine'",
        "q0 Q0 d0 1 nan mine": ":2: found 'q0 Q0 d0 1 nan mine'",
        "q0 Q0 d0 1 0.1 mine": ":2: passage 'd0' comes a second time for query 'q0'",
    }
    for line, expected in cases.items():
        run.write_text(f"q0 Q0 d0 1 0.5 mine\n{line}\n")
        assert f"{run}{expected}" in refused(*small, "--run", run)
    run.write_text("")
    assert f"{run}: the run is empty" in refused(*small, "--run", run)
    run.write_bytes(b"q0 Q0 d\xff 1 0.5 mine\n")
    assert f"{run}:1: " in refused(*small, "--run", run)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("metric", ["nDCG@0", "nDCG(dcg='exp-log2')@10"])
def test_a_metric_that_cannot_be_computed_is_refused_before_anything_is_read(
    refused, documented, tmp_path: Path, metric: str
) -> None:
    """pytrec_eval would abort the process at the cutoff 0."""
    line = refused("evaluate", "--store", tmp_path / "none", "--run", "r", "--metrics", "R@10", metric)
    assert line.startswith(f"error: --metrics {metric!r}: ")
    case = "a metric with the cutoff 0" if "@0" in metric else "a metric with a parameter that is not offered"
    documented("Evaluating", case, line, 1)


def test_a_run_of_other_queries_is_refused(small, refused, documented, tmp_path: Path) -> None:
    run = write_run(tmp_path / "other.trec", {"PLAIN-2": "MED-1 MED-2", "PLAIN-3": "MED-1"})
    line = refused(*small, "--run", run)
    assert "none of its 2 queries (such as 'PLAIN-2') is judged in queries/raw test (4 queries, such as 'q0')" in line
    assert "name the queries of this run with --queries and --split" in line
    assert not (tmp_path / "out").exists()
    documented("Evaluating", "a TREC file of another query set", line, 1)


def test_queries_that_only_the_run_or_only_the_split_has_are_told(small, done, documented, tmp_path: Path) -> None:
    run = write_run(tmp_path / "part.trec", {"q0": "d0", "q1": "d1", "q4": "d0", "x": "d0"})
    out = done(*small, "--run", run).splitlines()
    unjudged = f"warning: {run}: 2 of its 4 queries are not judged in queries/raw test, and do not count"
    missing = f"warning: {run}: 2 of the 4 judged queries are missing from the run, and count as 0"
    assert out[:2] == [unjudged, missing]
    documented("Evaluating", "a TREC file with some queries that are not judged", unjudged, 0)
    documented("Evaluating", "a run without some of the judged queries", missing, 0)
    full = write_run(tmp_path / "full.trec", {f"q{n}": "d0" for n in range(4)})
    assert "warning" not in done(*small, "--run", full, "--overwrite")
    # With a limit, the other judged queries of the run are neither unjudged nor missing.
    assert "warning" not in done(*small, "--run", full, "--limit", 2, "--overwrite")


def test_a_run_over_another_corpus_is_told(small, done, documented, tmp_path: Path) -> None:
    run = write_run(tmp_path / "far.trec", {f"q{n}": "MED-10 MED-14" for n in range(4)})
    [line] = [line for line in done(*small, "--run", run).splitlines() if line.startswith("warning")]
    assert "no relevant hit, and none of its first 8 passages (such as 'MED-10') is in the corpus of" in line
    documented("Evaluating", "a TREC file of another corpus", line, 0)
    near = write_run(tmp_path / "near.trec", {f"q{n}": "MED-10 d2" for n in range(4)})
    assert "passages" not in done(*small, "--run", near, "--overwrite")


def test_a_run_of_the_store_without_some_queries_is_told(world, done, tmp_path: Path) -> None:
    done("search", "--store", world.store, "--mode", "exact", "--k", 5, "--name", "few", "--limit", 10)
    out = done("evaluate", "--store", world.store, "--run", "few", "--json", tmp_path / "e.json")
    assert "warning: few: 20 of the 30 judged queries are missing from the run, and count as 0" in out


def test_an_evaluation_is_not_replaced_by_another_one(small, done, refused, documented, tmp_path: Path) -> None:
    good = write_run(tmp_path / "good.trec", {f"q{n}": "d0 d1" for n in range(4)})
    bad = write_run(tmp_path / "bad.trec", {f"q{n}": "d1 d0" for n in range(4)})
    file = tmp_path / "out/e.json"
    done(*small, "--run", good)
    before = file.read_bytes()
    done(*small, "--run", good)  # the same evaluation may be repeated
    line = refused(*small, "--run", bad)
    assert f"{file}: a file with other content is there, and is kept: name another file, or give --overwrite" in line
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["e.json"]
    documented("Evaluating", "another evaluation under the same --json", line, 1)
    done(*small, "--run", bad, "--overwrite")
    assert file.read_bytes() != before


def test_each_evaluation_has_a_file_of_its_own_by_default(
    small, done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = write_run(tmp_path / "good.trec", {f"q{n}": "d0 d1" for n in range(4)})
    command = small[:3]
    for more in ((), (), ("--metrics", "R@1"), ("--limit", 2)):  # the second one repeats the first
        done(*command, "--run", good, *more)
    write_run(good, {f"q{n}": "d1 d0" for n in range(4)})
    done(*command, "--run", good)
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert len(names) == 4
    assert all(re.fullmatch(r"evaluation-test-good-[0-9a-f]{8}\.json", name) for name in names)


def slow_measures(queries: np.ndarray, passages: np.ndarray, pairs: list[tuple[int, int]]) -> list[float]:
    """Returns alignment and the uniformity of queries and of passages, pair by pair in float64."""

    def distance(one: np.ndarray, other: np.ndarray) -> float:
        return math.fsum((float(a) - float(b)) ** 2 for a, b in zip(one, other, strict=True))

    def uniformity(rows: np.ndarray) -> float:
        terms = [math.exp(-2 * distance(rows[i], rows[j])) for i in range(len(rows)) for j in range(i)]
        return math.log(math.fsum(terms) / len(terms))

    aligned = math.fsum(distance(queries[query], passages[row]) for query, row in pairs) / len(pairs)
    return [aligned, uniformity(queries), uniformity(passages)]


def test_embeddings_are_measured_as_by_a_slow_loop(world, done: Done, tmp_path: Path) -> None:
    """The tiny encoder does not normalise, so raw vectors are measured too."""
    out_file = tmp_path / "e.json"
    command = ("evaluate", "--store", world.store, "--embeddings", "enc", "--json", out_file)
    out = done(*command)
    document = json.loads(out_file.read_text())
    found = document["embeddings"]["enc"]
    assert (found["pairs"], found["queries"], found["passages"]) == (30, 30, 240)
    assert "mean" not in document
    store = Store(str(world.store))
    corpus = Corpus.open(store)
    embeddings = Embeddings.open(store, "enc", corpus)
    passages = embeddings.take(np.arange(240)).astype(np.float64)
    encoder = Encoder(world.model, EncoderOptions(dtype="float32", compile="never"))
    texts = {query["_id"]: query["text"] for query in world.queries}
    judged = world.judged[:30]
    queries = encoder.encode([texts[query] for query, _, _ in judged], side="query").astype(np.float64)
    rows = corpus.rows_of([passage for _, passage, _ in judged])
    pairs = list(enumerate(rows.tolist()))
    names = ("alignment", "uniformity_queries", "uniformity_passages")
    assert [found["raw"][name] for name in names] == pytest.approx(slow_measures(queries, passages, pairs), rel=1e-5)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    passages /= np.linalg.norm(passages, axis=1, keepdims=True)
    expected = slow_measures(queries, passages, pairs)
    assert [found["unit"][name] for name in names] == pytest.approx(expected, rel=1e-5)
    assert found["unit"]["cosine_relevant"] == pytest.approx(1 - expected[0] / 2, rel=1e-5)
    assert found["unit"]["cosine_other"] < found["unit"]["cosine_relevant"]
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["enc", "unit"], ["enc", "raw"]]
    assert f"{expected[0]:.4f}" in out
    assert "enc: alignment of 30 pairs, uniformity of 30 queries and of 240 passages" in out
    done(*command)  # the same figures: the file would be refused otherwise


def test_a_sample_is_drawn_from_a_seed_and_leaves_out_deleted_passages(world, done: Done, tmp_path: Path) -> None:
    out_file = tmp_path / "e.json"
    command = ("evaluate", "--store", world.store, "--embeddings", "enc", "--json", out_file, "--overwrite")

    def measured(*more: object) -> dict:
        done(*command, *more)
        return json.loads(out_file.read_text())["embeddings"]["enc"]

    everything = measured()
    first, again, other = (measured("--sample", 20, "--seed", seed) for seed in (1, 1, 2))
    assert (first["pairs"], first["queries"], first["passages"]) == (30, 20, 20)
    assert first == again != other
    assert first["unit"]["alignment"] == other["unit"]["alignment"] == everything["unit"]["alignment"]
    gone = [passage for _, passage, _ in world.judged[:5]]
    (tmp_path / "gone").write_text("".join(f"{id}\n" for id in gone))
    done("import_corpus", "--store", world.store, "--delete", tmp_path / "gone")
    done(
        "encode_corpus",
        "--store",
        world.store,
        "--encoder",
        world.model,
        "--name",
        "enc",
        "--dtype",
        "float32",
        "--compile",
        "never",
    )
    less = measured()
    assert (less["pairs"], less["queries"], less["passages"]) == (25, 25, 235)


def test_runs_and_embeddings_are_measured_together(world, done: Done, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("evaluate", "--store", world.store, "--run", "exact", "--embeddings", "enc")
    out = done(*command, "--plan")
    assert "embeddings enc: 30 queries to encode, alignment of 30 pairs" in out
    assert not (tmp_path / "results").exists()
    done(*command)
    done(*command)
    done(*command, "--sample", 10)
    files = sorted((tmp_path / "results").iterdir())
    assert len(files) == 2
    assert all(re.fullmatch(r"evaluation-test-exact-enc-[0-9a-f]{8}\.json", path.name) for path in files)
    document = json.loads(files[0].read_text())
    assert document["mean"].keys() == {"exact"}
    assert document["embeddings"].keys() == {"enc"}


def test_an_encoder_without_embeddings_is_refused(world, refused: Done) -> None:
    line = refused("evaluate", "--store", world.store, "--run", "exact", "--task", "t")
    remedy = "expected --embeddings, --source or --certify too; a run is measured without an encoder"
    assert line == f"error: --task t: {remedy}"


def test_embeddings_that_cannot_be_measured_are_refused(
    world, done: Done, refused: Done, documented: Callable[..., None], tmp_path: Path
) -> None:
    command = ("evaluate", "--store", world.store, "--json", tmp_path / "e.json")
    assert "no --run, no --source, no --embeddings and no --certify: expected something to measure" in refused(*command)
    measured = (*command, "--embeddings", "enc")
    assert "embeddings/none: there is no such artifact" in refused(*command, "--embeddings", "none")
    assert "--sample 1 --seed 0: expected at least 2" in refused(*measured, "--sample", 1)
    line = refused(*measured, "--split", "all")
    assert "--split all: it has no judgements, and alignment is measured on judged pairs" in line
    assert "1 queries and 240 passages, expected at least 2 of each" in refused(*measured, "--limit", 1)
    assert {passage for _, passage, _ in world.judged[30:]}.isdisjoint({"p0", "p1", "p2"})
    done("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "few", "--limit", 3)
    line = refused(*command, "--embeddings", "few", "--split", "train")
    assert "none of its 10 queries has a relevant passage among the 3 passages of embeddings/few" in line
    documented("Evaluating", "embeddings that have no relevant passage of the split", line, 1)
    assert not (tmp_path / "e.json").exists()
