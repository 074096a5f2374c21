"""Filters over typed columns, against a plain loop over the same values."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from indexing.corpus.corpus import Corpus, write_table
from indexing.corpus.filters import Filter, filter_columns
from indexing.formats.parse import CORPUS_SCHEMA, FILTER_TYPES
from indexing.store.store import Store, generation
from retriever.errors import InputError

YEARS = [2001, None, 2003, 2003, -5, 2010, 2003]
LANGUAGES = ["en", "de", None, "en", "fr", "en", "de"]
SCORES = [0.5, 1.0, None, 2.5, float("nan"), -1.0, 2.5]
OPEN = [True, False, None, True, False, False, True]
TIMES = [datetime(2020, 1, day, tzinfo=UTC) if day else None for day in (1, 2, None, 4, 5, 6, 7)]
COLUMNS: dict[str, tuple[str, list[Any]]] = {
    "year": ("int64", YEARS),
    "lang": ("string", LANGUAGES),
    "score": ("float64", SCORES),
    "open": ("bool", OPEN),
    "at": ("timestamp", TIMES),
}
PARTS = [range(3), range(3, 4), range(4, 7)]  # the last one a generation of its own
DELETED = [3]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    store = Store(str(tmp_path))
    for number, parts in enumerate([PARTS[:2], PARTS[2:]]):
        with store.create("corpus", generation(number), config={"limit": None}) as draft:
            for place, rows in enumerate(parts):
                names = [f"p{row}" for row in rows]
                table = pa.table([names, names, names, [""] * len(names)], schema=CORPUS_SCHEMA)
                for name, (kind, values) in COLUMNS.items():
                    column = pa.array([values[row] for row in rows], FILTER_TYPES[kind])
                    table = table.append_column(f"filter.{name}", column)
                draft.commit(f"part-{place:05d}", ".arrow", lambda path, t=table: write_table(t, path), rows=len(rows))
            if number:
                draft.commit("deleted", ".npy", lambda path: np.save(path, np.array(DELETED)), rows=1)
    return Corpus.open(store)


def found(corpus: Corpus, document: dict[str, Any], *stretch: int) -> list[int]:
    return Filter.parse(document, filter_columns(corpus)).rows(corpus, *stretch).tolist()


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ({}, [0, 1, 2, 4, 5, 6]),
        ({"year": 2003}, [2, 6]),
        ({"year": [2001, 2010]}, [0, 5]),
        ({"year": {"gte": 2001, "lt": 2010}}, [0, 2, 6]),
        ({"year": {"gt": 2001}}, [2, 5, 6]),
        ({"year": None}, [1]),
        ({"lang": "en"}, [0, 5]),
        ({"lang": ["de", "fr"], "open": False}, [1, 4]),
        ({"lang": {"gte": "e", "lte": "en"}}, [0, 5]),
        ({"score": 1}, [1]),
        ({"score": {"gte": 0.5}}, [0, 1, 6]),
        ({"score": {"lte": 1e300}}, [0, 1, 5, 6]),
        ({"open": True}, [0, 6]),
        ({"at": {"gt": "2020-01-02T01:00:00+01:00"}}, [4, 5, 6]),
        ({"at": "2020-01-02"}, [1]),
        ({"lang": "none such"}, []),
    ],
)
def test_conditions_hold_as_in_a_plain_loop(corpus: Corpus, document: dict[str, Any], rows: list[int]) -> None:
    assert found(corpus, document) == rows


def test_a_stretch_of_rows_is_looked_at_alone(corpus: Corpus) -> None:
    assert found(corpus, {"lang": ["en", "de"]}, 1, 6) == [1, 5]
    assert found(corpus, {}, 3, 4) == []


def test_equal_filters_are_equal_however_they_are_spelt(corpus: Corpus) -> None:
    columns = filter_columns(corpus)
    one, other = {"year": 2003, "lang": "en"}, {"lang": "en", "year": 2003}
    assert Filter.parse(one, columns) == Filter.parse(other, columns)
    assert columns == {name: FILTER_TYPES[kind] for name, (kind, _) in COLUMNS.items()}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"colour": "red"}, "'colour' is no filter of this corpus; there are: year, lang, score, open, at"),
        ({"year": "2003"}, "year: expected values of type int64"),
        ({"year": True}, "year: expected values of type int64"),
        ({"year": 2**63}, "year: expected values of type int64"),
        ({"year": 2003.5}, "year: expected values of type int64"),
        ({"score": True}, "score: expected values of type float64"),
        ({"open": 1}, "open: expected values of type bool"),
        ({"open": {"gt": False}}, "open: expected a value"),
        ({"lang": []}, "lang: expected 1 to 1000 values, found 0"),
        ({"lang": [None]}, "lang: expected values of type string"),
        ({"lang": {}}, "lang: expected a value, a list of values or bounds"),
        ({"lang": {"near": "en"}}, "lang: expected a value, a list of values or bounds"),
        ({"at": "yesterday"}, "at: expected values of type timestamp"),
        ({"at": 5}, "at: expected values of type timestamp"),
        ({"lang": ["x" * 2**19, "x" * 2**19]}, "expected up to 1,048,576 characters of texts, found 1,048,580"),
        ({"x" * 10_000: 1}, f"filter: '{'x' * 100}' is no filter of this corpus"),
    ],
)
def test_what_does_not_fit_is_named(corpus: Corpus, document: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as raised:
        Filter.parse(document, filter_columns(corpus))
    assert told in str(raised.value)


def test_a_corpus_without_filters_says_so(corpus: Corpus) -> None:
    with pytest.raises(InputError, match="import the corpus with --filters"):
        Filter.parse({"year": 1}, {})
