"""Filters on the metadata of passages, by the typed columns that an import made.

A filter is a JSON object. A passage matches if all of its conditions hold:

    {"year": 2004}                        equal
    {"lang": ["en", "de"]}                one of these
    {"year": {"gte": 2000, "lt": 2010}}   between: gt, gte, lt, lte
    {"editor": null}                      no value; other conditions never match a missing value
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indexing.corpus.corpus import Corpus, open_table
from indexing.store.documents import canonical
from retriever.errors import InputError

_ORDER = {"gt": pc.greater, "gte": pc.greater_equal, "lt": pc.less, "lte": pc.less_equal}
_LARGEST = 1_000  # conditions of a filter, and values of a condition
_MOST_CHARACTERS = 1 << 20  # of all names and texts of a filter together


@dataclass(frozen=True)
class Filter:
    """Conditions whose fields and types are checked. text: the canonical JSON, so equal filters are equal."""

    text: str

    @classmethod
    def parse(cls, document: Mapping[str, Any], columns: Mapping[str, pa.DataType]) -> Filter:
        """Returns the filter of a JSON object.

        Args:
            document: The object, as in the docstring of the module.
            columns: The types of the filters that the corpus has (`filter_columns`).

        Raises:
            InputError: For an unknown field, and for a value of another type.
        """
        if len(document) > _LARGEST:
            raise InputError(f"filter: expected up to {_LARGEST} fields, found {len(document)}")
        if (characters := _characters(document)) > _MOST_CHARACTERS:
            raise InputError(f"filter: expected up to {_MOST_CHARACTERS:,} characters of texts, found {characters:,}")
        for name, condition in document.items():
            if name not in columns:
                have = ", ".join(columns) or "none: import the corpus with --filters"
                raise InputError(f"filter: {name[:100]!r} is no filter of this corpus; there are: {have}")
            _conditions(name, condition, columns[name])
        return cls(canonical(document).decode())

    def rows(self, corpus: Corpus, first_row: int = 0, end: int | None = None) -> np.ndarray:
        """Returns the matching rows in [first_row, end), int64 ascending; deleted rows are excluded."""
        end = corpus.num_rows if end is None else end
        document = json.loads(self.text)
        matching = [np.empty(0, np.int64)]
        for part in corpus.parts:
            low, high = max(first_row, part.first_row), min(end, part.end)
            if low >= high:
                continue
            table = open_table(part).slice(low - part.first_row, high - low)
            inside = np.ones(high - low, bool)
            for name, condition in document.items():
                column = table.column(f"filter.{name}")
                for operator, value in _conditions(name, condition, column.type):
                    inside &= _holds(column, operator, value)
            matching.append(low + np.flatnonzero(inside))
        rows = np.concatenate(matching)
        return rows[~np.isin(rows, corpus.deleted)] if len(corpus.deleted) else rows


def filter_columns(corpus: Corpus) -> dict[str, pa.DataType]:
    """Returns the filters that a corpus has: name -> type."""
    if not corpus.parts:
        return {}
    schema = open_table(corpus.parts[0]).schema
    return {field.name.removeprefix("filter."): field.type for field in schema if field.name.startswith("filter.")}


def _characters(value: Any) -> int:
    """Returns the number of characters of all texts of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(len, value)) + sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _conditions(name: str, condition: Any, kind: pa.DataType) -> list[tuple[str, Any]]:
    """Returns the conditions on a field: (operator, Arrow value). Raises InputError for a bad condition."""
    if condition is None:
        return [("null", None)]
    if isinstance(condition, list):
        if not 1 <= len(condition) <= _LARGEST:
            raise InputError(f"filter: {name}: expected 1 to {_LARGEST} values, found {len(condition)}")
        return [("in", pa.array([_value(name, value, kind) for value in condition], kind))]
    if not isinstance(condition, dict):
        return [("in", pa.array([_value(name, condition, kind)], kind))]
    if not condition or set(condition) - set(_ORDER) or pa.types.is_boolean(kind):
        raise InputError(
            f"filter: {name}: expected a value, a list of values or bounds ({', '.join(_ORDER)}; none of "
            f"a bool), found {json.dumps(condition)[:80]}"
        )
    return [(operator, pa.scalar(_value(name, value, kind), kind)) for operator, value in condition.items()]


def _value(name: str, value: Any, kind: pa.DataType) -> Any:
    """Returns a JSON value in the type of a column. Raises InputError if it is of another type."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = (
        (pa.types.is_boolean(kind) and isinstance(value, bool))
        or (pa.types.is_string(kind) and isinstance(value, str))
        or (pa.types.is_int64(kind) and number and isinstance(value, int) and -(2**63) <= value < 2**63)
        or (pa.types.is_float64(kind) and number and abs(value) <= 1e308)
    )
    if fits:
        return float(value) if pa.types.is_float64(kind) else value
    if pa.types.is_timestamp(kind) and isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise InputError(f"filter: {name}: expected values of type {kind}, found {json.dumps(value)[:80]}")


def _holds(column: pa.ChunkedArray, operator: str, value: Any) -> np.ndarray:
    """Returns which rows satisfy a condition: bool [rows]. A missing value satisfies only "null"."""
    if operator == "null":
        mask = pc.is_null(column)
    elif operator == "in":
        mask = pc.and_(pc.is_in(column, value_set=value), pc.is_valid(column))
    else:
        mask = pc.fill_null(_ORDER[operator](column, value), False)
    return np.asarray(mask.to_numpy(), bool)
