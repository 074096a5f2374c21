"""A toy experiment from mining to the table: what is chosen, measured and compared, and what a second run makes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.jobs.experiments import (
    ControlFunctions,
    ControlSearchRequest,
    RunExperiment,
    main,
    preparing_steps,
    select_arms,
)
from riptide.jobs.experiments.arms import read_experiment
from riptide.jobs.experiments.choosing import choose
from riptide.jobs.experiments.experiment import ExperimentRun
from riptide.jobs.experiments.performing import Performer
from riptide.jobs.experiments.results_file import (
    pack_values,
    read_results,
    read_values,
    summarise_results,
    unpack_values,
)
from riptide.jobs.experiments.trials import make_trial, with_trained

TRAINING = {"train": "prompts", "length": 4, "steps": 2, "batch": 4, "split": "train", "dev_split": "test", "cpus": 1}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riptide.jobs.common.session.find_cluster", lambda **options: None)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(**document) writes a file of arms and returns its path."""

    def write(**document: Any) -> str:
        file = tmp_path / "arms.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        return str(file)

    return write


def test_a_toy_experiment_is_chosen_measured_and_compared_and_made_once(
    world, write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], no_work: Callable[[], None]
) -> None:
    words = {"mode": "bm25", "split": "test", "k": 100, "run": str(tmp_path / "bm25.trec"), "name": "words"}
    mining = {"sources": ["bm25"], "split": "train", "depth": 10, "pool_negatives": 2, "name": "mined"}
    searched: list[ControlSearchRequest] = []

    def search(request: ControlSearchRequest) -> None:
        searched.append(request)
        Path(request.file).write_text((tmp_path / "bm25.trec").read_text(), encoding="utf-8")

    arms = write(
        prepare=[{"build_bm25": {}}, {"mine_negatives": mining}, {"search": words}],
        common={**TRAINING, "backbone": world.model, "negatives": "mined", "negatives_per_query": 2},
        seeds=[0, 1],
        evaluate={"metrics": ["RR@10", "R@5"]},
        hybrid="bm25",
        arms={
            "bm25": {"source": "bm25"},
            "untrained": {"encoder": world.model},
            "prompt": {"try": {"lr": [1e-6, 0.5]}},
            "copied": {"uses": "prompt", "control": "words", "weight": 2, "seeds": [0]},
        },
        pairs=[["prompt", "untrained"], ["copied", "bm25"], ["bm25+prompt", "bm25"]],
    )
    results, file = tmp_path / "figures.json.gz", tmp_path / "figures.json"
    options = RunExperiment(store=str(world.store), arms=arms, results=str(results))
    controls = {"words": ControlFunctions(search=search)}

    main(RunExperiment(store=str(world.store), arms=arms, results=str(results), plan=True), controls)
    planned = capsys.readouterr().out
    assert "$ riptide train-retriever" in planned
    assert "4 train_retriever" not in planned, "a plan assumes the first values: two rates, and a second seed of one"
    assert "3 train_retriever" in planned
    assert not Store(str(world.store)).names("prompts")
    assert not file.exists()
    assert not results.exists()

    main(options, controls)
    store = Store(str(world.store))
    out, document = capsys.readouterr().out, json.loads(file.read_text())
    qualities = {lr: store.open("prompts", f"prompt-lr{lr:g}-seed0").notes["best"] for lr in (1e-6, 0.5)}
    best = max(qualities, key=lambda lr: qualities[lr])
    assert document["arms"]["prompt"]["chosen"] == {"lr": best}
    assert [*document["arms"]["prompt"]["dev"].values()] == [*qualities.values()]
    assert sorted(store.names("prompts")) == sorted(
        {*(f"prompt-lr{lr:g}-seed0" for lr in qualities), f"prompt-lr{best:g}-seed1"}
    )
    figures = document["sets"][""]["subsets"]["all"]
    runs = [json.loads((tmp_path / f"figures/prompt-lr{best:g}-seed{seed}-test.json").read_text()) for seed in (0, 1)]
    by_seed = [next(iter(run["per_query"].values()))["RR@10"] for run in runs]
    assert figures["queries"] == len(by_seed[0])
    assert figures["arms"]["prompt"]["RR@10"][0] == pytest.approx(np.mean(by_seed))
    untrained = json.loads((tmp_path / "figures/floor-untrained-test.json").read_text())
    difference = np.mean(by_seed, axis=0) - untrained["per_query"]["floor-untrained-test"]["RR@10"]
    assert {"bm25+prompt", "bm25+untrained"} < figures["arms"].keys()
    compared = figures["differences"]["prompt - untrained"]["RR@10"]
    assert compared["interval"][0] == pytest.approx(difference.mean())
    assert compared["interval"][1] <= difference.mean() <= compared["interval"][2]
    assert figures["differences"]["copied - bm25"]["RR@10"] == {"interval": [0.0, 0.0, 0.0], "p": 1.0}
    assert f"| prompt | {figures['arms']['prompt']['RR@10'][0]:.4f} [" in out
    assert (tmp_path / "figures.md").read_text() in out
    assert [(request.task, request.arm["weight"], request.seed) for request in searched] == [
        (f"prompt-lr{best:g}-seed0", 2, 0)
    ]

    saved = read_results(str(results))
    values = read_values(saved).values[""]["prompt"]
    for seed, expected in enumerate(by_seed):
        assert values[seed].metrics["RR@10"].tolist() == pytest.approx(expected)
    assert json.loads(json.dumps(summarise_results(saved))) == document["sets"]
    assert saved["experiment"]["prepare"][0] == {"build_bm25": {}}

    no_work()
    main(options, controls)
    assert len(searched) == 1
    assert read_results(str(results)) == saved
    with pytest.raises(InputError) as error:
        main(dataclasses.replace(options, seeds=(0,)), controls)
    assert str(error.value) == (
        f"{results}: holds results of experiment.arms.copied.seeds [0], expected null: name another file with "
        "parameter results, or give parameter overwrite"
    )
    with pytest.raises(InputError, match=r"holds results of only null, expected \[\"bm25\"\]"):
        main(dataclasses.replace(options, only=("bm25",)), controls)
    assert json.loads(file.read_text())["sets"] == document["sets"]
    main(RunExperiment(store=str(world.store), arms=arms, results=str(results), plan=True), controls)
    assert capsys.readouterr().out.endswith("all steps have run\n") == (best == 1e-6)


