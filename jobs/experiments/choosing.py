"""Chooses the values of an arm's options by a measured quality."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from riptide.base.errors import InputError
from riptide.jobs.experiments.arms import Settings

Quality = Callable[[Settings], float | None]
"""Returns the quality of values on a dev split, larger is better; None if their training diverges."""


def choose(arm: str, values_by_option: Mapping[str, list[Any]], quality: Quality, *, one_at_a_time: bool) -> Settings:
    """Returns the values with the best quality; among equal ones, the first.

    Args:
        arm: Name of the arm, for messages.
        values_by_option: The values of each option.
        quality: Measures the quality of values.
        one_at_a_time: Whether the values of an option are tried after that of the option before it was chosen; if not,
            all combinations are tried.

    Raises:
        InputError: If all values diverge.
    """
    if not one_at_a_time:
        combinations = [
            dict(zip(values_by_option, values, strict=True)) for values in itertools.product(*values_by_option.values())
        ]
        return _best_candidate(arm, combinations, quality)
    chosen = {option: values[0] for option, values in values_by_option.items()}
    for option, values in values_by_option.items():
        chosen = _best_candidate(arm, [{**chosen, option: value} for value in values], quality)
    return chosen


def _best_candidate(arm: str, candidates: list[Settings], quality: Quality) -> Settings:
    """Returns the candidate with the best quality."""
    if len(candidates) == 1:
        return candidates[0]
    qualities = [quality(candidate) for candidate in candidates]
    if all(value is None for value in qualities):
        raise InputError(
            f"arm {arm}: the training diverges with every value of {', '.join(candidates[0])}: give others"
        )
    return candidates[max(range(len(qualities)), key=lambda place: -math.inf if (q := qualities[place]) is None else q)]
