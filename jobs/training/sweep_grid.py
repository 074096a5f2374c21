"""The grid of a sweep: from `lr=1e-2,3e-2 seed=0,1,2` to the options of each run."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from retriever.errors import InputError

Options = TypeVar("Options")

MAX_RUNS = 1_000
Settings = dict[str, Any]  # the swept options of a run, by name


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        settings: The swept options.
        options: All options of the job.
    """

    settings: Settings
    options: Any

    @property
    def suffix(self) -> str:
        """The settings as part of a name: `lr0.01-seed2`."""
        return "-".join(f"{name}{_written(value)}" for name, value in self.settings.items())


def parse_grid(texts: Sequence[str], options: Options, fixed: Collection[str]) -> list[Run]:
    """Returns every combination of the swept values, the last option changing fastest.

    Args:
        texts: `NAME=VALUE,VALUE,…`, one for each swept option.
        options: The options of the job; each run has them, apart from the swept ones.
        fixed: Options that cannot be swept.

    Raises:
        InputError: If an option is unknown or cannot be swept, if it comes twice, or if a value does not fit.
    """
    known = [field.name for field in dataclasses.fields(options) if field.name not in fixed]  # type: ignore[arg-type]
    hints = typing.get_type_hints(type(options))
    values: dict[str, list[Any]] = {}
    for text in texts:
        name, sign, listed = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not sign or not listed:
            raise InputError(f"--sweep {text}: expected NAME=VALUE,VALUE")
        if name in fixed and name in hints:
            raise InputError(
                f"--sweep {text}: all runs of a sweep have the same {name}; give it as --{name.replace('_', '-')}"
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "--help lists the options"
            raise InputError(f"--sweep {text}: {name} is not an option that can be swept; {hint}")
        if name in values:
            raise InputError(f"--sweep {text}: {name} is swept twice; give all values in one list")
        values[name] = [_parse(value.strip(), hints[name], text) for value in listed.split(",")]
        if len({_written(value) for value in values[name]}) < len(values[name]):
            raise InputError(f"--sweep {text}: a value comes twice")
    count = 1
    for listed_values in values.values():
        count *= len(listed_values)
    if count > MAX_RUNS:
        raise InputError(f"--sweep {' '.join(texts)}: {count:,} runs; expected at most {MAX_RUNS:,}")
    combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return [Run(settings, dataclasses.replace(options, **settings)) for settings in combinations]  # type: ignore[type-var]


def _parse(value: str, hint: Any, text: str) -> Any:
    """Returns a value of the type of its option, by the parser of the command line."""
    import tyro

    if hint in (bool, bool | None) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    problem = InputError(f"--sweep {text}: expected {_described(hint)}, got {value!r}")
    if hint is bool:
        raise problem
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(hint, args=["--", value], console_outputs=False)
    except SystemExit:
        raise problem from None


def _described(hint: Any) -> str:
    """Returns the values of a type in words: `a number or none`; `adamw or adafactor`."""
    kinds: dict[Any, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        type(None): "none",
    }
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_described(each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(str(each) for each in typing.get_args(hint))
    return kinds.get(hint, str(hint))


def _written(value: Any) -> str:
    """Returns a value as it is part of a name: letters, digits, points, dashes and underscores."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in text)