def test_values_are_packed_without_loss() -> None:
    random = np.random.default_rng(0)
    few, many = random.integers(0, 11, 999) / 7, random.random(500)
    for values in (few, many, np.zeros(3)):
        packed = json.loads(json.dumps(pack_values(values)))
        assert unpack_values(packed).astype(np.float32).tolist() == values.astype(np.float32).tolist()
    assert len(json.dumps(pack_values(few))) < 1_500


SETS = {name: {"store": f"{{store}}/{name}", "train": {"queries": name, "negatives": "bm25"}} for name in "abc"}


def test_an_arm_is_trained_on_the_other_sets_on_all_or_on_its_own(write: Callable[..., str]) -> None:
    arms = {
        "zero": {"train_on": "others", "try": {"lr": [0.1, 0.2]}},
        "every": {"like": "zero", "train_on": "all", "negatives": None},
        "own": {"like": "every", "train_on": "own", "lr": 0.3},
        "elsewhere": {"store": "d", "queries": "d"},
    }
    experiment = read_experiment(write(sets=SETS, arms=arms, choose={"metric": "RR@10", "options": {"steps": 9}}), "s/")
    chosen: dict[str, dict[str, Any]] = {"zero": {"lr": 0.2}, "every": {}, "own": {}, "elsewhere": {}}
    trials = {name: make_trial(experiment, name, chosen, 4, "a", choosing=False) for name in arms}
    assert {name: (trial.store, trial.name) for name, trial in trials.items()} == {
        "zero": ("s/b", "zero-without-a-lr0.2-seed4"),
        "every": ("s/a", "every-seed4"),
        "own": ("s/a", "own-seed4"),
        "elsewhere": ("d", "elsewhere-seed4"),
    }
    assert trials["zero"].options["also_train"] == ["queries=c,negatives=bm25,store=s/c"]
    assert trials["every"].options["also_train"] == ["queries=b,store=s/b", "queries=c,store=s/c"]
    assert {name: trial.options.get("lr") for name, trial in trials.items()} == {
        "zero": 0.2,
        "every": 0.2,
        "own": 0.3,
        "elsewhere": None,
    }
    choosing = make_trial(experiment, "zero", chosen, 4, "a", choosing=True)
    assert (choosing.name, choosing.options["steps"]) == ("choose-zero-without-a-lr0.2-seed4", 9)


