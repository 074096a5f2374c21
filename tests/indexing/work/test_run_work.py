"""run_work with the smallest kind of work: it shows what a new kind needs, and that every guarantee comes with it."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from riptide.base.errors import InputError, StorageError
from riptide.indexing.store import draft as draft_module
from riptide.indexing.store.draft import ABANDONED_S, Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store
from riptide.indexing.work import local_runner
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import (
    RESUME,
    ArtifactTarget,
    BaseStage,
    BaseWork,
    Committed,
    Progress,
    WorkUnit,
    run_work,
)
from riptide.indexing.work.worker_tasks import ONE_CORE, Allocation, Report, Runner, WorkerResources


@dataclass(frozen=True)
class Squares(BaseWork, BaseStage):
    """The work that makes squares/NAME: one part for each number. This class and its task are all that a kind needs."""

    numbers: tuple[int, ...]
    power: int = 2
    name: str = "n"
    bad: int | None = None
    resources: WorkerResources = ONE_CORE
    fails_whole: bool = False
    title: str = "square"
    noun: str = "numbers"

    @property
    def targets(self) -> list[ArtifactTarget]:
        config = {"power": self.power, "numbers": list(self.numbers)}
        return [ArtifactTarget("squares", self.name, {}, config, fails_whole=self.fails_whole)]

    @property
    def stages(self) -> list[Any]:
        return [self]

    @property
    def total(self) -> int:
        return len(self.numbers)

    def units(self, committed_parts: Committed) -> Iterator[WorkUnit]:
        for number in self.numbers:
            yield WorkUnit((f"part-{number:05d}",), 1, number)

    def check(self, unit: WorkUnit, parts: Sequence[ArtifactPart]) -> None:
        assert parts[0].name == unit.names[0]

    def task(self, drafts: Sequence[Draft]) -> Square:
        return Square(drafts[0], self.power, self.bad, self.resources)

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        drafts[0].add_notes(parts=len(drafts[0].committed_parts()))


@dataclass(frozen=True)
class Square:
    """Commits the power of a number."""

    draft: Draft
    power: int
    bad: int | None
    resources: WorkerResources

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], int]:
        return self._square

    def _square(self, unit: WorkUnit, report: Report) -> int:
        if unit.payload == self.bad:
            raise InputError(f"number {self.bad} is bad")
        text = str(unit.payload**self.power)
        self.draft.commit(unit.names[0], ".txt", lambda path: path.write_text(text), rows=1)
        report(1)
        return unit.payload


@dataclass
class Log:
    """A Progress that keeps what it receives."""

    lines: list[Any] = field(default_factory=list)
    parts: Counter[str] = field(default_factory=Counter)

    def __call__(self, title: str, total: int | None, noun: str, artifact: str) -> Log:
        self.lines.append((title, total, noun, artifact))
        return self

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None: ...

    def count(self, amount: int, is_kept: bool = False) -> None:
        self.lines.append("kept" if is_kept else amount)

    def show(self, unfinished: int) -> None: ...

    def add(self, figure: str, amount: int, **tags: str) -> None:
        assert figure == "parts"
        self.parts[tags["outcome"]] += amount


WORK = Squares(tuple(range(7)))


def contents(store: Store) -> dict[str, str]:
    artifact = store.open("squares", "n")
    return {part.name: artifact.local_path(part).read_text() for part in artifact.parts}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("python_bound", [False, True])
def test_every_way_of_the_local_runner_makes_the_same_bytes(
    store: Store, cores: int, python_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runner, "SPAWN_AFTER_S", 0.0)
    log = Log()
    work = replace(WORK, resources=WorkerResources(python_bound=python_bound))
    [artifact] = run_work(store, work, LocalRunner(cores=cores), log)
    assert contents(store) == {f"part-{n:05d}": str(n * n) for n in range(7)}
    assert artifact.notes == {"parts": 7}
    assert log.lines == [("square", 7, "numbers", "squares/n"), *[1] * 7]
    assert log.parts == {"made": 7, "kept": 0}


def test_what_is_complete_is_not_made_again(store: Store) -> None:
    [first] = run_work(store, WORK, LocalRunner(cores=1))
    [again] = run_work(store, replace(WORK, bad=3), LocalRunner(cores=1))
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize("cores", [1, 2])
def test_an_interrupted_run_keeps_its_parts_and_makes_the_others(store: Store, cores: int) -> None:
    made: list[int] = []

    def interrupt(unit: WorkUnit, result: int) -> None:
        made.append(result)
        if len(made) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run_work(store, WORK, LocalRunner(cores=cores), observe=interrupt)
    assert caught.value.__notes__ == [RESUME]
    log = Log()
    run_work(store, WORK, LocalRunner(cores=cores), log, observe=lambda unit, result: made.append(result))
    kept = log.lines.count("kept")
    assert log.parts == {"made": 7 - kept, "kept": kept}
    assert kept >= 3
    assert len(made) == 3 + 7 - kept
    assert contents(store) == {f"part-{n:05d}": str(n * n) for n in range(7)}


def test_bad_input_before_any_part_leaves_nothing(store: Store) -> None:
    with pytest.raises(InputError, match="number 0 is bad"):
        run_work(store, replace(WORK, bad=0), LocalRunner(cores=1))
    assert store.incomplete_keys() == []
    run_work(store, replace(WORK, power=3), LocalRunner(cores=1))
    assert contents(store)["part-00002"] == "8"


def test_bad_input_after_some_parts_keeps_them(store: Store) -> None:
    with pytest.raises(InputError, match="number 4 is bad"):
        run_work(store, replace(WORK, bad=4), LocalRunner(cores=1))
    assert store.incomplete_keys() == ["squares/n"]
    log = Log()
    run_work(store, WORK, LocalRunner(cores=1), log)
    assert log.lines.count("kept") == 4


def test_after_bad_input_a_target_that_fails_whole_begins_anew(store: Store) -> None:
    with pytest.raises(InputError, match="number 4 is bad"):
        run_work(store, replace(WORK, bad=4, fails_whole=True), LocalRunner(cores=1))
    assert store.failed_drafts() == {"squares/n": "number 4 is bad"}
    log = Log()
    run_work(store, replace(WORK, fails_whole=True), LocalRunner(cores=1), log)
    assert log.lines.count("kept") == 0


def test_a_failure_of_the_storage_keeps_the_parts_of_every_target(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Square, unit: WorkUnit, report: Report) -> int:
        if unit.payload == 3:
            raise StorageError("the disk is full")
        return original(self, unit, report)

    original = Square._square
    monkeypatch.setattr(Square, "_square", broken)
    with pytest.raises(StorageError, match="the disk is full"):
        run_work(store, replace(WORK, fails_whole=True), LocalRunner(cores=1))
    monkeypatch.undo()
    log = Log()
    run_work(store, replace(WORK, fails_whole=True), LocalRunner(cores=1), log)
    assert log.lines.count("kept") == 3


def test_a_taken_name_is_refused_with_the_option_to_give(store: Store) -> None:
    run_work(store, WORK, LocalRunner(cores=1))
    with pytest.raises(InputError) as raised:
        run_work(store, replace(WORK, power=3), LocalRunner(cores=1))
    assert str(raised.value) == (
        f"{store.url}/squares/n was made otherwise: parameter power 2, now 3; give parameter power 2, or another name "
        f"(parameter name), or, if nobody needs it, remove it: riptide store remove squares/n --store {store.url}"
    )


CUBES = replace(WORK, power=3)


def begin(store: Store, work: Squares) -> Draft:
    """Begins the draft of a work, as a process does that is killed before its first part."""
    [target] = work.targets
    return store.create(target.kind, target.name, config=target.config)


def age(store: Store, seconds: float) -> None:
    """Makes the last sign of a process that works on the draft older."""
    for path in Path(store.url, "squares/n").iterdir():
        os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def test_a_draft_without_parts_is_replaced_once_no_process_works_on_it(store: Store) -> None:
    old = begin(store, WORK)
    with pytest.raises(InputError) as raised:
        run_work(store, CUBES, LocalRunner(cores=1))
    assert str(raised.value) == (
        f"{store.url}/squares/n: another command is making it, otherwise: parameter power 2, now 3; give parameter "
        "power 2, or another name (parameter name), or run this command again when that one has ended (a killed "
        "command counts as ended after 120 s)"
    )
    age(store, ABANDONED_S + 1)
    run_work(store, CUBES, LocalRunner(cores=1))
    assert contents(store)["part-00002"] == "8"
    with pytest.raises(InputError, match="removed while it was being made"):
        old.commit("part-00000", ".txt", lambda path: path.write_text("0"), rows=1)
    assert contents(store)["part-00000"] == "0"
    assert store.open("squares", "n").config["power"] == 3


def test_a_draft_with_a_part_is_never_replaced(store: Store) -> None:
    begin(store, WORK).commit("part-00000", ".txt", lambda path: path.write_text("0"), rows=1)
    with pytest.raises(InputError, match=r"another command is making it, otherwise: parameter power 2, now 3; "):
        run_work(store, CUBES, LocalRunner(cores=1))
    age(store, 1e6)
    with pytest.raises(InputError, match=r"was begun otherwise: parameter power 2, now 3; .*, or remove it, as it is "):
        run_work(store, CUBES, LocalRunner(cores=1))
    run_work(store, WORK, LocalRunner(cores=1))


def test_a_process_shows_that_it_works_on_a_draft(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part may take long: the draft was begun long ago, and is not replaced."""
    refusals: list[str] = []

    def slow(self: Square, unit: WorkUnit, report: Report) -> int:
        if not refusals:
            age(store, ABANDONED_S + 1)
            path = Path(store.url) / "squares/n/manifest.begun.json"
            until = time.monotonic() + 60
            while path.stat().st_mtime < time.time() - ABANDONED_S and time.monotonic() < until:
                time.sleep(0.01)
            with pytest.raises(InputError, match="another command is making it") as raised:
                begin_otherwise(store)
            refusals.append(str(raised.value))
        return original(self, unit, report)

    def begin_otherwise(store: Store) -> None:
        [target] = CUBES.targets
        store.create(target.kind, target.name, config=target.config, abandoned_s=ABANDONED_S)

    original = Square._square
    monkeypatch.setattr(draft_module, "RENEWAL_S", 0.01)
    monkeypatch.setattr(Square, "_square", slow)
    run_work(store, WORK, LocalRunner(cores=1))
    assert len(refusals) == 1
    assert contents(store)["part-00002"] == "4"


