"""The command line of a job: reads options from a YAML file and from arguments, and prints --help."""

from __future__ import annotations

import argparse
import difflib
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from riptide.base.arguments import closest_name
from riptide.base.errors import InputError
from riptide.base.wording import shown
from riptide.jobs.common.flat_options import (
    MAX_INTEGER,
    SCALARS,
    Option,
    build_options,
    choices_of,
    describe_type,
    metavar_of,
    options_by_name,
    parse_words,
)
from riptide.jobs.common.starting import command_of, is_job, job_name

Options = TypeVar("Options")
# Called with the argparse action of each option that takes a value.
Complete = Callable[[argparse.Action, Option], None]

MIN_WIDTH, WIDTH = 40, 100  # smallest and largest width of --help, in columns
FIXED_SPACE = "\u00a0"
NAMES_SHOWN = 6  # number of options that a message about an unknown option names
REQUIRED = "required"  # heading of the required options in --help
CONFIG_HELP = "Read options from this YAML file, one `name: value` a line. The command line overrides it."
# Former names of options, with the options that replace them.
RENAMED = {
    "undenoised": ("pool_negatives",),
    "denoised": ("denoised_negatives",),
    "topology": ("row_ranges", "replicas"),
}


class UsageError(InputError):
    """An invalid command line: an unknown option, a missing option, or a value of the wrong type."""


def parse_arguments(options: type[Options], arguments: Sequence[str], module: str = "") -> Options:
    """Reads options from the defaults, then from the YAML file of --config, then from the command line.

    A job that has its own option `config` reads that file itself.

    Args:
        options: The class of the options.
        arguments: The command line, without the program's name.
        module: Name of the job's module, whose docstring becomes the description in --help.

    Returns:
        The parsed options.

    Raises:
        UsageError: If the command line is invalid.
        InputError: If the YAML file is invalid, or if the options contradict each other.
        SystemExit: For --help.
    """
    flat = options_by_name(options)
    parser = make_parser(options, module)
    known, unknown = parser.parse_known_intermixed_args(
        _attach_values([_with_dashes(each) for each in arguments], flat)
    )
    words_by_option = vars(known)
    if unknown:
        refuse_argument(unknown[0], flat)
    values: dict[str, Any] = {}
    if "config" in words_by_option and "config" not in flat:
        file = words_by_option.pop("config")
        values = read_options_file(file, options)
    for name, words in words_by_option.items():
        values[name] = _parse_value(flat[name], words)
    if missing := [option for option in flat.values() if option.is_required and option.name not in values]:
        explanation = describe_expected(missing[0], ()) if choices_of(missing[0].type) else missing[0].help
        raise UsageError(f"{missing[0].flag} is required: {explanation}")
    return build_options(options, values)


def refuse_argument(argument: str, known_options: Mapping[str, Option]) -> NoReturn:
    """Raises UsageError for an argument that no option takes."""
    if not argument.startswith("-"):
        raise UsageError(f"{shown(repr(argument))}: unexpected argument; options have names, for example --store")
    flag = argument.partition("=")[0]
    named = {name: option.flag for name, option in known_options.items() if not option.is_positional}
    remedy = suggest_option(flag.lstrip("-").removeprefix("no-").replace("-", "_"), named)
    raise UsageError(f"{shown(flag)}: unknown option; {remedy or '--help lists the options'}")


def suggest_option(name: str, spellings: Mapping[str, str]) -> str:
    """Returns a suggestion for an unknown option; "" if no option has a similar name.

    Args:
        name: The unknown option.
        spellings: How each known option is written, by name.
    """
    if new := [spellings[each] for each in RENAMED.get(name, ()) if each in spellings]:
        return f"it is {' or '.join(new)} now"
    close = closest_name(name, spellings)
    return f"did you mean {spellings[close]}?" if close else ""


def _parse_value(option: Option, words: Any) -> Any:
    """Converts words of the command line to an option's value. Raises UsageError if they do not fit its type."""
    if isinstance(words, bool):  # `--flag` or `--no-flag`
        return words
    words = words if isinstance(words, list) else [words]
    try:
        return parse_words(option.type, words)
    except (ValueError, KeyError):
        raise UsageError(f"{option.flag} {shown(' '.join(words))}: {describe_expected(option, words)}") from None


def describe_expected(option: Option, words: Sequence[str]) -> str:
    """Describes the values that an option accepts, and names the choice that is most similar to the given words."""
    close = difflib.get_close_matches(words[-1] if words else "", choices_of(option.type), 1)
    expected = f"expected {describe_type(option.type)}"
    if SCALARS[int][1] in expected and any(len(word) > 18 and word.lstrip("-").isdecimal() for word in words):
        expected += f" of at most {MAX_INTEGER:,}"
    return expected + (f"; did you mean {close[0]}?" if close else "")