def test_training_measures_the_dev_splits_of_all_sets_that_it_is_trained_on(write: Callable[..., str]) -> None:
    common = {"dev_split": "dev"}
    experiment = read_experiment(write(sets=SETS, arms={"zero": {"train_on": "others"}}, common=common), "s/")
    trial = make_trial(experiment, "zero", {"zero": {}}, 0, "a", choosing=False)
    assert trial.options["dev_split"] == "dev"
    assert trial.options["also_train"] == ["dev=dev,queries=c,negatives=bm25,store=s/c"]


def test_sets_may_share_a_store_and_change_the_options_of_an_arm(write: Callable[..., str]) -> None:
    sets = {
        "one": {"store": "{store}", "queries": "one-dev", "train": {"queries": "one"}, "split": "all", "hits": 7},
        "two": {"store": "{store}", "queries": "two-dev", "train": {"queries": "two"}},
        "other": {"store": "o", "is_trained_on": False},
    }
    arms = {
        "own": {"train_on": "own", "epochs": 3, "for_set": {"two": {"epochs": 5}}, "measured_on": ["one", "two"]},
        "all": {"train_on": "all"},
        "zero": {"train_on": "others", "embeddings": "enc"},
        "few": {"like": "own", "init": "{prompt:zero}", "task_size": 9},
    }
    experiment = read_experiment(write(sets=sets, arms=arms), "s")
    chosen: dict[str, dict[str, Any]] = {name: {} for name in arms}

    def trial(arm: str, set_name: str) -> Any:
        return make_trial(experiment, arm, chosen, 0, set_name, choosing=False)

    assert [trial("own", name).name for name in ("one", "two")] == ["own-one-seed0", "own-two-seed0"]
    assert [trial("few", name).options["epochs"] for name in ("one", "two")] == [3, 5]
    assert trial("all", "other").trained_on == trial("zero", "other").trained_on == ("one", "two")
    assert trial("zero", "other").name == "zero-seed0", "no task is left out"
    assert (trial("zero", "two").name, trial("zero", "two").options["queries"]) == ("zero-without-two-seed0", "one")
    assert trial("zero", "other").options["also_train"] == ["embeddings=enc,queries=two,store=s"]
    few = with_trained(trial("few", "one"), {"zero": ("s", "zero-without-one-seed0")}, plan=False)
    assert few.options["init"] == "s/prompts/zero-without-one-seed0"
    assert experiment.sets_of("own") == ["one", "two"]
    assert [experiment.split_of(name) for name in sets] == ["all", "test", "test"]
    assert [experiment.name_in_store(name) for name in sets] == ["one", "two", ""]


def test_the_part_of_an_experiment_that_an_arm_needs(write: Callable[..., str]) -> None:
    prompts = {"train": "prompts", "backbone": "models/rip", "negatives": "hard"}
    file = write(
        sets={name: {"store": f"{{store}}/{name}", "queries": name} for name in "ab"},
        prepare=[
            {"import_corpus": {"store": "{store}/{set}", "source": "raw/{set}"}},
            {"build_bm25": {"store": "{store}/{set}"}},
            {"pretrain_rip": {"store": "{store}/a", "backbone": "x/y", "name": "rip"}},
            {"pretrain_rip": {"store": "{store}/a", "backbone": "x/y", "name": "other"}},
            {"train_retriever": {"store": "{store}/a", "task": "first", "negatives": "none", **prompts}},
            {"encode_corpus": {"store": "{store}/a", "task": "first", "name": "first"}},
            {"mine_negatives": {"store": "{store}/a", "sources": ["bm25", "exact:first"], "name": "hard"}},
        ],
        arms={
            "bm25": {"source": "bm25"},
            "base": {**prompts, "store": "{store}/a", "queries": "a"},
            "mlp": {"like": "base", "prompt": "mlp"},
            "elsewhere": {"encoder": "{store}/a/models/other"},
        },
        pairs=[["mlp", "base"], ["mlp", "bm25"]],
    )
    experiment = read_experiment(file, "s")

    def jobs(**measured: list[str]) -> tuple[list[str], list[str]]:
        part = select_arms(experiment, file, measured)
        return [*part.arms], [f"{step.title} {step.options.store}" for step in preparing_steps(part, file)]

    assert jobs(bm25=["b"]) == (["bm25"], ["import_corpus raw/b s/b", "build_bm25 bm25 s/b"])
    arms, steps = jobs(mlp=["b"])
    assert arms == ["base", "mlp"]
    assert steps == [
        "import_corpus raw/a s/a",
        "import_corpus raw/b s/b",
        "build_bm25 bm25 s/a",
        "pretrain_rip rip s/a",
        "train_retriever first s/a",
        "encode_corpus first s/a",
        "mine_negatives hard s/a",
    ]
    assert jobs(elsewhere=["b"])[1] == ["import_corpus raw/a s/a", "import_corpus raw/b s/b", "pretrain_rip other s/a"]
    assert select_arms(experiment, file, {"mlp": ["b"], "bm25": ["b"]}).pairs == [("mlp", "base"), ("mlp", "bm25")]


