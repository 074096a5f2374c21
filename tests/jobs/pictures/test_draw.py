"""The job that draws pictures: numbers beside the pictures, files that are kept, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from samples import write_beir, write_queries
from serving import OPTIONS, computed_prompt

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.store.model_artifacts import commit_files
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topics_reader import Topics
from riptide.jobs.pictures.drawn_passages import group_by_category
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.prompts.task_prompt import TaskPrompt

Done = Callable[..., str]
WORDLESS = "漢字 ???"


def put_prompt(store: Path, name: str, model: str, prompt: TaskPrompt, folder: Path) -> None:
    """Commits prompts/NAME."""
    folder.mkdir()
    prompt.save(folder)
    with Store(str(store)).create("prompts", name, config={}, inputs={}) as draft:
        draft.add_notes(backbone=model, options=asdict(prompt.options))
        commit_files(draft, folder)


@pytest.fixture
def kilt(tmp_path: Path, world, done: Done) -> Path:
    """A store with a task of computed prompts, and two query sets, one with a query without words."""
    put_prompt(world.store, "hyper", world.model, computed_prompt(world.model, 1), tmp_path / "hyper")
    texts = ["river bank", "money", "water flows", WORDLESS]
    queries = [{"_id": f"k{number}", "text": text} for number, text in enumerate(texts)]
    source = write_queries(tmp_path / "short", queries, {"test": [(f"k{n}", "p0", 1) for n in range(4)]})
    done("import_queries", "--store", world.store, "--source", source)
    return world.store


def test_attention_of_query_sets(kilt: Path, model: str, tmp_path: Path, done: Done, refused: Done) -> None:
    """The means are those of the encoder's weights; the query without words does not count."""
    png = tmp_path / "out" / "a.png"
    command = ("draw", "attention", "--store", kilt, "--task", "hyper", "--png", png)
    sets = ("--queries", "short", "queries=tiny,split=train,label=long ones")
    assert f"writes   {png}" in done(*command, *sets, "--plan")
    assert not png.exists()
    out = done(*command, *sets)
    assert out.splitlines() == [
        "warning: short: 1 queries have no word that the backbone knows, and do not count",
        f"attention of hyper over queries of 3 short, 10 long ones: {png}",
    ]
    assert png.read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "out" / "a.json").read_text())
    assert numbers["queries"] == ["queries/short test", "queries/tiny train"]
    assert (numbers["sets"], numbers["num_queries"]) == (["short", "long ones"], [3, 10])
    assert numbers["num_without_words"] == [1, 0]
    encoder = Encoder(model, OPTIONS, tasks={"t": computed_prompt(model, 1)})
    expected = encoder.prompt_weights(["river bank", "money", "water flows"], task="t").mean(axis=0)
    np.testing.assert_allclose(numbers["mean_attention"][0], expected, atol=2e-3)  # the job has the options' dtype
    a, b = np.array(numbers["mean_attention"])
    assert numbers["cosine"][0][1] == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)))
    assert numbers["divergence"][0][1] > 0
    first = png.read_bytes()
    done(*command, *sets)  # the same bytes
    assert png.read_bytes() == first
    assert "a file with other content is there" in refused(*command, *sets, "--title", "another")
    done(*command, *sets, "--title", "another", "--overwrite")
    assert png.read_bytes() != first


def test_attention_of_bad_input_is_one_line(kilt: Path, model: str, tmp_path: Path, done: Done, refused: Done) -> None:
    command = ("draw", "attention", "--store", kilt, "--png", tmp_path / "a.png", "--queries")
    assert "expected --task" in refused(*command, "short", "tiny")
    assert "one query set, expected at least 2" in refused(*command, "short", "--task", "hyper")
    assert "two query sets have this name" in refused(*command, "short", "short", "--task", "hyper")
    form = refused(*command, "short", "queries=tiny,splits=x", "--task", "hyper")
    assert "--queries 'queries=tiny,splits=x': found 'splits=x', expected NAME=VALUE" in form
    assert "no such prompt and no such model" in refused(*command, "short", "tiny", "--task", "other")
    put_prompt(kilt, "even", model, computed_prompt(model, 1, attention="uniform"), tmp_path / "even")
    assert "the weights of all queries are equal" in refused(*command, "short", "tiny", "--task", "even")
    assert "goes with rates" in refused(*command, "short", "tiny", "--task", "hyper", "--metric", "RR@10")
    source = write_queries(tmp_path / "none", [{"_id": "z", "text": WORDLESS}], {"test": [("z", "p0", 1)]})
    done("import_queries", "--store", kilt, "--source", source)
    assert "none of its 1 queries has a word" in refused(*command, "short", "none", "--task", "hyper")