def read_options_file(path: str, options: type) -> dict[str, Any]:
    """Reads the options in a YAML file, by name.

    Raises:
        InputError: If the file is no mapping of known options; the message names the file and the key.
    """
    from riptide.base.yaml_files import read_yaml

    loaded = read_yaml(path, "--config expects a YAML file")
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: expected `key: value` lines, found {type(loaded).__name__}")
    return recipe_values(loaded, options, path)


def recipe_values(settings: Mapping[Any, Any], options: type, place: str) -> dict[str, Any]:
    """Reads options from a YAML mapping, by name; null means the default.

    Args:
        settings: The mapping.
        options: The class of the options.
        place: Where the mapping is, for messages.

    Raises:
        InputError: If a key is no option, or if a value does not fit its option.
    """
    flat = options_by_name(options)
    values: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in flat:
            remedy = suggest_option(name, {option: option for option in flat}) or known_names(flat)
            raise InputError(f"{place}: unknown key {shown(repr(key))}; {remedy}")
        if value is None:
            continue
        if flat[name].type is bool and not isinstance(value, bool):
            raise InputError(f"{place}: {key}: expected true or false, found {shown(repr(value))}")
        try:
            values[name] = setting_value(value, flat[name])
        except (ValueError, KeyError):
            expected = setting_expectation(value, flat[name])
            quotes = "; on, off, yes and no are true and false in YAML: put a text in quotes"
            remedy = quotes if any(isinstance(each, bool) for each in _words_of_value(value, flat[name])) else ""
            raise InputError(f"{place}: {key}: found {shown(repr(value))}, {expected}{remedy}") from None
    return values


def setting_value(value: Any, option: Option) -> Any:
    """Converts a value from YAML or Python to that of an option. Raises ValueError or KeyError if it does not fit."""
    if option.type is bool and not isinstance(value, bool):
        raise ValueError(value)
    return parse_words(option.type, [_word_of_value(each, option) for each in _words_of_value(value, option)])


def setting_expectation(value: Any, option: Option) -> str:
    """Returns a description of the values that an option accepts, for an error about a value from YAML or Python."""
    return describe_expected(option, [str(each) for each in _words_of_value(value, option)])


def known_names(flat: Mapping[str, Option]) -> str:
    """Returns the names of the first options, for a message."""
    first, more = list(flat)[:NAMES_SHOWN], len(flat) - NAMES_SHOWN
    return f"known are {', '.join(first)}" + (f" and {more} more, which --help lists" if more > 0 else "")


def _words_of_value(value: Any, option: Option) -> list[Any]:
    """Returns the items of a list or a mapping from YAML or Python; another value is the only item."""
    if isinstance(value, dict) and option.is_mapping:
        return [piece for pair in value.items() for piece in pair]
    return list(value) if isinstance(value, list | tuple) else [value]


def _word_of_value(value: Any, option: Option) -> str:
    """Converts one item to a word of the command line. Raises ValueError for an item that has no such form."""
    if isinstance(value, dict | list | tuple | None) or (isinstance(value, bool) and not option.is_boolean):
        raise ValueError(value)
    return str(value)


