"""Tasks on Ray: every item once, a bounded number in flight, the first exception as it was raised, lost workers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from riptide.base.errors import InputError
from riptide.indexing.work import ray_progress, ray_tasks, worker_tasks
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.worker_tasks import ONE_CORE, Allocation, Report, WorkerRequest, WorkerResources
from riptide.telemetry.phases import take_measures

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def _tasks_of_this_file(local_ray: None) -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this file


@dataclass(frozen=True)
class Calls:
    """Calls a function with each item and an argument; `folder` gets a file for each worker that is opened."""

    function: Callable[[int, Any], Any]
    argument: Any = None
    folder: Path | None = None
    resources: WorkerResources = ONE_CORE
    stays_open: bool = True

    def open(self, allocation: Allocation) -> Callable[[int, Report], Any]:
        if self.folder:
            (self.folder / f"opened-{os.getpid()}-{time.monotonic_ns()}").touch()
        return lambda item, report: self.function(item, self.argument)


class Sized(NamedTuple):
    """An item with a size."""

    number: int
    size_bytes: int


def multiply(item: int, factor: int) -> int:
    return item * factor


def fail_at(item: int, bad: int) -> int:
    if item == bad:
        raise InputError(f"item {item} is bad")
    return item


def die_once(item: int, folder: Path) -> int:
    mark = folder / str(item)
    if item == 1 and not mark.exists():
        mark.touch()
        os._exit(1)
    return item


def wait_for(item: int, file: Path) -> int:
    end = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(file)
        time.sleep(0.05)
    return item


def counted(drawn: list[int]) -> Iterator[int]:
    """An endless source that lists what was drawn."""
    while True:
        drawn.append(len(drawn))
        yield drawn[-1]


def test_every_item_comes_back_once_with_its_result() -> None:
    runner = RayTasks()
    take_measures()
    assert sorted(runner.run(Calls(multiply, 3), range(20))) == [(item, item * 3) for item in range(20)]
    assert take_measures().keys() >= {"open", "compute"}, "the seconds of the workers"
    assert list(runner.run(Calls(multiply, 3), [])) == []


def test_a_worker_stays_open_for_the_next_items_of_its_task(tmp_path: Path) -> None:
    """As many workers as processes, whatever the number of items and runs: a worker may hold a model."""
    runner, task = RayTasks(), Calls(multiply, 1, folder=tmp_path)
    for _ in range(3):
        list(runner.run(task, range(10)))
    opened = [path.name.split("-")[1] for path in tmp_path.iterdir()]
    assert len(opened) == len(set(opened)) <= 8


def test_an_endless_source_is_drawn_a_bounded_number_of_items_ahead() -> None:
    """Twice as many as the workers take, on a cluster of any size: pending tasks make an autoscaler add nodes."""
    for max_workers in (1, 20):
        drawn: list[int] = []
        found = RayTasks(WorkerRequest(max_workers=max_workers)).run(Calls(multiply, 1), counted(drawn))
        for taken in range(1, 8):
            next(found)
            assert len(drawn) == taken - 1 + 2 * max_workers
        found.close()  # type: ignore[attr-defined]


def test_an_endless_source_is_drawn_a_bounded_number_of_bytes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single item may be larger than the bound."""
    monkeypatch.setattr(worker_tasks, "MAX_PREFETCH_BYTES", 10)
    for size_bytes, ahead in ((4, 3), (50, 1)):
        drawn: list[int] = []
        items = (Sized(item, size_bytes) for item in counted(drawn))
        found = RayTasks().run(Calls(multiply, 1), items)
        for taken in range(1, 5):
            next(found)
            assert len(drawn) - taken < ahead
        found.close()  # type: ignore[attr-defined]


def test_an_input_error_is_raised_as_one_and_ends_the_run() -> None:
    from riptide.jobs.commands.cli import find_input_error

    drawn: list[int] = []
    with pytest.raises(InputError) as raised:
        list(RayTasks(WorkerRequest(max_workers=2)).run(Calls(fail_at, 5), counted(drawn)))
    assert str(find_input_error(raised.value)) == "item 5 is bad"
    assert len(drawn) < 1_000  # of an endless source; other workers go on until one has failed


def test_the_items_of_a_killed_worker_are_run_again(tmp_path: Path) -> None:
    assert sorted(item for item, _ in RayTasks().run(Calls(die_once, tmp_path), range(3))) == [0, 1, 2]
    assert (tmp_path / "1").exists()


