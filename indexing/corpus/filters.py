"""Parses and evaluates filters on the metadata of passages, which an import stores as typed columns.

A filter is a JSON object, or a text (`riptide.indexing.corpus.filter_text`). A passage matches if all conditions hold:

    {"year": 2004}                        equal
    {"lang": ["en", "de"]}                one of these
    {"year": {"gte": 2000, "lt": 2010}}   between: gt, gte, lt, lte
    {"editor": null}                      no value
    {"and": [{…}, {…}]}                   all of these filters match
    {"or": [{…}, {…}]}                    at least one of these filters matches
    {"not": {…}}                          this filter does not match

A condition on a field with lists holds if one value of the list fulfils it; all bounds must hold for the same value. If
a passage has no value, only null holds; so {"not": {"lang": "en"}} matches passages without a language.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.base.wording import Command
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filter_text import parse_filter_text
from riptide.indexing.corpus.row_sets import RowSet, filter_cache
from riptide.indexing.store.chain import RowRange
from riptide.indexing.store.sealed_json import canonical_json

GROUPS = ("and", "or", "not")  # names that no field can have
_ORDER = {"gt": pc.greater, "gte": pc.greater_equal, "lt": pc.less, "lte": pc.less_equal}
_MAX_CONDITIONS = 1_000  # conditions of a filter, and values of a condition
_MAX_CHARACTERS = 1 << 20  # characters of all names and texts of a filter in total
_MAX_LEVELS = 100  # nested levels of lists and objects

Test = Callable[[pa.Table], np.ndarray]  # returns a mask of the matching rows of a table: bool [rows]


@dataclass(frozen=True)
class Filter:
    """A filter with checked fields and types.

    Attributes:
        text: The canonical JSON, so the same conditions compare as equal.
        before_part: Called before the rows of each part of a corpus are compared; an exception of it ends the
            comparison.
    """

    text: str
    before_part: Callable[[], object] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, document: Mapping[str, Any] | str, columns: Mapping[str, pa.DataType]) -> Filter:
        """Parses a filter from a JSON object or a text, and checks it.

        Args:
            document: The object, as in the docstring of the module; or this object as JSON, or a text in the grammar of
                `riptide.indexing.corpus.filter_text`.
            columns: The types of the filters that the corpus has (`filter_columns`).

        Raises:
            InputError: For a text that does not parse, an unknown field, and a value of another type.
        """
        if isinstance(document, str):
            _check_unicode(document)
            is_json = document.lstrip().startswith("{")
            document = _parse_json(document) if is_json else parse_filter_text(document, columns)
        if not isinstance(document, Mapping):
            raise InputError(f"filter: expected a text or an object, found {type(document).__name__}")
        _check_size(document)
        _Compiler(columns).compile_filter(document)
        return cls(canonical_json(document).decode())

    def rows(self, corpus: Corpus, first_row: int = 0, end: int | None = None) -> np.ndarray:
        """Returns the matching rows in [first_row, end), int64 ascending; deleted rows are excluded."""
        end = corpus.num_rows if end is None else end
        test = _Compiler(filter_columns(corpus)).compile_filter(json.loads(self.text))
        matching = [np.empty(0, np.int64)]
        for part in corpus.parts:
            low, high = max(first_row, part.first_row), min(end, part.end)
            if low < high:
                if self.before_part is not None:
                    self.before_part()
                table = corpus.filters(part).slice(low - part.first_row, high - low)
                matching.append(low + np.flatnonzero(test(table)))
        rows = np.concatenate(matching)
        return rows[~np.isin(rows, corpus.deleted)] if len(corpus.deleted) else rows


class FilteredQueries(NamedTuple):
    """The queries that are searched with a filter; None: without one. numbers: int64, ascending."""

    filter: Filter | None
    numbers: np.ndarray


def group_queries(filters: Iterable[Filter | None]) -> list[FilteredQueries]:
    """Returns the numbers of the queries by filter, in the order in which the filters first occur."""
    numbers: dict[Filter | None, list[int]] = {}
    for number, filter in enumerate(filters):
        numbers.setdefault(filter, []).append(number)
    return [FilteredQueries(filter, np.array(each)) for filter, each in numbers.items()]


class MatchingRows:
    """Finds the rows of one range that match a filter, and keeps those of the latest filters in `filter_cache`."""

    def __init__(self, corpus: Corpus, range: RowRange):
        self.corpus, self.range = corpus, range

    def rows(self, filter: Filter) -> RowSet:
        """Returns the rows of the range that match a filter; deleted rows are excluded."""
        key = hashlib.sha256(filter.text.encode()).digest()  # the text may be long
        matching = filter_cache.get(self, key)
        if matching is None:
            matching = RowSet(filter.rows(self.corpus, *self.range), *self.range)
            filter_cache.put(self, key, matching)
        return matching


def filter_columns(corpus: Corpus) -> dict[str, pa.DataType]:
    """Returns the filters of a corpus: field name -> Arrow type."""
    if not corpus.parts:
        return {}
    schema = corpus.filters(corpus.parts[0]).schema
    return {field.name.removeprefix("filter."): field.type for field in schema if field.name.startswith("filter.")}


def prepare_filters() -> None:
    """Makes pyarrow import pandas, if it is installed, so that the first filter of a process does not wait for it."""
    pa.array([0])


def check_field_names(names: Iterable[str]) -> None:
    """Raises InputError for a metadata field that filters cannot name."""
    for name in names:
        if name in GROUPS:
            raise InputError(f"filter {name}: and, or and not combine filters, expected another name; rename the field")


def type_name(data_type: pa.DataType) -> str:
    """Returns the name by which an import declares the type of a filter, such as "list[string]"."""
    if pa.types.is_list(data_type):
        return f"list[{type_name(data_type.value_type)}]"
    return {"double": "float64"}.get(str(data_type), str(data_type).partition("[")[0])


def _check_unicode(text: str) -> None:
    """Raises InputError for a text from a command line whose bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"filter: at character {error.start + 1}: expected text in UTF-8") from error


