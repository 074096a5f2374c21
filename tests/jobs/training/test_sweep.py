"""Sweeps of a small training: every run once, the dev split chooses, and an interrupted sweep resumes run by run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mined import mine, weights
from training_commands import TUNE, command

from riptide.base.errors import InputError
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.training import retriever_data
from riptide.indexing.training.training_sets import OpenSets
from riptide.jobs.common.flat_options import build_options
from riptide.jobs.training import retriever_run
from riptide.jobs.training.opening import RetrieverSetup
from riptide.jobs.training.sweep import parse_grid
from riptide.jobs.training.training_options import FIXED, TrainRetriever

Done = Callable[..., str]
GRID = ("--sweep", "lr=1e-3,1e-2", "seed=0,1")
RUNS = ("grid-lr0.001-seed0", "grid-lr0.001-seed1", "grid-lr0.01-seed0", "grid-lr0.01-seed1")


def test_a_sweep_trains_every_run_and_names_the_chosen_one(world, mined: Store, done: Done, tmp_path: Path) -> None:
    out = done(*command(TUNE, world, "grid", "--steps", 4, *GRID, "--curves", tmp_path / "c"))
    assert sorted(mined.names("prompts")) == sorted(RUNS)
    artifact = mined.open("sweeps", "grid")
    qualities = {name: mined.open("prompts", name).notes["best"] for name in RUNS}
    means = {lr: (qualities[f"grid-lr{lr}-seed0"] + qualities[f"grid-lr{lr}-seed1"]) / 2 for lr in ("0.001", "0.01")}
    lr = max(means, key=lambda each: means[each])
    chosen = max((f"grid-lr{lr}-seed{seed}" for seed in (0, 1)), key=lambda name: qualities[name])
    assert artifact.notes["chosen"] == f"prompts/{chosen}"
    assert artifact.notes["mean"] == pytest.approx(means[lr])
    assert f"chosen: prompts/{chosen}, dev MRR@10 {qualities[chosen]:.4f}, the best of 2 seeds" in out
    assert json.loads((tmp_path / "c/sweep.json").read_text())["chosen"]["artifact"] == f"prompts/{chosen}"
    assert (tmp_path / "c/sweep.png").exists()
    assert all((tmp_path / "c" / name / "curves.png").exists() for name in RUNS)
    for task in ("grid", "sweeps/grid"):
        planned = done("encode_corpus", "--store", world.store, "--task", task, "--plan")
        assert planned.startswith(f"task     {chosen}, chosen by sweeps/grid\n")
    done(*command(TUNE, world, "alone", "--steps", 4, "--lr", 1e-2, "--seed", 1))
    assert weights(mined, f"prompts/{RUNS[3]}") == weights(mined, "prompts/alone"), "a run is the same job alone"


def test_training_sets_are_opened_once(world, mined: Store, done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a training run, and by all runs of a sweep with the same sets; each still has its own options."""
    opened, open_sets = [], retriever_data.open_sets

    def counted(*arguments: Any, **options: Any) -> OpenSets:
        opened.append(options)
        return open_sets(*arguments, **options)

    monkeypatch.setattr(retriever_data, "open_sets", counted)
    done(*command(TUNE, world, "one", "--steps", 2))
    assert len(opened) == 1
    done(*command(TUNE, world, "grid", "--steps", 2, "--sweep", "seed=0,1", "draw_positive=random,weighted"))
    assert [each["weighted"] for each in opened[1:]] == [False, True]


