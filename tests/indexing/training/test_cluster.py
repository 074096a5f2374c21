"""The driver of a run on Ray, without Ray: it passes a request to stop on to the workers, and waits for their end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from riptide.indexing.training import cluster
from riptide.indexing.training.monitor import Listener


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.001)


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    """An event that ends the workers; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def listener(*, has_stepped: bool) -> Listener:
    def ignore(*_: object) -> None: ...

    return Listener(list, ignore, ignore, ignore, threading.Event(), has_stepped=has_stepped)


def test_workers_are_asked_once_to_stop_and_waited_for(ended: threading.Event) -> None:
    looks, requests = itertools.count(), []

    def stop() -> None:
        requests.append(True)
        threading.Timer(0.02, ended.set).start()

    def run() -> None:
        ended.wait()
        raise OSError("a worker is lost")

    failure = cluster.fit(run, lambda: next(looks) >= 3, stop, listener(has_stepped=True))
    assert requests == [True]
    assert ended.is_set()
    assert str(failure) == "a worker is lost"
    assert cluster.fit(lambda: None, lambda: False, stop, listener(has_stepped=True)) is None


@pytest.mark.parametrize("has_stepped", [False, True])
def test_workers_without_a_step_or_without_an_end_are_left(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch, has_stepped: bool
) -> None:
    """Before the first step at once; later after STOP_S seconds."""
    monkeypatch.setattr(cluster, "STOP_S", 0.01)
    requests: list[bool] = []
    failure = cluster.fit(ended.wait, lambda: True, lambda: requests.append(True), listener(has_stepped=has_stepped))
    assert failure is None
    assert requests == [True] * has_stepped
    assert not ended.is_set()
