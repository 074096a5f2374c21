"""The parameters of a method: the options of its job, checked as those of a recipe, and named in errors."""

from __future__ import annotations

from riptide.jobs.common.cli import find_input_error, options_class_of

import contextlib
import importlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from riptide.base.arguments import UnknownParameterError, plain_value
from riptide.base.errors import InputError
from riptide.jobs.common.command_line import (
    as_arguments,
    known_names,
    setting_expectation,
    setting_value,
    suggest_option,
)
from riptide.jobs.common.options import Option, build_options, choices_of, describe_type, options_by_name

# The methods that are jobs, and their parameters that have other names than the options.
METHODS: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {
        "import_corpus": {},
        "import_queries": {"name": "queries"},
        "encode_corpus": {},
        "build_index": {},
        "build_bm25": {},
        "fit_topics": {},
        "mine_negatives": {},
        "train_retriever": {},
        "tune_prompts": {},
        "train_reranker": {},
        "pretrain_rip": {},
        "serve_search": {},
    }
)
NO_PARAMETERS = ("store", "plan")  # options of every job: the store is the object, and its lists show what exists
_WORD = r"(?:'[^']*'|[^\s;,()]+)"  # a value that a message quotes for a shell
# The value of an option in a command; other words may follow other options.
_VALUE = rf" (?:[A-Z_]+|\d+)\b|(?<=--name) [\w.-]*\w|(?<=--store) {_WORD}|(?<=--encoder) {_WORD}"
_COMMAND = re.compile(
    rf"\b(?:python -m )?riptide ([a-z0-9]+(?:-[a-z0-9]+)*)((?: --[a-z][a-z0-9-]*(?:{_VALUE})?)*)([^;,:()]*)"
)
_REMOVAL = re.compile(rf"riptide store remove ([\w./-]*\w)(?: --store {_WORD})?")
_OPTION = re.compile(r"(?<![\w-])(?:--([a-z][a-z0-9-]*)|parameter ([a-z][a-z0-9_]*))")


