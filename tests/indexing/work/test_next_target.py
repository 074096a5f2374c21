"""The next generation of an index: its inputs and its shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import count_shards, next_target


def test_the_next_generation_has_the_number_of_its_source(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    for kind, name in (("corpus", "g0000"), ("corpus", "g0001"), ("index", "i/g0000")):
        with store.create(kind, name, config={}, inputs={}):
            pass
    corpus = [store.open("corpus", "g0000"), store.open("corpus", "g0001")]
    first = next_target("index", "i", corpus[:1], [], {"shards": 2})
    assert (first.kind, first.name, first.inputs, first.config) == (
        "index",
        "i/g0000",
        {"corpus/0": corpus[0]},
        {"shards": 2},
    )
    index = store.open("index", "i/g0000")
    second = next_target("index", "i", corpus, [index], {})
    assert second.name == "i/g0001"
    assert second.inputs == {"corpus/0": corpus[0], "corpus/1": corpus[1], "previous": index}


@pytest.mark.parametrize(
    ("shards", "rows", "first_rows", "expected"),
    [(4, 100, 0, 4), (4, 3, 0, 3), (4, 0, 0, 1), (4, 100, 100, 4), (4, 25, 100, 1), (4, 200, 100, 8), (4, 1, 100, 1)],
)
def test_shards_are_in_proportion_to_those_of_the_first_generation(
    shards: int, rows: int, first_rows: int, expected: int
) -> None:
    assert count_shards(shards, rows, first_rows) == expected
