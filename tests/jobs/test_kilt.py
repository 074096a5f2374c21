"""KILT's tasks by jobs alone: from the files to negatives, R-precision and a trained task of HYPER; bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import yaml
from kilt_files import PAGES, TASKS, at, on_page, task, write_jsonl, write_kilt
from samples import write_beir
from tiny import add_masked_head, save_encoder

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.measures.answers import AnswerMatcher
from riptide.indexing.mining.negatives import read_groups
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.jobs import train_retriever

Done = Callable[..., str]
TRAINED = [name.split("-")[0] for name in TASKS if "-train-" in name]
WITHOUT_ANSWERS = ("fever", "aidayago2")  # a label, and the title of the page, are no answers
RECIPE = Path(train_retriever.__file__).parent / "recipes" / "pipeline-kilt.yaml"
# The tasks of the recipe, by the names of their query sets.
NAMES = {"fever": "fever", "ay2": "aidayago2", "zsre": "structured_zeroshot", "nq": "nq"}
NAMES |= {"hopo": "hotpotqa", "tqa": "triviaqa", "wow": "wow"}


class Kilt(NamedTuple):
    """The files, and a store with the pages in passages of at most 12 words, its BM25 index, and all tasks."""

    files: dict[str, Path]
    store: Path

    def open(self, task: str) -> tuple[Corpus, Queries]:
        store = Store(str(self.store))
        return Corpus.open(store), Queries.open(store, task)


@pytest.fixture(scope="module")
def kilt(tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> Kilt:
    folder = tmp_path_factory.mktemp("kilt")
    files, store = write_kilt(folder / "raw"), folder / "store"
    at_store = ("--store", store)
    source = files["kilt_knowledgesource"]
    assert call_job("import_corpus", *at_store, "--source", source, "--split-words", 12) == 0
    for name in TASKS:
        assert call_job("import_queries", *at_store, "--source", files[name], "--queries", name.split("-")[0]) == 0
    assert call_job("build_bm25", *at_store) == 0
    for name in TRAINED:
        answers = () if name in WITHOUT_ANSWERS else ("--drop-answers",)
        mine = ("--queries", name, "--sources", "bm25", "--depth", 20, "--pool-negatives", 6, "--name", name)
        assert call_job("mine_negatives", *at_store, *mine, *answers) == 0
    return Kilt(files, store)


def pages_of(line: dict[str, Any]) -> list[set[str]]:
    """Returns the pages of each provenance set of a line of a task file."""
    sets = [{entry["wikipedia_id"] for entry in output.get("provenance", [])} for output in line["output"]]
    return [pages for pages in sets if pages]


@pytest.mark.parametrize("name", TRAINED)
def test_negatives_are_of_no_cited_page_and_have_no_answer(kilt: Kilt, name: str) -> None:
    corpus, _ = kilt.open(name)
    groups = read_groups(Store(str(kilt.store)).open("negatives", name))
    lines = {line["id"]: line for line in TASKS[f"{name}-train-kilt"]}
    assert groups.query_ids == list(lines)
    num_negatives = 0
    for id, positives, negatives in zip(groups.query_ids, groups.positives, groups.negatives, strict=True):
        cited = set().union(*pages_of(lines[id]))
        assert {passage.metadata["wikipedia_id"] for passage in corpus.passages(positives)} == cited
        passages = corpus.passages(negatives)
        assert not cited & {passage.metadata["wikipedia_id"] for passage in passages}
        answers = [output["answer"] for output in lines[id]["output"] if "answer" in output]
        if name not in WITHOUT_ANSWERS:
            assert not AnswerMatcher().contains([passage.text for passage in passages], answers).any()
        num_negatives += len(passages)
    assert num_negatives


def test_an_answer_in_another_page_makes_no_negative(kilt: Kilt, done: Done) -> None:
    """The page of the novelist has words of the query and its answer; without --drop-answers it is a negative."""
    corpus, _ = kilt.open("nq")
    mine = ("mine_negatives", "--store", kilt.store, "--queries", "nq", "--depth", 20, "--pool-negatives", 20)
    done(*mine, "--name", "all-nq", "--candidates", "all-nq")
    found = {}
    for name in ("nq", "all-nq"):
        groups = read_groups(Store(str(kilt.store)).open("negatives", name))
        rows = groups.negatives[groups.query_ids.index("77")]
        found[name] = [passage.text for passage in corpus.passages(rows)]
    assert any("Port Mirel" in text for text in found["all-nq"])
    assert not any("Port Mirel" in text for text in found["nq"])


def test_labels_and_entities_are_no_answers(kilt: Kilt, refused: Done, documented) -> None:
    for name in WITHOUT_ANSWERS:
        line = refused("mine_negatives", "--store", kilt.store, "--queries", name, "--drop-answers")
        assert (
            f"--drop-answers: no query of queries/{name} train has answers in its metadata, which are no labels" in line
        )
    documented("Mining", "--drop-answers for a task of KILT without answers", line, 1)


def page_r_precision(store: Store, run: str, lines: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the R-precision of pages of each query, from the rows of a stored run and the lines of the task file."""
    corpus, hits = Corpus.open(store), {}
    for row in pa.concat_tables(read_run(store.open("runs", run))).to_pylist():
        [passage] = corpus.passages([row["row"]])
        hits.setdefault(row["query_id"], {})[passage.metadata["wikipedia_id"]] = None
    values = {}
    for line in lines:
        pages = [*hits.get(line["id"], {})]
        values[line["id"]] = max(len({*pages[: len(own)]} & own) / len(own) for own in pages_of(line))
    return values


