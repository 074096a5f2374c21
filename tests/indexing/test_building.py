"""The dials of an index: turned until a recall is reached, measured with queries that are passages themselves."""

from __future__ import annotations

import numpy as np
import pytest

from indexing.building import turn_dials, without

TRUTH = np.arange(100)[None].repeat(5, axis=0)


def found(share: float) -> np.ndarray:
    """Rows of which `share` are among the true ones."""
    rows = TRUTH.copy()
    rows[:, int(100 * share) :] += 1_000
    return rows


def test_the_smallest_nprobe_and_then_the_smallest_depth_that_reach_the_recall() -> None:
    asked = []

    def search(nprobe: int) -> dict[int, np.ndarray]:
        asked.append(nprobe)
        return {200: found(min(1, nprobe / 8 - 0.1)), 400: found(min(1, nprobe / 8))} if nprobe > 1 else {200: found(0)}

    dial = turn_dials(search, TRUTH, 64, 0.95)
    assert (dial.nprobe, dial.depth, dial.reached) == (8, 400, True)
    assert dial.recall == {10: 1.0, 100: 1.0}
    assert asked == [1, 2, 4, 8]


def test_the_best_is_told_where_the_recall_is_out_of_reach() -> None:
    dial = turn_dials(lambda nprobe: {200: found(0.5 if nprobe < 4 else 0.6)}, TRUTH, 16, 0.95)
    assert (dial.nprobe, dial.reached) == (4, False)
    assert dial.at == pytest.approx(0.6)


def test_a_flat_index_has_nothing_to_probe() -> None:
    assert turn_dials(lambda nprobe: {200: found(1.0)}, TRUTH, 0, 1.0).reached


def test_a_query_that_is_a_passage_does_not_count_itself() -> None:
    rows = np.array([[7, 1, 2], [3, 9, 4], [5, 6, 8]])
    np.testing.assert_array_equal(without(rows, np.array([7, 9, 0])), [[1, 2], [3, 4], [5, 6]])
