"""riptide.telemetry.phases counts each second of a thread once, and gives the seconds of all threads once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from riptide.telemetry import phases
from riptide.telemetry.phases import Phase, add_measures, call_in_thread, iterate_uncounted, measured, take_measures


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    take_measures()
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    yield clock
    take_measures()


def test_a_phase_within_another_one_pauses_it(clock: Clock) -> None:
    clock.spend(100)  # in no phase
    with Phase("compute"):
        clock.spend(1)
        with Phase("read"):
            clock.spend(2)
            with Phase(None):
                clock.spend(100)
            clock.spend(4)
        clock.spend(8)
    clock.spend(100)
    assert take_measures() == {"compute": 9, "read": 6}
    assert take_measures() == {}


def test_an_exception_ends_a_phase(clock: Clock) -> None:
    @measured("write")
    def fail() -> None:
        clock.spend(1)
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"), Phase("compute"):
        fail()
    clock.spend(100)
    assert take_measures() == {"write": 1, "compute": 0}


def test_the_time_of_another_thread_counts_in_the_phase_of_its_caller_and_once(clock: Clock) -> None:
    with ThreadPoolExecutor(1) as thread, Phase("compute"):
        clock.spend(1)
        call_in_thread(thread, clock.spend, 2)
        clock.spend(4)
    assert take_measures() == {"compute": 7}


def test_the_time_that_an_iterator_takes_is_not_counted(clock: Clock) -> None:
    with Phase("driver"):
        for _ in iterate_uncounted(clock.spend(100) for _ in range(3)):
            clock.spend(1)
    assert take_measures() == {"driver": 3}


def test_no_second_of_concurrent_threads_is_lost() -> None:
    take_measures()

    def add() -> None:
        for _ in range(1_000):
            add_measures({"wait": 1.0})

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert take_measures() == {"wait": 8_000.0}
