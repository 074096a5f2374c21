"""A chain makes what its jobs make one by one, refuses a bad recipe before it begins, and goes on where it was."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_cluster import without_progress
from recipe_labels import unlabelled
from samples import files_of, make_passages, make_queries, write_beir

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.jobs import build_index, encode_corpus, fit_topics, import_corpus, mine_negatives, pipeline, replay, verify
from riptide.jobs.commands import cli
from riptide.jobs.commands.steps import JobStep, make_step, read_steps
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.migration.migrate_options import Migrate
from riptide.jobs.training.resolving import tune_options, with_terms

JOBS = Path(cli.__file__).parents[1]
RECIPES = sorted((JOBS / "recipes").glob("pipeline-*.yaml"))
NUMERICS = {"dtype": "float32", "compile": "never"}
Write = Callable[..., Path]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    passages = make_passages(60)
    queries, judged = make_queries(passages, 20)
    return write_beir(tmp_path / "raw", passages, queries, {"test": judged[:12], "train": judged[12:]})


@pytest.fixture
def recipe(tmp_path: Path) -> Write:
    """recipe(*steps, **head): a recipe's file, whose store is tmp_path/store."""

    def write(*steps: object, **head: object) -> Path:
        file = tmp_path / "chain.yaml"
        file.write_text(yaml.safe_dump({"store": str(tmp_path / "store"), "steps": list(steps), **head}))
        return file

    return write


@pytest.fixture
def chain(source: Path, model: str, tmp_path: Path) -> list[dict]:
    """From raw files to figures."""
    return [
        {"import_corpus": {"source": str(source), "part_size": 20}},
        {"build_bm25": None},
        {"encode_corpus": {"encoder": model, "name": "enc", **NUMERICS}},
        {"build_index": {"embeddings": "enc", "factory": "Flat", "shards": 2}},
        {"mine_negatives": {"sources": ["bm25", "exact:enc"], "depth": 10, "pool_negatives": 3, "name": "hard"}},
        {"search": {"mode": "dense", "k": 10, "name": "dense"}},
        {"search": {"mode": "bm25", "k": 10, "name": "words"}},
        {"evaluate": {"run": ["dense", "words"], "metrics": ["R@10"], "json": str(tmp_path / "figures.json")}},
    ]


def headers(out: str) -> list[str]:
    return [line.removeprefix("== ") for line in out.splitlines() if line.startswith("== ")]


def artifacts(store: Path) -> dict[str, str]:
    opened = Store(str(store))
    keys = opened.keys()
    return {key: Artifact(opened.storage, opened.cache, key).fingerprint for key in keys}


def test_a_chain_makes_what_its_commands_make_one_by_one_and_a_second_run_makes_nothing(
    chain: list[dict], recipe: Write, done: Callable[..., str], tmp_path: Path
) -> None:
    """The commands are those that --plan prints; Lucene's files differ each time, so fingerprints are compared."""
    file = recipe(*chain)
    printed = done("pipeline", "--config", file, "--store", tmp_path / "single", "--plan")
    commands = [shlex.split(line[2:]) for line in printed.splitlines() if line.startswith("$ ")]
    assert not (tmp_path / "single").exists()
    out = done("pipeline", "--config", file)
    assert headers(out) == [
        f"1/8 import_corpus {tmp_path}/raw",
        "2/8 build_bm25 bm25",
        "3/8 encode_corpus enc",
        "4/8 build_index enc",
        "5/8 mine_negatives hard",
        "6/8 search dense",
        "7/8 search words",
        "8/8 evaluate",
    ]
    assert re.search(r"^encode: 60 passages", out, re.M)
    figures = (tmp_path / "figures.json").read_text()
    assert 0.5 < json.loads(figures)["mean"]["words"]["R@10"] <= 1
    for command in commands:
        program, job, *arguments = command
        assert program == "riptide"
        done(job.replace("-", "_"), *arguments)
    made = artifacts(tmp_path / "store")
    assert len(made) == 9
    assert artifacts(tmp_path / "single") == made
    assert (tmp_path / "figures.json").read_text() == figures
    before = files_of(tmp_path / "store", but=())
    again = done("pipeline", "--config", file)
    assert files_of(tmp_path / "store", but=()) == before
    assert headers(again) == headers(out)
    stages = "import|check ids|index text|encode|train|fill|measure recall|pool|sample|search"
    assert not re.search(rf"^({stages}): ", again, re.M)


