"""An interrupted run keeps its checkpoints, and the same command ends with the weights of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import psutil
import pytest
import torch
from interruption import signal_in
from local_cluster import LONG, PATIENCE, start, wait_for, wait_for_its_end, without_progress
from mined import weights
from training_commands import RERANK, RIP, TUNE, command

from riptide.indexing.store.draft import ABANDONED_S, Draft
from riptide.indexing.store.model_artifacts import StoredCheckpoint
from riptide.indexing.store.store import Store
from riptide.indexing.training.worker import TrainingTask

Done = Callable[..., str]


# Moments: the method of Trainer in which a signal arrives, the number of the call, the signal, and the saved step.
STARTS = [("restore", 0, SIGTERM, None), ("_measure", 0, SIGINT, None)]
STEPS = [("step", 2, SIGINT, 3), ("_measure", 2, SIGTERM, 4), ("step", 7, SIGTERM, 8)]


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("form", "kind", "more", "moments"),
    [
        (TUNE, "prompts", (), [*STARTS, *STEPS]),
        (RERANK, "models", ("--zero", 1), [STARTS[0], STEPS[0], STEPS[2]]),
        pytest.param(RERANK, "models", ("--zero", 2), [STARTS[0], STEPS[0], STEPS[2]], marks=pytest.mark.long),
        pytest.param(RIP, "models", (), [STEPS[0], STEPS[2]], marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_a_run_after_its_step_and_the_same_command_resumes_it(
    world,
    mined: Store,
    done: Done,
    job,
    monkeypatch: pytest.MonkeyPatch,
    documented: Callable[..., None],
    form: tuple,
    kind: str,
    more: tuple,
    moments: list,
) -> None:
    more = (*more, "--steps", 8)
    done(*command(form, world, "whole", *more))
    threads = torch.get_num_threads()
    for number, (method, call, ending, step) in enumerate(moments):
        name = f"cut{number}"
        cut = command(form, world, name, *more)
        with monkeypatch.context() as patch:
            signal_in(patch, method, call, ending)
            outcome = job(*cut)
        word, status = ("terminated", 143) if ending == SIGTERM else ("interrupted", 130)
        saved = f"{kind}/{name} is saved at step {step}; run the same command again to resume"
        nothing = f"nothing of {kind}/{name} was saved: the next run starts from the beginning"
        assert (outcome.status, outcome.err) == (status, f"error: {word}; {saved if step else nothing}\n")
        assert torch.get_num_threads() == threads
        latest = world.store / f"checkpoints/{name}.{kind}/latest.json"
        assert latest.exists() == (step is not None)
        if step is not None:
            assert json.loads(latest.read_text())["step"] == step
        if form is TUNE and method in ("restore", "step") and step != 8:
            moment = "before its first step" if step is None else "during its third step"
            documented("Training", f"a training job that {ending.name} ends {moment}", outcome.err, status)
        if step == 3:  # the next one is ended before its first step: its checkpoint is still that of the first
            with monkeypatch.context() as patch:
                signal_in(patch, "restore", 0, ending)
                again = job(*cut)
            assert (again.status, again.err) == (outcome.status, outcome.err)
        out = done(*cut)
        assert (f"train: 8 steps ({step} kept) in " in out) == (step is not None)
        assert ("at step 0, before training" in out) == (step is None and form is TUNE)
        assert weights(mined, f"{kind}/{name}") == weights(mined, f"{kind}/whole")
        assert mined.open(kind, name).notes == mined.open(kind, "whole").notes
        assert not [*(world.store / "checkpoints").rglob("*.safetensors")]


@pytest.mark.usefixtures("default_signals")
def test_a_run_of_a_sweep_that_a_signal_ends_is_resumed(
    world, mined: Store, done: Done, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second run: in its first step, whose checkpoint is kept, or before it, when the first run is kept.

    The plan is that of the whole sweep without what is kept.
    """
    grid = ("--steps", 4, "--sweep", "seed=0,1")
    for name, method, call, steps, line in (
        ("one", "step", 4, 3, "prompts/one-seed1 is saved at step 1"),
        ("two", "_measure", 3, 4, "nothing of prompts/two-seed1 was saved: the next run starts from the beginning"),
    ):
        assert "\nwork     64 queries in 2 parts; " in done(*command(TUNE, world, name, *grid, "--plan"))
        with monkeypatch.context() as patch:
            signal_in(patch, method, call, SIGTERM)
            outcome = job(*command(TUNE, world, name, *grid))
        assert outcome.err == f"error: terminated; {line}; run the same command again to resume\n"
        assert f"\nwork     {8 * steps} queries in 1 part; " in done(*command(TUNE, world, name, *grid, "--plan"))
        assert ("train: 4 steps (1 kept) in " in done(*command(TUNE, world, name, *grid))) == (method == "step")
        chosen = mined.open("sweeps", name).notes
    assert mined.open("sweeps", "one").notes["quality"] == chosen["quality"]


def test_interrupted_before_its_first_checkpoint_it_does_not_block_the_corrected_command(
    world, mined: Store, done: Done, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: StoredCheckpoint, step: int, write: Callable) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoredCheckpoint, "save", interrupted)
        assert job(*command(TUNE, world, "cut", "--steps", 4)).status == 130
    assert mined.failed_drafts() == {"prompts/cut": "interrupted before its first part"}
    done(*command(TUNE, world, "cut", "--steps", 3))
    assert mined.open("prompts", "cut").notes["steps"] == 3