def as_arguments(options: type, values: Mapping[str, Any]) -> list[str]:
    """Returns the command-line arguments that set options to values."""
    flat = options_by_name(options)
    positional = [str(values[name]) for name, option in flat.items() if option.is_positional and name in values]
    arguments: list[str] = []
    for option, value in ((flat[name], value) for name, value in values.items()):
        if option.is_positional:
            continue
        if isinstance(value, bool) and option.type is bool:
            arguments.append(option.flag if value else f"--no-{option.flag.removeprefix('--')}")
            continue
        words = [word for pair in value.items() for word in pair] if isinstance(value, dict) else value
        words = [str(word) for word in (words if isinstance(words, list | tuple) else [words])]
        if any(word.startswith("-") for word in words):
            arguments += [f"{option.flag}={word}" for word in words]
        elif option.metadata.get("repeated"):
            arguments += [piece for word in words for piece in (option.flag, word)]
        else:
            arguments += [option.flag, *words]
    return positional + arguments


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        """Splits a text into lines, but not at a hyphen within a word nor within a default."""
        return _wrap(text.replace("(default: ", f"(default:{FIXED_SPACE}"), width)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises UsageError: `argument --k: expected one argument` becomes `--k: expected one value`."""
        message = message.removeprefix("argument ").replace("expected one argument", "expected one value")
        raise UsageError(message.replace("ignored explicit argument", "expected no value, got"))


def make_parser(options: type, module: str, complete: Complete | None = None) -> argparse.ArgumentParser:
    """Returns a parser that keeps the values of each option as strings.

    Args:
        options: The class of the options.
        module: Name of the job's module.
        complete: Prepares the actions of options for shell completion.
    """
    flat = options_by_name(options)
    width = max(MIN_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    required = [option for option in flat.values() if option.is_required]
    required.sort(key=lambda option: (not option.is_positional, option.name != "store"))
    usage = [f"{'' if option.is_positional else option.flag + FIXED_SPACE}{metavar_of(option)}" for option in required]
    job = job_name() if module == "__main__" else module.rpartition(".")[2]
    program = command_of(job) if is_job(job) else f"python {sys.argv[0]}"
    parser = _Parser(
        prog=program,
        usage="\n    ".join(_wrap(" ".join([program, *usage, "[OPTIONS]"]), width - len("usage: "))),
        description=_description(options, module, width),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        formatter_class=lambda prog: _Formatter(prog, max_help_position=28, width=width),
    )
    headings = [option.group for option in flat.values() if not option.is_required]
    first = [REQUIRED] * bool(required) + [each for each in getattr(options, "HELP_FIRST", ()) if each in headings]
    groups = {heading: parser.add_argument_group(heading) for heading in dict.fromkeys(first + headings)}
    for option in required:
        _add_option(groups[REQUIRED], option, complete)
    for option in flat.values():
        if not option.is_required:
            _add_option(groups[option.group], option, complete)
    common = groups[headings[-1]]  # the last group holds the options of every job
    if "config" not in flat:
        common.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
    common.add_argument("-h", "--help", action="help", help="Print this and exit.")
    return parser


def _add_option(group: argparse._ArgumentGroup, option: Option, complete: Complete | None) -> None:
    """Adds an option to its group in --help."""
    text = argparse.SUPPRESS if option.metadata.get("hidden") else _help_of_option(option)
    settings: dict[str, Any] = {"help": text}
    if option.type is bool and option.default:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **settings)
        return
    if option.type in (bool, bool | None):
        negation = f"--no-{option.flag.removeprefix('--')}"
        group.add_argument(negation, dest=option.name, action="store_false", help=argparse.SUPPRESS)
    if option.type is bool:
        group.add_argument(option.flag, action="store_true", **settings)
        return
    settings["metavar"] = metavar_of(option)
    if option.type == bool | None:
        settings |= {"nargs": "?", "const": "True"}
    elif option.metadata.get("repeated"):
        settings["action"] = "append"
    elif option.is_list:
        settings |= {"nargs": "*", "action": "extend"}
    elif option.is_positional:
        settings["nargs"] = "?"
    action = group.add_argument(option.flag, **settings)
    if complete is not None:
        complete(action, option)


def _help_of_option(option: Option) -> str:
    """Returns the help of an option with its default. The help itself explains None, False and an empty list."""
    default = option.default
    if option.is_required or default is None or default is False or (isinstance(default, Collection) and not default):
        shown = ""
    elif default is True:
        shown = f" (default: {option.flag})"
    elif isinstance(default, tuple | list):
        shown = f" (default: {' '.join(map(str, default))})"
    else:
        shown = f" (default: {default})"
    return f"{option.help}{shown}".replace("%", "%%")


def _description(options: type, module: str, width: int) -> str:
    """Returns the description in --help: the docstrings of the job and of its class of options."""
    docstring = options.__dict__.get("__doc__") or ""
    is_generated = docstring.startswith(f"{options.__name__}(")  # dataclass generates a docstring with the signature
    texts = [getattr(sys.modules.get(module), "__doc__", None) or "", "" if is_generated else docstring]
    paragraphs = [each for text in texts for each in inspect.cleandoc(text).split("\n\n") if each]
    return "\n\n".join(_wrap_paragraph(each, width) for each in paragraphs)


def _wrap_paragraph(text: str, width: int) -> str:
    """Wraps a paragraph of a docstring; commands and indented lines are not wrapped, and are indented."""
    if text.startswith((" ", "riptide ", "python ", "ray ")):
        return textwrap.indent(textwrap.dedent(text), "    ")
    return "\n".join(_wrap(text, width))


def _wrap(text: str, width: int) -> list[str]:
    """Wraps a text into lines; FIXED_SPACE becomes a space at which no line breaks."""
    return [
        line.replace(FIXED_SPACE, " ")
        for line in textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    ]


def _attach_values(arguments: Sequence[str], flat: Mapping[str, Option]) -> list[str]:
    """Returns the arguments, with a value that begins with one dash attached to its option: `--lr=-1e-3`.

    argparse would take it for an option.
    """
    single = {
        each.flag
        for each in flat.values()
        if not (each.is_positional or each.is_boolean or (each.is_list and not each.metadata.get("repeated")))
    }
    attached: list[str] = []
    for argument in arguments:
        is_value = argument.startswith("-") and not argument.startswith("--") and argument not in ("-", "-h")
        if is_value and attached and attached[-1] in single:
            attached[-1] += f"={argument}"
        else:
            attached.append(argument)
    return attached


def _with_dashes(argument: str) -> str:
    """Returns an argument with dashes instead of underscores in the name of the option."""
    name, sign, value = argument.partition("=")
    return f"{name.replace('_', '-')}{sign}{value}" if argument.startswith("--") else argument
