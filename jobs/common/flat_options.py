"""The options of a job as a flat list, read from its dataclass and the nested dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from riptide.base.option_fields import TextForm
from riptide.base.wording import alternatives

Options = TypeVar("Options")

DEFAULT_GROUP = "options"
MAX_INTEGER = 2**63 - 1  # maximum of whole numbers: arrays hold no larger ones
SCALARS: dict[Any, tuple[str, str]] = {  # type -> how --help and how messages name its values
    bool: ("true|false", "true or false"),
    int: ("N", "a whole number"),
    float: ("X", "a number"),
    str: ("TEXT", "a text"),
}


class Heading(str):
    """A heading in --help above the options that follow it: `OUTPUT: ClassVar = Heading("output")` among the fields.

    The options above the first one have the class variable GROUP as their heading.
    """


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a job, read from a field of a dataclass of options.

    Attributes:
        name: Its name in recipes; the command line has dashes for the underscores.
        path: The attributes that lead from the job's options to its value.
        owner: The dataclass that declares it.
        type: Its type.
        default: Its default; MISSING if it is required.
        group: Heading under which --help lists it.
        metadata: What `riptide.base.option_fields.option` declared.
    """

    name: str
    path: tuple[str, ...]
    owner: type
    type: Any
    default: Any
    group: str
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        """The name of the option on the command line."""
        return self.name if self.is_positional else f"--{self.name.replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def is_positional(self) -> bool:
        return self.metadata.get("positional", False)

    @property
    def is_list(self) -> bool:
        """Whether the option takes any number of values."""
        return typing.get_origin(_without_none(self.type)) in (tuple, list, dict)

    @property
    def is_mapping(self) -> bool:
        """Whether the values of the option are pairs of a name and a value."""
        return typing.get_origin(_without_none(self.type)) is dict

    @property
    def is_boolean(self) -> bool:
        """Whether the option is true or false, or None for a default."""
        return _without_none(self.type) is bool

    @property
    def help(self) -> str:
        """The docstring below the field of the option, as one line."""
        text = self.metadata.get("help") or next(
            (text for each in self.owner.__mro__ if (text := field_docstrings(each).get(self.path[-1]))), ""
        )
        return " ".join(text.split())

    def value(self, options: object) -> Any:
        """Returns the value of the option in an options object."""
        return functools.reduce(getattr, self.path, options)


def options_by_name(options: type) -> Mapping[str, Option]:
    """Returns the options of a job by name: first those of its class, then those of the base classes.

    The fields of a field that is a dataclass are options too, at its place and in its order.

    Raises:
        TypeError: If two options have the same name, or if the command line cannot express a type.
    """
    return _options_by_name(typing.cast(Hashable, options))


@functools.cache
def _options_by_name(options: type) -> Mapping[str, Option]:
    flat: dict[str, Option] = {}
    for each in _walk_options(options, (), MISSING, ""):
        if (other := flat.get(each.name)) is not None:
            places = " and ".join(".".join(option.path) for option in (other, each))
            raise TypeError(f"{options.__name__}: the option {each.flag} is declared twice: {places}")
        describe_type(each.type)
        flat[each.name] = each
    return types.MappingProxyType(flat)


def _walk_options(owner: type, path: tuple[str, ...], instance: Any, group: str) -> Iterator[Option]:
    """Yields the options of a class, recursively. instance: an object with the defaults; MISSING: none."""
    hints = typing.get_type_hints(owner)
    headings = _headings_by_field(owner)
    fields = list(dataclasses.fields(owner))
    if not path:  # options of the job itself precede those of the base classes
        fields.sort(key=lambda field: list(headings).index(field.name))
    for field in fields:
        default = _default_of_field(field) if instance is MISSING else getattr(instance, field.name)
        heading = field.metadata.get("group") or group
        hint, inner_path = _type_of_field(field, hints), (*path, field.name)
        if dataclasses.is_dataclass(hint):
            yield from _walk_options(typing.cast(type, hint), inner_path, default, heading)
            continue
        if choices := field.metadata.get("choices"):
            literal: Any = Literal[tuple(choices)]
            hint = literal if _without_none(hint) is hint else literal | None
        yield Option(
            name=(field.metadata.get("flag") or field.name).replace("-", "_"),
            path=inner_path,
            owner=owner,
            type=hint,
            default=default,
            group=heading or headings[field.name],
            metadata=field.metadata,
        )


def _headings_by_field(owner: type) -> dict[str, str]:
    """Returns the heading of each field. Fields of the class precede those of its base classes.

    A field that a class declares again stays where its base class declares it.
    """
    headings: dict[str, str] = {}
    for each in owner.__mro__:
        inherited = {name for base in each.__mro__[1:] for name in inspect.get_annotations(base)}
        heading = each.__dict__.get("GROUP", DEFAULT_GROUP)
        for name in inspect.get_annotations(each):
            value = each.__dict__.get(name)
            heading = value if isinstance(value, Heading) else heading
            if name not in inherited:
                headings[name] = heading
    return headings


