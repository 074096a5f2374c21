"""Sets of rows against numpy's sets, and the cache of them within its bound."""

from __future__ import annotations

import numpy as np
import pytest

from riptide.indexing.corpus.row_sets import ENTRY_BYTES, FilterCache, RowSet


class Owner:
    """Something that searches."""


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 4_000), (8, 4_001), (13, 3_999), (7, 7)])
def test_a_set_answers_as_its_list_of_rows(first: int, end: int, share: float) -> None:
    every = np.arange(first, end)
    rows = every[np.random.default_rng(end).random(len(every)) < share]
    near = np.arange(-3, end + 20).reshape(1, -1)
    for rows_of_range in (RowSet(rows, first, end), RowSet.of(np.append(rows, end + 5), first, end), RowSet(rows)):
        assert len(rows_of_range) == len(rows)
        np.testing.assert_array_equal(rows_of_range.rows(), rows)
        np.testing.assert_array_equal(rows_of_range.contains(near), np.isin(near, rows))
        bits = np.unpackbits(rows_of_range.bitmap(), bitorder="little")
        np.testing.assert_array_equal(np.flatnonzero(bits), rows)
    rows_of_range = RowSet(rows, first, end)
    assert rows_of_range.nbytes <= min(8 * len(rows), (end - first) // 8 + 2)
    np.testing.assert_array_equal(rows_of_range.missing_rows(), np.setdiff1d(every, rows))
    assert RowSet.of(rows_of_range, first, end) is rows_of_range
    middle = (first + end) // 2
    for low, high in ((first, middle), (middle, end), (min(first + 3, end), max(first + 3, end - 2))):
        inside = rows[(rows >= low) & (rows < high)]
        np.testing.assert_array_equal(RowSet.of(rows_of_range, low, high).rows(), inside)


def test_the_cache_keeps_its_bound_and_the_latest_sets() -> None:
    rows = RowSet(np.arange(800), 0, 800)
    entry_bytes, owners = rows.nbytes + ENTRY_BYTES, [Owner(), Owner()]
    cache = FilterCache(3 * entry_bytes)
    for number in range(100):
        cache.put(owners[number % 2], bytes([number]), rows)
        assert cache.usage().bytes == min(number + 1, 3) * entry_bytes <= cache.usage().max_bytes
        cache.get(owners[0], b"\0")
    assert cache.get(owners[0], b"\0") is rows  # the one that was used again and again
    assert cache.get(owners[1], bytes([99])) is rows
    assert cache.get(owners[1], bytes([1])) is None
    cache.put(owners[0], b"large", RowSet(np.arange(10**6), 0, 10**6))
    assert cache.usage().entries == 3  # a set above the bound is not kept
    for owner in owners:
        cache.put(owner, b"\0", rows)
    del owner, owners[1]
    assert cache.usage() == (entry_bytes, 3 * entry_bytes, 1)