def test_values_are_chosen_among_all_combinations_or_one_option_after_the_other() -> None:
    tried = {"a": [1, 2], "b": [1, 2, 3]}
    landscape = {(1, 1): 0.5, (1, 2): 0.2, (1, 3): 0.9, (2, 1): 0.6, (2, 2): 0.6, (2, 3): 0.6}
    calls: list[tuple[int, int]] = []

    def quality(values: dict[str, Any]) -> float | None:
        calls.append((values["a"], values["b"]))
        return landscape[calls[-1]]

    assert choose("arm", tried, quality, one_at_a_time=False) == {"a": 1, "b": 3}
    assert calls == list(itertools.product(*tried.values()))
    calls.clear()
    assert choose("arm", tried, quality, one_at_a_time=True) == {"a": 2, "b": 1}, "of equal ones the first"
    assert calls == [(1, 1), (2, 1), (2, 1), (2, 2), (2, 3)]
    calls.clear()
    assert choose("arm", {"a": [1], "b": [2]}, quality, one_at_a_time=False) == {"a": 1, "b": 2}
    assert choose("arm", {}, quality) == {}
    assert calls == [], "there is nothing to choose"
    assert choose("arm", {"a": [1, 2]}, lambda values: None if values["a"] == 1 else 0.1, one_at_a_time=False) == {
        "a": 2
    }
    with pytest.raises(InputError, match=r"arm arm: the training diverges with every value of a"):
        choose("arm", {"a": [1, 2]}, lambda values: None, one_at_a_time=False)


@pytest.mark.parametrize(
    ("best", "extensions", "tried", "chosen"),
    [
        (0.3, 2, [0.1, 0.3, 1.0], 0.3),
        (0.01, 0, [0.1, 0.3, 1.0], 0.1),
        (0.01, 2, [0.1, 0.3, 1.0, 0.033, 0.011], 0.011),
        (0.01, 1, [0.1, 0.3, 1.0, 0.033], 0.033),
        (4.0, 9, [0.1, 0.3, 1.0, 3.3, 11.0], 3.3),
        (math.nan, 2, [0.1, 0.3, 1.0], 0.1),
    ],
)
def test_a_grid_is_extended_beyond_its_best_value(
    best: float, extensions: int, tried: list[float], chosen: float
) -> None:
    """Quality falls with the distance to `best`; it is NaN in a plan."""
    calls: list[float] = []

    def quality(values: dict[str, Any]) -> float | None:
        calls.append(values["lr"])
        return -abs(math.log(values["lr"] / best))

    assert choose("arm", {"lr": [0.1, 0.3, 1.0]}, quality, extensions=extensions) == {"lr": chosen}
    assert calls == tried


