"""Whose turn it is: against the whole sequence, sorted; every set is gone through in epochs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from riptide.retriever.training import mixture_schedule as schedule
from riptide.retriever.training.mixture_schedule import SetMixture, schedule_sets

SHARES = [[1], [1, 1], [3, 1], [1, 2, 5], [0.001, 1, 7, 7], [1] * 9]


@pytest.mark.parametrize("shares", SHARES)
def test_turns_are_those_of_the_whole_sequence_sorted_by_time(shares: list[float]) -> None:
    """A stretch from the middle equals the same stretch of the sequence from the start."""
    total = sum(shares)
    times = [((number + 0.5) / (share / total), place) for place, share in enumerate(shares) for number in range(3000)]
    whole = [place for _, place in sorted(times)][:2500]
    for first in (0, 1, 2, 7, 500, 2490):
        sets, numbers = schedule_sets(np.array(shares), first, 10)
        assert sets.tolist() == whole[first : first + 10]
        for place, number in zip(sets, numbers, strict=True):
            assert whole.index(place) >= 0
            position = first + [*zip(sets, numbers, strict=True)].index((place, number))
            assert number == whole[:position].count(place)


@pytest.mark.parametrize("shares", SHARES)
def test_every_stretch_has_the_shares_of_the_sets(shares: list[float]) -> None:
    for first in (0, 3, 10**6):
        sets, _ = schedule_sets(np.array(shares), first, 1000)
        counts = np.bincount(sets, minlength=len(shares))
        expected = 1000 * np.array(shares) / sum(shares)
        assert np.abs(counts - expected).max() <= 1 + len(shares)


def test_a_mixed_batch_is_a_function_of_seed_and_step_and_goes_through_epochs() -> None:
    """Sets of 6 and 3 queries, the second with weight 2: half of the queries each."""
    mixture = SetMixture(("a", "b"), (6, 3), (1.0, 2.0))
    drawn = [mixture.queries_at(5, step, 4) for step in range(12)]
    again = mixture.queries_at(5, 7, 4)
    assert [each.tolist() for each in again] == [each.tolist() for each in drawn[7]]
    assert mixture.queries_at(6, 7, 4)[0].tolist() != again[0].tolist()
    for queries, _ in drawn:
        assert Counter(mixture.sets_of(queries).tolist()) == {0: 2, 1: 2}
    pairs = [
        (int(query), int(epoch)) for queries, epochs in drawn for query, epoch in zip(queries, epochs, strict=True)
    ]
    assert len({*pairs}) == len(pairs) == 48
    assert Counter(epoch for query, epoch in pairs if query < 6) == dict.fromkeys(range(4), 6)
    assert Counter(epoch for query, epoch in pairs if query >= 6) == dict.fromkeys(range(8), 3)
    # The batch size decides only about cuts of one sequence.
    whole = np.concatenate([queries for queries, _ in drawn])
    halves = np.concatenate([mixture.queries_at(5, step, 8)[0] for step in range(6)])
    assert whole.tolist() == halves.tolist()


def test_a_batch_of_one_task_has_queries_of_one_set() -> None:
    mixture = SetMixture(("a", "b"), (8, 4), (1.0, 1.0), "one-task")
    drawn = [mixture.queries_at(0, step, 4) for step in range(9)]
    sets = [{*mixture.sets_of(queries).tolist()} for queries, _ in drawn]
    assert all(len(each) == 1 for each in sets)
    assert Counter(each.pop() for each in sets) == {0: 6, 1: 3}
    first = np.concatenate([queries for queries, _ in drawn if queries[0] < 8])
    assert [sorted(first[start : start + 8].tolist()) for start in (0, 8, 16)] == [[*range(8)]] * 3


def test_the_order_of_each_of_many_sets_is_made_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 40 sets; the numbers of the queries follow from the orders."""
    calls: list[tuple[int, int]] = []
    original = schedule._permutation

    def permutation(seed: int, epoch: int, number: int, size: int) -> np.ndarray:
        calls.append((epoch, number))
        return original(seed, epoch, number, size)

    monkeypatch.setattr(schedule, "_permutation", permutation)
    mixture = SetMixture(tuple(map(str, range(40))), (8,) * 40, (1.0,) * 40)
    queries = np.concatenate([mixture.queries_at(3, step, 160)[0] for step in range(4)])  # two epochs of each set
    assert sorted(calls) == [(epoch, number) for epoch in range(2) for number in range(40)]
    for number in range(40):
        of_set = queries[mixture.sets_of(queries) == number] - 8 * number
        assert of_set.tolist() == [*original(3, 0, number, 8), *original(3, 1, number, 8)]
