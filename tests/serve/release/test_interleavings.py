"""Servers and jobs that change one store at the same time, storage call by storage call: the live release always opens.

Hypothesis chooses which operations begin, which one continues to its next call of the storage, and when hours pass.
An operation is a thread that waits before each of its calls, so exactly one runs at a time. RIPTIDE_TESTS=all tries
3,000 schedules, SCHEDULES of each seed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from local_cluster import LONG

from riptide.base.errors import InputError
from riptide.indexing.maintenance import retention
from riptide.indexing.maintenance.retention import (
    GIVEN,
    GRACE_S,
    expired_prompts,
    expired_releases,
    remove_prompt,
    remove_release,
)
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.serve.release import live as live_module
from riptide.serve.release.live import discard_release, live_release_id, read_live_release, save_as_live
from riptide.serve.release.release import Release
from riptide.serve.release.release_tasks import ServedTask

SCHEDULES = 50 if LONG else 15
FIRST_SEED = int(os.environ.get("RIPTIDE_CRASH_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + (60 if LONG else 1))
PROMPTS = ("legal.1", "legal.2", "tides.1")
OPERATIONS = 3  # that run at the same time
HOURS = 3_600.0
DAY_S = 24 * HOURS
IN_FLIGHT_S = 5 * HOURS  # an operation takes less than the time of grace


COUNTS: Counter[str] = Counter()  # outcomes of all operations


class Stopped(BaseException):
    """Ends the thread of an operation."""


class Operation:
    """An operation on the store in a thread that waits before each of its calls of the storage."""

    def __init__(self, run: Callable[[Store], object], machine: Interleavings, *, publishes: bool):
        self.publishes, self.error = publishes, None
        self.age_s, self.is_done, self._is_stopped = 0.0, False, False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        store = machine.open_store(self._wait)

        def target() -> None:
            try:
                self._wait()
                run(store)
            except Stopped:
                pass
            except Exception as error:
                self.error = error
            finally:
                self.is_done = True
                self._paused.release()

        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()
        self._paused.acquire()

    def step(self) -> None:
        """Continues to the next call of the storage, or to the end."""
        self._go.release()
        self._paused.acquire()
        if self.is_done:
            self._thread.join()
            if self.error is not None and not isinstance(self.error, InputError):
                raise self.error

    def stop(self) -> None:
        self._is_stopped = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        if threading.current_thread() is not getattr(self, "_thread", threading.current_thread()):
            return  # a thread of a pool, for whose calls the operation waits
        if not self._is_stopped:
            self._paused.release()
            self._go.acquire()
        if self._is_stopped:  # also in the calls that clean up after `Stopped`
            raise Stopped


class SteppedStorage:
    """A storage that calls `wait` before each call, and whose times are those of a clock that the schedule sets."""

    WRITES = ("put", "put_new", "compare_and_swap", "touch_if_equal")
    CALLS = frozenset((*WRITES, "delete", "read", "read_tagged", "size", "list", "write_time", "write_times"))

    def __init__(self, storage: Any, written: dict[str, float], now: Callable[[], float], wait: Callable[[], object]):
        self._storage, self._written, self._now, self._wait = storage, written, now, wait

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if name not in self.CALLS:
            return method

        def call(*arguments: Any) -> Any:
            self._wait()
            result = method(*arguments)
            if name in self.WRITES and result is not False:
                self._written[arguments[0]] = self._now()
            if name == "write_time":
                return self._written[arguments[0]]
            return {key: self._written[key] for key in result} if name == "write_times" else result

        return call


class Interleavings(RuleBasedStateMachine):
    """Servers that save, swap and discard releases, `gc`, `remove`, and jobs that append, on one store."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="riptide-interleavings-")
        self.now, self.written, self.generations = 0.0, dict[str, float](), 0
        self.operations: list[Operation] = []
        self.patches = [
            mock.patch.object(retention, "time", mock.Mock(time=lambda: self.now)),
            mock.patch.object(live_module, "KEPT", 1),
        ]
        for patch in self.patches:
            patch.start()
        self.store = self.open_store(lambda: None)
        self.append(self.store)
        assert self.publish(self.store, ())

    def open_store(self, wait: Callable[[], object]) -> Store:
        store = Store(f"{self.folder}/store")
        store.storage = SteppedStorage(store.storage, self.written, lambda: self.now, wait)
        return store

    def append(self, store: Store) -> None:
        """Adds a generation of the embeddings."""
        self.generations += 1
        make(store, "embeddings", f"enc/g{self.generations - 1:04d}")

    def publish(self, store: Store, prompts: tuple[str, ...]) -> bool:
        """Puts prompts that came over HTTP and makes a release with them live, as a server does."""
        live = live_release_id(store)
        parts = [store.open("embeddings", key.partition("/")[2]) for key in store.keys("embeddings")]
        parts += [make(store, "prompts", prompt, **{GIVEN: prompt}) for prompt in prompts]
        tasks = tuple(ServedTask(name, name, "enc") for name in prompts)
        fingerprints = {part.key: part.fingerprint for part in parts}
        release = Release("bert", {}, (ServedTask("default", None, "enc"), *tasks), fingerprints)
        release.save(store)
        is_live = save_as_live(store, release, live and live[1])
        COUNTS["published" if is_live else "refused"] += 1
        if not is_live:
            discard_release(store, release.id)
        return is_live

    @precondition(lambda self: len(self.operations) < OPERATIONS)
    @rule(prompts=st.sets(st.sampled_from(PROMPTS), max_size=2))
    def begin_to_publish(self, prompts: set[str]) -> None:
        self._begin(lambda store: self.publish(store, tuple(sorted(prompts))), publishes=True)

    @precondition(lambda self: len(self.operations) < OPERATIONS)
    @rule()
    def begin_to_switch_back(self) -> None:
        def switch(store: Store) -> None:
            live = live_release_id(store)
            before = [id for id in retention.newest_releases(store) if live and id != live[0]]
            if live and before:
                COUNTS["switched back"] += save_as_live(store, Release.load(store, before[0]), live[1])

        self._begin(switch, publishes=True)

    @precondition(lambda self: len(self.operations) < OPERATIONS)
    @rule(is_late=st.booleans(), prompts=st.sets(st.sampled_from(PROMPTS), max_size=2))
    def begin_gc(self, is_late: bool, prompts: set[str]) -> None:
        """`gc` begins: at once, or a day after all operations have ended and releases have replaced that of prompts."""

        def collect(store: Store) -> None:
            removed = [bool(remove_release(store, key)) for key in expired_releases(store)]
            removed_prompts = [bool(remove_prompt(store, key)) for key in expired_prompts(store)]
            COUNTS["release removed"] += sum(removed)
            COUNTS["prompt removed"] += sum(removed_prompts)
            COUNTS["gc that removes"] += any([*removed, *removed_prompts])
            COUNTS["gc"] += 1

        if is_late:
            while self.operations:
                self.proceed_to_the_end(self.operations[-1])
            for names in (tuple(sorted(prompts)), (), ()):  # the last two are the live release and the previous one
                self.append(self.store)  # the release is another one than those before
                self.publish(self.store, names)
            self.now += DAY_S
        self._begin(collect)

    @precondition(lambda self: len(self.operations) < OPERATIONS)
    @rule()
    def begin_to_append(self) -> None:
        self._begin(self.append)

    @rule(prompt=st.sampled_from(PROMPTS))
    def remove(self, prompt: str) -> None:
        """A user removes a prompt that no release needs; between two calls of other operations."""
        try:
            self.store.remove(f"prompts/{prompt}")
        except InputError:
            return
        COUNTS["prompt removed by a user"] += 1

    @rule(hours=st.floats(0.5, 24))
    def pass_time(self, hours: float) -> None:
        seconds = min([hours * HOURS, *(IN_FLIGHT_S - each.age_s for each in self.operations)])
        self.now += seconds
        for each in self.operations:
            each.age_s += seconds

    @precondition(lambda self: self.operations)
    @rule(data=st.data(), steps=st.integers(1, 40))
    def proceed(self, data: st.DataObject, steps: int) -> None:
        operation = data.draw(st.sampled_from(self.operations))
        for _ in range(steps):
            operation.step()
            if operation.is_done:
                self.operations.remove(operation)
                return

    @invariant()
    def live_release_opens(self) -> None:
        if not any(operation.publishes for operation in self.operations):  # a swap may be about to be undone
            check_live(Store(self.store.url))

    def teardown(self) -> None:
        try:
            while self.operations:
                self.proceed_to_the_end(self.operations[-1])
            check_live(Store(self.store.url))
        finally:
            for operation in self.operations:
                operation.stop()
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.folder)

    def proceed_to_the_end(self, operation: Operation) -> None:
        while not operation.is_done:
            operation.step()
        self.operations.remove(operation)

    def _begin(self, run: Callable[[Store], object], *, publishes: bool = False) -> None:
        self.operations.append(Operation(run, self, publishes=publishes))


