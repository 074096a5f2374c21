"""Dataclass fields that declare the options of jobs, and the check of their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import MISSING, Field, asdict, field, fields
from types import NoneType
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from riptide.base.errors import InputError
from riptide.base.wording import Parameter


def option(
    default: Any = MISSING,
    *,
    flag: str = "",
    group: str = "",
    help: str = "",
    metavar: str = "",
    hidden: bool = False,
    positional: bool = False,
    repeated: bool = False,
    minimum: float | None = None,
    positive: bool = False,
    share: bool = False,
    choices: Collection[Any] | None = None,
    later: bool = False,
) -> Any:
    """Declares a dataclass field as an option of a job, with settings beyond its name, type and docstring.

    A field that is a dataclass is a group of options. The heading of the options of a class is its class variable
    GROUP.

    Args:
        default: The default; without one, the option is required.
        flag: Name of the option without dashes in front; default: the name of the field.
        group: Heading under which --help lists the option, or the options of the group; default: that of the class.
        help: Replaces the docstring below the field.
        metavar: Stands for the value in --help, for example FILE; default: that of the type.
        hidden: Leave the option out of --help.
        positional: The value is given without a name.
        repeated: The option is given once for each value of a tuple: --query A --query B.
        minimum: The smallest allowed number, which must be finite.
        positive: Only finite numbers above 0 are allowed.
        share: Only numbers from 0 to less than 1 are allowed.
        choices: All allowed values, if the type does not list them, or if a registry adds some.
        later: The option was added after artifacts existed: `stored_options` has it only if it is not the default.
    """
    settings = {
        "flag": flag,
        "group": group,
        "help": help,
        "metavar": metavar,
        "hidden": hidden,
        "positional": positional,
        "repeated": repeated,
        "minimum": minimum,
        "positive": positive,
        "share": share,
        "choices": choices,
        "later": later,
    }
    metadata = {name: value for name, value in settings.items() if value or (name == "minimum" and value is not None)}
    return field(default=default, metadata=metadata)


def stored_options(options: Any) -> dict[str, Any]:
    """Returns options as JSON-serialisable values for a record, without options added later that have their defaults.

    So artifacts that were made before an option existed keep their fingerprints.
    """
    later = {
        each.name: each.default for each in fields(options) if _field_settings(type(options), each.name).get("later")
    }
    return {name: value for name, value in asdict(options).items() if name not in later or value != later[name]}


class TextForm(str):
    """The base of types of options whose values are texts of one form, for example `hard:20`.

    A subclass raises ValueError in `__new__` for a text of another form.

    Attributes:
        METAVAR: Stands for a value in --help.
        EXPECTED: Describes the values in messages.
        PYTHON_TYPE: The type of the values that a Python method takes.
    """

    METAVAR: ClassVar[str]
    EXPECTED: ClassVar[str]
    PYTHON_TYPE: ClassVar[str] = "str"


class OptionGroup:
    """The base of option classes: refuses values that the fields do not allow."""

    def __post_init__(self) -> None:
        """Raises InputError for a value that its field does not allow."""
        check_values(self)


class _Rule(NamedTuple):
    """The values that a field allows.

    Attributes:
        option: The name of the option.
        choices: All values; None: any.
        is_optional: Whether None is allowed.
        bounds: The settings `minimum`, `positive` and `share` of `option`.
    """

    option: str
    choices: Collection[Any] | None
    is_optional: bool
    bounds: Mapping[str, Any]


def check_values(options: object) -> None:
    """Raises InputError if a value violates the field's `Literal` type or the rules in its declaration."""
    for name, (option, choices, is_optional, bounds) in _rules(cast(Hashable, type(options))).items():
        value = getattr(options, name)
        if value is None and (is_optional or choices is None):
            continue
        # The comparison with a tuple also works for unhashable JSON values.
        if choices is not None and value not in tuple(choices):
            raise InputError(f"{Parameter(option, repr(value))}: expected one of {', '.join(map(str, choices))}")
        if "minimum" in bounds and not bounds["minimum"] <= value < math.inf:
            raise InputError(f"{Parameter(option, value)}: expected at least {bounds['minimum']}{_finite_hint(value)}")
        if "positive" in bounds and not 0 < value < math.inf:
            raise InputError(f"{Parameter(option, value)}: expected more than 0{_finite_hint(value)}")
        if "share" in bounds and not 0 <= value < 1:
            raise InputError(f"{Parameter(option, value)}: expected a share, 0 to less than 1")


@functools.cache
def _rules(options: Any) -> Mapping[str, _Rule]:
    """Returns the rules of a class's fields that do not allow all values of their types."""
    rules, hints = {}, get_type_hints(options)
    for name in (each.name for each in fields(options)):
        members = (hints[name],) if get_origin(hints[name]) is Literal else get_args(hints[name])
        literals = [value for each in members if get_origin(each) is Literal for value in get_args(each)]
        settings = _field_settings(options, name)
        bounds: dict[str, Any] = {each: settings[each] for each in ("minimum", "positive", "share") if each in settings}
        choices = settings.get("choices", literals or None)
        if bounds or choices is not None:
            rules[name] = _Rule(option_name(options, name), choices, NoneType in members, bounds)
    return rules


def _field_settings(options: type, name: str) -> dict[str, Any]:
    """Returns the settings of a field, merged from its class and from base classes that also declare it."""
    settings: dict[str, Any] = {}
    for each in reversed(options.__mro__):
        declared: Mapping[str, Field[Any]] = getattr(each, "__dataclass_fields__", {})
        settings |= declared[name].metadata if name in declared else {}
    return settings


def option_name(options: type, name: str) -> str:
    """Returns the option name that a field declares in its class or in a base class."""
    return str(_field_settings(options, name).get("flag", name)).replace("-", "_")


def _finite_hint(value: float) -> str:
    """Returns the end of an error message: a request for a finite number if the value is not finite, else empty."""
    return "" if math.isfinite(value) else ", and a finite number"
