"""How a field of a dataclass declares an option of a job."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import MISSING, Field, field
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from retriever.errors import InputError


def option(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | Any = MISSING,
    flag: str = "",
    group: str = "",
    help: str = "",
    metavar: str = "",
    hidden: bool = False,
    positional: bool = False,
    repeated: bool = False,
) -> Any:
    """Declares a field of a dataclass that is an option of a job, for what its name, type and docstring do not say.

    A field that is a dataclass is a group of options. The heading of the options of a class is its class variable
    GROUP.

    Args:
        default: The default; without one and without `default_factory`, the option is required.
        default_factory: Makes the default.
        flag: Name of the option without dashes in front; default: the name of the field.
        group: Heading under which --help lists the option, or the options of the group; default: that of the class.
        help: Replaces the docstring below the field.
        metavar: Stands for the value in --help, for example FILE; default: that of the type.
        hidden: Leave the option out of --help.
        positional: The value is given without a name.
        repeated: The option is given once for each value of a tuple: --query A --query B.
    """
    settings = {
        "flag": flag,
        "group": group,
        "help": help,
        "metavar": metavar,
        "hidden": hidden,
        "positional": positional,
        "repeated": repeated,
    }
    metadata = {name: value for name, value in settings.items() if value}
    return field(default=default, default_factory=default_factory, metadata=metadata)


def check_choices(options: object, **allowed: Collection[Any]) -> None:
    """Raises InputError for a field of type `Literal`, or `Literal | None`, that has none of its values.

    Args:
        options: An instance of a dataclass.
        allowed: The values of fields whose type does not list all of them.
    """
    for name, values in {**_choices(cast(Hashable, type(options))), **allowed}.items():
        if (value := getattr(options, name)) not in values:
            expected = ", ".join(str(each) for each in values if each is not None)
            raise InputError(f"parameter {option_name(options, name)} {value!r}: expected one of {expected}")


@functools.cache
def _choices(options: Any) -> Mapping[str, Collection[Any]]:
    """Returns the values of each field of type `Literal` or `Literal | None`."""
    choices: dict[str, Collection[Any]] = {}
    for name, hint in get_type_hints(options).items():
        members = (hint,) if get_origin(hint) is Literal else get_args(hint)
        values = [value for each in members if get_origin(each) is Literal for value in get_args(each)]
        if values:
            choices[name] = [*values, None] if NoneType in members else values
    return choices


def check_least(options: object, **least: float) -> None:
    """Raises InputError for a field with a number that is too small, or not finite; None is allowed."""
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and not smallest <= value < math.inf:
            raise InputError(
                f"parameter {option_name(options, name)} {value}: expected at least {smallest}{_finite(value)}"
            )


def option_name(options: object, field_name: str) -> str:
    """Returns the name of the option that a field declares, in its class or in a base class."""
    owners = [dict[str, Field[Any]](getattr(each, "__dataclass_fields__", {})) for each in type(options).__mro__]
    flags = [flag for each in owners if field_name in each and (flag := each[field_name].metadata.get("flag"))]
    return str(flags[0] if flags else field_name).replace("-", "_")


def _finite(value: float) -> str:
    """Returns the end of a message about a number: a request for a finite one if it is not finite."""
    return "" if math.isfinite(value) else ", and a finite number"


def check_positive(options: object, *names: str) -> None:
    """Raises InputError for a field with a number that is not above 0, or not finite; None is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"parameter {option_name(options, name)} {value}: expected more than 0{_finite(value)}")


def check_share(options: object, *names: str) -> None:
    """Raises InputError for a field with a number that is not from 0 to less than 1; None is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < 1:
            raise InputError(f"parameter {option_name(options, name)} {value}: expected a share, 0 to less than 1")
