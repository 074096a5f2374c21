"""Measures the throughput of a search source: queries per second from texts to hits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROUNDS = 3  # measured rounds, after a warm-up round that loads models and files


@dataclass(frozen=True)
class SearchRate:
    """The measured throughput of a search.

    Attributes:
        queries_per_s: The median over the rounds.
        queries: Number of queries of a round.
        batch: Number of queries that are searched at once.
        rounds: The queries per second of each round.
    """

    queries_per_s: float
    queries: int
    batch: int
    rounds: tuple[float, ...]


def measure_rate(search: Callable[[Sequence[str]], object], texts: Sequence[str], batch: int) -> SearchRate:
    """Measures how many queries per second a search answers, after a warm-up round.

    Args:
        search: Searches a list of queries.
        texts: The queries, at least one.
        batch: Number of queries that are searched at once.
    """
    rates = []
    for number in range(ROUNDS + 1):
        started = time.perf_counter()
        for start in range(0, len(texts), batch):
            search(list(texts[start : start + batch]))  # a new list has no cached vectors
        if number:
            rates.append(len(texts) / (time.perf_counter() - started))
    return SearchRate(statistics.median(rates), len(texts), batch, tuple(rates))