def _parse_json(text: str) -> Mapping[str, Any]:
    """Parses a JSON text that begins with `{`. Raises InputError if it is malformed, too large or repeats a name."""
    try:
        document: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InputError(f"filter: at character {error.pos + 1}: expected JSON, {error.msg}") from error
    _check_size(document)  # first, since deep nesting breaks the next parser
    json.loads(text, object_pairs_hook=_refuse_repeated_names)
    return document


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object from names and values. Raises InputError if a name occurs twice."""
    document = dict(pairs)
    if len(document) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise InputError(
            f"filter: found {repeated[:100]!r} twice in one object, expected distinct names; combine the conditions "
            'by {"and": [{...}, {...}]}, or give a list of values'
        )
    return document


def _check_size(document: Mapping[str, Any]) -> None:
    """Raises InputError for a JSON value with too many characters or nested levels, or a key that is not a string."""
    characters, num_levels, level = 0, 0, [document]
    while level:
        if (num_levels := num_levels + 1) > _MAX_LEVELS:
            raise InputError(f"filter: expected up to {_MAX_LEVELS} levels of lists and objects, found more")
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                characters += len(value)
            elif isinstance(value, Mapping):
                if unnamed := [name for name in value if not isinstance(name, str)]:
                    raise InputError(f"filter: expected fields by name, found {unnamed[0]!r}")
                characters += sum(map(len, value))
                below += value.values()
            elif isinstance(value, list):
                below += value
        level = below
    if characters > _MAX_CHARACTERS:
        raise InputError(f"filter: expected up to {_MAX_CHARACTERS:,} characters of texts, found {characters:,}")


class _Compiler:
    """Compiles filters on typed columns into functions that test tables, and counts the conditions."""

    def __init__(self, columns: Mapping[str, pa.DataType]):
        self.columns, self.num_conditions = columns, 0

    def compile_filter(self, document: Mapping[str, Any]) -> Test:
        """Compiles a filter into a test of tables. Raises InputError for an invalid filter."""
        self.num_conditions += sum(name not in GROUPS for name in document) if document else 1
        if self.num_conditions > _MAX_CONDITIONS:
            raise InputError(f"filter: expected up to {_MAX_CONDITIONS} conditions, found more")
        tests = [
            self._compile_group(name, condition) if name in GROUPS else self._compile_condition(name, condition)
            for name, condition in document.items()
        ]
        return lambda table: _and_masks([test(table) for test in tests]) if tests else np.ones(len(table), bool)

    def _compile_group(self, name: str, documents: Any) -> Test:
        if name == "not":
            if not isinstance(documents, dict):
                raise InputError(f"filter: not: expected a filter, an object, found {_format_value(documents)}")
            test = self.compile_filter(documents)
            return lambda table: ~test(table)
        if not isinstance(documents, list) or not documents or not all(isinstance(each, dict) for each in documents):
            raise InputError(
                f"filter: {name}: expected a list of filters, as objects, found {_format_value(documents)}"
            )
        tests = [self.compile_filter(document) for document in documents]
        combine = _and_masks if name == "and" else _or_masks
        return lambda table: combine([test(table) for test in tests])

    def _compile_condition(self, name: str, condition: Any) -> Test:
        if name not in self.columns:
            names = ", ".join(map(_quoted, self.columns)) or f"none; {Command('import-corpus', filters='')} adds them"
            raise InputError(f"filter: {name[:100]!r} is no filter of this corpus; there are: {names}")
        kind, column = self.columns[name], f"filter.{name}"
        if condition is None:
            return lambda table: _as_bools(pc.is_null(table.column(column)))
        if not pa.types.is_list(kind):
            conditions = _parse_conditions(name, condition, kind)
            return lambda table: _conditions_hold(table.column(column), conditions)
        conditions = _parse_conditions(name, condition, kind.value_type)
        return lambda table: _hold_for_one_value(table.column(column).combine_chunks(), conditions)


def _parse_conditions(name: str, condition: Any, data_type: pa.DataType) -> list[tuple[str, Any]]:
    """Returns the conditions on a field as (operator, Arrow value). Raises InputError for an invalid condition."""
    if isinstance(condition, list):
        if not 1 <= len(condition) <= _MAX_CONDITIONS:
            raise InputError(f"filter: {name}: expected 1 to {_MAX_CONDITIONS} values, found {len(condition)}")
        return [("in", _value_set(name, condition, data_type))]
    if not isinstance(condition, dict):
        return [("in", _value_set(name, [condition], data_type))]
    if not condition or set(condition) - set(_ORDER) or pa.types.is_boolean(data_type):
        raise InputError(
            f"filter: {name}: expected a value, a list of values or bounds ({', '.join(_ORDER)}; none of "
            f"a bool), found {_format_value(condition)}"
        )
    return [
        (operator, pa.scalar(_typed_value(name, value, data_type), data_type)) for operator, value in condition.items()
    ]


def _value_set(name: str, values: list[Any], data_type: pa.DataType) -> pa.Array:
    """Returns the accepted values as a typed array; a float 0 with both signs, because `pc.is_in` compares bits."""
    typed = [_typed_value(name, value, data_type) for value in values]
    if pa.types.is_float64(data_type) and 0.0 in typed:
        typed += [0.0, -0.0]
    return pa.array(typed, data_type)


def _typed_value(name: str, value: Any, data_type: pa.DataType) -> Any:
    """Converts a JSON value to the type of a column. Raises InputError for a value of another type."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = (
        (pa.types.is_boolean(data_type) and isinstance(value, bool))
        or (pa.types.is_string(data_type) and isinstance(value, str))
        or (pa.types.is_int64(data_type) and number and isinstance(value, int) and -(2**63) <= value < 2**63)
        or (pa.types.is_float64(data_type) and number and abs(value) <= 1e308)
    )
    if fits:
        return float(value) if pa.types.is_float64(data_type) else value
    if pa.types.is_timestamp(data_type) and isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise InputError(f"filter: {name}: expected values of type {type_name(data_type)}, found {_format_value(value)}")


