"""Measures how the CPU time of a function grows with its input."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

FACTOR = 8  # the larger size divided by the smaller one: the exponents 1 and 2 are far apart, also on a busy machine


def growth_exponent(function: Callable[[Any], object], inputs: Callable[[int], Any], size: int) -> float:
    """Returns the exponent with which the CPU time of this process grows: about 1 if linear, 2 if quadratic.

    Args:
        function: The function.
        inputs: Returns an input of a size.
        size: The smaller size. At it the part of the time that may grow faster should already be the largest one.
    """
    function(inputs(1))  # what is computed once
    values = [inputs(size), inputs(FACTOR * size)]
    # In turn, as the speed of the machine changes.
    runs = [[_seconds(function, value) for value in values] for _ in range(5)]
    small, large = map(min, zip(*runs, strict=True))
    return math.log(large / small, FACTOR)


def _seconds(function: Callable[[Any], object], value: Any) -> float:
    start = time.process_time()
    function(value)
    return time.process_time() - start