def test_rates_of_measured_sources(world, tmp_path: Path, done: Done, refused: Done) -> None:
    """`evaluate --rate-queries` measures; `draw rates` averages runs with the same label."""
    evaluation = tmp_path / "e.json"
    command = ("evaluate", "--store", world.store, "--source", "exact:enc", "--json", evaluation)
    done(*command, "--rate-queries", 20, "--rate-batch", 10)
    document = json.loads(evaluation.read_text())
    [(run, rate)] = document["rates"].items()
    assert (rate["queries"], rate["batch"], rate["hits"], len(rate["rounds"])) == (20, 10, 100, 3)
    assert sorted(rate["rounds"])[1] == rate["queries_per_s"] > 0
    assert "a rate differs from call to call" in refused(*command, "--rate-queries", 20)
    assert "expected at least 1, and --source" in refused(
        "evaluate", "--store", world.store, "--run", "exact", "--rate-queries", 20
    )
    other = tmp_path / "f.json"
    other.write_text(json.dumps({"mean": {"x": {"nDCG@10": 0.5}, "y": {"nDCG@10": 0.7}}}))
    png = tmp_path / "r.png"
    drawing = ("draw", "rates", "--evaluation", evaluation, other, "--png", png, "--label", "x=both", "y=both")
    assert "x has no rate" in refused(*drawing)
    out = done(*drawing, "--rate", "x=100", "y=300")
    mean = document["mean"][run]["nDCG@10"]
    assert out.splitlines() == [
        f"{run}: nDCG@10 {mean:.4f}, {rate['queries_per_s']:,.4g} queries/s",
        "both: nDCG@10 0.6000, 150 queries/s",  # two queries take 1/100 + 1/300 s
        f"2 points: {png}",
    ]
    numbers = json.loads(png.with_suffix(".json").read_text())
    assert numbers["points"][1] == {"label": "both", "queries_per_s": pytest.approx(150), "quality": 0.6}
    assert "no file has such a run" in refused(*drawing, "--rate", "x=1", "y=1", "z=1")
    assert "expected RUN=NUMBER" in refused(*drawing, "--rate", "x=0")
    assert "has no RR" in refused(*drawing, "--rate", "x=1", "y=1", "--metric", "RR@1000")
    assert "goes with points" in refused(*drawing, "--sample", 10)
    before = evaluation.read_bytes()
    onto = ("--evaluation", evaluation, "--png", evaluation.with_suffix(".png"), "--overwrite")
    assert f"would replace {evaluation}, which is drawn" in refused("draw", "rates", *onto)
    assert evaluation.read_bytes() == before
    taken = tmp_path / "taken.json"
    taken.write_text("{}")
    line = refused("draw", "rates", "--evaluation", evaluation, "--png", taken.with_suffix(".png"))
    assert f"{taken}: a file with other content is there" in line
    assert not taken.with_suffix(".png").exists()
    run = '{"mean": {"x": {"nDCG@10": %s}}, "rates": {"x": {"queries_per_s": %s}}}'
    for text in ("[]", "[" * 100_000, run % (0.5, "9" * 400), run % (0.5, 1e300), run % ("1e300", 5), run % ("NaN", 5)):
        other.write_text(text)
        assert "not a file of evaluate with runs" in refused(*drawing)
    assert "/dev/zero: more than 16,777,216 bytes" in refused("draw", "rates", "--evaluation", "/dev/zero")


def test_points_by_topic_and_category(world, tmp_path: Path, done: Done, refused: Done) -> None:
    """A sample of 40 of the 240 passages; their topics are those of the corpus."""
    fitting = ("--min-passages", 2, "--most-frequent", 0, "--iterations", 5, "--method", "lda", "--topics", 2)
    done("fit_topics", "--store", world.store, *fitting)
    png = tmp_path / "p.png"
    command = ("draw", "points", "--store", world.store, "--png", png, "--sample", 40, "--perplexity", 5)
    assert "expected --topics or --categories-field" in refused(*command)
    assert "the passage 'p" in refused(*command, "--categories-field", "kind")
    assert "goes with attention" in refused(*command, "--topics", "topics", "--task", "t")
    assert "--seed 4294967296: expected" in refused(*command, "--topics", "topics", "--seed", 2**32)
    out = done(*command, "--topics", "topics")
    assert out == f"40 of 240 passages of embeddings/enc: {png}\n"
    numbers = json.loads(png.with_suffix(".json").read_text())
    rows = np.sort(np.random.default_rng(0).choice(240, 40, replace=False))
    assert numbers["ids"] == [f"p{row}" for row in rows]
    topics = Topics.open(Store(str(world.store)))
    expected = topics.topic_per_row()[rows].tolist()
    words = [f"{number}: {' '.join(of[:3])}" for number, of in enumerate(topics.model.words)]
    assert numbers["by topic"] == ["" if topic < 0 else words[topic] for topic in expected]
    assert np.array(numbers["positions"]).shape == (40, 2)
    assert done(*command, "--topics", "topics", "--plan").splitlines()[0] == "passages 40 of 240 of embeddings/enc"


def test_a_passage_of_several_categories_is_in_the_largest(tmp_path: Path, done: Done) -> None:
    """Categories by the number of passages: b 3, a 2, c 1."""
    kinds = (["a", "b"], ["b", "c"], ["a"], ["b"])
    passages = [{"_id": f"d{n}", "text": "x", "metadata": {"kinds": names}} for n, names in enumerate(kinds)]
    done("import_corpus", "--store", tmp_path / "s", "--source", write_beir(tmp_path / "raw", passages))
    corpus = Corpus.open(Store(str(tmp_path / "s")))
    assert group_by_category(corpus, "kinds", np.arange(4)).groups == ["b", "b", "a", "b"]
    assert group_by_category(corpus, "kinds", np.array([0, 2])).groups == ["a", "a"]
