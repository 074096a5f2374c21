"""Parses JSON in time linear in its length, in short steps, between which other threads run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from retriever.errors import shortened

MOST_DEPTH = 64  # containers within one another
# Containers in memory at once. Python's collection of garbage looks at all of them in one step.
MOST_CONTAINERS = 32_768
_MOST_DIGITS = 308  # of an integer: more cannot be converted to a float
_MOST_SHOWN = 60  # characters of a name in a message
_SPACE = re.compile(r"[ \t\n\r]*")
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def parse_json(text: str, *, convert: Callable[[str, Any], Any] | None = None) -> Any:
    """Returns the value of a JSON text; as for json.loads, NaN and Infinity are numbers.

    json.loads holds Python's GIL until it has read the whole text, for up to 50 ms per MiB, in which a server answers
    nobody. Here a step reads one string or number.

    Args:
        text: The text.
        convert: Is called with each field of the outermost object and its value, and returns what replaces the value.
            Then this object must not have a field twice; otherwise the last one counts.

    Raises:
        json.JSONDecodeError: If the text is not JSON, or has a string that is not Unicode text (half of a surrogate
            pair), an integer of more than 308 digits, more than MOST_DEPTH containers within one another, or more than
            MOST_CONTAINERS in all (if values are converted, in the value of a field).
    """
    open_containers: list[Any] = []  # from the outside inwards
    fields: list[str] = []  # of each open container the field whose value is read; "" for a list
    position = count = 0
    while True:
        position = _skip_space(text, position)
        if text.startswith(("{", "["), position):
            value: Any = {} if text[position] == "{" else []
            count += 1
            if count > MOST_CONTAINERS:
                raise json.JSONDecodeError(f"more than {MOST_CONTAINERS:,} objects and lists", text, position)
            position = _skip_space(text, position + 1)
            if not text.startswith(_end_of(value), position):
                if len(open_containers) == MOST_DEPTH:
                    raise json.JSONDecodeError(f"more than {MOST_DEPTH} containers within one another", text, position)
                field, position = _read_field(text, position) if isinstance(value, dict) else ("", position)
                open_containers.append(value)
                fields.append(field)
                continue
            position += 1
        else:
            value, position = _read_scalar(text, position)
        while open_containers:
            container = open_containers[-1]
            if isinstance(container, dict):
                if convert is not None and len(open_containers) == 1:
                    if fields[0] in container:
                        name = shortened(fields[0], _MOST_SHOWN)
                        raise json.JSONDecodeError(f"the field {name!r} stands twice", text, position)
                    value, count = convert(fields[0], value), 0
                container[fields[-1]] = value
            else:
                container.append(value)
            position = _skip_space(text, position)
            if text.startswith(",", position):
                position += 1
                if isinstance(container, dict):
                    fields[-1], position = _read_field(text, position)
                break
            if not text.startswith(_end_of(container), position):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
            position += 1
            value = open_containers.pop()
            fields.pop()
        else:
            position = _skip_space(text, position)
            if position != len(text):
                raise json.JSONDecodeError("Extra data", text, position)
            return value


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _end_of(container: dict[str, Any] | list[Any]) -> str:
    return "}" if isinstance(container, dict) else "]"


def _read_field(text: str, position: int) -> tuple[str, int]:
    """Returns the name of an object's field, and the position of its value."""
    position = _skip_space(text, position)
    if not text.startswith('"', position):
        raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, position)
    name, position = _read_scalar(text, position)
    position = _skip_space(text, position)
    if not text.startswith(":", position):
        raise json.JSONDecodeError("Expecting ':' delimiter", text, position)
    return name, position + 1


def _read_scalar(text: str, position: int) -> tuple[Any, int]:
    """Returns a string, a number, a boolean or null, and the position after it."""
    try:
        value, end = _SCALARS.raw_decode(text, position)
    except _LongNumberError:
        raise json.JSONDecodeError(f"an integer of more than {_MOST_DIGITS} digits", text, position) from None
    if isinstance(value, str) and not value.isascii() and _HALF_PAIR.search(value):
        raise json.JSONDecodeError("a string that is not Unicode text (half of a surrogate pair)", text, position)
    return value, end


class _LongNumberError(Exception):
    """An integer with too many digits."""


def _parse_int(digits: str) -> int:
    if len(digits.removeprefix("-")) > _MOST_DIGITS:
        raise _LongNumberError
    return int(digits)


_SCALARS = json.JSONDecoder(parse_int=_parse_int)
