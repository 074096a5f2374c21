"""A part that answers requests while releases are opened and closed."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from riptide.indexing.store.store import Store
from riptide.serve.parts import part as part_module
from riptide.serve.parts.leaf import HitsRequest, LeafRequest, PassagesRequest
from riptide.serve.parts.part import ServicePart, check_deadline
from riptide.serve.service_errors import ExpiredError

RELEASE = "0123456789abcdef"
SECONDS = 1.0


class Numbers(ServicePart):
    """A part whose releases are open at once, and hold a number."""

    name = "numbers"

    def _open(self, artifacts: Any) -> int:
        return 5

    def answer(self, release_id: str) -> int:
        number: int = self._get_content(release_id)
        return number


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numbers]:
    monkeypatch.setattr(part_module, "Release", SimpleNamespace(load=lambda store, id: id))
    monkeypatch.setattr(part_module, "ReleaseArtifacts", lambda store, release: None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield Numbers(Store("/none"))
    sys.setswitchinterval(before)


def test_a_release_may_be_closed_at_any_moment_of_a_request_or_a_check(part: Numbers) -> None:
    """With row ranges, one front may close the previous release in a leaf while another front still uses it."""
    end = time.monotonic() + SECONDS

    def close() -> None:
        while time.monotonic() < end:
            part.close_release(RELEASE)

    def use() -> int:
        count = 0
        while time.monotonic() < end:
            assert part.answer(RELEASE) == 5
            part.check(RELEASE)
            part.read_files(RELEASE, 0, 0.0)
            count += 1
        return count

    with ThreadPoolExecutor(3) as threads:
        closing, *users = threads.submit(close), threads.submit(use), threads.submit(use)
        assert min(user.result() for user in users) > 0
        closing.result()


def test_a_check_does_not_wait_until_another_release_is_open(part: Numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    part.open_release(RELEASE)
    began, done = threading.Event(), threading.Event()

    def slow_open(artifacts: Any) -> int:
        began.set()
        assert done.wait(60)
        return 6

    monkeypatch.setattr(part, "_open", slow_open)
    opening = threading.Thread(target=part.open_release, args=("fedcba9876543210",))
    opening.start()
    assert began.wait(60)
    part.check(RELEASE)
    assert part.answer(RELEASE) == 5
    done.set()
    opening.join()


@pytest.mark.parametrize("shift_s", [15.0, -15.0, 1e6])
@pytest.mark.parametrize(
    "request_of", [lambda at: HitsRequest(RELEASE, at, ()), lambda at: PassagesRequest(RELEASE, at, np.arange(1))]
)
def test_a_leaf_counts_the_remaining_time_with_its_own_clocks(
    request_of: Callable[[float], LeafRequest], shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {name: getattr(time, name)() for name in ("time", "monotonic")}
    with monkeypatch.context() as clock:
        for name, start in now.items():
            clock.setattr(time, name, lambda start=start: start)
        in_time, late = (pickle.dumps(request_of(now["monotonic"] + remaining_s)) for remaining_s in (10.0, -1.0))
        for name, start in now.items():
            clock.setattr(time, name, lambda start=start: start + shift_s)
        received = pickle.loads(in_time)
        assert received.deadline == pytest.approx(time.monotonic() + 10, abs=1e-3)
        assert received.release == RELEASE
        assert "deadline" not in received.__getstate__()  # versions that send a time of another clock fail
        check_deadline(received.deadline)
        with pytest.raises(ExpiredError):
            check_deadline(pickle.loads(late).deadline)