@pytest.mark.parametrize("by", ["document", "passage"])
def test_r_precision_of_pages_from_a_search(kilt: Kilt, done: Done, tmp_path: Path, by: str) -> None:
    """The values of BM25's hits are those of a plain function over the stored run and the task files."""
    for name, lines in TASKS.items():
        at_queries = ("--store", kilt.store, "--queries", name.split("-")[0], "--split", name.split("-")[1])
        done("search", *at_queries, "--mode", "bm25", "--k", 12, "--by", by, "--name", f"{name}-{by}")
        expected = page_r_precision(Store(str(kilt.store)), f"{name}-{by}", lines)
        done("evaluate", *at_queries, "--run", f"{name}-{by}", "--metrics", "PageRprec", "--json", tmp_path / "e.json")
        document = json.loads((tmp_path / "e.json").read_text())
        [values] = document["per_query"].values()
        assert dict(zip(document["query_ids"], values["PageRprec"], strict=True)) == pytest.approx(expected), name
        (tmp_path / "e.json").unlink()


def small_recipe(kilt: Kilt, model: Path, results: Path) -> list[dict[str, dict[str, Any]]]:
    """Returns the steps of pipeline-kilt.yaml for the small files and a small model, with few queries and steps."""
    sizes = {"length": 4, "basic_prompts": 3, "prompt_hidden": 6, "prompt_bottleneck": 5}
    loop = {"batch": 8, "epochs": None, "steps": 6, "checkpoint_every": 3, "evaluate_every": 3, "workers": 1}
    device = {"cpus": 1, "gpus": None, "wait": None, "dtype": "float32", "negatives_per_query": 3}
    changes = {
        "import_corpus": {"split_words": 12},
        "import_queries": {"hold_out": 1},
        "train_retriever": {
            "backbone": str(model),
            **sizes,
            **loop,
            **device,
            "query_length": 40,
            "passage_length": 40,
        },
        "encode_corpus": {"dtype": "float32"},
    }
    steps = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["steps"]
    for step in steps:
        [(job, options)] = step.items()
        options |= {name: value for name, value in changes.get(job, {}).items() if name in options or name == "dtype"}
        for name, folder in {"source": kilt.files["kilt_knowledgesource"].parent, "json": results}.items():
            if "/" in options.get(name, ""):
                options[name] = str(folder / Path(options[name]).name)
        if "curves" in options:
            options["curves"] = str(results / "curves")
    return steps


def test_the_recipe_from_files_to_r_precision(kilt: Kilt, done: Done, tmp_path: Path) -> None:
    """All steps of the recipe run; BM25's figures are those of the other tests, and the plan names each command."""
    texts = [text for page in PAGES for text in page["text"]]
    texts += [line["input"] for lines in TASKS.values() for line in lines]
    words = sorted({word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text)})
    model = add_masked_head(save_encoder(tmp_path / "model", words=words, lowercase=True), spread=0.2)
    recipe = tmp_path / "recipe.yaml"
    steps = small_recipe(kilt, model, tmp_path)
    recipe.write_text(yaml.safe_dump({"store": str(tmp_path / "store"), "steps": steps}))
    plan = done("pipeline", "--config", recipe, "--plan")
    assert plan.count("$ riptide import-queries") == 14
    assert not (tmp_path / "store").exists()
    done("pipeline", "--config", recipe)
    for label, name in NAMES.items():
        document = json.loads((tmp_path / f"kilt-{label}.json").read_text())
        values = {run.partition("-")[2]: value["PageRprec"] for run, value in document["per_query"].items()}
        assert values.keys() == {"bm25", "hyper"}
        lines = TASKS[f"{name}-train-kilt"]
        expected = page_r_precision(Store(str(tmp_path / "store")), f"{label}-bm25", lines)
        assert dict(zip(document["query_ids"], values["bm25"], strict=True)) == pytest.approx(expected), name
    store = Store(str(tmp_path / "store"))
    assert len(store.open("models", "hyper").config["also_train"]) == len(NAMES) - 1
    assert store.open("prompts", "hyper-prompt").inputs["model"]["artifact"] == "models/hyper"


