"""The local runner: how many workers, which items at once, what an exception ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from riptide.base.errors import InputError, StorageError
from riptide.indexing.work import local_runner
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.worker_tasks import (
    ALL_CORES,
    MAX_PREFETCH_BYTES,
    ONE_CORE,
    PYTHON_CORE,
    Allocation,
    Report,
    WorkerRequest,
    WorkerResources,
    task_name,
)
from riptide.telemetry.phases import take_measures

TWO_CALLS = WorkerResources(cores=None, calls=2)


@dataclass(frozen=True, eq=False)
class Call:
    """A task that calls a function with the place and the item."""

    function: Callable[[Allocation, int], object]
    resources: WorkerResources = ONE_CORE

    def open(self, allocation: Allocation) -> Callable[[int, Report], object]:
        return lambda item, report: self.function(allocation, item)


@dataclass(frozen=True)
class ProcessOf:
    """A task that returns the id of its process."""

    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
        return lambda item, report: os.getpid()


@dataclass(frozen=True)
class Refusing:
    """A task whose worker cannot be opened."""

    resources: WorkerResources

    def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
        raise InputError("no such model")


@pytest.mark.parametrize(
    ("cores", "gpus", "resources", "allocation", "slots"),
    [
        (8, 0, ONE_CORE, Allocation(1), 8),
        (8, 0, ALL_CORES, Allocation(8), 1),
        (8, 0, WorkerResources(cores=3), Allocation(3), 2),
        (2, 0, WorkerResources(cores=5), Allocation(2), 1),
        (8, 1, ONE_CORE, Allocation(1), 8),
        (8, 1, WorkerResources(cores=None, gpus=None), Allocation(8, "cuda"), 1),
        (8, 0, WorkerResources(cores=None, gpus=None), Allocation(8), 1),
        (8, 1, WorkerResources(cores=2, gpus=0), Allocation(2), 4),
        (8, 2, WorkerResources(cores=2, gpus=1), Allocation(2, "cuda"), 2),
    ],
)
def test_a_worker_gets_its_cores_and_a_gpu_if_there_is_one(
    cores: int, gpus: int, resources: WorkerResources, allocation: Allocation, slots: int
) -> None:
    runner = LocalRunner(cores=cores, gpus=gpus)
    assert (runner.allocate(resources), runner.slots(resources)) == (allocation, slots)


@pytest.mark.parametrize(
    ("request_", "resources", "allocation", "slots"),
    [
        (WorkerRequest(cpus=3), ALL_CORES, Allocation(3), 2),
        (WorkerRequest(cpus=3, max_workers=1), ALL_CORES, Allocation(3), 1),
        (WorkerRequest(cpus=3), ONE_CORE, Allocation(1), 8),
        (WorkerRequest(gpus=0), WorkerResources(cores=None, gpus=None), Allocation(8), 1),
        (WorkerRequest(gpus=0), WorkerResources(cores=2, gpus=1), Allocation(2, "cuda"), 1),
    ],
)
def test_a_user_sets_the_sizes_that_are_not_fixed(
    request_: WorkerRequest, resources: WorkerResources, allocation: Allocation, slots: int
) -> None:
    runner = LocalRunner(cores=8, gpus=1, request=request_)
    assert (runner.allocate(resources), runner.slots(resources)) == (allocation, slots)


def test_no_more_workers_are_opened_than_there_are_items() -> None:
    class Counted:
        resources = ONE_CORE
        opened = 0

        def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
            self.opened += 1
            return lambda item, report: item

    task = Counted()
    assert sorted(item for item, _ in LocalRunner(cores=8).run(task, range(3))) == [0, 1, 2]
    assert task.opened == 3


def test_a_task_has_a_readable_name() -> None:
    class SearchBm25Task: ...

    class LuceneVersions: ...

    assert [task_name(kind()) for kind in (SearchBm25Task, LuceneVersions)] == [
        "riptide search bm25",
        "riptide lucene versions",
    ]  # type: ignore[arg-type]


def test_one_worker_runs_in_the_calling_thread_in_order() -> None:
    here = threading.get_ident()
    found = list(LocalRunner(cores=1).run(Call(lambda allocation, item: (item, threading.get_ident())), range(5)))
    assert found == [(n, (n, here)) for n in range(5)]


def test_as_many_items_run_at_once_as_there_are_slots() -> None:
    together = threading.Barrier(3, timeout=30)  # would break with fewer than three threads
    found = list(LocalRunner(cores=3).run(Call(lambda allocation, item: together.wait() >= 0), range(6)))
    assert sorted(found) == [(n, True) for n in range(6)]


def test_one_worker_takes_as_many_calls_as_it_says() -> None:
    together = threading.Barrier(2, timeout=30)
    opened: list[Allocation] = []

    @dataclass(frozen=True, eq=False)
    class Both:
        resources: WorkerResources = TWO_CALLS

        def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
            opened.append(allocation)
            return lambda item, report: together.wait()

    assert len(list(LocalRunner(cores=2).run(Both(), range(4)))) == 4
    assert opened == [Allocation(2)]


@pytest.mark.parametrize("cores", [1, 2])
def test_items_are_drawn_as_workers_become_free(cores: int) -> None:
    drawn = 0

    def endless() -> Iterator[int]:
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn

    results = LocalRunner(cores=cores).run(Call(lambda allocation, item: item), endless())
    for _ in range(10):
        next(results)
    results.close()  # type: ignore[attr-defined]
    assert drawn <= 10 + 2 * cores


def test_large_items_wait_while_others_are_held() -> None:
    held = most = 0
    lock = threading.Lock()

    def work(allocation: Allocation, item: int) -> None:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
        time.sleep(0.01)
        with lock:
            held -= 1

    large = SimpleNamespace(size_bytes=MAX_PREFETCH_BYTES)
    list(LocalRunner(cores=4).run(Call(work), [large] * 8))
    assert most == 1


@pytest.mark.parametrize("cores", [1, 2])
def test_the_first_exception_is_raised_and_no_further_item_begins(cores: int) -> None:
    begun: list[int] = []

    def work(allocation: Allocation, item: int) -> int:
        begun.append(item)
        if item == 3:
            raise InputError("item 3 is bad")
        return item

    with pytest.raises(InputError, match="item 3 is bad"):
        list(LocalRunner(cores=cores).run(Call(work), range(1_000)))
    assert len(begun) < 20


def test_a_task_that_runs_again_opens_no_second_worker() -> None:
    opened = 0

    @dataclass(frozen=True, eq=False)
    class Model:
        resources: WorkerResources = ALL_CORES
        stays_open: bool = True

        def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
            nonlocal opened
            opened += 1
            return lambda item, report: item

    runner, model = LocalRunner(cores=2), Model()
    for _ in range(3):
        assert list(runner.run(model, [1])) == [(1, 1)]
        list(runner.run(Call(lambda allocation, item: item), [1]))
    assert opened == 1
    list(runner.run(Model(), [1]))
    assert opened == 2


def test_work_that_holds_pythons_lock_goes_to_processes_once_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {pid for _, pid in LocalRunner(cores=2).run(ProcessOf(), range(5))} == {os.getpid()}
    monkeypatch.setattr(local_runner, "SPAWN_AFTER_S", 0.0)
    found = list(LocalRunner(cores=2).run(ProcessOf(), range(5)))
    assert [item for item, pid in found if pid == os.getpid()] == [0]
    assert sorted(item for item, _ in found) == list(range(5))
    assert {pid for _, pid in LocalRunner(cores=1).run(ProcessOf(), range(5))} == {os.getpid()}


def test_workers_that_cannot_share_a_process_have_one_each_from_the_second_item_on() -> None:
    task = ProcessOf(WorkerResources(one_per_process=True))
    assert list(LocalRunner(cores=2).run(task, [1])) == [(1, os.getpid())]
    assert {pid for _, pid in LocalRunner(cores=1).run(task, range(3))} == {os.getpid()}
    found = list(LocalRunner(cores=2).run(task, range(6)))
    assert sorted(item for item, _ in found) == list(range(6))
    assert os.getpid() not in {pid for _, pid in found}


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_the_end(pids: list[int]) -> None:
    """Waits until processes have ended, without reaping them: their pool would wait for them forever."""
    end = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, "a spawned process outlives the run that started it"
        time.sleep(0.05)


@dataclass(frozen=True)
class DiesOnce:
    """A task whose process is killed by its item 3, the first time."""

    mark: Path
    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
        def work(item: int, report: Report) -> int:
            if item == 3 and not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return item

        return work


@dataclass(frozen=True)
class Sleeps:
    """A task that takes a minute in a spawned process."""

    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[float, Report], float]:
        return lambda item, report: time.sleep(item) or item


@dataclass(frozen=True)
class BlockedSignals:
    """A task that returns the signals that its process was started with as blocked."""

    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[int, Report], set[int]]:
        return lambda item, report: signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_waits_until_a_spawned_process_has_its_first_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself ignores SIGINT from its start."""
    monkeypatch.setattr(local_runner, "SPAWN_AFTER_S", 0.0)
    [_, *spawned] = LocalRunner(cores=2).run(BlockedSignals(), range(3))
    assert [blocked for _, blocked in spawned] == [{signal.SIGINT}] * 2
    done: list[bool] = []

    def interrupt() -> None:
        with local_runner._deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    # A process that a shell started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert done


