"""Reads JSON files and checks the types of their fields; errors name file, field, value and expected type."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

from riptide.base.errors import InputError
from riptide.base.option_fields import option_name
from riptide.base.text_files import read_small_text
from riptide.base.wording import Words, shorten

MAX_DIGITS = 308  # maximum digits of an integer: a longer one cannot be converted to a float
_MAX_SHOWN = 60  # maximum characters of a value in a message
_LONG_NUMBER = re.compile(rf"(?:^|[\[:,\s])-?[0-9]{{{MAX_DIGITS + 1}}}")

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def read_document(file: Path, kind: type[Any], *, required: bool = False) -> Any:
    """Reads a JSON file whose content has type `kind` (dict or list); returns an empty one if the file does not exist.

    Args:
        file: The file.
        kind: The type of the content.
        required: Whether a missing file is refused.

    Raises:
        InputError: If the file is missing and required, cannot be read, is too large, not UTF-8, not JSON (as
            `parse_json` reads it), or of another type.
    """
    if os.path.exists(file) and not os.path.isfile(file):  # Path.exists raises for a folder that may not be entered
        raise InputError(f"{file}: not a file: expected a JSON file; copy it again")
    try:
        text = read_small_text(file, "expected a JSON file")
    except FileNotFoundError:
        if required or file.is_symlink():
            raise InputError(f"{file}: no such file: the model folder is incomplete; copy it again") from None
        return kind()
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 at byte {error.start}: expected a JSON file; copy it again") from error
    if not text.strip("\0 \t\r\n"):
        raise InputError(f"{file}: empty: expected JSON; copy the file again")
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{error.lineno}: not JSON: {error.msg}; copy the file again") from error
    if not isinstance(content, kind):
        raise InputError(f"{file}: expected {_NAMES[kind]}, got {format_json(content)}")
    return content


def parse_json(text: str, *, has_unique_fields: bool = False) -> Any:
    """Parses a JSON text in time linear in its length; like json.loads, accepts NaN and Infinity as numbers.

    json.loads holds the GIL for up to 20 ms per MiB here, so a caller who serves requests bounds the length.

    Args:
        text: The text.
        has_unique_fields: Whether no object may have a field twice; otherwise the last one counts.

    Raises:
        json.JSONDecodeError: If the text is not JSON, is nested too deeply, or has an integer of more than MAX_DIGITS
            digits or a string with an unpaired surrogate.
    """
    if _LONG_NUMBER.search(text):
        raise json.JSONDecodeError(f"an integer of more than {MAX_DIGITS} digits", text, 0)
    try:
        pairs_hook = _unique_fields if has_unique_fields else None
        value = json.loads(text, object_pairs_hook=pairs_hook)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except _RefusedValueError as error:
        raise json.JSONDecodeError(str(error), text, 0) from None
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None
    except UnicodeEncodeError:
        raise json.JSONDecodeError("a string with an unpaired surrogate", text, 0) from None
    return value


class _FieldWords(Words):
    """Writes the parameters of a message as fields of a JSON file; arguments as of `field_errors`."""

    def __init__(self, path: str, options: type[Any]):
        self._fields = {option_name(options, field.name): f"{path}{field.name}" for field in fields(options)}

    def parameter(self, name: str, value: str | bool) -> str:
        """Returns a parameter as a field of the file; a parameter that is no field stays as it is."""
        return f"{self._fields[name]} {value}".rstrip(" ") if name in self._fields else super().parameter(name, value)


@contextlib.contextmanager
def field_errors(file: Path | str, path: str, options: type[Any]) -> Iterator[None]:
    """Context in which errors about options name the fields of the JSON file that the options are from.

    Args:
        file: The file.
        path: The place of the options in the file, with a point at its end: "options.".
        options: The class of the options, whose fields are those of the file.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{file}: {_FieldWords(path, options).render(f'{error}')}") from error


class _RefusedValueError(Exception):
    """A JSON object has a duplicate field, which JSON allows but a model file may not contain."""


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise _RefusedValueError(f"duplicate field {format_json(name)}")
        fields[name] = value
    return fields


def read_object(file: Path, *, required: bool = False) -> dict[str, Any]:
    """Reads the JSON object in a file; returns an empty one if there is no file. Raises like `read_document`."""
    content: dict[str, Any] = read_document(file, dict, required=required)
    return content


def read_field(document: Mapping[str, Any], name: str, kind: type[Any], file: Path, default: Any = None) -> Any:
    """Returns a field of a JSON object, after a check of its type; `default` if the field is absent or null.

    `kind` int excludes booleans; float includes integers. Raises InputError for another type.
    """
    value = document.get(name)
    if value is None:
        return default
    if not has_type(value, kind):
        raise InputError(f"{file}: {name}: expected {_NAMES[kind]}, got {format_json(value)}")
    return value


def read_count(document: Mapping[str, Any], name: str, file: Path) -> int | None:
    """Returns a count field; None if it is absent or null. Raises InputError unless the count is at least 1.

    A float without a fraction counts as an integer: some tools write `1e30` for "no limit".
    """
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not has_type(value, int) or value < 1:
        raise InputError(f"{file}: {name}: expected an integer of at least 1, got {format_json(document[name])}")
    return int(value)


def check_object(value: Any, types: Mapping[str, type | None], path: str, file: Path) -> None:
    """Raises InputError unless a JSON value is an object with exactly the fields in `types` and values of these types.

    Args:
        value: The value.
        types: The type of each field; None: any.
        path: The place of the object in the file, with a point at its end; empty: the content of the file.
        file: The file, for messages.
    """
    if not isinstance(value, dict):
        raise InputError(f"{file}: {path.rstrip('.') or 'content'}: expected an object, got {format_json(value)}")
    for name, item in value.items():
        if name not in types:
            raise InputError(f"{file}: {path}{shorten(name, 60)}: unknown field; expected {', '.join(types)}")
        kind = types[name]
        if kind is not None and not has_type(item, kind):
            raise InputError(f"{file}: {path}{name}: expected {kind.__name__}, got {format_json(item)}")
    for name in types:
        if name not in value:
            raise InputError(f"{file}: {path}{name}: missing")


def check_inner_path(value: Any, name: str, file: Path) -> str:
    """Returns a relative path after checking that it stays inside the model folder; raises InputError otherwise."""
    if not isinstance(value, str):
        raise InputError(f"{file}: {name}: expected a folder inside the model's, got {format_json(value)}")
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\\" in value or "\0" in value:
        raise InputError(f"{file}: {name}: {format_json(value)} leaves the model folder; expected a folder inside it")
    return value


def has_type(value: Any, kind: type[Any]) -> bool:
    """Whether a JSON value has a type: booleans are not integers, integers are numbers, and numbers must be finite."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def format_json(value: Any) -> str:
    """Formats a JSON value for a message in at most 60 characters, without reading the remainder of long values."""
    if isinstance(value, str):
        value = value[:_MAX_SHOWN]
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(value):
        text += piece
        if len(text) > _MAX_SHOWN:
            return f"{text[: _MAX_SHOWN - 1]}…"
    return text