def test_splits_held_out_queries_and_plan(kilt: Kilt, done: Done, refused: Done, documented) -> None:
    command = ("import_queries", "--store", kilt.store, "--source", kilt.files["wow-train-kilt"], "--queries", "w")
    assert "splits with qrels: train, held-out" in done(*command, "--hold-out", 1, "--plan")
    assert "splits with qrels: mine" in done(*command, "--split", "mine", "--plan")
    assert "splits with qrels: none" in done(*command, "--provenance", "none", "--plan")
    out = done(*command, "--hold-out", 1)
    assert "provenance  2 pages of queries judged by spans, 0 as a whole" in out
    assert kilt.open("w")[1].splits == ["held-out", "train"]
    assert "was imported otherwise" in refused(*command, "--provenance", "page")
    line = refused(*command[:-1], "other", "--split", "a b")
    assert "wow-train-kilt.jsonl: its split has no valid name" in line
    line = refused(*command, "--provenance", "none", "--split", "dev")
    assert "--split dev with --provenance none: found no judgements to name; leave the split out" in line
    documented("Importing", "--split for KILT's queries without judgements", line, 1)
    qrels = kilt.store.parent / "q.tsv"
    qrels.write_text("w0\t0\t104\t1\n")
    line = refused(*command, "--provenance", "page", "--qrels", qrels)
    assert "--provenance page with --qrels: expected one of them" in line
    documented("Importing", "--provenance with --qrels", line, 1)
    done(*command[:-1], "w-qrels", "--qrels", qrels, "--split", "dev")
    assert kilt.open("w-qrels")[1].qrels("dev").to_pylist() == [{"query_id": "w0", "corpus_id": "104", "score": 1}]


def test_queries_without_provenance(kilt: Kilt, done: Done, tmp_path: Path, documented) -> None:
    """As in the test files of KILT, whose answers are hidden, or if no output has any."""
    file = write_kilt(tmp_path)["fever-test"]
    out = done("import_queries", "--store", kilt.store, "--source", file, "--queries", "hidden")
    warning = f"warning: no judgements in {file}: no query has provenance, as in KILT's test files"
    assert out.splitlines()[-1] == warning
    documented("Importing", "a task file of KILT without provenance", warning, 0)
    assert kilt.open("hidden")[1].splits == []
    source = write_jsonl(tmp_path / "nq-dev-kilt.jsonl", [task("a", "who", [{"answer": "x", "provenance": []}])])
    assert f"warning: no judgements in {source}" in done("import_queries", "--store", kilt.store, "--source", source)


def test_pages_that_the_corpus_lacks(kilt: Kilt, done: Done, refused: Done, tmp_path: Path, documented) -> None:
    gone = [{"wikipedia_id": id, "title": title} for id, title in (("900", "Gone"), ("901", "Away"))]
    lines = [
        task("a", "who", [{"provenance": [on_page("101"), gone[0]]}]),
        task("b", "what", [{"provenance": gone}]),
        task("c", "where", [{"provenance": [at("105", "Their coach")]}]),
    ]
    source = write_jsonl(tmp_path / "nq-dev-kilt.jsonl", lines)
    command = ("import_queries", "--store", kilt.store, "--source", source, "--queries", "gone")
    line = refused(*command)
    assert line.endswith(
        f"{source}: query 'a' has its provenance in the page '900' ('Gone'), which is not in the corpus (and 2 more "
        "pages of queries like it); add the page, or leave such judgements out by --skip-unknown"
    )
    documented("Importing", "provenance in pages that the corpus lacks", line, 1)
    assert "gone" not in Store(str(kilt.store)).names("queries")
    out = done(*command, "--skip-unknown")
    assert "left out 3 judgements of passages that the corpus lacks" in out
    qrels = kilt.open("gone")[1].qrels("dev").to_pylist()
    assert [(row["query_id"], row["corpus_id"]) for row in qrels] == [("a", "101"), ("c", "105")]


def test_other_bad_input_is_one_line(kilt: Kilt, done: Done, refused: Done, tmp_path: Path, documented) -> None:
    """TriviaQA without questions, a broken line, a corpus without pages, another format."""
    command = ("import_queries", "--store", kilt.store, "--source")
    files = write_kilt(tmp_path / "kilt")
    line = refused(*command, files["triviaqa-train_id"])
    assert "triviaqa-train_id-kilt.jsonl: found no input, expected a query in each line" in line
    documented("Importing", "KILT's file of TriviaQA, without its questions", line, 1)
    broken = tmp_path / "fever-dev-kilt.jsonl"
    broken.write_text(files["fever-train-kilt"].read_text()[:-30])
    line = refused(*command, broken)
    assert "fever-dev-kilt.jsonl:2: found no valid JSON" in line
    documented("Importing", "a task file of KILT that ends in the middle of a line", line, 1)
    source = write_beir(tmp_path / "raw", [{"_id": "d0", "text": "x"}])
    done("import_corpus", "--store", tmp_path / "s", "--source", source)
    other = ("import_queries", "--store", tmp_path / "s", "--source", files["fever-train-kilt"])
    line = refused(*other)
    assert "its provenance names pages, and no passage of the corpus has wikipedia_id in its metadata" in line
    documented("Importing", "provenance over passages without pages", line, 1)
    done(*other, "--provenance", "none")
    table = tmp_path / "asked.csv"
    table.write_text("id,question\na,who\n")
    line = refused(*command, table, "--provenance", "span")
    assert "--provenance span: " in line
    assert "has the format csv, which has no provenance, expected kilt; leave it out" in line
    documented("Importing", "--provenance for a table", line, 1)
