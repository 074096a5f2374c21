"""Chains of generations, compared with one flat list of rows."""

import copy
from pathlib import Path

import numpy as np
import pytest

from riptide.indexing.store.chain import RowParts, split_range, split_rows
from riptide.indexing.store.store import Store, generation

SIZES = [[3, 1], [2], [4, 0, 1]]


@pytest.fixture
def parts(tmp_path: Path):
    store = Store(str(tmp_path))
    for number, sizes in enumerate(SIZES):
        with store.create("corpus", generation(number)) as draft:
            for part, rows in reversed(list(enumerate(sizes))):  # the order of work is not that of rows
                draft.commit(f"part-{part:05d}", ".bin", lambda path: path.write_bytes(b"x"), rows=rows)
            draft.commit("ids-00000", ".bin", lambda path: path.write_bytes(b"x"), rows=99)
    return RowParts(store.generations("corpus"))


def test_parts_follow_one_another_through_generations(parts) -> None:
    assert [(part.label, part.first_row, part.end) for part in parts] == [
        ("g0000/part-00000", 0, 3),
        ("g0000/part-00001", 3, 4),
        ("g0001/part-00000", 4, 6),
        ("g0002/part-00000", 6, 10),
        ("g0002/part-00001", 10, 10),
        ("g0002/part-00002", 10, 11),
    ]


def test_every_row_is_found_in_the_part_that_holds_it(parts) -> None:
    rows = np.array([10, 0, 4, 3, 3, 9, 2, 5, 6], np.int64)
    found = np.full(len(rows), -1)
    for part, positions, local in split_rows(parts, rows):
        assert ((local >= 0) & (local < part.part.rows)).all()
        found[positions] = part.first_row + local
    assert found.tolist() == rows.tolist()
    assert list(split_rows(parts, np.empty(0, np.int64))) == []


def test_each_shard_belongs_to_one_range() -> None:
    """To the range of its middle row, whatever the borders of the shards; some ranges have none."""
    shards = [(0, 7), (7, 8), (8, 40), (40, 41), (41, 41), (41, 100)]
    for pieces in (1, 2, 3, 4, 7, 100):
        ranges = split_range(0, 100, pieces)
        shares = [shards[rows.select_shards(shards)] for rows in ranges]
        assert [shard for share in shares for shard in share] == shards
        for rows, share in zip(ranges, shares, strict=True):
            assert all(rows.first_row <= (first + end) // 2 < rows.end for first, end in share)
    assert [len(shards[rows.select_shards(shards)]) for rows in split_range(0, 100, 2)] == [5, 1]


def test_a_part_that_is_sent_to_a_worker_leaves_the_other_parts_behind(parts) -> None:
    sent = copy.deepcopy(parts[0])  # copies by the protocol of pickle
    assert (sent.part, sent.label) == (parts[0].part, parts[0].label)
    assert sent.artifact.local_path(sent.part) == parts[0].artifact.local_path(parts[0].part)
    assert len(sent.artifact.parts) == 0