def _type_of_field(field: dataclasses.Field, hints: Mapping[str, Any]) -> Any:
    """Returns the type of a field; for a group of options, its dataclass, which a registry may have made."""
    return field.default_factory if dataclasses.is_dataclass(field.default_factory) else hints[field.name]


def _default_of_field(field: dataclasses.Field) -> Any:
    """Returns the default value of a field, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def build_options(options: type[Options], values: Mapping[str, Any]) -> Options:
    """Builds the options object of a job from values by name; other options have their defaults."""
    return _build_instance(options, MISSING, _values_by_path(options, values))


def replace_options(options: Options, values: Mapping[str, Any]) -> Options:
    """Returns a copy of an options object with other values, given by name."""
    return _build_instance(type(options), options, _values_by_path(type(options), values))


def _values_by_path(options: type, values: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    flat = options_by_name(options)
    return {flat[name].path: value for name, value in values.items()}


def _build_instance(options: type[Options], instance: Any, values: Mapping[tuple[str, ...], Any]) -> Options:
    arguments = {path[0]: value for path, value in values.items() if len(path) == 1}
    hints = _type_hints(typing.cast(type, options))
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        group = _type_of_field(field, hints)
        if not dataclasses.is_dataclass(group):
            continue
        inner = {path[1:]: value for path, value in values.items() if path[0] == field.name and len(path) > 1}
        base = _default_of_field(field) if instance is MISSING else getattr(instance, field.name)
        arguments[field.name] = _build_instance(typing.cast(type, group), base, inner)
    if instance is MISSING:
        return options(**arguments)
    return dataclasses.replace(instance, **arguments)


@functools.cache
def _type_hints(owner: type) -> Mapping[str, Any]:
    """Returns the types of the fields of a class."""
    return typing.get_type_hints(owner)


@functools.cache
def field_docstrings(owner: type) -> Mapping[str, str]:
    """Returns the docstring below each field of a class, by the name of the field."""
    body = next((each.body for each in _parse_classes(owner.__module__) if each.name == owner.__name__), [])
    return {
        first.target.id: second.value.value
        for first, second in itertools.pairwise(body)
        if isinstance(first, ast.AnnAssign)
        and isinstance(first.target, ast.Name)
        and isinstance(second, ast.Expr)
        and isinstance(second.value, ast.Constant)
        and isinstance(second.value.value, str)
    }


@functools.cache
def _parse_classes(module: str) -> list[ast.ClassDef]:
    file = getattr(sys.modules[module], "__file__", None)
    tree = ast.parse(Path(file).read_text(encoding="utf-8")) if file else ast.Module([], [])
    return [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]


def parse_words(hint: Any, words: Sequence[str]) -> Any:
    """Converts words of the command line to a value of a type. Raises ValueError or KeyError if they do not fit."""
    if (inner := _without_none(hint)) is not hint:
        return None if list(words) == ["None"] else parse_words(inner, words)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, list):
        return origin(parse_words(arguments[0], [word]) for word in words)
    if origin is dict:
        if len(words) % 2:
            raise ValueError(words)
        return dict(zip(words[::2], words[1::2], strict=True))
    [word] = words
    if origin is typing.Literal:
        return {str(choice): choice for choice in arguments}[word]
    if hint is bool:
        return {"true": True, "false": False}[word.lower()]
    if hint is int and abs(int(word)) > MAX_INTEGER:
        raise ValueError(word)
    return hint(word)


def describe_type(hint: Any) -> str:
    """Returns a description of the values of a type: `a number`; `adamw or adafactor`."""
    if (inner := _without_none(hint)) is not hint:
        return describe_type(inner)
    if names := choices_of(hint):
        return alternatives(names)
    if typing.get_origin(hint) in (tuple, list):
        return f"values, each {describe_type(typing.get_args(hint)[0])}"
    if hint == dict[str, str]:
        return "pairs of a name and a value"
    return _scalar_words(hint)[1]


def choices_of(hint: Any) -> tuple[str, ...]:
    """Returns the values of a Literal type as strings; () for any other type."""
    hint = _without_none(hint)
    return tuple(map(str, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else ()


def metavar_of(option: Option) -> str:
    """Returns the placeholder of an option's value in --help."""
    if names := choices_of(option.type):
        return "{" + ",".join(names) + "}"
    hint = _without_none(option.type)
    scalar = typing.get_args(hint)[0] if typing.get_origin(hint) in (tuple, list) else hint
    return option.metadata.get("metavar") or ("KEY VALUE" if hint == dict[str, str] else _scalar_words(scalar)[0])


def _scalar_words(hint: Any) -> tuple[str, str]:
    """Returns how --help and how messages name the values of a type. Raises TypeError for an unknown type."""
    if isinstance(hint, type) and issubclass(hint, TextForm):
        return hint.METAVAR, hint.EXPECTED
    if hint not in SCALARS:
        raise TypeError(f"{hint}: a type that the command line cannot express")
    return SCALARS[hint]


def _without_none(hint: Any) -> Any:
    """Returns T for the type `T | None`; other types are returned unchanged."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    rest = [each for each in typing.get_args(hint) if each is not types.NoneType]
    return rest[0] if len(rest) == 1 else hint
