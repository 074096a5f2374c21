"""An interrupted run keeps its checkpoints, and the same command ends with the weights of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from interruption import interrupt_at
from local_cluster import LONG, start, wait_for, wait_for_its_end
from mined import weights
from training_commands import RERANK, TUNE, command

from indexing.artifact import ABANDONED_S, Draft
from indexing.models import Checkpoints
from indexing.store import Store
from indexing.training.worker import TrainingTask

Done = Callable[..., str]


@pytest.mark.parametrize(("form", "kind"), [(TUNE, "prompts"), (RERANK, "models")])
@pytest.mark.parametrize("is_written", [False, True])
def test_interrupted_while_it_writes_a_checkpoint(
    world, mined: Store, done: Done, job, monkeypatch: pytest.MonkeyPatch, form: tuple, kind: str, is_written: bool
) -> None:
    """Ctrl-C before or after the write of the second checkpoint."""
    more = ("--steps", 8, "--checkpoint-every", 2)
    done(*command(form, world, "whole", *more))
    threads = torch.get_num_threads()
    interrupt_at(monkeypatch, 4, is_written=is_written)
    outcome = job(*command(form, world, "cut", *more))
    assert (outcome.status, outcome.err) == (130, "error: interrupted; run the same command again to resume\n")
    assert mined.incomplete() == [f"{kind}/cut"]
    assert torch.get_num_threads() == threads
    latest = json.loads((world.store / f"checkpoints/cut.{kind}/latest.json").read_text())
    assert latest["step"] == (4 if is_written else 2)
    out = done(*command(form, world, "cut", *more))
    assert " kept) in " in out
    assert weights(mined, f"{kind}/cut") == weights(mined, f"{kind}/whole")
    assert mined.open(kind, "cut").notes == mined.open(kind, "whole").notes
    assert not [*(world.store / "checkpoints").rglob("*.safetensors")]


def test_interrupted_before_its_first_checkpoint_it_does_not_block_the_corrected_command(
    world, mined: Store, done: Done, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Checkpoints, step: int, write: Callable) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", interrupted)
        assert job(*command(TUNE, world, "cut", "--steps", 4)).status == 130
    assert mined.failed() == {"prompts/cut": "interrupted before its first part"}
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
        def save(self: Checkpoints, step: int, write: Callable) -> None:
            nonlocal saves
            if saves == 0:
                raise KeyboardInterrupt
            saves -= 1
            original(self, step, write)

        original = Checkpoints.save
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", save)
            assert job(*command(TUNE, world, "cut", *more)).status == 130

    cut_after(0)
    line = refused(*command(TUNE, world, "cut", "--steps", 3))
    assert "or wait 120 s after the command that makes it has ended (it has no part yet), or remove it: " in line
    documented("Training", "other options under the name of a run that was killed before its first checkpoint", line, 1)
    os.utime(manifest, (0, 0))
    assert "nothing to make" not in done(*command(TUNE, world, "cut", "--steps", 3, "--plan"))
    done(*command(TUNE, world, "cut", "--steps", 3))
    mined.remove("prompts/cut")
    cut_after(2)
    os.utime(manifest, (0, 0))
    line = refused(*command(TUNE, world, "cut", "--steps", 3))
    assert "was begun otherwise: " in line
    assert "or wait" not in line
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
    ("form", "kind", "workers"),
    [
        (RERANK, "models", 1),
        *([(TUNE, "prompts", 1), (TUNE, "prompts", 2), (RERANK, "models", 2)] if LONG else []),
    ],
)
def test_killed_and_started_again(
    world, mined: Store, done: Done, request: pytest.FixtureRequest, form: tuple, kind: str, workers: int
) -> None:
    """kill -9 to the job after a checkpoint; a private Ray goes down with it."""
    if workers > 1:
        request.getfixturevalue("local_ray")
    more = ("--steps", 100, "--workers", workers, "--checkpoint-every", 5)
    done(*command(form, world, "whole", *more))
    process = start(*command(form, world, "cut", *more)).process
    latest = world.store / f"checkpoints/cut.{kind}/latest.json"
    wait_for(latest.exists, "a checkpoint", process)
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for_its_end(children)
    assert json.loads(latest.read_text())["step"] < 100, "the kill came too late"
    assert mined.incomplete() == [f"{kind}/cut"]
    assert " kept) in " in done(*command(form, world, "cut", *more))
    assert weights(mined, f"{kind}/cut") == weights(mined, f"{kind}/whole")
    assert mined.open(kind, "cut").notes == mined.open(kind, "whole").notes
