"""The grid of a sweep: parses `lr=1e-2,3e-2 seed=0,1,2` into the options of each run."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.named_values import parse_named_value
from riptide.jobs.common.flat_options import describe_type, options_by_name, parse_words, replace_options

Options = TypeVar("Options")

MAX_RUNS = 1_000
Settings = dict[str, Any]  # the values of the swept options of a run, by name


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep: its swept values and its options.

    Attributes:
        settings: The swept options.
        options: All options of the job.
    """

    settings: Settings
    options: Any

    @property
    def suffix(self) -> str:
        """The swept values as part of a name: `lr0.01-seed2`."""
        return "-".join(f"{name}{_name_part(value)}" for name, value in self.settings.items())


def parse_grid(texts: Sequence[str], options: Options, fixed_options: Collection[str]) -> list[SweepRun]:
    """Returns a run for every combination of the swept values; the last option changes fastest.

    Args:
        texts: `NAME=VALUE,VALUE,…`, one for each swept option.
        options: The options of the job; each run has them, apart from the swept ones.
        fixed_options: Options that cannot be swept.

    Raises:
        InputError: If an option is unknown or cannot be swept, if it comes twice, or if a value does not fit.
    """
    flat = options_by_name(type(options))
    known = [name for name in flat if name not in fixed_options]
    values: dict[str, list[Any]] = {}
    for text in texts:
        name, listed = parse_named_value(text, f"{Parameter('sweep', text)}: expected NAME=VALUE,VALUE")
        name = name.removeprefix("--").replace("-", "_")
        if name in fixed_options and name in flat:
            raise InputError(
                f"{Parameter('sweep', text)}: all runs of a sweep have the same {name}; give it as {Parameter(name)}"
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "--help lists the options"
            raise InputError(f"{Parameter('sweep', text)}: {name} is not an option that can be swept; {hint}")
        if name in values:
            raise InputError(f"{Parameter('sweep', text)}: {name} is swept twice; give all values in one list")
        values[name] = [_parse_value(value.strip(), flat[name].type, text) for value in listed.split(",")]
        if len({_name_part(value) for value in values[name]}) < len(values[name]):
            raise InputError(f"{Parameter('sweep', text)}: a value comes twice")
    count = 1
    for listed_values in values.values():
        count *= len(listed_values)
    if count > MAX_RUNS:
        raise InputError(f"{Parameter('sweep', ' '.join(texts))}: {count:,} runs; expected at most {MAX_RUNS:,}")
    combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return [SweepRun(settings, replace_options(options, settings)) for settings in combinations]


def _parse_value(value: str, hint: Any, text: str) -> Any:
    """Converts a swept value to the type of its option. Raises InputError if it does not fit."""
    try:
        return parse_words(hint, [value])
    except (ValueError, KeyError):
        raise InputError(f"{Parameter('sweep', text)}: expected {describe_type(hint)}, got {value!r}") from None


def _name_part(value: Any) -> str:
    """Converts a swept value to a part of a name: letters, digits, periods, dashes and underscores."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in text)
