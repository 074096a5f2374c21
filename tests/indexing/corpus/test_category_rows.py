"""Categories of passages from their metadata: the table of a corpus, and metadata without categories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import build_corpus_of

from riptide.base.errors import InputError
from riptide.indexing.corpus.categories import CategoryTable, categories_of_rows
from riptide.indexing.corpus.corpus import Corpus

FIRST = [["wheat", "corn"], ["ship"], ["corn", "corn", "crude"]]
LATER = [["gold"], "wheat", ["äpfel", "crude"]]


def corpus_of(root: Path, *generations: list[Any], deleted: dict[int, list[int]] | None = None) -> Corpus:
    """Builds a corpus whose passages have these metadata objects; those without one have no metadata."""
    parts = [[json.dumps(fields) if fields else "" for fields in each] for each in generations]
    return build_corpus_of(root, parts, deleted or {})


def with_categories(*values: Any) -> list[dict[str, Any]]:
    return [{"year": 2020, "categories": value} for value in values]


def names_of(table: CategoryTable) -> list[list[str]]:
    return [[table.names[number] for number in table.of_row(row)] for row in range(table.num_rows)]


def test_the_table_of_two_generations(tmp_path: Path) -> None:
    """Names are in the order of the alphabet, each once; a string is one category."""
    table = categories_of_rows(corpus_of(tmp_path, with_categories(*FIRST), with_categories(*LATER)))
    assert table.names == ("corn", "crude", "gold", "ship", "wheat", "äpfel")
    assert (table.offsets.dtype, table.values.dtype) == (np.int64, np.int32)
    assert table.offsets.tolist() == [0, 2, 3, 5, 6, 7, 9]
    assert table.values.tolist() == [0, 4, 3, 0, 1, 2, 4, 1, 5]
    assert names_of(table)[:3] == [["corn", "wheat"], ["ship"], ["corn", "crude"]]


def test_more_passages_than_are_read_at_once(tmp_path: Path) -> None:
    table = categories_of_rows(corpus_of(tmp_path, with_categories(*([str(row % 7)] for row in range(3000)))))
    assert table.values.tolist() == [row % 7 for row in range(3000)]


def test_members_have_the_columns_that_some_row_has(tmp_path: Path) -> None:
    table = categories_of_rows(corpus_of(tmp_path, with_categories(*FIRST)))
    assert table.multi_hot(np.array([2, 1, 2])).tolist() == [[1, 1, 0], [0, 0, 1], [1, 1, 0]]
    assert table.multi_hot(np.empty(0, np.int64)).shape == (0, 0)


def test_deleted_passages_and_passages_that_are_not_needed_may_lack_categories(tmp_path: Path) -> None:
    passages = [*with_categories(["a"]), {}, *with_categories(["b"]), {}]
    corpus = corpus_of(tmp_path, passages, with_categories(["c"]), deleted={1: [3]})
    table = categories_of_rows(corpus, rows=np.array([4, 2, 2, 3]))
    assert names_of(table) == [[], [], ["b"], [], ["c"]]
    assert table.names == ("b", "c")
    with pytest.raises(InputError, match="'i1' has no categories"):
        categories_of_rows(corpus)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "it has no metadata"),
        ({"topics": ["a"], "year": 1}, "its metadata has no field 'categories', but 'topics', 'year'"),
        ({"categories": []}, r"its metadata field 'categories' is \[\]"),
        ({"categories": None}, "its metadata field 'categories' is null"),
        ({"categories": ["a", 3]}, r"is \[\"a\",3\]"),
        ({"categories": [""]}, r"is \[\"\"\]"),
        ({"categories": ""}, 'is ""'),
    ],
)
def test_a_passage_without_categories_is_named_in_one_line(
    tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    corpus = corpus_of(tmp_path, with_categories(["a"]), [*with_categories(["b"]), fields])
    with pytest.raises(InputError, match=rf"corpus/g0001: the passage 'i2' has no categories: .*{expected}") as raised:
        categories_of_rows(corpus)
    assert "\n" not in str(raised.value)


def test_another_field(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [{"topics": ["x", "y"]}, {"topics": "x"}])
    assert names_of(categories_of_rows(corpus, "topics")) == [["x", "y"], ["x"]]
