"""Slow float64 references of the divergence of mixtures, written from the equations."""

from __future__ import annotations

import math


def slow_divergence(one: list[float], other: list[float]) -> float:
    """(KL(one || mean) + KL(other || mean)) / 2."""
    total = 0.0
    for a, b in zip(one, other, strict=True):
        mean = (a + b) / 2
        total += sum(value * math.log(value / mean) / 2 for value in (a, b) if value)
    return total


def slow_means(weights: list[list[float]], tasks: list[int]) -> tuple[float, float]:
    """Returns the mean divergence over pairs of one task, and over pairs of different tasks."""
    within, between = [], []
    for i, one in enumerate(weights):
        for j, other in enumerate(weights):
            if i != j:
                (within if tasks[i] == tasks[j] else between).append(slow_divergence(one, other))
    return sum(within) / max(1, len(within)), sum(between) / max(1, len(between))
