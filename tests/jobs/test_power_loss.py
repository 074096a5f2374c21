"""After a loss of power, all that a store has acknowledged is whole, and the same command completes the job.

The file system's calls of an import, an encoding and an index into a new folder are recorded. At each prefix of them,
what was not synced is lost, torn, or lost in part (`power_loss.py`). The commands run again on a seeded sample of the
states that remain; on all of them in the long form.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_cluster import LONG
from power_loss import MODES, Call, Disk, recorded_calls, write_files
from samples import files_of, make_passages, save_tiny_bert, write_beir

from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.store import Store

SAMPLED = 3  # states of each job after which it runs again, in the short form


@dataclass(frozen=True)
class Run:
    """A job that ran without a loss of power: its options, the folder before it, its calls and the bytes after it."""

    options: tuple[str, ...]
    before: Path
    calls: list[Call]
    expected: dict[str, bytes]


JOBS = ("import_corpus", "encode_corpus", "build_index")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the jobs make the folders of a store."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def runs(disk: Path, tmp_path_factory: pytest.TempPathFactory, call_job: Callable[..., int]) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("runs")
    source = write_beir(root / "source", make_passages(12))
    model = save_tiny_bert(root / "model")
    commands = {
        "import_corpus": ("--source", str(source), "--part-size", "6"),
        "encode_corpus": ("--encoder", model, "--name", "enc", "--dtype", "float32", "--compile", "never"),
        "build_index": ("--embeddings", "enc", "--factory", "Flat", "--shards", "2"),
    }
    recorded = {}
    for name, options in commands.items():
        before = root / name
        shutil.copytree(disk, before)
        with recorded_calls(disk) as calls:
            assert call_job(name, "--store", disk / "new" / "store", *options) == 0
        recorded[name] = Run(options, before, calls, files_of(disk))
    return recorded


@pytest.mark.parametrize("name", JOBS)
def test_what_is_acknowledged_survives_a_loss_of_power_and_the_same_command_completes_the_job(
    name: str, runs: dict[str, Run], disk: Path, tmp_path: Path, call_job: Callable[..., int]
) -> None:
    run = runs[name]
    states = {}
    shutil.rmtree(disk)
    shutil.copytree(run.before, disk)
    simulated = Disk(disk)
    for number in range(len(run.calls) + 1):
        for mode in MODES:
            files = simulated.after_loss(mode, seed=number)
            lost = [path for path, data in simulated.acknowledged.items() if files.get(path) != data]
            assert lost == [], f"call {number}, {mode}"
            states[tuple(files.items())] = files
        if number < len(run.calls):
            simulated.apply(run.calls[number])
    print(f"{name}: {len(run.calls)} calls, {len(states)} states")
    for files in list(states.values()) if LONG else random.Random(name).sample(list(states.values()), SAMPLED):
        shutil.rmtree(disk)
        write_files(files, disk, disk)
        store = Store(str(disk / "new" / "store"))
        assert [finding.problem for finding in verify(store, keys=store.keys()) if finding.problem] == []
        assert call_job(name, "--store", store.url, *run.options) == 0
        assert files_of(disk) == run.expected