def make(store: Store, kind: str, name: str, **config: object) -> Artifact:
    with store.create(kind, name, config=config) as draft:
        if not draft.is_complete:
            draft.commit("file-00000", ".file", lambda path: path.write_bytes(name.encode()), rows=0, path="file")
    return store.open(kind, name)


def check_live(store: Store) -> None:
    """Checks that the live release and all of its artifacts open."""
    release, _ = read_live_release(store)
    assert release is not None
    for key in release.fingerprints:
        release.artifact(store, key)


@pytest.fixture(autouse=True, scope="module")
def _files_of_hypothesis(tmp_path_factory: pytest.TempPathFactory) -> None:
    set_hypothesis_home_dir(tmp_path_factory.mktemp("hypothesis"))


@pytest.mark.parametrize("number", SEEDS)
def test_the_live_release_opens_whatever_others_do_meanwhile(number: int) -> None:
    assert IN_FLIGHT_S < GRACE_S
    COUNTS.clear()
    run_state_machine_as_test(
        seed(number)(Interleavings),
        settings=settings(
            max_examples=SCHEDULES,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"seed {number}, {SCHEDULES} schedules: {dict(COUNTS)}")


def test_the_operations_publish_refuse_and_remove() -> None:
    """Drawn schedules may by chance lack one of these outcomes; this one has them all."""
    COUNTS.clear()
    machine = Interleavings()
    try:
        machine.begin_to_append()
        machine.proceed_to_the_end(machine.operations[0])
        machine.begin_to_publish(prompts={"legal.1"})
        machine.begin_to_publish(prompts=set())
        for _ in range(2):  # to the first call, and past it: the live release is read
            machine.operations[1].step()
        machine.proceed_to_the_end(machine.operations[0])
        assert (COUNTS["published"], COUNTS["refused"]) == (2, 0)
        machine.proceed_to_the_end(machine.operations[0])
        assert (COUNTS["published"], COUNTS["refused"]) == (2, 1)
        machine.live_release_opens()
        machine.begin_gc(is_late=True, prompts={"tides.1"})
        machine.proceed_to_the_end(machine.operations[0])
        assert COUNTS["release removed"]
        assert COUNTS["prompt removed"]
    finally:
        machine.teardown()