def _conditions_hold(values: pa.Array | pa.ChunkedArray, conditions: list[tuple[str, Any]]) -> np.ndarray:
    """Returns a mask of the values that fulfil all conditions: bool [n]; False for missing values."""
    return _and_masks([_compare_values(values, operator, value) for operator, value in conditions])


def _compare_values(values: pa.Array | pa.ChunkedArray, operator: str, value: Any) -> np.ndarray:
    if operator == "in":
        return _as_bools(pc.and_(pc.is_in(values, value_set=value), pc.is_valid(values)))
    return _as_bools(pc.fill_null(_ORDER[operator](values, value), False))


def _hold_for_one_value(lists: pa.ListArray, conditions: list[tuple[str, Any]]) -> np.ndarray:
    """Returns a mask of the lists with at least one value that fulfils all conditions: bool [lists]."""
    holds = _conditions_hold(pc.list_flatten(lists), conditions)
    result = np.zeros(len(lists), bool)
    result[np.asarray(pc.list_parent_indices(lists))[holds]] = True
    return result


def _and_masks(masks: list[np.ndarray]) -> np.ndarray:
    result: np.ndarray = np.logical_and.reduce(masks)
    return result


def _or_masks(masks: list[np.ndarray]) -> np.ndarray:
    result: np.ndarray = np.logical_or.reduce(masks)
    return result


def _as_bools(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return np.asarray(values.to_numpy(zero_copy_only=False), bool)


def _quoted(field: str) -> str:
    """Returns a field name as filter texts write it: in quotes unless it is a single word."""
    return field if re.fullmatch(r"""[^\s"'=!<>(),]+""", field) else json.dumps(field, ensure_ascii=False)


def _format_value(value: Any) -> str:
    return json.dumps(value, default=repr)[:80]
