"""From ids to rows by hashes, compared with a dictionary; collisions and buckets included."""

import random
from pathlib import Path

import numpy as np
import pytest

from riptide.indexing.corpus import ids
from riptide.indexing.corpus.ids import (
    hash_ids,
    merge_bucket,
    num_buckets,
    repeated_hashes,
    rows_with_hashes,
    sorted_hashes,
)


def files_of(folder: Path, parts: list[list[str]]) -> list[tuple[Path, int]]:
    files, row = [], 0
    for number, part in enumerate(parts):
        np.save(folder / f"{number}.npy", sorted_hashes(part))
        files.append((folder / f"{number}.npy", row))
        row += len(part)
    return files


def rows_found(buckets: list[np.ndarray], asked: list[str]) -> list[list[int]]:
    positions, rows = rows_with_hashes(buckets, hash_ids(asked))
    assert (np.diff(positions) >= 0).all()
    return [sorted(rows[positions == number].tolist()) for number in range(len(asked))]


@pytest.mark.parametrize("buckets", [1, 2, 8])
def test_look_ups_equal_those_of_a_dictionary(tmp_path: Path, buckets: int) -> None:
    draw = random.Random(buckets)
    names = list({f"{draw.choice('abcdé語')}{draw.randrange(10**6)}" for _ in range(2000)})
    parts = [names[:700], names[700:701], [], names[701:]]
    files = files_of(tmp_path, parts)
    merged = [merge_bucket(files, bucket, buckets) for bucket in range(buckets)]
    assert sum(part.shape[1] for part in merged) == len(names)
    hashes = np.concatenate([part[0] for part in merged])
    assert (np.diff(hashes.astype(np.float64)) >= 0).all()
    assert (hashes[1:] >= hashes[:-1]).all()
    rows = {name: row for row, name in enumerate(names)}
    asked = [*draw.sample(names, 300), "unknown", names[0], names[0], ""]
    assert rows_found(merged, asked) == [[rows[name]] if name in rows else [] for name in asked]


def test_ids_that_come_twice_and_ids_of_one_hash_are_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hashes collide, all rows of one are candidates, in order, for the reader to check."""
    weak = {"a": 5, "b": 5, "c": 1 << 63, "d": 7}
    monkeypatch.setattr(ids, "hash_ids", lambda names: np.array([weak[name] for name in names], np.uint64))
    files = files_of(tmp_path, [["c", "a"], ["d", "b", "a"]])
    merged = [merge_bucket(files, bucket, 2) for bucket in range(2)]
    assert repeated_hashes(merged[0]).tolist() == [[1, 3], [3, 4]]
    assert repeated_hashes(merged[1]).tolist() == []
    positions, rows = rows_with_hashes(merged, np.array([7, 5, 1 << 63, 6], np.uint64))
    assert list(zip(positions.tolist(), rows.tolist(), strict=True)) == [(0, 2), (1, 1), (1, 3), (1, 4), (2, 0)]


def test_the_ends_of_the_range_of_hashes_belong_to_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = (1 << 64) - 1
    values = [0, top, 1 << 62, (1 << 62) - 1, 3 << 62, (3 << 62) - 1]
    monkeypatch.setattr(ids, "hash_ids", lambda names: np.array([values[int(name)] for name in names], np.uint64))
    files = files_of(tmp_path, [[str(number) for number in range(len(values))]])
    merged = [merge_bucket(files, bucket, 4) for bucket in range(4)]
    assert [part.shape[1] for part in merged] == [2, 1, 1, 2]
    positions, rows = rows_with_hashes(merged, np.array(values, np.uint64))
    assert positions.tolist() == rows.tolist() == list(range(len(values)))


def test_buckets_are_a_power_of_two_that_bounds_what_is_sorted_at_once() -> None:
    for rows in (0, 1, ids.BUCKET_ROWS, ids.BUCKET_ROWS + 1, 21_000_000, 10**9):
        buckets = num_buckets(rows)
        assert buckets & (buckets - 1) == 0
        assert rows <= buckets * ids.BUCKET_ROWS
        assert buckets == 1 or rows > buckets // 2 * ids.BUCKET_ROWS
