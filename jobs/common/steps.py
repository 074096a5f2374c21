"""Reads the steps of a chain of jobs from a recipe and checks all of them before one runs."""

from __future__ import annotations

from jobs.common.cli import Common, options_of, parse, read_recipe

import contextlib
import dataclasses
import difflib
import importlib
import io
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from retriever.errors import InputError

JOBS = Path(__file__).resolve().parents[1]
HEAD = ("store", "steps")  # the keys of a recipe
PIPELINE = "pipeline"  # cannot be a step
WHOLE = ("import_corpus", "import_queries")  # jobs that the chain's limit does not apply to
LABELS = ("name", "task", "embeddings", "source")  # options that name what a step makes, the best first


@dataclass(frozen=True)
class Step:
    """A job with its options: step `number` (from 1) of a chain of `count` steps."""

    number: int
    count: int
    job: str
    main: Callable[[Any], Any]
    options: Common
    arguments: list[str]

    @property
    def label(self) -> str:
        """The name of what it makes, if its options say it; otherwise empty."""
        values = (getattr(self.options, name, None) for name in LABELS)
        return next((value for value in values if isinstance(value, str)), "")

    @property
    def title(self) -> str:
        """The job and its label."""
        return f"{self.job} {self.label}".rstrip()

    @property
    def place(self) -> str:
        """Its number in the chain, and its title."""
        return f"{self.number}/{self.count} {self.title}"

    @property
    def command(self) -> str:
        """The command that runs this step alone."""
        return shlex.join(["python", f"jobs/{self.job}.py", *self.arguments])

    def after(self, steps: Sequence[Step]) -> int:
        """Returns the number of the step that it waits for: the last earlier one that makes what its options name."""
        words = set(re.findall(r"[\w.-]+", " ".join(self.arguments)))
        makers = [step.number for step in steps[: self.number - 1] if step.label in words]
        return makers[-1] if makers else self.number - 1


def read_steps(path: str, store: str = "", limit: int | None = None) -> list[Step]:
    """Returns the steps of a recipe.

    Args:
        path: The YAML file.
        store: Replaces the recipe's store.
        limit: The limit of each step that sets none, except imports.

    Raises:
        InputError: If the recipe is invalid; names the file, the number of the step and the key.
    """
    try:
        recipe = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; --config expects a recipe of steps") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("steps"), list) or not recipe["steps"]:
        raise InputError(f"{path}: expected `steps:` and below it a list of `- job: {{option: value}}`")
    if unknown := [key for key in recipe if key not in HEAD]:
        raise InputError(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(HEAD)}")
    store = store or recipe.get("store") or ""
    if not isinstance(store, str) or not store:
        raise InputError(f"{path}: expected `store:`, a local folder or s3://bucket/prefix; or give --store")
    entries = recipe["steps"]
    return [_read_step(path, number, len(entries), entry, store, limit) for number, entry in enumerate(entries, 1)]


def find_step(steps: Sequence[Step], wanted: str) -> Step:
    """Returns the step with a number, job, label or title. Raises InputError if there is none, or several."""
    found = [step for step in steps if wanted in (str(step.number), step.job, step.label, step.title)]
    if len(found) != 1:
        choice = ", ".join(f"{step.number} {step.title}" for step in found or steps)
        many = "several steps have" if found else "no step has"
        raise InputError(f"step {wanted!r}: {many} this name; give the number: {choice}")
    return found[0]


def _read_step(path: str, number: int, count: int, entry: object, store: str, limit: int | None) -> Step:
    where = f"{path}: step {number}"
    job, settings = read_entry(entry, where)
    if own := [key for key in settings if key in ("store", "plan")]:
        raise InputError(
            f"{where} {job}: {own[0]} belongs to the chain, not to a step: put it at the recipe's top, or give "
            f"--{own[0]}"
        )
    if limit is not None and job not in WHOLE:
        settings = {"limit": limit, **settings}
    return make_step(where, job, settings, store, number, count)


def read_entry(entry: object, where: str) -> tuple[str, dict[str, Any]]:
    """Returns the job and the settings of `job: {option: value}`. Raises InputError for anything else."""
    if not isinstance(entry, dict) or len(entry) != 1:
        raise InputError(f"{where}: expected one `job: {{option: value}}`, found {entry!r}")
    [(job, settings)] = entry.items()
    settings = {} if settings is None else settings
    _open_job(str(job), where)
    if not isinstance(settings, dict):
        raise InputError(f"{where} {job}: expected {{option: value}}, found {settings!r}")
    return str(job), settings


def make_step(where: str, job: str, settings: dict[str, Any], store: str, number: int = 1, count: int = 1) -> Step:
    """Returns a job with its options.

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
    arguments = ["--store", store, *_arguments(settings, options, where)]
    parsed = _parse(options, arguments, where)
    if parsed.limit is not None and parsed.limit < 1:
        raise InputError(f"{where}: limit: found {parsed.limit}, expected at least 1")
    return Step(number, count, job, main, parsed, arguments)


def _open_job(name: str, where: str) -> tuple[Callable[[Any], Any], type[Common]]:
    """Returns the main function and the options of a job. Raises InputError if there is no such job."""
    known = {file.stem for file in JOBS.glob("*.py") if '__name__ == "__main__"' in file.read_text()} - {PIPELINE}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        raise InputError(f"{where}: unknown job {name!r}; {hint}")
    module = importlib.import_module(f"jobs.{name}")
    return module.main, options_of(module.main)


def _arguments(settings: dict, options: type[Common], where: str) -> list[str]:
    """Returns the settings of a step as command-line arguments, checked like the recipe of a job."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(settings, file)
        file.flush()
        try:
            return read_recipe(file.name, options)
        except InputError as error:
            raise InputError(str(error).replace(file.name, where, 1)) from None


def _parse(options: type[Common], arguments: list[str], where: str) -> Common:
    """Returns the options. Raises InputError for arguments that the command line would refuse with its usage."""
    required = (field.name for field in dataclasses.fields(options) if _is_required(field))
    if missing := [name for name in required if f"--{name.replace('_', '-')}" not in arguments]:
        raise InputError(f"{where}: missing key {missing[0]!r}")
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            return parse(options, arguments)
    except SystemExit:
        reason = " ".join(re.sub(r"[─-╿]+", " ", told.getvalue()).split())  # less the frame around it
        raise InputError(f"{where}: {reason}") from None


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