def test_the_items_of_a_killed_process_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runner, "SPAWN_AFTER_S", 0.0)
    take_measures()
    found = [item for item, _ in LocalRunner(cores=2).run(DiesOnce(tmp_path / "mark"), range(12))]
    assert sorted(found) == list(range(12))
    assert take_measures()["lost_workers"] == 1


def test_processes_that_are_killed_again_and_again_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runner, "SPAWN_AFTER_S", 0.0)
    monkeypatch.setattr(local_runner, "RETRIES", 0)
    with pytest.raises(StorageError, match="1 worker processes were killed"):
        list(LocalRunner(cores=2).run(DiesOnce(tmp_path / "mark"), range(12)))


def test_an_exception_ends_spawned_processes_in_the_middle_of_their_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runner, "SPAWN_AFTER_S", 0.0)
    results = LocalRunner(cores=2).run(Sleeps(), iter([0.0, 0.0, *[300.0] * 6]))
    assert [next(results)[0], next(results)[0]] == [0.0, 0.0]
    children = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
    assert children
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    wait_for_the_end([child.pid for child in children])


@dataclass(frozen=True)
class Scribbles:
    """A task that returns the folder of its process's temporary files, or fills a folder there for ever."""

    resources: WorkerResources = PYTHON_CORE

    def open(self, allocation: Allocation) -> Callable[[str, Report], str]:
        def work(item: str, report: Report) -> str:
            folder = Path(tempfile.mkdtemp(prefix="riptide-lucene-"))
            for number in itertools.count() if item == "endless" else ():
                (folder / f"{number % 100}").write_text(item)
            return str(folder.parent)

        return work


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_spawned_processes_leave_no_temporary_files(
    is_interrupted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_runner, "SPAWN_AFTER_S", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    items = iter(["", "", *["endless"] * 2 * is_interrupted])
    results = LocalRunner(cores=2).run(Scribbles(), items)
    here, folder = next(results)[1], Path(next(results)[1])
    assert here == tempfile.gettempdir()  # the first item runs in this process
    assert folder.name.startswith("riptide-workers-")
    if is_interrupted:
        end = time.monotonic() + 60
        while not list(folder.glob("*/9")):
            assert time.monotonic() < end, "no process writes"
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    else:
        assert list(results) == []
    end = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < end, "temporary files are left"
        time.sleep(0.01)


def test_spawned_processes_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """The program prints the ids of its spawned processes, and is killed while they wait for items."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        f"sys.path[:0] = {[str(Path(__file__).resolve().parents[3]), str(Path(__file__).parent)]}\n"
        "from riptide.indexing.work import local_runner\n"
        "from test_local_runner import ProcessOf\n"
        "if __name__ == '__main__':\n"
        "    local_runner.SPAWN_AFTER_S = 0.0\n"
        "    results = local_runner.LocalRunner(cores=2).run(ProcessOf(), iter(range(100)))\n"
        "    print(*{next(results)[1] for _ in range(20)} - {os.getpid()}, flush=True)\n"
        "    time.sleep(300)\n"
    )
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    spawned = [int(word) for word in process.stdout.readline().split()]
    assert spawned
    process.kill()
    process.wait()
    wait_for_the_end(spawned)


@pytest.mark.parametrize("resources", [ONE_CORE, ALL_CORES, WorkerResources(python_bound=True)])
def test_a_worker_that_cannot_be_opened_ends_the_run_with_its_line(resources: WorkerResources) -> None:
    with pytest.raises(InputError, match="no such model"):
        list(LocalRunner(cores=2).run(Refusing(resources), range(3)))


def test_no_items_open_no_worker() -> None:
    for resources in (ONE_CORE, ALL_CORES, WorkerResources(python_bound=True)):
        assert list(LocalRunner(cores=2).run(Refusing(resources), [])) == []


def test_progress_within_items_is_summed_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runner, "PROGRESS_S", 0.01)
    seen: list[int] = []
    shown = threading.Event()

    @dataclass(frozen=True, eq=False)
    class Slow:
        resources: WorkerResources = ONE_CORE

        def open(self, allocation: Allocation) -> Callable[[int, Report], int]:
            def work(item: int, report: Report) -> int:
                report(item)
                assert shown.wait(30)
                return item

            return work

    def on_progress(rows: int) -> None:
        seen.append(rows)
        if rows == 30:
            shown.set()

    list(LocalRunner(cores=2).run(Slow(), [10, 20], on_progress=on_progress))
    assert 30 in seen