def test_a_worker_with_a_gpu_stays_open_for_the_next_item() -> None:
    """In a Ray of its own, which is told of a GPU that need not be there."""
    script = """
import logging, os, ray
from dataclasses import dataclass
from riptide.indexing.work.ray_tasks import RayTasks
from riptide.indexing.work.worker_tasks import WorkerResources

@dataclass(frozen=True)
class Pid:
    resources: WorkerResources = WorkerResources(gpus=None)

    def open(self, allocation):
        return lambda item, report: (os.getpid(), allocation.device)

ray.init(num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
found = {result for _, result in RayTasks().run(Pid(), range(6))}
print(len(found), {device for _, device in found})
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=Path(ray_tasks.__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    count, devices = run.stdout.split(maxsplit=1)
    assert int(count) < 6
    assert devices.strip() == "{'cuda'}"


def test_the_first_of_several_workers_gives_the_result_and_the_others_end(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    assert RayTasks().run_on_first_available(Calls(wait_for, tmp_path / "go"), 7, 50) == 7


def test_the_first_workers_keep_their_nodes_until_the_work_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoscaler removes nodes that are idle for some seconds."""
    import ray

    ended: list[Any] = []
    kill = ray.kill
    monkeypatch.setattr(ray, "kill", lambda actor: (ended.append(actor), kill(actor)))
    runner = RayTasks()
    for _ in range(2):  # a second probe gets the nodes of the first one
        assert runner.run_on_first_available(Calls(multiply, 3), 1, 2) == 3
    first, reserved = ended[:2], ended[2:]
    assert (len(first), reserved) == (2, [])
    found = runner.run(Calls(multiply, 3), range(4))
    first_result = next(found)  # any of the four: results come as they are ready
    assert len(ended) == 4
    assert sorted([first_result, *found])[-1] == (3, 9)


def test_the_first_worker_may_be_lost(tmp_path: Path) -> None:
    take_measures()
    assert RayTasks().run_on_first_available(Calls(die_once, tmp_path), 1, 1) == 1
    assert take_measures()["lost_workers"] == 1


@dataclass(frozen=True)
class Broken:
    """A task whose workers cannot open."""

    resources: WorkerResources = ONE_CORE

    def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
        raise OSError("the disk is full")


@pytest.mark.parametrize(
    "start",
    [lambda runner: list(runner.run(Broken(), range(3))), lambda runner: runner.run_on_first_available(Broken(), 0, 3)],
    ids=["run", "first"],
)
def test_a_job_whose_nodes_are_all_excluded_waits_for_others_only_as_long_as_requested(
    start: Callable[[RayTasks], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster that may grow: Ray reports a head without cores besides the node of this test."""
    import ray

    from riptide.indexing.work.nodes import HEAD, Reports

    head = {"Alive": True, "NodeID": "head", "Resources": {HEAD: 1.0}, "Labels": {}}
    nodes = [{**node, "Resources": {"CPU": node["Resources"].get("CPU", 0)}} for node in ray.nodes()]
    monkeypatch.setattr(ray, "nodes", lambda: [head, *nodes])
    said: list[str] = []
    with pytest.raises(InputError, match="parameter min_workers 1: the nodes have 0 CPUs, room for 0 of 1 worker of 1"):
        start(RayTasks(WorkerRequest(wait_s=0), Reports(said.append)))
    assert len(said) == 1
    assert said[0].endswith("is excluded, as a worker could not open there: OSError: the disk is full")


@dataclass(frozen=True)
class Reporting:
    """Reports 7 rows of its item until a file exists; the file appears when the driver has received them."""

    received: Path
    resources: WorkerResources = ONE_CORE
    reports_progress: bool = True

    def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
        def work(item: int, report: Report) -> int:
            end = time.monotonic() + 60
            while not self.received.exists() and time.monotonic() < end:
                report(7)
                time.sleep(0.05)
            return item

        return work


def test_rows_within_an_unfinished_item_reach_the_driver(tmp_path: Path) -> None:
    rows: list[int] = []

    def on_progress(unfinished: int) -> None:
        rows.append(unfinished)
        if unfinished == 7:
            (tmp_path / "received").touch()

    assert list(RayTasks().run(Reporting(tmp_path / "received"), [3], on_progress=on_progress)) == [(3, 3)]
    assert 7 in rows


class SilentBoard:
    """A progress board that never answers, like an actor that a cluster has no worker for."""

    def count_rows(self) -> None:
        threading.Event().wait()

    def set_rows(self, number: int, rows: int | None) -> None:
        """Never runs, because `count_rows` does."""


def test_a_run_ends_without_a_board_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_progress, "ProgressBoard", SilentBoard)
    monkeypatch.setattr(ray_progress, "REPORT_INTERVAL_S", 0.01)
    monkeypatch.setattr(ray_progress, "ANSWER_TIMEOUT_S", 0.1)
    (tmp_path / "received").touch()
    found = list(RayTasks().run(Reporting(tmp_path / "received"), [3], on_progress=lambda rows: None))
    assert found == [(3, 3)]
