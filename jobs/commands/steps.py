"""The steps of a chain of jobs: reads them from a recipe, and checks all of them before the first one runs."""

from __future__ import annotations

from riptide.jobs.commands.cli import options_class_of

import contextlib
import difflib
import importlib
import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from riptide import jobs
from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter, list_first, shown
from riptide.base.yaml_files import read_yaml
from riptide.indexing.hit_sources.grammar import parse_source
from riptide.jobs.commands.command_line import as_arguments, recipe_values
from riptide.jobs.common.flat_options import build_options, options_by_name
from riptide.jobs.common.job_options import PROCESS_OPTIONS, Common
from riptide.jobs.common.plans import CHAINS
from riptide.jobs.common.starting import command_of, is_job

HEAD = ("store", "values", "steps")  # top-level keys of a recipe
# The kind of artifact that a kind of source searches, for sources whose kind has another name.
SEARCHED = {"exact": "embeddings", "splade": "index"}


@dataclass(frozen=True)
class JobStep:
    """A job with its options, as step `number` (from 1) of a chain of `count` steps."""

    number: int
    count: int
    job: str
    main: Callable[[Any], Any]
    options: Common
    arguments: list[str]

    @property
    def label(self) -> str:
        """The name of the artifact that the step makes; "" if its options do not give it."""
        values = (self._value_of_option(name) for name in self.options.NAMED_BY)
        return next((value for value in values if value is not None), "")

    @property
    def title(self) -> str:
        """The job and the label of the step."""
        return f"{self.job} {self.label}".rstrip()

    @property
    def place(self) -> str:
        """The number of the step in the chain, and its title."""
        return f"{self.number}/{self.count} {self.title}"

    @property
    def command(self) -> str:
        """The command that runs this step alone, in the form in which this process was started."""
        return f"{command_of(self.job)} {shlex.join(self.arguments)}"

    @property
    def step_key(self) -> str:
        """The key of the step in the file of an experiment: the same command in whichever form the job was started."""
        return shlex.join(["python", f"jobs/{self.job}.py", *self.arguments])

    def after(self, steps: Sequence[JobStep]) -> int:
        """Returns the number of the last earlier step that makes an input of this step; default: the previous step."""
        read = set(self.reads())
        makers = [step.number for step in steps[: self.number - 1] if read.intersection(step.makes())]
        return makers[-1] if makers else self.number - 1

    def makes(self) -> list[str]:
        """Returns the keys of the artifacts that the step makes, as far as its options name them."""
        return self.options.made_keys(self.label)

    def reads(self) -> Iterator[str]:
        """Yields the keys of the artifacts that the options of the step name."""
        for name, kind in self.options.READS.items():
            value = self._value_of_option(name)
            for each in value if isinstance(value, list | tuple) else filter(None, [value]):
                if kind == "sources":
                    yield from _searched_keys(each)
                else:
                    yield f"{kind}/{each.removeprefix(f'{kind}/')}"

    def _value_of_option(self, name: str) -> Any:
        """Returns the value of an option of the step."""
        return options_by_name(type(self.options))[name].value(self.options)


def _searched_keys(source: str) -> Iterator[str]:
    """Yields the keys of the artifacts that a source of hits names."""
    # The artifacts of a mode depend on the store. An invalid source is ignored here: the job itself refuses it.
    with contextlib.suppress(InputError):
        for term in parse_source(source).terms:
            yield f"{SEARCHED.get(term.kind.name, term.kind.name)}/{term.name or term.kind.name}"


def job_names() -> list[str]:
    """Returns the names of all jobs in alphabetical order: the modules of the package, except `jobs/riptide.py`."""
    return sorted({module.name for module in pkgutil.iter_modules(jobs.__path__) if not module.ispkg} - {"riptide"})