@dataclass(frozen=True)
class Parameters:
    """The parameters of a method by name, without those that are hidden or excluded.

    Attributes:
        method: The name of the method.
        run_job: The function of its job.
        job: The class of the options of the job.
        options: The options by the names of the parameters.
    """

    method: str
    run_job: Callable[..., Any]
    job: type
    options: Mapping[str, Option]

    @classmethod
    def of_method(cls, method: str, *, job: str = "", excluded: tuple[str, ...] = ()) -> Parameters:
        """Returns the parameters of a method.

        Args:
            method: The name of the method.
            job: The name of its job; default: that of the method.
            excluded: Options that are no parameters.
        """
        name = job or method
        module = importlib.import_module(f"riptide.jobs.{name}")
        options, other_names = options_class_of(module.main), {old: new for new, old in METHODS.get(name, {}).items()}
        shown = {
            other_names.get(each.name, each.name): each
            for each in options_by_name(options).values()
            if each.name not in (*NO_PARAMETERS, *excluded) and not each.metadata.get("hidden")
        }
        return cls(method, getattr(module, "run_job", module.main), options, shown)

    def read(self, url: str, keywords: Mapping[str, Any]) -> Any:
        """Returns the options of the job; arguments and errors as of `values`, and if values contradict each other."""
        values = self.values(url, keywords)
        with self.named(keywords):
            return build_options(self.job, values)

    def arguments(self, url: str, keywords: Mapping[str, Any]) -> list[str]:
        """Returns the command line of the job; arguments and errors as of `read`."""
        self.read(url, keywords)
        return as_arguments(self.job, self.values(url, keywords))

    def values(self, url: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of the job that are not the default, by name.

        Args:
            url: The store.
            keywords: Values by the names of the parameters; None stands for the default.

        Raises:
            InputError: If a parameter is unknown or missing, or if a value does not fit it.
        """
        values: dict[str, Any] = {"store": url}
        for name, value in keywords.items():
            if name not in self.options:
                raise UnknownParameterError(f"{self.method}: unknown parameter {name}; {self._suggest_parameter(name)}")
            value = plain_argument(f"{self.method}: {name}", value)
            if value is None:
                continue
            option = self.options[name]
            try:
                values[option.name] = setting_value(value, option)
            except (ValueError, KeyError):
                expected = setting_expectation(value, option)
                raise InputError(f"{self.method}: {name}={value!r}: {expected}") from None
        for name, option in self.options.items():
            if option.is_required and option.name not in values:
                raise InputError(self.in_words(f"{self.method}: --{name} is required: {option.help}"))
        return values

    def _suggest_parameter(self, name: str) -> str:
        """Returns what to write instead of an unknown parameter."""
        for parameter, option in self.options.items():
            if option.name == name:
                return f"it is {parameter} here"
        known = known_names(self.options).replace("--help lists", f"describe_options({self.method!r}) lists")
        return suggest_option(name, {parameter: parameter for parameter in self.options}) or known

    @contextlib.contextmanager
    def named(self, keywords: Mapping[str, Any], clean: Callable[[str], str] = str) -> Iterator[None]:
        """Within the block, errors for bad input speak of parameters and methods, not of options and commands.

        Args:
            keywords: Values by the names of the parameters.
            clean: Returns a message without what says nothing to the caller: the path of a temporary file.
        """
        try:
            yield
        except Exception as error:
            cause = find_input_error(error)
            if cause is None:
                raise
            message = self.in_words(clean(str(cause)), keywords)
            notes = [self.in_words(clean(note), keywords) for note in getattr(cause, "__notes__", ())]
            if cause is not error:
                translated = InputError(message)
                for note in notes:
                    translated.add_note(note)
                raise translated from error
            error.args = (message, *error.args[1:])
            if notes:
                error.__notes__ = notes
            raise

    def in_words(self, message: str, keywords: Mapping[str, Any] | None = None) -> str:
        """Returns a message of a job with parameters in place of options, and methods in place of commands.

        `--factory Flat` becomes `factory=Flat`, `--recall` becomes `recall=`, `riptide build-index --shards N` becomes
        `store.build_index(shards=N)`. Commands that are no methods stay as they are.
        """
        message = _REMOVAL.sub(lambda match: f"store.remove({match[1]!r})", message)
        pieces, end = [], 0
        while match := _COMMAND.search(message, end):
            method = match[1].replace("-", "_")
            pieces.append(self._with_parameters(message[end : match.start()], keywords or {}))
            if method in METHODS or method in _METHOD_OF:
                options = re.findall(rf" --([a-z][a-z0-9-]*)({_VALUE})?", match[2])
                arguments = [
                    f"{option.replace('-', '_')}={_as_python(value.strip())}"
                    for option, value in options
                    if option != "store"  # the object
                ]
                pieces.append(f"store.{_METHOD_OF.get(method, method)}" + f"({', '.join(arguments)})" * bool(arguments))
                end = match.end(2)
            else:
                pieces.append(match[0])
                end = match.end()
        return "".join([*pieces, self._with_parameters(message[end:], keywords or {})])

    def _with_parameters(self, text: str, keywords: Mapping[str, Any]) -> str:
        """Returns a text with parameters in place of options."""
        pieces, end = [], 0
        for match in _OPTION.finditer(text):
            name, rest = _parameter_of_option(match), text[match.end() :]
            pieces.append(f"{text[end : match.start()]}{name}=")
            end = match.end()
            if rest.startswith(" ") and self._starts_with_value(name, rest[1:], keywords):
                end += 1
        return "".join([*pieces, text[end:]])

    def _starts_with_value(self, name: str, text: str, keywords: Mapping[str, Any]) -> bool:
        """Whether a text begins with a value of a parameter: a given one, a choice, a number, or the name of values."""
        value, word = keywords.get(name), re.split(r"[\s,;:()]", text, maxsplit=1)[0]
        values = [value, *(value if isinstance(value, list | tuple) else ())] if name in keywords else []
        if any(text.startswith((str(each), repr(each))) for each in values if str(each)):
            return True
        if (option := self.options.get(name)) is not None and word in (*choices_of(option.type), str(option.default)):
            return True
        return bool(re.fullmatch(r"-?[\d.]+|[A-Z_]{2,}|N", word))

    def describe(self) -> str:
        """Returns a line for each parameter: its name, values, default and help."""
        lines = [f"store.{self.method}: parameters", ""]
        for name, option in self.options.items():
            values = " | ".join(choices_of(option.type)) or describe_type(option.type)
            default = "required" if option.is_required else f"default {option.default!r}"
            lines.append(f"{name}: {values}; {default}\n    {self.in_words(option.help)}")
        return "\n".join(lines)


def named_parameters(keywords: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """As `Parameters.named`, for a method that is no job. keywords: values by the names of the parameters."""
    return Parameters("", lambda: None, object, {}).named(keywords)


def plain_argument(name: str, value: Any) -> Any:
    """Returns the value of a parameter in types of Python. Raises InputError for one that contains itself."""
    try:
        return plain_value(value)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def check_name(name: str, value: Any) -> None:
    """Raises InputError unless a parameter is a text or None."""
    if value is not None and not isinstance(value, str):
        raise InputError(f"parameter {name} {value!r}: expected a text")


_METHOD_OF = {
    "serve_search": "serve",
    "search": "search_queries",
    "evaluate": "evaluate",
}  # the methods that have other names than their jobs


def _as_python(value: str) -> str:
    """Returns the value of an option in a command as a value of Python."""
    if not value:
        return "…"
    return value if value.isupper() or value.isdecimal() else repr(value.strip("'"))


def _parameter_of_option(match: re.Match[str]) -> str:
    """Returns the name of the parameter for an option in a message."""
    return (match[1] or match[2]).replace("-", "_")
