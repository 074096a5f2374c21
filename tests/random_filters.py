"""Random metadata and filters, filters as text, and a plain loop that says which metadata match."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

VALUES: dict[str, Sequence[Any]] = {
    "year": range(1998, 2006),
    "score": (0, 0.5, 1, 1e3),
    "lang": ("en", "de", "a b", "null", "or", "7", 'say "x"', ""),
    "open": (True, False),
    "at": ("2020-01-02", "2020-01-02T00:30:00+01:00", "2021-05-06T07:08:09Z"),
    "tags": ("x", "y", "and", "it's"),
    "pages": range(5),
}
TYPES = {
    "year": "int64",
    "score": "float64",
    "lang": "string",
    "open": "bool",
    "at": "timestamp",
    "tags": "list[string]",
    "pages": "list[int64]",
}
SIGNS = {"lt": "<", "lte": "<=", "gt": ">", "gte": ">="}
ORDER = {"lt": operator.lt, "lte": operator.le, "gt": operator.gt, "gte": operator.ge}


def random_metadata(draw: random.Random) -> dict[str, Any]:
    """Returns metadata in which values may be missing, null, single values for lists, or empty lists."""
    fields: dict[str, Any] = {}
    for name, values in VALUES.items():
        chance = draw.random()
        if chance < 0.2:
            continue
        if TYPES[name].startswith("list") and chance > 0.3:
            fields[name] = draw.choices([*values, None], k=draw.randint(0, 4))
        else:
            fields[name] = None if chance < 0.3 else draw.choice(values)
    return fields


def random_filter(draw: random.Random, levels: int = 3, *, values: dict[str, Sequence[Any]] = VALUES) -> dict[str, Any]:
    """Returns a filter of up to three conditions, whose groups are nested up to some levels."""
    document: dict[str, Any] = {}
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 3)) if levels else 1):
        kind = draw.choice(("and", "or", "not", "field", "field")) if levels else "field"
        if kind == "not":
            document["not"] = random_filter(draw, levels - 1, values=values)
        elif kind != "field":
            count = draw.randint(1, 3)
            document[kind] = [random_filter(draw, levels - 1, values=values) for _ in range(count)]
        else:
            name = draw.choice(list(values))
            document[name] = random_condition(draw, name, values[name])
    return document


def random_condition(draw: random.Random, name: str, values: Sequence[Any]) -> Any:
    chance = draw.random()
    if chance < 0.15:
        return None
    if chance < 0.45:
        return draw.choice(values)
    if chance < 0.7 or name == "open":
        return draw.choices(values, k=draw.randint(1, 3))
    return {name: draw.choice(values) for name in draw.sample(list(SIGNS), draw.choice((1, 2)))}


def matches(document: dict[str, Any], fields: dict[str, Any]) -> bool:
    """Returns whether metadata match a filter."""
    for name, condition in document.items():
        if name == "and":
            holds = all(matches(each, fields) for each in condition)
        elif name == "or":
            holds = any(matches(each, fields) for each in condition)
        elif name == "not":
            holds = not matches(condition, fields)
        else:
            holds = _holds(name, condition, fields.get(name))
        if not holds:
            return False
    return True


def _holds(name: str, condition: Any, field: Any) -> bool:
    values = [_moment(name, value) for value in (field if isinstance(field, list) else [field]) if value is not None]
    if condition is None:
        return not values
    if isinstance(condition, dict):
        return any(
            all(ORDER[sign](value, _moment(name, bound)) for sign, bound in condition.items()) for value in values
        )
    wanted = condition if isinstance(condition, list) else [condition]
    return any(value in [_moment(name, each) for each in wanted] for value in values)


def _moment(name: str, value: Any) -> Any:
    if name != "at":
        return value
    moment = datetime.fromisoformat(value)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def as_text(draw: random.Random, document: dict[str, Any]) -> str | None:
    """Returns a filter as text; None if it has no condition, or several bounds of one value of a list."""
    terms = []
    for name, condition in document.items():
        if name in ("and", "or"):
            parts = [as_text(draw, each) for each in condition]
            if None in parts:
                return None
            terms.append(f"({f' {draw.choice((name, name.upper()))} '.join(f'({part})' for part in parts)})")
        elif name == "not":
            inner = as_text(draw, condition)
            if inner is None:
                return None
            terms.append(f"not ({inner})")
        elif isinstance(condition, list):
            terms.append(f"{name} in ({', '.join(_written(draw, value) for value in condition)})")
        elif not isinstance(condition, dict):
            terms.append(f"{name}={_written(draw, condition)}")
        elif len(condition) > 1 and name in ("tags", "pages"):
            return None
        else:
            terms += [f"{name} {SIGNS[sign]} {_written(draw, bound)}" for sign, bound in condition.items()]
    return " and ".join(terms) or None


def _written(draw: random.Random, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    if not isinstance(value, str):
        return str(value)
    is_word = value and value != "null" and not set(value) & set(" '\"")
    quote = draw.choice("'\"")
    return value if is_word else quote + value.replace("\\", "\\\\").replace(quote, "\\" + quote) + quote
