"""Checks arguments: converts values of other libraries, expands `~`, and refuses unknown parameter names."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from riptide.base.errors import InputError
from riptide.base.wording import shown

MAX_LEVELS = 100  # maximum nesting of lists and dicts; more would overflow the stack of the libraries that read them
AnyClass = TypeVar("AnyClass", bound=type)


class UnknownParameterError(InputError, TypeError):
    """A call names a parameter that the function does not have; it is also a TypeError, like Python's own error."""


def expand_home(path: str | Path) -> Path:
    """Returns a path with the home directory in place of `~` or `~user`. Raises InputError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{path}: found no home directory for ~, expected a path; write the path without ~") from None


def check_levels(value: Any, levels: int = MAX_LEVELS) -> None:
    """Raises InputError if lists and dicts are nested too deeply, or contain themselves."""
    if not isinstance(value, Mapping | list | tuple):
        return
    if not levels:
        raise InputError(
            f"expected up to {MAX_LEVELS} levels of lists and dicts, found more, or a list or dict that contains itself"
        )
    for each in value.values() if isinstance(value, Mapping) else value:
        check_levels(each, levels - 1)


def plain_value(value: Any) -> Any:
    """Converts a value of NumPy, pandas or torch to plain Python, also within lists and dicts; others are unchanged.

    A date or a time becomes text (ISO 8601); an array, a series, a tuple and a set become a list.

    Raises:
        InputError: As `check_levels`.
    """
    check_levels(value)
    return _plain_value(value)


def _plain_value(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain_value(name): _plain_value(each) for name, each in value.items()}
    if isinstance(value, Set):
        return sorted(map(_plain_value, value), key=repr)
    if isinstance(value, list | tuple):
        return list(map(_plain_value, value))
    if isinstance(value, date):  # This includes datetime and pandas.Timestamp.
        return value.isoformat()
    if isinstance(value, type) or not (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return value
    is_time = getattr(value.dtype, "kind", "") == "M"  # tolist() would turn NumPy times into integers of varying units.
    plain = (value.astype(str) if is_time else value).tolist()  # These are scalars, arrays, series and tensors.
    return plain if plain is value else _plain_value(plain)


def check_texts(texts: Any) -> None:
    """Raises InputError unless texts are a list or another iterable."""
    if isinstance(texts, str):
        raise InputError(f"texts {texts[:40]!r}: expected a list of texts, got one text; write [text]")
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise InputError(f"texts: expected a list of texts, got {type(texts).__name__}")


def check_side(side: Any) -> None:
    """Raises InputError unless a side is "query" or "passage"."""
    if side not in ("query", "passage"):
        raise InputError(f"side {shown(repr(side))}: expected query or passage")


def check_names(method: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises UnknownParameterError if one of the names is unknown.

    Args:
        method: The method that is called, for the error.
        names: The names of the call.
        known: The names of the parameters.
    """
    known = list(known)
    if unknown := next((name for name in names if name not in known), None):
        parameter_list = f"the parameters are {', '.join(known)}" if known else "it takes no parameters"
        closest = closest_name(unknown, known)
        raise UnknownParameterError(
            f"{method}: unknown parameter {unknown!r}; {f'did you mean {closest!r}?' if closest else parameter_list}"
        )


def closest_name(unknown: str, known: Collection[str]) -> str | None:
    """Returns the known name that an unknown one may mean, for example `k` for `top_k`; None: no name is close."""
    close = difflib.get_close_matches(unknown, known, 1)
    close = close or [each for each in known if re.fullmatch(f"(top|num|max|n)_?{re.escape(each)}", unknown)]
    return close[0] if close else None


def refuse_unknown_names(cls: AnyClass) -> AnyClass:
    """Makes the public methods and the calls of a class refuse unknown parameters and suggest the intended name.

    Methods that take any keyword arguments check them by themselves.
    """
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and (not name.startswith("_") or name in ("__init__", "__call__")):
            parameters = inspect.signature(method).parameters.values()
            if all(each.kind is not each.VAR_KEYWORD for each in parameters):
                shown = {"__init__": cls.__name__, "__call__": cls.__name__.lower()}.get(name, name)
                setattr(cls, name, _check_calls(method, shown))
    return cls


def _check_calls(method: Callable[..., Any], shown: str) -> Callable[..., Any]:
    """Wraps a method to check the names of its keyword arguments. shown: its name in errors."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not keywords.keys() <= set(known):
            check_names(shown, keywords, known)
        return method(*arguments, **keywords)

    return call