def test_killed_without_a_checkpoint_it_is_replaced_later_and_with_one_never(
    world,
    mined: Store,
    done: Done,
    refused: Done,
    job,
    monkeypatch: pytest.MonkeyPatch,
    documented: Callable[..., None],
) -> None:
    """A run that is killed marks nothing; its draft is made older than a process would leave it."""
    monkeypatch.setattr(Draft, "abandon", lambda self, error: None)
    more = ("--steps", 4, "--checkpoint-every", 2)
    manifest = world.store / "prompts/cut/manifest.begun.json"

    def cut_after(saves: int) -> None:
        def save(self: StoredCheckpoint, step: int, write: Callable) -> None:
            nonlocal saves
            if saves == 0:
                raise KeyboardInterrupt
            saves -= 1
            original(self, step, write)

        original = StoredCheckpoint.save
        with monkeypatch.context() as patch:
            patch.setattr(StoredCheckpoint, "save", save)
            assert job(*command(TUNE, world, "cut", *more)).status == 130

    cut_after(0)
    line = refused(*command(TUNE, world, "cut", "--steps", 3))
    assert line.endswith(
        "run this command again when that one has ended (a killed command counts as ended after 120 s)"
    )
    documented("Training", "other options under the name of a run that was killed before its first checkpoint", line, 1)
    os.utime(manifest, (0, 0))
    assert "nothing to make" not in done(*command(TUNE, world, "cut", "--steps", 3, "--plan"))
    done(*command(TUNE, world, "cut", "--steps", 3))
    mined.remove("prompts/cut")
    cut_after(2)
    os.utime(manifest, (0, 0))
    line = refused(*command(TUNE, world, "cut", "--steps", 3))
    assert "was begun otherwise: " in line
    assert "run this command again" not in line
    done(*command(TUNE, world, "cut", *more))


def test_a_run_whose_draft_was_replaced_ends_at_its_next_checkpoint(
    world, mined: Store, job, monkeypatch: pytest.MonkeyPatch, documented: Callable[..., None]
) -> None:
    """Another command with other options begins while the run is suspended before its first checkpoint."""
    new: list[Draft] = []

    def suspended(self: TrainingTask, *arguments: Any) -> None:
        if not new:
            os.utime(world.store / "prompts/cut/manifest.begun.json", (0, 0))
            new.append(mined.create("prompts", "cut", config={"other": 1}, abandoned_s=ABANDONED_S))
        save(self, *arguments)

    save = TrainingTask.save
    monkeypatch.setattr(TrainingTask, "save", suspended)
    outcome = job(*command(TUNE, world, "cut", "--steps", 4))
    line = f"error: {world.store}/prompts/cut: it was removed while it was being made; run the command again\n"
    assert (outcome.status, outcome.err) == (1, line)
    documented("Training", "a run whose name another command has taken meanwhile", line, 1)
    assert new[0].is_pinned()
    assert list(mined.storage.list("checkpoints")) == []


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("form", "kind", "workers", "ending"),
    [
        (RERANK, "models", 1, SIGKILL),
        *(
            [
                (RERANK, "models", 2, SIGINT),
                (TUNE, "prompts", 1, SIGKILL),
                (TUNE, "prompts", 2, SIGKILL),
                (RERANK, "models", 2, SIGKILL),
                (TUNE, "prompts", 2, SIGTERM),
                (RIP, "models", 1, SIGTERM),
                (TUNE, "prompts", 1, SIGINT),
            ]
            if LONG
            else []
        ),
    ],
)
def test_ended_and_started_again(
    world,
    mined: Store,
    done: Done,
    request: pytest.FixtureRequest,
    form: tuple,
    kind: str,
    workers: int,
    ending: signal.Signals,
) -> None:
    """kill -9 to the job after a checkpoint, or Ctrl-C to its process group; a private Ray goes down with it."""
    if workers > 1:
        request.getfixturevalue("local_ray")
    steps = 800  # many more than are made until the signal arrives, also on a busy machine
    more = ("--steps", steps, "--workers", workers, "--checkpoint-every", 5)
    done(*command(form, world, "whole", *more))
    process = start(*command(form, world, "cut", *more)).process
    latest = world.store / f"checkpoints/cut.{kind}/latest.json"
    wait_for(latest.exists, "a checkpoint", process)
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid, ending) if ending == SIGKILL else os.killpg(process.pid, ending)
    _, err = process.communicate(timeout=PATIENCE)
    wait_for_its_end(children)
    assert latest.exists(), f"there is no checkpoint any more: {err}"
    step = json.loads(latest.read_text())["step"]
    assert step < steps, "the signal came too late"
    if ending != SIGKILL:
        word, status = ("terminated", 143) if ending == SIGTERM else ("interrupted", 130)
        line = f"error: {word}; {kind}/cut is saved at step {step}; run the same command again to resume"
        assert (process.returncode, without_progress(err).splitlines()[-1]) == (status, line), err
    assert mined.incomplete_keys() == [f"{kind}/cut"]
    assert f"train: {steps} steps ({step} kept) in " in done(*command(form, world, "cut", *more))
    assert weights(mined, f"{kind}/cut") == weights(mined, f"{kind}/whole")
    assert mined.open(kind, "cut").notes == mined.open(kind, "whole").notes
