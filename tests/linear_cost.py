"""Measures how the CPU time of a function grows with its input."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def growth(function: Callable[[Any], object], inputs: Callable[[int], Any], size: int) -> float:
    """Returns how many times as much CPU time of this thread a function takes for an input of twice the size.

    Args:
        function: The function.
        inputs: Returns an input of a size.
        size: The smaller size.
    """
    function(inputs(1))  # what is computed once
    small, large = (min(_seconds(function, inputs(count)) for _ in range(7)) for count in (size, 2 * size))
    return large / small


def _seconds(function: Callable[[Any], object], value: Any) -> float:
    start = time.thread_time()
    function(value)
    return time.thread_time() - start