PROMPT = {"train": "prompts", "backbone": "b", "negatives": "n"}
JOINT = {"train": "all", "backbone": "b", "negatives": "n", "store": "s"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "arms: missing key"),
        ({"arm": {}, "arms": {}}, "arm: unknown key; expected one of sets, prepare, common, arms"),
        ({"arms": {"a": {"seeds": "x"}}}, "arms.a.seeds: found 'x'; input should be a valid list"),
        ({"arms": {}, "choose": {"metrics": "R@5"}}, "choose.metrics: unknown key; expected one of metric, split"),
        ({"arms": {"a": {"like": "b"}, "b": {}}}, "arms.a.like: found 'b'; expected an earlier arm of none"),
        ({"arms": {"a": {}}, "pairs": [["a", "c"]]}, "pairs: found 'c'; expected one of a"),
        ({"arms": {"a": {"try": {"lr": []}}}}, "arms.a.try.lr: found []; list should have at least 1 item"),
        ({"arms": {"a": {"try": {"lr": [1]}}}}, "arms.a.try: expected the option dev_split, whose quality chooses"),
        ({"arms": {"a": {}, "b": {"uses": "a"}}}, "arms.b: missing key control"),
        ({"arms": {"a": {"control": "c"}}}, "arms.a.control: found 'c'; expected one of none"),
        ({"arms": {"a": {**PROMPT, "lrr": 1}}}, "arms.a train_retriever: unknown key 'lrr'; did you mean lr?"),
        ({"arms": {"a": {"train": "prompts", "negatives": "n"}}}, "arms.a train_retriever: missing key 'backbone'"),
        ({"arms": {"a": {**PROMPT, "lr": "high"}}}, "arms.a train_retriever: lr: found 'high', expected"),
        ({"arms": {}, "prepare": [{"build": {}}]}, "prepare, step 1: unknown job 'build'"),
        ({"arms": {}, "prepare": [{"reproduce": {}}]}, "prepare, step 1: unknown job 'reproduce'"),
        ({"arms": {"a": {"source": "bm25", "measured_on": ["x"]}}}, "arms.a.measured_on: found 'x'; expected one of"),
        ({"arms": {"a": {**PROMPT, "projection": 4}}}, "arms.a: parameter projection 4 parameter train prompts"),
        (
            {"arms": {"b": {"source": "bm25"}, "a": {**PROMPT, "init": "{model:b}"}}},
            "arms.a: {model:b}: found 'b'; expected an earlier, trained arm of none",
        ),
        ({"arms": {"a": {**PROMPT, "init": "{model:a}"}}}, "arms.a: {model:a}: found 'a'; expected an earlier"),
        (
            {"sets": {"one": {"store": "s"}, "two": {"store": "s"}}, "arms": {}},
            "sets.two.store: found s, the store of one, and the same queries; expected another store or other queries",
        ),
        *(
            (
                {"sets": {"one": {"store": "s"}, "two": {"store": "t"}}, "arms": {"a": {**JOINT, **options}}},
                "arms.a: sets.two.store: found t, and the prompt that is trained together with the weights is in s, ",
            )
            for options in ({"prompt": "matrix"}, {"prompt": "synthesised", "sides": "untied"})
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_key_and_what_is_expected(
    write: Callable[..., str], tmp_path: Path, document: dict[str, Any], message: str
) -> None:
    file = write(**document)
    with pytest.raises(InputError) as error:
        main(RunExperiment(store=str(tmp_path / "store"), arms=file, results=str(tmp_path / "figures.json.gz")))
    assert str(error.value).startswith(f"{file}: {message}")
    assert "\n" not in str(error.value)


def test_an_arm_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """YAML keeps the last one of equal keys. Keys that a merge repeats are no duplicates."""
    file = tmp_path / "arms.yaml"
    merged = "one: &one {lr: 1}\n  two: &two {<<: *one, lr: 2}\n  three: {<<: *two, lr: 3}\n"
    file.write_text(f"arms:\n  {merged}")
    assert read_experiment(str(file), "s").arms["three"].settings == {"lr": 3}
    file.write_text(f"arms:\n  {merged}  two: {{}}\n")
    with pytest.raises(InputError, match=r"arms.yaml: not YAML: line 5: the key two occurs twice$"):
        read_experiment(str(file), "s")


def test_every_experiment_of_the_benchmarks_is_valid(tmp_path: Path) -> None:
    """Their controls are in the benchmark; any function stands for them here."""
    controls = dict.fromkeys(("random", "shuffled", "swapped", "judged", "same-topic"), ControlFunctions())
    files = sorted((Path(__file__).resolve().parents[3] / "benchmarks/arms").glob("*.yaml"))
    assert len(files) > 10
    for file in files:
        experiment = read_experiment(str(file), str(tmp_path))
        ExperimentRun(experiment, str(file), tmp_path, Performer(plan=True), controls).check()


def test_programs_use_the_names_of_the_package_alone() -> None:
    programs = sorted((Path(__file__).resolve().parents[3] / "benchmarks").glob("*.py"))
    users = [program.name for program in programs if "riptide.jobs.experiments" in program.read_text()]
    assert users == ["experiment.py", "topic_prompts.py"]
    assert [name for name in users if "riptide.jobs.experiments." in (programs[0].parent / name).read_text()] == []
