"""Parses NAME=VALUE,NAME=VALUE: how options name a query set with its split, its store and other settings."""

from __future__ import annotations

from collections.abc import Collection

from retriever.errors import InputError


def parse_named_values(text: str, names: Collection[str], form: str) -> dict[str, str]:
    """Returns the values of a text by name.

    Args:
        text: The text.
        names: The names that it may have, in the order of the error.
        form: What the error begins with: the option and its value.

    Raises:
        InputError: If the text has another form, or an unknown name, or a name twice.
    """
    values: dict[str, str] = {}
    for piece in text.split(","):
        name, sign, value = (part.strip() for part in piece.partition("="))
        if not sign or not value or name not in names or name in values:
            raise InputError(f"{form}found {piece!r}, expected NAME=VALUE once for each of {', '.join(names)}")
        values[name] = value
    return values
