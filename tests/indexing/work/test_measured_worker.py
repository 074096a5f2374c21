"""The seconds of workers by phase reach the process of the runner: of its threads, and of spawned processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.worker_tasks import JVM_CORE, ONE_CORE, Allocation, Report, WorkerResources
from riptide.telemetry.phases import Phase, take_measures

SLEEP_S = 0.05


@dataclass(frozen=True)
class Sleep:
    """Sleeps while it opens, and twice for each item, the second time as if it read from a store."""

    resources: WorkerResources

    def open(self, allocation: Allocation) -> Callable[[int, Report], None]:
        time.sleep(SLEEP_S)

        def sleep(item: int, report: Report) -> None:
            time.sleep(SLEEP_S)
            with Phase("read"):
                time.sleep(SLEEP_S)

        return sleep


@pytest.mark.parametrize("resources", [ONE_CORE, JVM_CORE], ids=["threads", "processes"])
def test_each_phase_of_the_workers_is_counted(resources: WorkerResources) -> None:
    take_measures()
    list(LocalRunner(cores=2).run(Sleep(resources), range(4)))
    seconds = take_measures()
    assert seconds.keys() <= {"open", "compute", "read", "wait"}
    assert seconds["open"] >= SLEEP_S
    assert seconds["compute"] >= 4 * SLEEP_S
    assert seconds["read"] >= 4 * SLEEP_S


def test_a_worker_in_the_thread_of_the_driver_does_not_wait() -> None:
    """Its time between two items is that of the driver."""
    take_measures()
    with Phase("driver"):
        for _ in LocalRunner(cores=1).run(Sleep(ONE_CORE), range(3)):
            time.sleep(SLEEP_S)
    seconds = take_measures()
    assert "wait" not in seconds
    assert seconds["driver"] >= 3 * SLEEP_S
