"""Every table of jobs/tables: its file, its plan at both scales, the data that it names, and estimates of hours."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from recipe_labels import names_of

from riptide.base.errors import InputError
from riptide.jobs.commands.steps import JobStep, make_step, read_steps
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.experiments import STORE, Performer, Results, RunValues, make_trial, preparing_steps
from riptide.jobs.experiments.measuring import Measurement
from riptide.jobs.planning.backbone_sizes import known_backbones
from riptide.jobs.planning.planner import Planner
from riptide.jobs.reproduce import describe
from riptide.jobs.reproduction.page import (
    RAW,
    Grid,
    counts,
    differences_from_paper,
    is_measured,
    seeds_grid,
    settings_of,
)
from riptide.jobs.reproduction.raw_data import IMPORTS, data_of, read_facts
from riptide.jobs.reproduction.table import SCALES, TABLES, Scale, Table, read_table, table_files
from riptide.jobs.tune_prompts import TunePrompts

NAMES = [*table_files()]
EXPECTED = {
    "dptdr": [2, 3, 4, 5, 6, 7, 8, 9],
    "topic-dpr": [1, 2, 3],
    "gtr": [3, 4, 5, 6],
    "hyper": [1, 2, 3, 4, 5],
    "splade": ["msmarco"],
}


@functools.cache
def open_table(name: str) -> Table:
    return read_table(table_files()[name])


def has_form(name: str, scale: Scale) -> bool:
    return not isinstance(open_table(name).document.scales.get(scale, ""), str)


def test_there_are_the_tables_of_the_papers() -> None:
    assert sorted(NAMES) == sorted(f"{paper}-{number}" for paper, numbers in EXPECTED.items() for number in numbers)
    assert [name for name in NAMES if not has_form(name, "paper")] == []


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_table_is_planned_without_data(name: str, scale: Scale, job: Callable[..., Any], tmp_path: Path) -> None:
    outcome = job("reproduce", "--table", name, "--scale", scale, "--plan", "--raw", tmp_path / "raw")
    if not has_form(name, scale):
        assert outcome.status == 1
        assert re.fullmatch(rf"error: --scale small: {name} has no small form[;,] .+\n", outcome.err)
        return
    assert (outcome.status, outcome.err) == (0, "")
    first, *lines, last = outcome.out.splitlines()
    assert first == open_table(name).heading
    missing = [line for line in lines if not line.startswith("$ ")]
    assert missing
    assert [line for line in missing if not re.search(r": no .+: get .+ and put it there; licence: .+", line)] == []
    machine = "8 x A100: 96 cores, .*" if scale == "paper" else "this machine .*"
    cost = r"[0-9,.]+ (s|min|h|days)" + (r", [0-9,.]+ USD" if scale == "paper" else "")
    assert re.fullmatch(rf"estimate {cost}, [0-9,.]+ [kMGT]?B written, on {machine}", last), "a size is unknown"
    steps = [line for line in lines if line.startswith("$ ") and not re.search(r" (compare|convert-prompts) ", line)]
    assert [line for line in steps if not re.search(rf"  # {cost}$", line)] == []
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_with_an_arm_is_measured_at_the_scale_of_the_paper(name: str) -> None:
    table = open_table(name)
    experiment = table.experiment("paper", STORE, RAW)
    rows = table.document.rows
    for cell in table.cells("paper", experiment):
        row, column = rows[cell.row], table.document.columns[cell.column]
        if cell.figure is not None and (row.arm or row.arms or column.arm):
            assert cell.arm is not None, (row.title, column.title)
            assert (cell.metric is None) != (cell.other is None), (row.title, column.title)
            metrics = [{**experiment.evaluate, **experiment.sets[s].evaluate}["metrics"] for s, _ in cell.sets]
            assert all(cell.metric is None or cell.metric in each for each in metrics)
            assert sum(weight for _, weight in cell.sets) == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_and_backbone_is_described(name: str) -> None:
    table = open_table(name)
    for scale in SCALES:
        if has_form(name, scale):
            for step in preparing_steps(table.experiment(scale, STORE, RAW), table.path):
                assert step.job not in IMPORTS or data_of(step, RAW) is not None, step.command
            for backbone in settings_of(table, scale).get("backbone", "").split(", "):
                assert not backbone or backbone.split(" (")[0] in {*known_backbones()} or "{" in backbone


def test_sets_of_beir_without_a_zip_file_are_made_as_beir_says() -> None:
    names = {name for name, data in read_facts().sets.items() if "beir/tree/main/examples/dataset" in data.download}
    assert names == {"bioasq", "signal1m", "trec-news", "robust04"}


def test_tables_of_a_scale_share_what_they_make() -> None:
    """Steps of the same store that make artifacts of the same name are the same steps."""
    commands: dict[tuple[str, str], set[str]] = {}
    for name in NAMES:
        for scale in SCALES:
            if has_form(name, scale):
                table = open_table(name)
                for step in preparing_steps(table.experiment(scale, f"{{store}}/{scale}", RAW), table.path):
                    for key in step.makes():
                        commands.setdefault((step.options.store, key), set()).add(step.command)
    assert len(commands) > 50
    assert {key: found for key, found in commands.items() if len(found) > 1} == {}


def operations(planner: Planner) -> list[float]:
    """Returns the operations of each step of a plan."""
    return [each.forward_flops + each.training_flops + each.exact_flops for each, _ in planner.planned]


def test_hours_are_the_products_of_weights_and_tokens() -> None:
    planner = Planner("a100x8")
    steps = [
        make_step("f", "import_corpus", {"source": "raw/msmarco", "hold_out": 2000}, "s"),
        make_step("f", "pretrain_rip", {"backbone": "FacebookAI/roberta-large", "name": "rip", "epochs": 8}, "s"),
        make_step(
            "f",
            "train_retriever",
            {"task": "t", "backbone": "models/rip", "negatives": "n", "train": "prompts", "batch": 64, "epochs": 10}
            | {"negatives_per_query": 29, "query_length": 32, "passage_length": 128},
            "s",
        ),
        make_step("f", "encode_corpus", {"task": "t", "name": "t"}, "s"),
        make_step("f", "search", {"source": "exact:t", "split": "dev.small", "name": "r"}, "s"),
        make_step("f", "search", {"source": "bm25", "split": "dev.small", "name": "b"}, "s"),
    ]
    texts = [describe(planner, "raw", step) for step in steps]
    passages = 8841823

    def weights(length: int) -> float:
        """Weights of RoBERTa-large, and the products of attention: 24 layers of 1024."""
        return 302e6 + 2 * 24 * 1024 * length

    pretraining = -(-8 * passages // 2048) * 2048 * 2 * 128 * 6 * (weights(128) + 0.15 * 1024 * 50265)
    training = -(-10 * 500939 // 64) * 64 * 4 * (32 * weights(32) + 30 * 128 * weights(128))
    encoding = passages * 128 * 2 * weights(128)
    search = 6980 * 2 * (32 * weights(32) + passages * 1024)
    expected = [pretraining, training, encoding, search, 0]
    assert operations(planner)[1:] == [pytest.approx(each) for each in expected]
    hours = [each / 62e12 / 3600 for each in expected]
    for text, expected_hours in zip(texts[1:3], hours, strict=False):  # of one GPU
        assert float(text.split(" h, ")[0].replace(",", "")) == pytest.approx(expected_hours, rel=0.01)
    assert float(texts[3].split(" min, ")[0]) == pytest.approx(60 * hours[2] / 8, rel=0.2)  # of eight, and the disk


def test_hours_count_mining_again_topics_and_checkpointing() -> None:
    planner = Planner("a100x8")
    bert = {"task": "t", "backbone": "google-bert/bert-base-uncased", "train": "all", "batch": 64}
    texts = {"query_length": 32, "passage_length": 128}
    topics = {"prompt": "topics", "positives": "categories", "negatives": "none", "topic_sample": 2, "steps": 10}
    steps = [
        make_step("f", "import_corpus", {"source": "raw/msmarco"}, "s"),
        make_step("f", "train_retriever", {**bert, **texts, "epochs": 3, "refresh_epochs": 1, "negatives": "n"}, "s"),
        make_step("f", "train_retriever", {**bert, **texts, **topics}, "s"),
        make_step("f", "train_retriever", {**bert, **texts, "steps": 10, "checkpointing": True}, "s"),
    ]
    for step in steps:
        describe(planner, "raw", step)
    passages, queries = 8841823, 502939
    query, passage = (length * (85e6 + 2 * 12 * 768 * length) for length in (32, 128))
    mining = 2 * (passages * passage + queries * query + queries * passages * 768)
    expected = [
        -(-3 * queries // 64) * 64 * (query + 2 * passage) * 6 + 2 * mining,
        640 * (query + 3 * passage) * 6,
        640 * (query + 2 * passage) * 8,
    ]
    assert operations(planner)[1:] == [pytest.approx(each) for each in expected]


def write(folder: Path, **changes: Any) -> Path:
    """Writes the file of a table of one cell."""
    document = {
        "title": "toy",
        "paper": "none",
        "number": "1",
        "columns": [{"title": "R@5", "metric": "R@5", "sets": "one"}],
        "rows": [{"title": "row", "arm": "bm25", "figures": [1.0]}],
        "scales": {"small": {"sets": {"one": {"store": "{store}/one"}}, "arms": {"bm25": {"source": "bm25"}}}},
    }
    file = folder / "toy.yaml"
    file.write_text(yaml.safe_dump(document | changes))
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colums": []}, "colums: extra inputs are not permitted"),
        (
            {"rows": [{"title": "row", "arm": "bm25", "figures": [1, 2]}]},
            "rows: row: figures: found 2 values, expected",
        ),
        ({"rows": [{"title": "row", "arm": "bm52", "figures": [1]}]}, "rows: row: no scale has the arm 'bm52'"),
        ({"rows": [{"title": "row", "arms": [], "figures": [1]}]}, "rows: row: arms: found 0 values, expected one"),
        ({"columns": [{"title": "R@5", "arm": "bm52"}]}, "columns: R@5: no scale has the arm 'bm52'"),
        ({"columns": [{"title": "R@5", "sets": ["one", ["tow"]]}]}, "columns: R@5: no scale has the set 'tow'"),
        ({"columns": [{"title": "R@5", "sets": [5]}]}, "columns.0.sets."),
        ({"scales": {"small": {"sets": 3}}}, "rows: row: no scale has the arm 'bm25'"),
        ({"scales": {"small": {"sets": {"one": {}}, "arms": None}}}, "rows: row: no scale has the arm 'bm25'"),
    ],
)
def test_a_bad_table_is_refused_with_the_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_table(write(tmp_path, **changes))
    assert str(error.value).startswith(f"{tmp_path}/toy.yaml: {message}")
    assert "\n" not in str(error.value)


def test_a_mean_over_sets_weighs_each_item_of_the_list(tmp_path: Path) -> None:
    sets = {name: {"store": f"{{store}}/{name}"} for name in ("one", "two", "three")}
    columns = [{"title": "R@5", "metric": "R@5", "sets": ["one", ["two", "three"]]}]
    scales = {"small": {"sets": sets, "arms": {"bm25": {"source": "bm25"}}}}
    table = read_table(write(tmp_path, columns=columns, scales=scales))
    [cell] = table.cells("small", table.experiment("small", "s", "raw"))
    assert cell.sets == (("one", 0.5), ("two", 0.25), ("three", 0.25))


def test_a_page_has_the_figures_of_each_seed_and_not_the_seeds_of_untrained_arms(tmp_path: Path) -> None:
    columns = [{"title": "Align", "figure": "alignment", "percent": False}, {"title": "R@5", "metric": "R@5"}]
    rows = [{"title": arm, "arm": arm, "sets": "one", "figures": [1, 2]} for arm in ("bm25", "prompt")]
    arms = {"bm25": {"source": "bm25"}, "prompt": {"train": "prompts", "backbone": "b"}}
    scales = {"small": {"sets": {"one": {"store": "{store}/one"}}, "arms": arms, "seeds": [1, 2]}}
    table = read_table(write(tmp_path, columns=columns, rows=rows, scales=scales))
    results = Results({"bm25"})
    for arm, seed, value in (("bm25", 0, 0.5), ("prompt", 2, 0.25), ("prompt", 1, 1.0)):
        figures = {"alignment": value} if seed else {}
        results.add("one", arm, seed, RunValues({"R@5": np.array([value, 0.0])}, figures))
    cells = [cell for cell in table.cells("small", table.experiment("small", "s", "raw")) if is_measured(cell, results)]
    assert counts(results) == "2 queries of one. Seeds: 1, 2."
    _, grid = seeds_grid(table, results, cells)
    assert grid == Grid(["", "Align", "R@5"], [["prompt", "1: 1.0, 2: 0.2", "1: 50.0, 2: 12.5"]])


def test_passages_of_a_store_count_once() -> None:
    table = open_table("hyper-1")
    sets = table.experiment("paper", STORE, RAW).sets
    *_, grid = differences_from_paper(table, "paper", dict.fromkeys(sets, 7))
    assert isinstance(grid, Grid)
    assert ["passages", "kilt 7"] in grid.rows


# Names of the steps of recipes that have other names in the tables. DPTDR's recipes mine in two halves of the queries.
DPTDR = {"bm25neg-1": "bm25neg", "reranker-1": "reranker", "hard-1": "unm"}
TABLE_3 = DPTDR | {"vanilla-prompts": "prompts", "vanilla-finetuned": "finetuned", "finetuned": "finetuned-rip-unm"}
GTR = {"stage1": "pt-large", "gtr": "gtr-large", "gtr-ft": "ft-large"}
GTR |= {"gtr-10": "gtr-large-10", "gtr-ft-10": "ft-large-10"}
TOPICS = {"dpr": "dpr", "dptdr": "dptdr-frozen", "dptdr-all": "dptdr-trained"}
TOPICS |= {"topic": "topic-frozen", "topic-all": "topic-trained"}
KILT = {task: f"{task}-bm25" for task in ("fever", "ay2", "zsre", "nq", "hopo", "tqa", "wow")}
HALVES = {"bm25neg-2", "bm25neg-dev", "reranker-2", "hard-2"}
# Jobs that decide what is trained.
TRAINING = {"train_retriever", "pretrain_rip", "train_reranker", "mine_negatives", "fit_topics", "build_bm25"}
# Steps of recipes that the tables lack.
LACKING = {
    "msmarco": HALVES,
    "msmarco-table3": HALVES,
    "nq": HALVES,
    "nq-table3": HALVES,
    "splade": HALVES | {"reranker-1", "hard-1", "splade-distilled"},
}
# Why a recipe has another value than a table, by recipe and JOB.OPTION; "" stands for every recipe.
NO_DEV_SPLIT = "arms of a table are not chosen on a dev split"
REASONS = {
    "": {
        **dict.fromkeys(
            (
                "train_retriever.dev_limit",
                "train_retriever.dev_passages",
                "train_retriever.evaluate_every",
                "train_reranker.evaluate_every",
                "import_corpus.hold_out",
                "import_queries.hold_out",
            ),
            NO_DEV_SPLIT,
        ),
        "mine_negatives.half": "recipes score no query with a re-ranker that was trained on it",
        "build_index.shards": "a number of files",
    },
    "gtr": {
        "train_retriever.warm_up": "stage 1 has 2,446 steps on MS MARCO; the table has the authors' 1,000 of 22,150",
        "search.k": "the recipe reports R@1000 too",
        "evaluate.median_length": "of Fig. 6, which is no table",
        "search.drop_self": "no query of MS MARCO is a passage",
    },
    "topic-dpr": dict.fromkeys(
        ("train_retriever.workers", "train_retriever.cpus"), "the recipe has 8 GPUs; the table one, as the paper"
    ),
    "mine-msmarco": {"mine_negatives.sources": "two dense retrievers; the paper allows several, and takes one"},
    "mine-nq": {"mine_negatives.sources": "an encoder that a package contains"},
}


def read_compared(name: str, values: dict[str, str], queries: str | None) -> dict[tuple[str, str], JobStep]:
    """Returns the steps of a recipe by job and name; a search has the name of the artifact that it searches.

    Args:
        name: The recipe.
        values: Replacements of its values.
        queries: The query set of the searches; None: that of the store.
    """
    file = TABLES.parent / f"recipes/{name}.yaml"
    single = {"mine": "mine_negatives", "topics": "fit_topics"}.get(name.partition("-")[0])
    steps: dict[tuple[str, str], JobStep] = {}
    if single is not None:
        listed = [make_step(file.name, single, yaml.safe_load(file.read_text()), "store")]
    else:
        listed = read_steps(str(file.with_name(f"pipeline-{name}.yaml")), values=values)
    for step in listed:
        job = "train_retriever" if step.job == "tune_prompts" else step.job
        if job != "search" or step.options.queries == queries:
            steps.setdefault((job, searched_name(step) if job == "search" else step.label), step)
    return steps


def searched_name(step: JobStep) -> str:
    """Returns the name of the artifact that a search reads first."""
    kinds = ("bm25", "embeddings", "index")
    return next(name for kind, _, name in (key.partition("/") for key in step.reads()) if kind in kinds)


def steps_of_table(
    table: Table, scale: Scale, set_name: str, arms: Iterable[str], folder: Path
) -> dict[tuple[str, str], JobStep]:
    """Returns the steps of a table on one of its sets by job and name; those of an arm have its name."""
    experiment = table.experiment(scale, STORE, "raw")
    data_set, seed = experiment.sets[set_name], experiment.seeds[0]
    first = {name: {option: v[0] for option, v in arm.tried.items()} for name, arm in experiment.arms.items()}
    steps = {
        (step.job, step.label): step
        for step in preparing_steps(experiment, table.path)
        if step.options.store == data_set.store
    }
    for arm in experiment.arms.keys() & {*arms, "bm25"}:
        performer = Performer(plan=True)
        measurement = Measurement(experiment, table.path, folder, performer)
        if experiment.arms[arm].is_trained:
            trial = make_trial(experiment, arm, first, seed, set_name, choosing=False)
            steps["train_retriever", arm] = trial.step(table.path)
            measurement.measure_trial(trial, set_name, experiment.split_of(set_name))
        else:
            measurement.measure_untrained(arm, set_name)
        for step in performer.planned.values():
            steps[step.job, "" if step.job == "evaluate" else arm] = step
    return steps


def settings_of_step(step: JobStep) -> dict[str, Any]:
    """Returns the options of a step that are settings, and not names."""
    options = step.options
    if isinstance(options, TunePrompts):
        options = replace(options.as_train_retriever(), prompt="matrix")
    names = names_of(type(options)) | {"overwrite"}
    return {name: each.value(options) for name, each in options_by_name(type(options)).items() if name not in names}


@pytest.mark.parametrize(
    ("recipe", "table_name", "set_name", "names"),
    [
        ("msmarco", "dptdr-2", "msmarco", DPTDR | {"marco": "dptdr"}),
        ("nq", "dptdr-2", "nq", DPTDR | {"nq": "dptdr"}),
        ("msmarco-table3", "dptdr-3", "msmarco", TABLE_3 | {"marco": "dptdr"}),
        ("nq-table3", "dptdr-3", "nq", TABLE_3 | {"nq": "dptdr"}),
        ("mine-msmarco", "dptdr-3", "msmarco", {"hard-both-1": "unm"}),
        ("mine-nq", "dptdr-3", "nq", {"": "unm"}),
        ("gtr", "gtr-4", "msmarco", GTR),
        ("kilt", "hyper-1", "fever", KILT | {"hyper": "splade-hyper-all"}),
        ("topic-dpr", "topic-dpr-1", "arxiv", TOPICS | {"arxiv": "topics"}),
        ("topics-arxiv", "topic-dpr-1", "arxiv", {"arxiv": "topics"}),
        ("splade", "splade-msmarco", "msmarco", {"splade": "splade-max", "bm25neg-1": "bm25neg-1000"}),
    ],
)
def test_a_recipe_and_a_table_of_the_same_runs_have_the_same_settings(
    recipe: str, table_name: str, set_name: str, names: dict[str, str], tmp_path: Path
) -> None:
    """They are equal, or `REASONS` says why not. A step that decides what is trained has a table's, or is in `LACKING`.

    Args:
        recipe: The recipe.
        table_name: The table.
        set_name: The set of the table whose steps are compared.
        names: Names of steps and arms of the table by those of steps of the recipe, where they differ.
    """
    table = open_table(table_name)
    scale: Scale = "small" if recipe == "topics-arxiv" else "paper"
    others = steps_of_table(table, scale, set_name, names.values(), tmp_path)
    queries = others["search", "bm25"].options.queries if ("search", "bm25") in others else None
    recipe_steps = read_compared(recipe, {"size": "large"} if recipe == "gtr" else {}, queries)
    pairs = {key: others[other] for key in recipe_steps if (other := (key[0], names.get(key[1], key[1]))) in others}
    assert {name for job, name in recipe_steps.keys() - pairs.keys() if job in TRAINING} == LACKING.get(recipe, set())
    differences: dict[str, str] = {}
    for (job, name), step in pairs.items():
        mine, of_table = settings_of_step(recipe_steps[job, name]), settings_of_step(step)
        if job == "encode_corpus":  # otherwise the settings of the training apply
            has_task = recipe_steps[job, name].options.task is not None
            mine = {option: value for option, value in mine.items() if value is not None and not has_task}
        if job == "evaluate":
            assert {*of_table.pop("metrics")} <= {*mine.pop("metrics")}
        differences |= {
            f"{job}.{option}": f"{name}: {value} in the recipe, {of_table[option]} in the table"
            for option, value in mine.items()
            if value != of_table[option]
        }
    reasons = REASONS.get(recipe, {})
    assert {key: text for key, text in differences.items() if key not in REASONS[""] | reasons} == {}
    assert reasons.keys() <= differences.keys()


def test_sets_of_beir_are_measured_as_in_their_recipe(tmp_path: Path) -> None:
    """The same encoding and search on ArguAna, where documents are queries, and on robust04 with longer documents."""
    experiment = open_table("gtr-3").experiment("paper", STORE, RAW)
    prepared = preparing_steps(experiment, "gtr-3")
    for set_name, lengths in (
        ("arguana", {"query_length": "512"}),
        ("robust04", {"passage_length": "768"}),
    ):
        performer = Performer(plan=True)
        measurement = Measurement(experiment, "gtr-3", tmp_path, performer)
        measurement.measure_untrained("bm25", set_name)
        trial = make_trial(experiment, "gtr-large", {"gtr-large": {}}, experiment.seeds[0], set_name, choosing=False)
        measurement.measure_trial(trial, set_name, "test")
        store = experiment.sets[set_name].store
        of_table = [step for step in [*prepared, *performer.planned.values()] if step.options.store == store]
        values = {"set": set_name, "model": "gtr", "size": "large", **lengths}
        of_recipe = read_steps(f"{TABLES.parent}/recipes/pipeline-gtr-beir.yaml", values=values)
        assert settings_of_steps(of_table) == settings_of_steps(of_recipe)


def settings_of_steps(steps: Iterable[JobStep]) -> set[tuple[Any, ...]]:
    """Returns the settings that decide the measures of a set of BEIR."""
    settings: set[tuple[Any, ...]] = set()
    for step in steps:
        if step.job == "build_bm25":
            settings.add((step.job, step.options.k1, step.options.b))
        elif step.job == "encode_corpus":
            vectors = step.options.vectors
            settings.add((step.job, vectors.query_length, vectors.passage_length))
        elif step.job == "search":
            is_bm25 = "bm25" in (step.options.source, step.options.mode)
            settings.add((step.job, is_bm25, step.options.split, step.options.k, step.options.drop_self))
    return settings
