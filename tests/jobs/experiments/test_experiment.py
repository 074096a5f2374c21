"""A toy experiment from mining to the table: what is chosen, measured and compared, and what a second run makes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from riptide.base.errors import InputError
from riptide.indexing.store.store import Store
from riptide.jobs.experiments import ControlFunctions, ControlSearchRequest, RunExperiment, main
from riptide.jobs.experiments.arms import read_experiment
from riptide.jobs.experiments.choosing import choose
from riptide.jobs.experiments.experiment import ExperimentRun
from riptide.jobs.experiments.performing import Performer
from riptide.jobs.experiments.trials import make_trial

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
    file = tmp_path / "figures.json"
    options = RunExperiment(store=str(world.store), arms=arms, json=str(file))
    controls = {"words": ControlFunctions(search=search)}

    main(RunExperiment(store=str(world.store), arms=arms, json=str(file), plan=True), controls)
    planned = capsys.readouterr().out
    assert "$ riptide train-retriever" in planned
    assert "4 train_retriever" not in planned, "a plan assumes the first values: two rates, and a second seed of one"
    assert "3 train_retriever" in planned
    assert not Store(str(world.store)).names("prompts")
    assert not file.exists()

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
    compared = figures["differences"]["prompt - untrained"]["RR@10"]
    assert compared["interval"][0] == pytest.approx(difference.mean())
    assert compared["interval"][1] <= difference.mean() <= compared["interval"][2]
    assert figures["differences"]["copied - bm25"]["RR@10"] == {"interval": [0.0, 0.0, 0.0], "p": 1.0}
    assert f"| prompt | {figures['arms']['prompt']['RR@10'][0]:.4f} [" in out
    assert (tmp_path / "figures.md").read_text() in out
    assert [(request.task, request.arm["weight"], request.seed) for request in searched] == [
        (f"prompt-lr{best:g}-seed0", 2, 0)
    ]

    no_work()
    main(options, controls)
    assert len(searched) == 1
    assert json.loads(file.read_text())["sets"] == document["sets"]
    main(RunExperiment(store=str(world.store), arms=arms, json=str(file), plan=True), controls)
    assert capsys.readouterr().out.endswith("all steps have run\n") == (best == 1e-6)


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
    assert choose("arm", {"a": [1, 2]}, lambda values: None if values["a"] == 1 else 0.1, one_at_a_time=False) == {
        "a": 2
    }
    with pytest.raises(InputError, match=r"arm arm: the training diverges with every value of a"):
        choose("arm", {"a": [1, 2]}, lambda values: None, one_at_a_time=False)


PROMPT = {"train": "prompts", "backbone": "b", "negatives": "n"}


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
        (
            {"arms": {"b": {"source": "bm25"}, "a": {**PROMPT, "init": "{model:b}"}}},
            "arms.a: {model:b}: found 'b'; expected an earlier, trained arm of none",
        ),
        ({"arms": {"a": {**PROMPT, "init": "{model:a}"}}}, "arms.a: {model:a}: found 'a'; expected an earlier"),
        (
            {"sets": {"one": {"store": "s"}, "two": {"store": "s"}}, "arms": {}},
            "sets.two.store: found s, the store of one; expected another one",
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_key_and_what_is_expected(
    write: Callable[..., str], tmp_path: Path, document: dict[str, Any], message: str
) -> None:
    file = write(**document)
    with pytest.raises(InputError) as error:
        main(RunExperiment(store=str(tmp_path / "store"), arms=file, json=str(tmp_path / "figures.json")))
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
