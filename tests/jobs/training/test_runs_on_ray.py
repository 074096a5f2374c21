"""Training on Ray gives the bytes of training in this process; a lost worker changes nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from foreign_sets import make_foreign_store
from local_cluster import title_of, wait_for
from mined import weights
from training_commands import RERANK, TUNE, command

from riptide.indexing.store.store import Store

Done = Callable[..., str]


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_one_worker_of_ray_gives_the_bytes_of_this_process(world, mined: Store, done: Done, tmp_path: Path) -> None:
    """The prompt is trained on a set of another store too, in a sweep that a run which diverges does not end.

    A warning of the worker reaches the driver.
    """
    foreign = make_foreign_store(tmp_path, world.model, done)
    foreign.mine(done, "mined")
    tune = (*TUNE, *foreign.training_set("mined"), "--queries", "tiny", "--passage-length", 12, "--steps", 4)
    done(*command(tune, world, "in-process", "--lr", "1e-3"))
    out = done(*command(tune, world, "grid", "--sweep", "lr=1e30,1e-3", "--ray"))
    assert "diverged" in out
    assert mined.open("sweeps", "grid").notes["chosen"] == "prompts/grid-lr0.001"
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert sum("passages of the batches were cut to 12 tokens" in line for line in warnings) == 1
    done(*command(RERANK, world, "in-process", "--steps", 4))
    done(*command(RERANK, world, "on-ray", "--steps", 4, "--ray"))
    for one, other in (("prompts/grid-lr0.001", "prompts/in-process"), ("models/on-ray", "models/in-process")):
        assert weights(mined, one) == weights(mined, other)
        on_ray, in_process = (mined.open(*name.split("/")) for name in (one, other))
        assert (on_ray.fingerprint, on_ray.notes) == (in_process.fingerprint, in_process.notes)


def train_workers() -> set[psutil.Process]:
    """The workers of Ray Train that this process has started."""
    return {one for one in psutil.Process().children(recursive=True) if "RayTrainWorker" in title_of(one)}


@pytest.mark.chaos
@pytest.mark.usefixtures("local_ray")
def test_two_workers_of_which_one_is_lost(world, mined: Store, done: Done) -> None:
    """kill -9 to one of two workers: both resume from the last checkpoint, and the weights are those of two workers."""
    more = ("--steps", 20, "--workers", 2, "--checkpoint-every", 4)
    assert "20 steps" in done(*command(RERANK, world, "whole", *more))
    assert mined.open("models", "whole").notes["workers"] == 2
    latest = world.store / "checkpoints/lost.models/latest.json"
    killed: list[psutil.Process] = []

    def kill() -> None:
        wait_for(latest.exists, "a checkpoint")
        killed.append(sorted(train_workers(), key=lambda process: process.pid)[-1])
        killed[0].kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    out = done(*command(RERANK, world, "lost", *more))
    killer.join()
    assert killed
    assert "models/lost: 20 steps" in out
    assert weights(mined, "models/lost") == weights(mined, "models/whole")
    assert mined.open("models", "lost").notes == mined.open("models", "whole").notes


@pytest.mark.chaos
@pytest.mark.usefixtures("local_ray", "default_signals")
def test_a_signal_before_the_first_step_ends_a_run_at_once(
    world, mined: Store, done: Done, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to save; the cores of its workers are free for the next run."""

    @contextlib.contextmanager
    def signalled(*_: object) -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    run = command(RERANK, world, "none", "--steps", 2, "--workers", 2)
    with monkeypatch.context() as patch:
        patch.setattr("riptide.indexing.training.cluster.announce_waiting", signalled)
        outcome = job(*run)
    line = "error: terminated; nothing of models/none was saved: the next run starts from the beginning\n"
    assert (outcome.status, outcome.err) == (143, line)
    assert "train: 2 steps in " in done(*run)


@pytest.mark.usefixtures("local_ray")
def test_more_workers_than_the_cluster_holds_are_refused(
    world, mined: Store, refused: Done, documented: Callable[..., None]
) -> None:
    line = refused(*command(TUNE, world, "t", "--workers", 8))
    assert line == (
        "error: --workers 8: the nodes have 2 CPUs, room for 2 of 8 workers of 1 CPU; --wait SECONDS waits for more "
        "nodes"
    )
    documented("Training", "more workers than the cluster has room for", line, 1)
    assert mined.names("prompts") == mined.incomplete_keys() == []
