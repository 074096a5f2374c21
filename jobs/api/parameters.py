"""The parameters of a method: the options of its job, checked like those of a recipe and named in errors."""

from __future__ import annotations

from riptide.jobs.commands.cli import find_input_error, options_class_of

import contextlib
import importlib
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from riptide.base.arguments import UnknownParameterError, plain_value
from riptide.base.errors import InputError
from riptide.base.wording import Parameter, Words
from riptide.jobs.commands.command_line import (
    as_arguments,
    known_names,
    setting_expectation,
    setting_value,
    suggest_option,
)
from riptide.jobs.common.flat_options import Option, build_options, choices_of, describe_type, options_by_name
from riptide.jobs.common.job_options import PROCESS_OPTIONS

# The methods that run a job, with the parameters that have other names than the options of the job.
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
        "migrate": {},
        "serve_search": {},
    }
)
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")  # an option in a help text
_METHOD_OF = {  # the methods that run a job and are missing in METHODS, or whose names differ from their jobs
    "serve_search": "serve",
    "search": "search_queries",
    "evaluate": "evaluate",
}


class Python(Words):
    """Writes parameters as keyword arguments and commands as method calls; a command without a method stays."""

    def parameter(self, name: str, value: str | bool) -> str:
        """Returns a parameter as a keyword argument of Python."""
        return f"{name}={value}"

    def command(self, job: str, words: Sequence[str], options: Mapping[str, str]) -> str:
        """Returns the call of the method that corresponds to a command; a command without a method stays as it is."""
        method = job.replace("-", "_")
        if job == "store" and words[0] == "remove":
            return f"store.remove({words[1]!r})"
        if method not in METHODS and method not in _METHOD_OF:
            return super().command(job, words, options)
        # The store is the object of the call, and no argument.
        arguments = [f"{name}={_as_python(value)}" for name, value in options.items() if name != "store"]
        return f"store.{_METHOD_OF.get(method, method)}" + f"({', '.join(arguments)})" * bool(arguments)


PYTHON = Python()


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
        """Reads the parameters of a method from the options of its job.

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
            if each.name not in (*PROCESS_OPTIONS, *excluded) and not each.metadata.get("hidden")
        }
        return cls(method, getattr(module, "run_job", module.main), options, shown)

    def read(self, url: str, keywords: Mapping[str, Any]) -> Any:
        """Returns the options of a job as an object. Raises InputError like `values`, and for contradictory values."""
        values = self.values(url, keywords)
        with named_parameters():
            return build_options(self.job, values)

    def arguments(self, url: str, keywords: Mapping[str, Any]) -> list[str]:
        """Returns the command line of the job. Arguments and errors: those of `read`."""
        self.read(url, keywords)
        return as_arguments(self.job, self.values(url, keywords))

    def values(self, url: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options that keyword arguments set, by name.

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
                raise InputError(f"{self.method}: {name}= is required: {_help_in_python(option)}")
        return values

    def _suggest_parameter(self, name: str) -> str:
        """Returns a suggestion for an unknown parameter."""
        for parameter, option in self.options.items():
            if option.name == name:
                return f"it is {parameter} here"
        known = known_names(self.options).replace("--help lists", f"describe_options({self.method!r}) lists")
        return suggest_option(name, {parameter: parameter for parameter in self.options}) or known

    def describe(self) -> str:
        """Returns a line for each parameter, with its name, values, default and help."""
        lines = [f"store.{self.method}: parameters", ""]
        for name, option in self.options.items():
            values = " | ".join(choices_of(option.type)) or describe_type(option.type)
            default = "required" if option.is_required else f"default {option.default!r}"
            lines.append(f"{name}: {values}; {default}\n    {_help_in_python(option)}")
        return "\n".join(lines)


@contextlib.contextmanager
def named_parameters(clean: Callable[[str], str] = str) -> Iterator[None]:
    """Context in which errors for bad input name parameters and methods of Python instead of options and commands.

    Args:
        clean: Returns a message without what says nothing to the caller: the path of a temporary file.
    """
    try:
        yield
    except Exception as error:
        cause = find_input_error(error)
        if cause is None:
            raise
        message = PYTHON.render(clean(f"{cause}"))
        notes = [PYTHON.render(clean(note)) for note in getattr(cause, "__notes__", ())]
        if cause is not error:
            translated = InputError(message)
            for note in notes:
                translated.add_note(note)
            raise translated from error
        error.args = (message, *error.args[1:])
        if notes:
            error.__notes__ = notes
        raise


def plain_argument(name: str, value: Any) -> Any:
    """Returns the value of a parameter in built-in types. Raises InputError for a container that contains itself."""
    try:
        return plain_value(value)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def check_name(name: str, value: Any) -> None:
    """Raises InputError unless the value of a parameter is a string or None."""
    if value is not None and not isinstance(value, str):
        raise InputError(f"{Parameter(name, repr(value))}: expected a text")


def path_text(name: str, value: Any) -> str | None:
    """Returns a parameter that names a file, a folder or a model as a text. Raises InputError for another type."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    check_name(name, text)
    return text


def _as_python(value: str) -> str:
    """Converts the value of an option in a command to a Python literal."""
    if not value:
        return "…"
    return value if value.isupper() or value.isdecimal() else repr(value.strip("'"))


def _help_in_python(option: Option) -> str:
    """Returns the help of an option, with names of parameters in place of names of options."""
    return _OPTION.sub(lambda match: match[1].replace("-", "_") + "=", option.help)
