"""Filters over typed columns, as JSON and as text, against a plain loop over the same values."""

from __future__ import annotations

import gc
import json
import random
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_filters import TYPES, as_text, matches, random_filter, random_metadata
from runners import InlineRunner

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus, write_table
from riptide.indexing.corpus.filters import Filter, MatchingRows, filter_columns
from riptide.indexing.corpus.importing import ImportCorpusWork, ImportOptions
from riptide.indexing.corpus.later_filters import AddFiltersWork
from riptide.indexing.corpus.row_sets import filter_cache
from riptide.indexing.formats.parse import CORPUS_SCHEMA, FILTER_TYPES
from riptide.indexing.formats.sources import detect_source
from riptide.indexing.store.chain import RowRange
from riptide.indexing.store.store import Store, generation
from riptide.indexing.work.work import run_work

YEARS = [2001, None, 2003, 2003, -5, 2010, 2003]
LANGUAGES = ["en", "de", None, "en", "fr", "en", "de"]
SCORES = [0.5, 1.0, None, 2.5, float("nan"), -1.0, 2.5]
OPEN = [True, False, None, True, False, False, True]
TIMES = [datetime(2020, 1, day, tzinfo=UTC) if day else None for day in (1, 2, None, 4, 5, 6, 7)]
TAGS = [["x", "y"], None, ["z"], ["x"], ["x", "a", "z0"], None, ["y"]]
COLUMNS: dict[str, tuple[str, list[Any]]] = {
    "year": ("int64", YEARS),
    "lang": ("string", LANGUAGES),
    "score": ("float64", SCORES),
    "open": ("bool", OPEN),
    "at": ("timestamp", TIMES),
    "tags": ("list[string]", TAGS),
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


def nested(levels: int) -> dict[str, Any]:
    document: dict[str, Any] = {"year": 1}
    for _ in range(levels):
        document = {"and": [document]}
    return document


def found(corpus: Corpus, document: dict[str, Any], *stretch: int) -> list[int]:
    return Filter.parse(document, filter_columns(corpus)).rows(corpus, *stretch).tolist()


def test_cached_rows_are_the_same_and_go_with_their_owner(corpus: Corpus) -> None:
    columns = filter_columns(corpus)
    gc.collect()
    start = filter_cache.usage().entries
    for first in (0, 2):
        rows = RowRange(first, corpus.num_rows)
        matches = MatchingRows(corpus, rows)
        for document in ({"not": {"lang": "en"}}, {"lang": "fr"}, {"year": {"gt": 9_999}}):
            filter = Filter.parse(document, columns)
            expected = filter.rows(corpus, *rows).tolist()
            before = filter_cache.usage().entries
            assert [matches.rows(filter).rows().tolist() for _ in range(2)] == [expected] * 2
            assert filter_cache.usage().entries == before + 1
        expired = replace(filter, before_part=lambda: 1 / 0)
        assert expired == filter
        assert matches.rows(expired).rows().tolist() == expected  # in the cache
        with pytest.raises(ZeroDivisionError):
            expired.rows(corpus)
        del matches
        gc.collect()
        assert filter_cache.usage().entries <= start


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ({"not": {"lang": "en"}}, [1, 2, 4, 6]),
        ({"not": {}}, []),
        ({"or": [{"year": 2001}, {"lang": "fr"}, {"year": None}]}, [0, 1, 4]),
        ({"and": [{"lang": ["en", "de"]}, {"not": {"year": 2003}}], "open": [True, False]}, [0, 1, 5]),
        ({"tags": "x"}, [0, 4]),
        ({"tags": ["y", "z"]}, [0, 2, 6]),
        ({"tags": None}, [1, 5]),
        ({"not": {"tags": ["x", "y", "z"]}}, [1, 5]),
        ({"tags": {"gt": "x", "lt": "z"}}, [0, 6]),
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
        ({"colour": "red"}, "'colour' is no filter of this corpus; there are: year, lang, score, open, at, tags"),
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
        ({"tags": 5}, "tags: expected values of type string, found 5"),
        ({"or": {"lang": "en"}}, 'or: expected a list of filters, as objects, found {"lang": "en"}'),
        ({"or": []}, "or: expected a list of filters"),
        ({"and": ["lang"]}, "and: expected a list of filters"),
        ({"not": [{"lang": "en"}]}, "not: expected a filter, an object, found ["),
        ({"not": {"or": [{"colour": 1}]}}, "'colour' is no filter of this corpus"),
        ({"or": [{"year": 1}] * 1_001}, "expected up to 1000 conditions, found more"),
        (nested(50), "expected up to 100 levels of lists and objects, found more"),
        ({"lang": ["x" * 2**19, "x" * 2**19]}, "expected up to 1,048,576 characters of texts, found 1,048,580"),
        ({"x" * 10_000: 1}, f"filter: '{'x' * 100}' is no filter of this corpus"),
    ],
)
def test_what_does_not_fit_is_named(corpus: Corpus, document: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as raised:
        Filter.parse(document, filter_columns(corpus))
    assert told in str(raised.value)


def test_a_corpus_without_filters_says_so(corpus: Corpus) -> None:
    with pytest.raises(InputError, match="there are: none; riptide import-corpus --filters adds them"):
        Filter.parse({"year": 1}, {})


def import_metadata(folder: Path, metadata: list[dict[str, Any]], filters: dict[str, str]) -> Corpus:
    """Imports a passage for each metadata, in parts of 16."""
    source = folder / "source" / "corpus.jsonl"
    source.parent.mkdir(parents=True)
    rows = [{"_id": f"p{row}", "text": "x", "metadata": fields} for row, fields in enumerate(metadata)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = Store(str(folder / "store"))
    options = ImportOptions(part_size=16, filters=filters)
    run_work(store, ImportCorpusWork(store, detect_source(str(source.parent)), options, append=False), InlineRunner())
    return Corpus.open(store)


def test_random_filters_match_as_a_plain_loop_over_the_metadata(tmp_path: Path) -> None:
    """Of imported passages with missing values and lists; nested filters as objects, as JSON and as text."""
    draw = random.Random(0)
    metadata = [random_metadata(draw) for _ in range(60)]
    corpus = import_metadata(tmp_path, metadata, TYPES)
    columns, num_texts, num_partial = filter_columns(corpus), 0, 0
    for number in range(200):
        document = random_filter(draw)
        expected = [row for row, fields in enumerate(metadata) if matches(document, fields)]
        first = number % 40
        assert found(corpus, document) == expected, document
        assert found(corpus, document, first, 50) == [row for row in expected if first <= row < 50]
        assert Filter.parse(json.dumps(document), columns) == Filter.parse(document, columns)
        if text := as_text(draw, document):
            assert Filter.parse(text, columns).rows(corpus).tolist() == expected, text
        num_texts += text is not None
        num_partial += 0 < len(expected) < len(metadata)
    assert num_texts > 80  # the filters have texts, and most of them match some passages
    assert num_partial > 100


def test_filters_after_the_import_have_the_columns_of_those_at_the_import(tmp_path: Path) -> None:
    draw = random.Random(1)
    metadata = [random_metadata(draw) for _ in range(40)]
    at_import = import_metadata(tmp_path / "one", metadata, TYPES)
    before = import_metadata(tmp_path / "other", metadata, {"year": "int64"})
    store = Store(str(tmp_path / "other" / "store"))
    run_work(store, AddFiltersWork(store, TYPES), InlineRunner())
    later = Corpus.open(store)
    assert filter_columns(later) == filter_columns(at_import) != filter_columns(before)
    for one, other in zip(at_import.parts, later.parts, strict=True):
        columns = later.filters(other)
        assert columns.equals(at_import.filters(one).select(columns.column_names))


def import_table(folder: Path, columns: dict[str, list[Any]], filters: dict[str, str]) -> Corpus:
    """Imports a passage for each row of a Parquet file."""
    names = [f"p{row}" for row in range(len(next(iter(columns.values()))))]
    pq.write_table(pa.table({"id": names, "text": names} | columns), folder / "rows.parquet")
    store = Store(str(folder / "store"))
    options = ImportOptions(filters=filters)
    source = detect_source(str(folder / "rows.parquet"))
    run_work(store, ImportCorpusWork(store, source, options, append=False), InlineRunner())
    return Corpus.open(store)


def test_zero_has_no_sign(tmp_path: Path) -> None:
    corpus = import_metadata(
        tmp_path,
        [{"x": 0.0, "l": [1.0, -0.0]}, {"x": -0.0, "l": [0.0]}, {"x": 1.0, "l": [1.0]}],
        {"x": "float64", "l": "list[float64]"},
    )
    columns = filter_columns(corpus)
    for zero in ("0", "-0.0", "0.0"):
        assert Filter.parse(f"x = {zero}", columns).rows(corpus).tolist() == [0, 1]
        assert Filter.parse(f"x != {zero}", columns).rows(corpus).tolist() == [2]
        assert Filter.parse(f"x in (5, {zero})", columns).rows(corpus).tolist() == [0, 1]
        assert Filter.parse(f"l = {zero}", columns).rows(corpus).tolist() == [0, 1]


def test_nan_and_infinities_are_null_in_metadata_and_in_filters(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    columns = {"x": [1.5, nan, inf, -inf], "l": [[nan], [inf, 2.0], [-inf, None], [1.0]]}
    corpus = import_table(tmp_path, columns, {"x": "float64", "l": "list[float64]"})
    assert found(corpus, {"x": None}) == [1, 2, 3]
    assert found(corpus, {"x": {"gte": -1e308}}) == [0]
    assert found(corpus, {"l": None}) == [0, 2]
    assert found(corpus, {"l": {"gt": -1e308}}) == [1, 3]
    assert [passage.metadata.get("x") for passage in corpus] == [1.5, None, None, None]


def test_times_are_compared_to_the_microsecond(tmp_path: Path) -> None:
    """Further digits are cut, of values and of conditions, so a value that is copied into a filter is found."""
    nanoseconds = [1_577_836_800_123_456_000 + more for more in (0, 789, 1_000)]
    corpus = import_table(tmp_path, {"at": pa.array(nanoseconds, pa.timestamp("ns", "UTC"))}, {"at": "timestamp"})
    for digits in ("123456", "123456001", "123456789"):
        assert found(corpus, {"at": f"2020-01-01T00:00:00.{digits}Z"}) == [0, 1]
        assert found(corpus, {"at": {"gt": f"2020-01-01T00:00:00.{digits}Z"}}) == [2]


@pytest.mark.parametrize("name", ["and", "or", "not"])
def test_a_field_named_like_a_word_of_filters_is_refused_at_import(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"filter {name}: and, or and not combine filters, expected another name"):
        import_metadata(tmp_path, [{name: 1}], {name: "int64"})


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ("year=2003", {"year": 2003}),
        (
            "year >= 2000 and lang in (en, de) and not lang = null",
            {"and": [{"year": {"gte": 2000}}, {"lang": ["en", "de"]}, {"not": {"lang": None}}]},
        ),
        ("year=1 OR lang=en And open=TRUE", {"or": [{"year": 1}, {"and": [{"lang": "en"}, {"open": True}]}]}),
        ("(year=1 or lang=en) and open=true", {"and": [{"or": [{"year": 1}, {"lang": "en"}]}, {"open": True}]}),
        ("year != -1", {"not": {"year": -1}}),
        ("tags not in (x,'y z')", {"not": {"tags": ["x", "y z"]}}),
        ("not not score < 1e3", {"not": {"not": {"score": {"lt": 1000.0}}}}),
        ("lang = 2003 or lang = true", {"or": [{"lang": "2003"}, {"lang": "true"}]}),
        ("lang = Null or lang = 'null'", {"or": [{"lang": None}, {"lang": "null"}]}),
        ("at > 2020-01-02T00:00:00+01:00", {"at": {"gt": "2020-01-02T00:00:00+01:00"}}),
        (r"""'lang' = "say \"x\" \\ 'y'" """, {"lang": "say \"x\" \\ 'y'"}),
        ("lang = or and tags = in", {"and": [{"lang": "or"}, {"tags": "in"}]}),
        ('\n{"year": 2003}', {"year": 2003}),
    ],
)
def test_a_text_is_the_same_filter_as_an_object(corpus: Corpus, text: str, document: dict[str, Any]) -> None:
    columns = filter_columns(corpus)
    assert Filter.parse(text, columns) == Filter.parse(document, columns)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at character 1: expected a field (in quotes if it has spaces), not or (, found the end"),
        ("year", "at character 5: expected =, !=, <, <=, >, >=, in or not in, found the end"),
        ("year >= 2000 adn lang = en", "at character 14: expected and, or, or the end, found 'adn'"),
        ("year >= ", "at character 9: expected a value, found the end"),
        ("year == 1", "at character 7: expected a value, found '='"),
        ("year ! 1", "at character 6: expected =, !=, <, <=, >, >=, in or not in, found '!'"),
        ("lang in ()", "at character 10: expected a value, found ')'"),
        ("lang in en", "at character 9: expected (, found 'en'"),
        ("lang in (en de)", "at character 13: expected ), found 'de'"),
        ("lang not = en", "at character 10: expected in, found '='"),
        ("(year = 1", "at character 10: expected ), found the end"),
        ("year = 1)", "at character 9: expected and, or, or the end, found ')'"),
        ("lang =\n'en", "at character 8: expected a value, found a quote that is not closed"),
        ("or = 1", "at character 1: expected a field (in quotes if it has spaces), not or (, found 'or'"),
        ("(" * 21, "at character 22: expected up to 20 levels of parentheses and not, found the end"),
        ("not " * 21, "at character 85: expected up to 20 levels of parentheses and not, found the end"),
        ("lang = caf\udce9", "at character 11: expected text in UTF-8"),
        ("x" * 65_537, "expected up to 65,536 characters, found 65,537"),
        ("colour = red", "'colour' is no filter of this corpus; there are: year, lang, score, open, at, tags"),
        ("year = en", 'year: expected values of type int64, found "en"'),
        ("year < null", "year: expected values of type int64, found null"),
        ("'or' = 1", "or: expected a list of filters, as objects, found 1"),
        (" or ".join(["year = 1"] * 1_001), "expected up to 1000 conditions, found more"),
        ('{"year": 1', "at character 11: expected JSON, "),
        ('{"year": NaN}', "at character 10: expected JSON, "),
        ('{"year": ' + "[" * 900 + "]" * 900 + "}", "expected up to 100 levels of lists and objects, found more"),
    ],
)
def test_a_text_that_does_not_parse_is_refused_with_the_place(corpus: Corpus, text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        Filter.parse(text, filter_columns(corpus))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_forms_in_the_table_of_the_documentation_are_the_same_filters() -> None:
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    table = page.partition("| text | JSON | matches passages |")[2].partition("<!-- end of table of filters")[0]
    forms = re.findall(r"^\| `(.+?)` \| `(.+?)` \|", table, re.MULTILINE)
    kinds = {"year": "int64", "day": "timestamp", "open": "bool", "tags": "list[string]"}
    columns = {name: FILTER_TYPES[kinds.get(name, "string")] for name in (*kinds, "lang", "editor", "title")}
    assert len(forms) == table.count("\n| `") == 11
    for text, document in forms:
        assert Filter.parse(text, columns) == Filter.parse(document, columns)


def test_a_filter_may_have_1000_conditions_and_names_a_field_once() -> None:
    columns = {"year": pa.int64()}
    Filter.parse({"or": [{"year": 1}] * 1_000}, columns)
    Filter.parse({"and": [{"year": 1}] * 500 + [{"not": {"or": [{"year": 2}] * 500}}]}, columns)
    for text in ('{"year": 1, "year": 2}', '{"or": [{"year": {"gt": 1, "gt": 2}}]}'):
        with pytest.raises(InputError, match=r"filter: found '(year|gt)' twice in one object"):
            Filter.parse(text, columns)