def test_a_failure_names_the_step_and_the_next_run_goes_on_there(
    chain: list[dict], recipe: Write, refused: Callable[..., str], done: Callable[..., str], tmp_path: Path
) -> None:
    good = chain[2]["encode_corpus"]["encoder"]
    late = tmp_path / "late"
    chain[2]["encode_corpus"]["encoder"] = str(late)
    file = recipe(*chain[:3], chain[6])
    line = refused("pipeline", "--config", file)
    assert line.startswith("error: step 3/4 encode_corpus enc: ")
    assert str(late) in line
    kept = files_of(tmp_path / "store", but=())
    late.symlink_to(good)
    done("pipeline", "--config", file)
    assert set(artifacts(tmp_path / "store")) == {
        "bm25/bm25/g0000",
        "corpus/g0000",
        "embeddings/enc/g0000",
        "queries/raw",
        "runs/words",
    }
    assert kept.items() <= files_of(tmp_path / "store", but=()).items()


@pytest.mark.parametrize(("number", "more"), [(1, ""), (2, "; run the same command again to resume")])
def test_an_interrupted_chain_is_resumed_if_a_step_is_complete(
    chain: list[dict], recipe: Write, job: Callable, monkeypatch: pytest.MonkeyPatch, number: int, more: str
) -> None:
    def perform(step: JobStep) -> None:
        if step.number == number:
            raise KeyboardInterrupt
        original(step)

    original = pipeline.run_step
    monkeypatch.setattr(pipeline, "run_step", perform)
    outcome = job("pipeline", "--config", recipe(*chain[:2]))
    assert (outcome.status, outcome.err) == (130, f"error: interrupted{more}\n")


