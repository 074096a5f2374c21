"""Times functions that take turns, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)  # of a function that is measured


def in_turns(
    functions: Mapping[Name, Callable[[], object]], rounds: int, deadline: float = float("inf")
) -> dict[Name, list[float]]:
    """Returns the seconds of each function in each round; the order is reversed in every second round.

    The first round is a warm-up and is not counted.

    Args:
        functions: By name. Their results are in main memory when they return, so nothing runs on a device any more.
        rounds: Number of rounds; fewer, but at least one, if time is short.
        deadline: Value of time.monotonic() after which no round starts.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() > deadline:
            break
        for name in list(functions)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            functions[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(seconds: Mapping[Name, Sequence[float]], name: Name, to: Name) -> float:
    """Returns the median of the ratios of the seconds of two functions in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))