def replace_in(value: Any, old: str, new: str) -> Any:
    """Returns a copy of a YAML value in whose strings `old` is replaced by `new`."""
    if isinstance(value, dict):
        return {key: replace_in(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_in(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value


def _with_values(recipe: dict[str, Any], path: str, replacements: Mapping[str, str]) -> dict[str, Any]:
    """Replaces each {NAME} in a recipe by the value of NAME: its replacement, or that under `values` of the recipe.

    Raises:
        InputError: If `values` is no mapping of texts and numbers, or if it lacks a replaced name or, in a recipe with
            `values`, that of a {NAME}.
    """
    values = recipe.get("values") or {}
    if not isinstance(values, dict) or not all(isinstance(each, str | int | float) for each in values.values()):
        raise InputError(
            f"{path}: values: expected `name: value` lines of texts and numbers, found {shown(repr(values))}"
        )
    names = list_first([str(name) for name in values], 20) or "none"
    for name in replacements:
        if name not in values:
            raise InputError(
                f"{Parameter('values', f'{name} {replacements[name]}')}: {path} has no value {name!r}; it has {names}"
            )
    for name, value in {**values, **replacements}.items():
        recipe = replace_in(recipe, f"{{{name}}}", str(value))
    if values and (unknown := re.search(r"\{[A-Za-z_]\w*\}", yaml.safe_dump(recipe))):
        raise InputError(f"{path}: found {shown(unknown[0])}, which has no value under `values`; it has {names}")
    return recipe


def read_steps(
    path: str, store: str = "", limit: int | None = None, values: Mapping[str, str] | None = None
) -> list[JobStep]:
    """Reads the steps of a recipe.

    Args:
        path: The YAML file.
        store: Replaces the recipe's store.
        limit: The limit of each step that sets none, except imports.
        values: Replace those under `values` of the recipe, by name.

    Raises:
        InputError: If the recipe is invalid; names the file, the number of the step and the key.
    """
    recipe = read_yaml(path, f"{Parameter('config')} expects a recipe of steps")
    if not isinstance(recipe, dict) or not isinstance(recipe.get("steps"), list) or not recipe["steps"]:
        raise InputError(f"{path}: expected `steps:` and below it a list of `- job: {{option: value}}`")
    if unknown := [key for key in recipe if key not in HEAD]:
        raise InputError(f"{path}: unknown key {shown(repr(unknown[0]))}; known are {', '.join(HEAD)}")
    recipe = _with_values(recipe, path, values or {})
    store = store or recipe.get("store") or ""
    if not isinstance(store, str) or not store:
        raise InputError(
            f"{path}: expected `store:`, a local folder or s3://bucket/prefix; or give {Parameter('store')}"
        )
    entries = recipe["steps"]
    return [_read_step(path, number, len(entries), entry, store, limit) for number, entry in enumerate(entries, 1)]


def find_step(steps: Sequence[JobStep], step_name: str) -> JobStep:
    """Returns the step for a number, job, label or title; dashes equal underscores.

    Raises:
        InputError: If no step or several steps have this name.
    """
    name = step_name.replace("-", "_")
    matches = [
        step
        for step in steps
        if name in (text.replace("-", "_") for text in (str(step.number), step.job, step.label, step.title))
    ]
    if len(matches) != 1:
        choice = ", ".join(f"{step.number} {step.title}" for step in matches or steps)
        many = "several steps have" if matches else "no step has"
        raise InputError(f"step {shown(repr(step_name))}: {many} this name; give the number: {choice}")
    return matches[0]


def _read_step(path: str, number: int, count: int, entry: object, store: str, limit: int | None) -> JobStep:
    where = f"{path}: step {number}"
    job, settings = read_entry(entry, where)
    _, options = _open_job(job, where)
    if "watch" in settings and "watch" in options_by_name(options):
        raise InputError(f"{where} {job}: watch: found a step that does not end; run {Command(job)} by itself with it")
    if chain_keys := [key for key in settings if key in PROCESS_OPTIONS and key != "watch"]:
        top = "put it at the recipe's top, or " if chain_keys[0] in HEAD else ""
        raise InputError(
            f"{where} {job}: {chain_keys[0]} belongs to the chain, not to a step: {top}give {Parameter(chain_keys[0])}"
        )
    # --limit of a chain does not apply to imports.
    if limit is not None and not {"corpus", "queries"}.intersection(options.MAKES):
        settings = {"limit": limit, **settings}
    return make_step(where, job, settings, store, number, count)


def read_entry(entry: object, where: str) -> tuple[str, dict[str, Any]]:
    """Reads an entry `job: {option: value}`: the job, with underscores, and its settings. Raises InputError."""
    if not isinstance(entry, dict) or len(entry) != 1:
        raise InputError(f"{where}: expected one `job: {{option: value}}`, found {shown(repr(entry))}")
    [(name, settings)] = entry.items()
    job = str(name).replace("-", "_")
    settings = {} if settings is None else settings
    _open_job(job, where)
    if not isinstance(settings, dict):
        raise InputError(f"{where} {job}: expected {{option: value}}, found {shown(repr(settings))}")
    return job, settings


def make_step(where: str, job: str, settings: dict[str, Any], store: str, number: int = 1, count: int = 1) -> JobStep:
    """Makes a step from a job and its settings.

    Args:
        where: The place of the settings, for messages.
        job: Name of the job.
        settings: Its options by name, without the store.
        store: The store.
        number: Number of the step in its chain, from 1.
        count: Number of steps of the chain.

    Raises:
        InputError: If there is no such job, or if the job does not take the settings.
    """
    main, options = _open_job(job, where)
    where = f"{where} {job}"
    values = {"store": store, **recipe_values(settings, options, where)}
    required = [option.name for option in options_by_name(options).values() if option.is_required]
    if missing := [name for name in required if name not in values]:
        raise InputError(f"{where}: missing key {missing[0]!r}")
    try:
        return JobStep(number, count, job, main, build_options(options, values), as_arguments(options, values))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _open_job(name: str, where: str) -> tuple[Callable[[Any], Any], type[Common]]:
    """Returns the main function and the class of options of a job. Raises InputError if there is no such job."""
    if name in (*CHAINS, "riptide") or not (name.isidentifier() and is_job(name)):
        known = set(job_names()).difference(CHAINS)
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        raise InputError(f"{where}: unknown job {shown(repr(name))}; {hint}")
    module = importlib.import_module(f"riptide.jobs.{name}")
    return module.main, options_class_of(module.main)