def test_what_is_no_bad_input_keeps_its_trace_and_says_its_step(
    chain: list[dict], recipe: Write, job: Callable, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(options: import_corpus.ImportCorpus) -> None:
        raise RuntimeError("our fault")

    def end(options: verify.Verify) -> None:
        sys.exit(1)

    monkeypatch.setattr(import_corpus, "main", break_down)
    with pytest.raises(RuntimeError, match="our fault") as caught:
        job("pipeline", "--config", recipe(*chain))
    assert caught.value.__notes__[0].startswith("in step 1/8 import_corpus ")
    monkeypatch.setattr(verify, "main", end)
    assert refused("pipeline", "--config", recipe({"verify": {}})) == "error: step 1/1 verify: ended with status 1"


BAD = [
    ({"build_bm52": {}}, "step 2: unknown job 'build_bm52'; did you mean build_bm25?"),
    ({"session": {}}, "step 2: unknown job 'session'; "),
    ({"pipeline": {}}, "step 2: unknown job 'pipeline'; "),
    ({"jobs": {}}, "step 2: unknown job 'jobs'; "),
    ({"../jobs/search": {}}, "step 2: unknown job '../jobs/search'; "),
    ({"search": {"mod": "bm25"}}, "step 2 search: unknown key 'mod'; did you mean mode?"),
    ({"search": {"mode": "words"}}, "step 2 search: mode: found 'words', expected "),
    ({"search": {"k": "many"}}, "step 2 search: k: found 'many', expected a whole number"),
    ({"search": {"drop_self": "yes"}}, "step 2 search: drop_self: expected true or false, found 'yes'"),
    ({"search": {"limit": 0}}, "step 2 search: --limit 0: expected at least 1"),
    ({"search": {"store": "x"}}, "step 2 search: store belongs to the chain, not to a step"),
    ({"import_corpus": {"source": "x", "sync": True, "watch": 9}}, "step 2 import_corpus: watch: found a step that "),
    ({"build_index": {"embeddings": "x", "watch": 5}}, "step 2 build_index: unknown key 'watch'; "),
    ({"search": {"plan": True}}, "step 2 search: plan belongs to the chain, not to a step"),
    ({"search": ["bm25"]}, "step 2 search: expected {option: value}, found ['bm25']"),
    ({"train_reranker": {"split": "train"}}, "step 2 train_reranker: missing key 'backbone'"),
    ({"search": {}, "evaluate": {}}, "step 2: expected one `job: {option: value}`, found "),
    ("build_bm25", "step 2: expected one `job: {option: value}`, found 'build_bm25'"),
]


@pytest.mark.parametrize(("step", "expected"), BAD, ids=[expected.rpartition("step 2")[2][:30] for _, expected in BAD])
def test_a_bad_step_is_refused_before_the_first_one_runs(
    step: object, expected: str, source: Path, recipe: Write, refused: Callable[..., str], tmp_path: Path
) -> None:
    file = recipe({"import_corpus": {"source": str(source)}}, step)
    assert refused("pipeline", "--config", file).startswith(f"error: {file}: {expected}")
    assert not (tmp_path / "store").exists()


def test_a_bad_recipe_is_refused(recipe: Write, refused: Callable[..., str], tmp_path: Path) -> None:
    def told(file: Path, *more: object) -> str:
        return refused("pipeline", "--config", file, *more).removeprefix(f"error: {file}: ")

    assert told(tmp_path / "none.yaml").startswith("No such file or directory")
    assert told(recipe()).startswith("expected `steps:`")
    assert told(recipe(steps={"verify": {}})).startswith("expected `steps:`")
    assert told(recipe({"verify": {}}, limit=3)) == "unknown key 'limit'; known are store, values, steps"
    assert told(recipe({"verify": {}}, store=None)).startswith("expected `store:`")
    assert told(recipe({"verify": {}}, store=["a"])).startswith("expected `store:`")
    (tmp_path / "chain.yaml").write_text("steps: [")
    assert told(tmp_path / "chain.yaml").startswith("not YAML: ")
    (tmp_path / "chain.yaml").write_text("- verify")
    assert told(tmp_path / "chain.yaml").startswith("expected `steps:`")


def test_values_replace_names_in_braces(
    chain: list[dict], recipe: Write, done: Callable[..., str], refused: Callable[..., str], tmp_path: Path
) -> None:
    words = {"search": {"mode": "bm25", "split": "{split}", "k": "{k}", "name": "{split}-{k}"}}
    head = {"store": str(tmp_path / "{name}"), "values": {"split": "test", "k": 5, "name": "one"}}
    file = recipe(*chain[:2], words, **head)
    assert headers(done("pipeline", "--config", file))[-1] == "3/3 search test-5"
    assert Store(str(tmp_path / "one")).open("runs", "test-5").config["k"] == 5
    given = ("--values", "split", "train", "k", 2)
    assert headers(done("pipeline", "--config", file, *given, "name", "two"))[-1] == "3/3 search train-2"
    assert Store(str(tmp_path / "two")).names("runs") == ["train-2"]
    line = refused("pipeline", "--config", file, "--values", "splits", "train")
    assert line == f"error: --values splits train: {file} has no value 'splits'; it has k, name, split"
    line = refused("pipeline", "--config", recipe(*chain[:2], words, values=["test"]))
    assert line.startswith(f"error: {file}: values: expected `name: value` lines of texts and numbers, found ['test']")
    line = refused("pipeline", "--config", recipe(*chain[:2], words, values={"k": 5}))
    assert line == f"error: {file}: found {{split}}, which has no value under `values`; it has k"
    assert "step 1 search: k: found '{q}'" in refused("pipeline", "--config", recipe({"search": {"k": "{q}"}}))


def test_a_plan_runs_nothing_and_says_what_a_step_waits_for(
    chain: list[dict], recipe: Write, done: Callable[..., str], refused: Callable[..., str], tmp_path: Path
) -> None:
    file, store = recipe(*chain), tmp_path / "store"

    def planned() -> dict[str, str]:
        pieces = re.split(r"^== (\d/8).*\n\$ .*\n", done("pipeline", "--config", file, "--plan"), flags=re.M)
        assert pieces[0] == ""
        return dict(zip(pieces[1::2], pieces[2::2], strict=True))

    fresh = planned()
    assert not store.exists()
    assert fresh["1/8"].startswith("store    ")
    waits = {place: re.match(r"after step (\d); now: .", text) for place, text in fresh.items()}
    assert {place: int(found[1]) for place, found in waits.items() if found} == {
        "2/8": 1,
        "3/8": 2,
        "4/8": 3,
        "5/8": 3,
        "6/8": 5,
        "7/8": 2,
        "8/8": 7,
    }
    done("pipeline", "--config", file, "--until", 3)
    before = files_of(store, but=())
    half = planned()
    assert [place for place, text in half.items() if text.startswith("after step ")] == ["6/8"]  # 8/8 opens no run
    assert half["4/8"].startswith("vectors  60 of 32 in embeddings/enc")
    assert half["5/8"].startswith("pool     8 queries x 2 sources x 10")
    assert files_of(store, but=()) == before
    chain[0]["import_corpus"]["source"] = str(tmp_path / "nowhere")
    assert "step 1/8" in refused("pipeline", "--config", recipe(*chain), "--plan")


def test_a_plan_refuses_a_name_of_a_later_step_that_is_taken(
    chain: list[dict], recipe: Write, done: Callable[..., str], refused: Callable[..., str], documented, tmp_path: Path
) -> None:
    """The run makes the earlier steps and ends with the same line."""
    words = chain[6]
    done("pipeline", "--config", recipe(*chain[:2], words))
    for changed in ({"build_bm25": {"k1": 2.0}}, {"search": {**words["search"], "k": 5}}):
        file = recipe(chain[0], {"build_bm25": {"name": f"pending-{next(iter(changed))}"}}, changed)
        before = files_of(tmp_path / "store", but=())
        line = refused("pipeline", "--config", file, "--plan")
        assert files_of(tmp_path / "store", but=()) == before
        assert line == refused("pipeline", "--config", file)
        assert line.startswith(f"error: step 3/3 {next(iter(changed))} ")
    documented("Stores", "pipeline --plan: a later step with the name of a run that has other options", line, 1)


def test_only_and_until_take_a_number_or_what_one_step_is_called(
    chain: list[dict], recipe: Write, done: Callable[..., str], refused: Callable[..., str], tmp_path: Path
) -> None:
    file = recipe(*chain)
    assert headers(done("pipeline", "--config", file, "--until", "build-bm25")) == [
        f"1/8 import_corpus {tmp_path}/raw",
        "2/8 build_bm25 bm25",
    ]
    for wanted in ("7", "words", "search words"):
        assert headers(done("pipeline", "--config", file, "--only", wanted)) == ["7/8 search words"]
    assert refused("pipeline", "--config", file, "--until", "search") == (
        "error: step 'search': several steps have this name; give the number: 6 search dense, 7 search words"
    )
    line = refused("pipeline", "--config", file, "--only", "9")
    assert "no step has this name; give the number: 1 import_corpus" in line
    assert refused("pipeline", "--config", file, "--only", 1, "--until", 2).startswith("error: --only and --until")


def test_a_limit_goes_to_steps_that_set_none(
    chain: list[dict], recipe: Write, done: Callable[..., str], model: str, tmp_path: Path
) -> None:
    chain[3]["build_index"]["name"] = "flat"
    chain[5] = {"search": {"source": "0.5*bm25+0.5*index:flat", "k": 10, "name": "dense"}}
    chain[6:6] = [
        {
            "pretrain_rip": {
                "backbone": model,
                "unit": "span",
                "batch": 8,
                "steps": 1,
                "max_length": 32,
                "cpus": 1,
                "name": "rip",
            }
        },
        {
            "tune_prompts": {
                "backbone": "models/rip",
                "negatives": "hard",
                "task": "t",
                "batch": 4,
                "steps": 1,
                "length": 2,
                "cpus": 1,
            }
        },
        {"encode_corpus": {"task": "t", "name": "t"}},
    ]
    chain[2]["encode_corpus"]["limit"] = chain[3]["build_index"]["limit"] = 40
    done("pipeline", "--config", recipe(*chain), "--limit", 30)
    store = Store(str(tmp_path / "store"))
    assert [artifact.rows for artifact in store.generations("corpus")] == [60]
    expected = {
        "bm25": ["bm25"],
        "embeddings": ["enc", "t"],
        "index": ["flat"],
        "negatives": ["hard"],
        "models": ["rip"],
        "prompts": ["t"],
        "runs": ["dense", "words"],
    }
    assert {kind: store.names(kind) for kind in expected} == expected


def test_a_chain_runs_as_a_plain_file_in_one_process(
    recipe: Write, source: Path, model: str, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = recipe(
        {"import_corpus": {"source": str(source)}},
        {"encode_corpus": {"encoder": model, "name": "enc", **NUMERICS}},
        {"search": {"mode": "exact", "k": 3, "name": "exact"}},
    )
    command = [sys.executable, str(JOBS / "pipeline.py"), "--config", file.name]
    good = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=600)
    errors = without_progress(good.stderr).splitlines()
    assert (good.returncode, errors) == (0, [])
    assert [line.split()[0] for line in headers(good.stdout)] == ["1/3", "2/3", "3/3"]
    recipe({"search": {"mod": "exact"}})
    monkeypatch.chdir(file.parent)
    line = "error: chain.yaml: step 1 search: unknown key 'mod'; did you mean mode?\n"
    assert job("pipeline", "--config", file.name) == (1, "", line)


TUNING = ("train_retriever", "tune_prompts")


def names_outside(key: str) -> bool:
    """Whether a step reads what no step makes: a model elsewhere, `none`, or the queries beside the corpus."""
    kind, _, name = key.partition("/")
    return "/" in name or name == "none" or kind == "queries"


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_of_ours_names_only_what_its_jobs_take_and_its_earlier_steps_make(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    jobs = [next(iter(step)) for step in yaml.safe_load(text)["steps"]]
    assert [job for job in jobs if not (JOBS / f"{job}.py").exists()] == []
    command = next(line for line in text.splitlines() if "riptide pipeline" in line)
    assert command.startswith("#   ")
    assert command.endswith(f"riptide pipeline --config jobs/recipes/{file.name}")
    made: set[str] = set()
    for step in read_steps(str(file)):
        unmade = [key for key in step.reads() if key.removesuffix("-prompt") not in made and not names_outside(key)]
        assert not unmade, (step.place, unmade)
        assert step.label or not step.makes(), step.place
        made.update(step.makes())


def test_there_are_recipes_for_the_papers_and_three_small_ones() -> None:
    names = [
        "billion",
        "gtr-beir",
        "gtr",
        "kilt",
        "msmarco-table3",
        "msmarco",
        "nq-table3",
        "nq",
        "scifact",
        "splade",
        "squad",
        "topic-dpr",
    ]
    assert [file.stem.partition("-")[2] for file in RECIPES] == [*names, "windows"]


def steps_of(name: str, *jobs: str) -> list[JobStep]:
    """Returns the steps of pipeline-NAME that are of these jobs."""
    return [step for step in read_steps(str(JOBS / f"recipes/pipeline-{name}.yaml")) if step.job in jobs]


def values_of(options: Any) -> dict[str, Any]:
    """Returns the options of a job by their flat names."""
    return {name: option.value(options) for name, option in options_by_name(type(options)).items()}


def test_each_setting_of_a_recipe_says_where_its_value_comes_from(tmp_path: Path) -> None:
    """A label is "paper", "authors' code" or "ours"; names of data and artifacts have none."""
    single = {
        "encode-e5-large-gpu": encode_corpus.EncodeCorpus,
        "encode-minilm-cpu": encode_corpus.EncodeCorpus,
        "index-21m": build_index.BuildIndex,
        "migrate-gate": Migrate,
        "mine-msmarco": mine_negatives.MineNegatives,
        "mine-nq": mine_negatives.MineNegatives,
        "replay-requests": replay.Replay,
        "topics-arxiv": fit_topics.FitTopics,
    }
    files = sorted((JOBS / "recipes").glob("*.yaml"))
    assert {*single} == {file.stem for file in files} - {file.stem for file in RECIPES}
    assert {file.stem: found for file in files if (found := unlabelled(file, single.get(file.stem)))} == {}
    text = (JOBS / "recipes/pipeline-nq.yaml").read_text()
    bad = text.replace("epochs: 60                  # paper", "epochs: 60").replace(
        "# ours: Anserini's", "# Anserini's"
    )
    (tmp_path / "bad.yaml").write_text(bad)
    assert [each.partition(": ")[2] for each in unlabelled(tmp_path / "bad.yaml")] == ["k1", "b", "epochs"]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_each_recipe_has_a_plan(file: Path, source: Path, tmp_path: Path, done: Callable[..., str]) -> None:
    """Of a new store: the first step is planned, and each other one waits for an earlier step."""
    text = re.sub(
        r"source: (raw|examples)/(\{[a-z]+\}|[^,}\n])+", f"source: {source}", file.read_text(encoding="utf-8")
    )
    (tmp_path / file.name).write_text(text)
    out = done("pipeline", "--config", tmp_path / file.name, "--store", tmp_path / "store", "--plan")
    count = len(read_steps(str(file)))
    assert len(headers(out)) == out.count("\n$ riptide ") == count
    assert len(re.findall(r"^after step \d+; now: ", out, re.M)) >= count - 3
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_trainings_of_a_recipe_have_options_that_fit_each_other(file: Path) -> None:
    """A plan checks them too, but only where the inputs of the step exist."""
    for step in steps_of(file.stem.partition("-")[2], *TUNING):
        options = step.options.as_train_retriever() if step.job == "tune_prompts" else step.options
        tuning = with_terms(options, tune_options(options), options.texts.pooling or "cls", tasks=1)
        assert (options.weights.sides == "untied") == (tuning.sides == "untied")


def test_what_the_recipes_of_single_jobs_read_is_made_by_other_recipes() -> None:
    made = {key for file in RECIPES for step in read_steps(str(file)) for key in step.makes()}
    minilm = yaml.safe_load((JOBS / "recipes/encode-minilm-cpu.yaml").read_text())
    made |= {f"embeddings/{minilm['name']}"}
    for name in ("mine-msmarco", "mine-nq"):
        settings = yaml.safe_load((JOBS / f"recipes/{name}.yaml").read_text())
        step = make_step("", "mine_negatives", settings, "s")
        assert {*step.reads()} <= made, name
    settings = yaml.safe_load((JOBS / "recipes/mine-msmarco.yaml").read_text())
    of_marco = [*steps_of("msmarco", "encode_corpus"), *steps_of("msmarco-table3", "encode_corpus")]
    assert {f"exact:{step.label}" for step in of_marco} > {*settings["sources"][1:]}


@pytest.mark.parametrize("name", ["msmarco", "msmarco-table3", "nq", "nq-table3", "splade"])
def test_a_reranker_does_not_score_the_queries_that_it_was_trained_on(name: str) -> None:
    """Each is trained on one half of the queries, chooses its checkpoint on a dev split, and scores the other half."""
    mined = {step.label: step.options for step in steps_of(name, "mine_negatives")}
    trained = {f"models/{step.label}": step.options for step in steps_of(name, "train_reranker")}
    scored = [options for options in mined.values() if options.reranker is not None]
    assert [options.pool.half for options in scored] == [1, 2]
    for options in scored:
        reranker = trained[options.reranker]
        assert mined[reranker.negatives].pool.half == 3 - options.pool.half
        assert mined[reranker.dev_negatives].split == reranker.dev_split != reranker.split
        assert mined[reranker.dev_negatives].pool.half is None
    for step in steps_of(name, *TUNING):
        first, second = step.options.negatives, step.options.also_train[0].partition("negatives=")[2]
        assert [mined[half].pool.half for half in (first, second)] == [1, 2]
        assert mined[first].reranker is None or mined[first].reranker != mined[second].reranker


def test_the_reranker_of_the_windows_is_trained_on_other_queries_than_it_scores() -> None:
    [reranker] = [step.options for step in steps_of("windows", "train_reranker")]
    scored = {step.options.split for step in steps_of("windows", "mine_negatives") if step.options.reranker}
    assert (scored, reranker.split) == ({"train"}, "held-out")


def test_the_recipe_of_nq_draws_as_the_authors_do_and_has_their_length() -> None:
    for step in steps_of("nq", "tune_prompts"):
        options = step.options
        assert (options.prompts.length, options.untied, options.batch.draw_positive) == (32, True, "first")
        assert (options.batch.draw_negatives, options.prompts.position_offset) == ("windows", False)


def test_the_two_stages_of_gtr_differ_in_their_data_and_length_alone() -> None:
    trained = {step.label: values_of(step.options) for step in steps_of("gtr", "train_retriever")}
    first, second = trained["stage1"], trained["gtr"]
    assert (first["negatives"], second["negatives"], second["negatives_per_query"]) == ("none", "bm25neg", 1)
    assert (first["projection"], second["projection"], second["backbone"]) == (768, None, "models/stage1")
    assert second["warm_up"] * second["steps"] == 1000
    assert {name for name, value in first.items() if value != second[name]} == {
        "task",
        "backbone",
        "projection",
        "negatives",
        "negatives_per_query",
        "warm_up",
        "epochs",
        "steps",
        "dev_split",
        "dev_limit",
        "dev_passages",
        "evaluate_every",
        "curves",
    }
    tenth = {"task", "task_size", "warm_up", "steps", "evaluate_every", "curves"}
    alone = {"task", "backbone", "projection", "curves"}
    for name, other, changed in (("gtr-10", "gtr", tenth), ("gtr-ft", "gtr", alone), ("gtr-ft-10", "gtr-10", alone)):
        assert {key for key, value in trained[name].items() if value != trained[other][key]} == changed
    assert not any(options["also_train"] for options in trained.values()), "BEIR's test sets are no training data"
    encoded = [step.options.vectors for step in steps_of("gtr", "encode_corpus")]
    assert {(each.query_length, each.passage_length) for each in encoded} == {(64, 512)}
    large = read_steps(str(JOBS / "recipes/pipeline-gtr.yaml"), values={"size": "large"})
    assert {step.options.backbone for step in large if step.job == "train_retriever"} == {
        "google-t5/t5-large",
        "models/stage1",
    }


def test_a_model_of_gtr_is_evaluated_on_any_set_of_beir() -> None:
    file = str(JOBS / "recipes/pipeline-gtr-beir.yaml")
    values = {"set": "arguana", "model": "gtr-ft", "size": "large", "query_length": "512"}
    by_job = {step.job: step.options for step in read_steps(file, values=values)}
    encoded = by_job["encode_corpus"]
    assert (encoded.store, encoded.encoder) == ("s3://bucket/beir/arguana", "s3://bucket/gtr-large/models/gtr-ft")
    assert (encoded.vectors.query_length, encoded.vectors.passage_length) == (512, 512)
    assert by_job["evaluate"].run == ("gtr-ft-large", "bm25")


@pytest.mark.parametrize(
    ("corpus", "queries", "arm", "epochs"), [("msmarco", None, "marco", (3, 2)), ("nq", "nq", "nq", (40, 20))]
)
def test_the_recipes_of_table_3_have_its_four_arms(
    corpus: str,
    queries: str | None,
    arm: str,
    epochs: tuple[int, int],
    source: Path,
    tmp_path: Path,
    done: Callable[..., str],
) -> None:
    """DPTDR, section 4.2.2; its plan names each command. The arm DPTDR is the retriever of the other recipe."""
    steps = steps_of(f"{corpus}-table3", "train_retriever")
    trained = {step.label: step.options for step in steps if step.label != "first"}
    arms = {name: (options.train, options.backbone, options.negatives) for name, options in trained.items()}
    vanilla, unm = ("FacebookAI/roberta-large", "bm25neg-1"), ("models/rip", "hard-1")
    assert arms == {
        "vanilla-prompts": ("prompts", *vanilla),
        "vanilla-finetuned": ("all", *vanilla),
        arm: ("prompts", *unm),
        "finetuned": ("all", *unm),
    }
    assert (trained["vanilla-finetuned"].epochs, trained["finetuned"].epochs) == epochs
    same: dict[str, Any] = {"task": "", "backbone": "", "negatives": "", "also_train": (), "curves": None}
    assert replace(trained["vanilla-prompts"], **same) == replace(trained[arm], **same)
    same["epochs"] = 1
    assert replace(trained["vanilla-finetuned"], **same) == replace(trained["finetuned"], **same)
    assert {options.queries for options in trained.values()} == {queries}
    [measured] = [step.options for step in steps_of(f"{corpus}-table3", "evaluate")]
    assert set(measured.run) == set(trained)
    tuned = [step.options for step in steps_of(corpus, "tune_prompts")]
    assert replace(tuned[-1].as_train_retriever(), prompt="matrix") == trained[arm]
    file = JOBS / f"recipes/pipeline-{corpus}-table3.yaml"
    (tmp_path / file.name).write_text(file.read_text().replace(f"source: raw/{corpus}\n", f"source: {source}\n"))
    out = done("pipeline", "--config", tmp_path / file.name, "--store", tmp_path / "store", "--plan")
    assert out.count("$ riptide train-retriever") == 5
    assert not (tmp_path / "store").exists()


def test_steps_that_two_recipes_of_a_store_share_are_the_same() -> None:
    """What one recipe has made, the other one finds."""
    for name in ("msmarco", "nq"):
        own, table3 = (read_steps(str(JOBS / f"recipes/pipeline-{each}.yaml")) for each in (name, f"{name}-table3"))
        by_title = {step.title: step.options for step in own if step.label}
        shared = [step for step in table3 if step.title in by_title]
        assert len(shared) >= 12
        assert [step.title for step in shared if step.options != by_title[step.title]] == []


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_no_split_of_a_recipe_both_chooses_and_reports(file: Path) -> None:
    """A split that chooses a checkpoint, or trains, is not one that is evaluated."""
    steps = read_steps(str(file))
    choosing = {
        (step.options.queries, step.options.dev_split)
        for step in steps
        if step.job in (*TUNING, "train_reranker") and step.options.dev_split
    }
    training = {(step.options.queries, step.options.split) for step in steps if step.job in (*TUNING, "train_reranker")}
    reported = {
        (step.options.queries, step.options.split) for step in steps if step.job == "evaluate" and step.options.run
    }
    assert reported or not training
    assert not reported & (choosing | training)
    assert not choosing & training
    for _, split in choosing - {(queries, "dev") for queries, _ in choosing}:
        assert split == "held-out", "expected a separate split dev, or held-out queries"
        assert any(step.options.hold_out for step in steps if step.job in ("import_corpus", "import_queries"))


def test_the_recipe_of_nq_reports_answers_over_all_test_queries() -> None:
    """DPR's accuracy: queries without a judged passage count too."""
    [file] = [file for file in RECIPES if file.stem == "pipeline-nq"]
    steps = read_steps(str(file))
    [imported] = [step.options for step in steps if step.job == "import_queries"]
    [measured] = [step.options for step in steps if step.job == "evaluate"]
    assert (measured.queries, measured.split) == (imported.queries, "all")
    assert measured.metrics == ("Answer@5", "Answer@20", "Answer@100")
    searches = {step.label: step.options for step in steps if step.job == "search"}
    assert {(searches[run].queries, searches[run].split) for run in measured.run} == {(imported.queries, "all")}
    used = {step.options.queries for step in steps if step.job in ("mine_negatives", "tune_prompts", "train_reranker")}
    assert used == {"nq"}, "the store has two query sets"
