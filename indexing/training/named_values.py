"""Parses NAME=VALUE and NAME=VALUE,NAME=VALUE, by which options name a query set with its split and store."""

from __future__ import annotations

from collections.abc import Collection

from riptide.base.errors import InputError


def parse_named_value(text: str, problem: str) -> tuple[str, str]:
    """Parses NAME=VALUE into the name and the value, without surrounding spaces.

    Args:
        text: The text. Its value may contain `=`.
        problem: The message of the error.

    Raises:
        InputError: If the text has another form.
    """
    name, _, value = (part.strip() for part in text.partition("="))
    if not name or not value:
        raise InputError(problem)
    return name, value


def parse_named_values(text: str, names: Collection[str], form: str) -> dict[str, str]:
    """Parses NAME=VALUE,NAME=VALUE into a dict.

    Args:
        text: The text.
        names: The names that it may have, in the order of the error.
        form: What the error begins with: the option and its value.

    Raises:
        InputError: If the text has another form, or an unknown name, or a name twice.
    """
    values: dict[str, str] = {}
    for piece in text.split(","):
        problem = f"{form}found {piece!r}, expected NAME=VALUE once for each of {', '.join(names)}"
        name, value = parse_named_value(piece, problem)
        if name not in names or name in values:
            raise InputError(problem)
        values[name] = value
    return values
