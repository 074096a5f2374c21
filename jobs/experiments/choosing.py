"""Chooses the values of an arm's options by a measured quality."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from riptide.base.errors import InputError
from riptide.jobs.experiments.arms import Settings

Quality = Callable[[Settings], float | None]
"""Returns the quality of values on a dev split, larger is better; None if their training diverges."""


def choose(
    arm: str,
    values_by_option: Mapping[str, list[Any]],
    quality: Quality,
    *,
    one_at_a_time: bool = False,
    extensions: int = 0,
) -> Settings:
    """Returns the values with the best quality; among equal ones, the first.

    Args:
        arm: Name of the arm, for messages.
        values_by_option: The values of each option.
        quality: Measures the quality of values.
        one_at_a_time: Whether the values of an option are tried after that of the option before it was chosen; if not,
            all combinations are tried.
        extensions: How often a further value is tried if the best one of an option is the smallest or the largest; not
            for combinations. Its ratio to the best value is that of the best value to the next one.

    Raises:
        InputError: If all values diverge.
    """
    if len(values_by_option) > 1 and not one_at_a_time:
        combinations = [
            dict(zip(values_by_option, values, strict=True)) for values in itertools.product(*values_by_option.values())
        ]
        if len(combinations) == 1:
            return combinations[0]
        return combinations[_best(arm, values_by_option, [quality(candidate) for candidate in combinations])]
    chosen = {option: values[0] for option, values in values_by_option.items()}
    for option, values in values_by_option.items():
        tried, qualities = [*values], list[float | None]()
        while len(tried) > max(1, len(qualities)):
            qualities += [quality({**chosen, option: value}) for value in tried[len(qualities) :]]
            best = _best(arm, values_by_option, qualities)
            if len(tried) < len(values) + extensions and not math.isnan(qualities[best] or 0.0):
                tried += _further_values(tried, tried[best])
        chosen[option] = tried[best] if qualities else values[0]
    return chosen


def _further_values(values: Sequence[Any], best: Any) -> list[float]:
    """Returns the value beyond the best one if that is the smallest or the largest; otherwise []."""
    if not all(isinstance(value, int | float) and value > 0 for value in values) or best not in (
        min(values),
        max(values),
    ):
        return []
    numbers = sorted(values)
    neighbour = numbers[1] if best == numbers[0] else numbers[-2]
    return [float(f"{best * best / neighbour:.2g}")]


def _best(arm: str, options: Iterable[str], qualities: Sequence[float | None]) -> int:
    """Returns the place of the best quality."""
    if all(value is None for value in qualities):
        raise InputError(f"arm {arm}: the training diverges with every value of {', '.join(options)}: give others")
    return max(range(len(qualities)), key=lambda place: -math.inf if (q := qualities[place]) is None else q)