def test_a_process_whose_draft_was_replaced_ends_with_one_line_and_leaves_the_new_draft(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended for longer than ABANDONED_S before its first part."""
    new: list[Draft] = []

    def suspended(self: Square, unit: WorkUnit, report: Report) -> int:
        if not new:
            age(store, ABANDONED_S + 1)
            [target] = CUBES.targets
            new.append(store.create(target.kind, target.name, config=target.config, abandoned_s=ABANDONED_S))
        return original(self, unit, report)

    original = Square._square
    monkeypatch.setattr(Square, "_square", suspended)
    with pytest.raises(InputError) as raised:
        run_work(store, WORK, LocalRunner(cores=1))
    assert str(raised.value) == (
        f"{store.url}/squares/n: it was removed while it was being made; run the command again"
    )
    assert new[0].is_pinned()
    log = Log()
    run_work(store, CUBES, LocalRunner(cores=1), log)
    assert contents(store) == {f"part-{n:05d}": str(n**3) for n in range(7)}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("the disk is full"), ValueError("a bug")])
def test_an_interruption_before_the_first_part_does_not_block_the_corrected_command(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def interrupted(self: Square, unit: WorkUnit, report: Report) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Square, "_square", interrupted)
        with pytest.raises(type(error)):
            run_work(store, WORK, LocalRunner(cores=1))
    assert not hasattr(error, "__notes__")
    assert store.failed_drafts() == {"squares/n": str(error) or "interrupted before its first part"}
    run_work(store, CUBES, LocalRunner(cores=1))
    assert contents(store)["part-00002"] == "8"
    assert list(Path(store.url).rglob("failed.json")) == []


def test_a_draft_that_is_removed_meanwhile_is_told_and_nothing_is_completed(store: Store) -> None:
    with pytest.raises(InputError, match="removed while it was being made"):
        run_work(store, WORK, LocalRunner(cores=1), observe=lambda unit, result: store.remove("squares/n"))
    assert store.keys() == []


def test_two_runs_at_once_complete_one_artifact(store: Store) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            run_work(store, WORK, LocalRunner(cores=2))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert contents(store) == {f"part-{n:05d}": str(n * n) for n in range(7)}
