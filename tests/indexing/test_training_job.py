"""What the job makes of its workers' words."""

from __future__ import annotations

import threading
from queue import Queue
from typing import Any

from indexing.tasks import RETRIES
from indexing.training_job import _listen


def heard_of(*messages: dict[str, Any]) -> tuple[dict[str, Any], list[int], bool]:
    """What is known at the end, the steps that were told, and whether workers are to end."""
    told: Queue[Any] = Queue()
    over: Queue[Any] = Queue()
    for message in (*messages, None):
        told.put(message)
    heard: dict[str, Any] = {}
    steps: list[int] = []
    _listen(told, over, threading.Event(), heard, lambda *_: None, lambda message: steps.append(message["step"]))
    return heard, steps, not over.empty()


def test_steps_that_are_done_again_are_told_once() -> None:
    begin, first, second = {"begun": 0}, {"step": 1}, {"step": 2}
    heard, steps, over = heard_of(begin, first, second, begin, {"resumed": 1}, second, {"step": 3}, {"loss": 0.5})
    assert (steps, over) == ([1, 2, 3], False)
    assert heard["loss"] == 0.5


def test_any_number_of_losses_is_borne_while_steps_are_made() -> None:
    assert not heard_of(*({"begun": 0} | ({"step": n} if n else {}) for n in range(3 * RETRIES)))[2]


def test_losses_on_the_way_to_the_same_step_end_it() -> None:
    lost = [{"begun": 0}, {"resumed": 1}, {"step": 2}, {"failed": "OSError: no room"}, {"failed": "closed by peer"}]
    assert not heard_of(*lost * (RETRIES + 1))[2]
    heard, steps, over = heard_of(*lost * (RETRIES + 3))
    assert (steps, over) == ([2], True)
    begin = f"workers were lost {RETRIES + 1} times on their way to step 3 (OSError: no room); "
    assert heard["error"].startswith(begin)


def test_workers_that_come_further_after_all_are_let_go_on() -> None:
    lost = [{"begun": 0}] * (RETRIES + 2)
    heard, steps, over = heard_of(*lost, {"step": 1}, {"begun": 0}, {"step": 2}, {"loss": 0.5, "steps": 2})
    assert (steps, over, "error" in heard) == ([1, 2], False, False)
    assert "error" not in heard_of(*lost, {"loss": 0.5, "steps": 0})[0]