def test_an_interrupted_sweep_keeps_the_runs_that_are_done(
    world, mined: Store, done: Done, refused: Done, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, trained = retriever_run.train_one_task, []

    def interrupted(store: Store, options: TrainRetriever, setup: RetrieverSetup) -> Artifact:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(options.task)
        return train(store, options, setup)

    ask = command(TUNE, world, "grid", "--steps", 4, *GRID)
    monkeypatch.setattr(retriever_run, "train_one_task", interrupted)
    assert job(*ask).status == 130
    assert trained == [*RUNS[:2]]

    def counted(store: Store, options: TrainRetriever, setup: RetrieverSetup) -> Artifact:
        trained.append(options.task)
        return train(store, options, setup)

    monkeypatch.setattr(retriever_run, "train_one_task", counted)
    done(*ask)
    assert trained == [*RUNS]
    assert "nothing to make" in done(*ask, "--plan")
    line = refused(*ask, "--length", 5)
    assert "or another name (--task), or, if nobody needs it, remove it" in line


def test_a_sweep_over_negatives_depends_on_all_of_them(world, mined: Store, done: Done) -> None:
    mine(mined, "more", run=mined.open("runs", "exact"))  # another input makes another fingerprint
    done(*command(TUNE, world, "grid", "--steps", 2, "--sweep", "negatives=hand,more"))
    inputs = mined.open("sweeps", "grid").inputs
    assert inputs["queries"]["artifact"] == "queries/tiny"
    named = {role: entry["artifact"] for role, entry in inputs.items() if "negatives" in role}
    assert named == {"negativeshand/negatives": "negatives/hand", "negativesmore/negatives": "negatives/more"}


def test_the_table_has_the_settings_in_the_order_of_the_options(world, mined: Store, done: Done) -> None:
    out = done(*command(TUNE, world, "grid", "--steps", 2, "--sweep", "seed=0,1", "lr=1e-3"))
    [header] = [line for line in out.splitlines() if line.endswith("artifact")]
    assert header.split()[:2] == ["seed", "lr"]


def test_values_that_are_true_or_false() -> None:
    options = build_options(TrainRetriever, {"store": "s", "task": "t", "backbone": "b", "train": "prompts"})
    for text in ("normalize=true,False", "position_offset=true,false"):
        name = text.partition("=")[0]
        assert [run.settings[name] for run in parse_grid([text], options, FIXED)] == [True, False]
    with pytest.raises(InputError, match="expected true or false, got '1'"):
        parse_grid(["position_offset=1,0"], options, FIXED)


def test_runs_are_measured_in_the_same_way() -> None:
    options = build_options(
        TrainRetriever, {"store": "s", "task": "t", "backbone": "b", "train": "prompts", "curves": "pictures"}
    )
    for name, values in (("queries", "a,b"), ("dev_split", "a,b"), ("dev_passages", "10,20"), ("evaluate_every", "0")):
        with pytest.raises(InputError, match=f"all runs of a sweep have the same {name}"):
            parse_grid([f"{name}={values}"], options, FIXED)
    assert options.as_run("t-seed0").curves == "pictures/t-seed0"


def test_a_run_that_diverges_is_an_answer(world, mined: Store, done: Done) -> None:
    """A learning rate of 1e30 makes weights that are not finite."""
    out = done(*command(TUNE, world, "grid", "--steps", 4, "--sweep", "lr=1e-3,1e30"))
    assert "1e+30" in out
    assert "diverged" in out
    assert mined.open("sweeps", "grid").notes["chosen"] == "prompts/grid-lr0.001"


def test_bad_sweeps_write_nothing(world, mined: Store, refused: Done, documented: Callable[..., None]) -> None:
    ask = command(TUNE, world, "grid", "--steps", 4)
    line = refused(*ask, "--sweep", "lrate=1e-2,3e-2")
    assert line == "error: --sweep lrate=1e-2,3e-2: lrate is not an option that can be swept; --help lists the options"
    documented("Training", "a sweep over an unknown option", line, 1)
    job, *rest = ask
    without_dev = [argument for argument in rest if argument not in ("--dev-split", "test")]
    line = refused(job, *without_dev, "--sweep", "seed=0,1")
    assert "expected --dev-split too, which chooses a run" in line
    assert mined.names("prompts") == mined.names("sweeps") == mined.incomplete_keys() == []


def test_the_plan_of_a_sweep_lists_its_runs(world, mined: Store, done: Done) -> None:
    out = done(*command(TUNE, world, "grid", "--steps", 4, *GRID, "--plan"))
    assert [line.split()[1] for line in out.splitlines() if line.startswith("run ")] == [
        f"prompts/{run}" for run in RUNS
    ]
    assert mined.names("prompts") == mined.names("sweeps") == []
