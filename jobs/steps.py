"""The steps of a chain of jobs, read from a recipe: all are checked against their jobs' options before one runs."""

from __future__ import annotations

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

from jobs.cli import Common, options_of, parse, read_recipe

import yaml

from retriever.errors import InputError

JOBS = Path(__file__).resolve().parent
HEAD = ("store", "steps")  # the keys of a recipe
PIPELINE = "pipeline"  # no step of itself
WHOLE = ("import_corpus", "import_queries")  # a limit is none of theirs: what they make, the whole chain uses too
# What a job makes, and what options take of it; a task may be a prompt or, fine-tuned, a model.
MAKES = {"build_bm25": "bm25", "pretrain_rip": "models", "train_reranker": "models", "mine_negatives": "negatives",
         "tune_prompts": "task", "encode_corpus": "embeddings", "build_index": "index", "search": "runs"}  # fmt: skip
TAKES = {"negatives": "negatives", "embeddings": "embeddings", "index": "index", "task": "task", "init": "task",
         "run": "runs"}  # fmt: skip
MODELS = ("backbone", "encoder", "reranker", "rerank")  # options that take models/NAME
SOURCES = {"exact": "embeddings", "index": "index", "bm25": "bm25"}  # as `source` and `sources` name them: exact:NAME
# Options of these names that take nothing of the kind: what the step makes, or finds by itself, or a file.
OWN = (("tune_prompts", "task"), ("build_index", "embeddings"), ("search", "run"))
Names = dict[tuple[str, str], str]  # of (kind, name): what it is called in the store
LABELS = ("name", "task", "embeddings", "source")  # the options that say what a step makes, the best first


@dataclass(frozen=True)
class Step:
    """A job with its options, the `number`-th (from 1) of a chain of `count`."""

    number: int
    count: int
    job: str
    main: Callable[[Any], Any]
    options: Common
    arguments: list[str]

    @property
    def label(self) -> str:
        """What it makes, as far as its options name it; else nothing."""
        values = (getattr(self.options, name, None) for name in LABELS)
        return next((value for value in values if isinstance(value, str)), "")

    @property
    def made(self) -> str:
        """What that is called in the store: NAME-limitN, where it is of the first N only."""
        limit = None if self.job in WHOLE else self.options.limit
        return self.label if limit is None or not self.label else f"{self.label}-limit{limit}"

    @property
    def names(self) -> Names:
        """What later steps find where they say its name."""
        kinds = {MAKES.get(self.job, "")}
        options = vars(self.options)
        if options.get("method") == "finetune":
            kinds.add("models")
        if options.get("train") == "prompts":
            kinds = {"task"}
        return {(kind, self.label): self.made for kind in kinds}

    @property
    def title(self) -> str:
        return f"{self.job} {self.label}".rstrip()

    @property
    def place(self) -> str:
        return f"{self.number}/{self.count} {self.title}"

    @property
    def command(self) -> str:
        """What a person would type for this step alone."""
        return shlex.join(["python", f"jobs/{self.job}.py", *self.arguments])

    def after(self, steps: Sequence[Step]) -> int:
        """The number of the step that this one waits for: the last before it that makes what its options name."""
        words = set(re.findall(r"[\w.-]+", " ".join(self.arguments)))
        makers = [step.number for step in steps[: self.number - 1] if words & {step.label, step.made}]
        return makers[-1] if makers else self.number - 1


def read_steps(path: str, store: str = "", limit: int | None = None) -> list[Step]:
    """A recipe's steps; `store` counts instead of the recipe's, `limit` for each step that has none of its own. What is
    made with a limit, NAME-limitN, is what later steps find where they say NAME.

    Raises InputError with the file, and where it is one step's, with its number and the key.
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
    entries, steps, names = recipe["steps"], list[Step](), Names()
    for number, entry in enumerate(entries, 1):
        step = _read_step(path, number, len(entries), entry, store, limit, names)
        steps.append(step)
        names |= step.names
    return steps


def find_step(steps: Sequence[Step], wanted: str) -> Step:
    """The step of that number, job, label or title. Raises InputError where it is none, or several."""
    found = [step for step in steps if wanted in (str(step.number), step.job, step.label, step.title)]
    if len(found) != 1:
        choice = ", ".join(f"{step.number} {step.title}" for step in found or steps)
        many = "several are" if found else "none is"
        raise InputError(f"step {wanted!r}: {many} called so; give the number: {choice}")
    return found[0]


def _read_step(path: str, number: int, count: int, entry: object, store: str, limit: int | None, names: Names) -> Step:
    where = f"{path}: step {number}"
    if not isinstance(entry, dict) or len(entry) != 1:
        raise InputError(f"{where}: expected one `job: {{option: value}}`, found {entry!r}")
    [(job, settings)] = entry.items()
    settings = {} if settings is None else settings
    main, options = _open_job(str(job), where)
    where = f"{where} {job}"
    if not isinstance(settings, dict):
        raise InputError(f"{where}: expected {{option: value}}, found {settings!r}")
    if own := [key for key in settings if key in ("store", "plan")]:
        raise InputError(f"{where}: {own[0]} is the chain's, not a step's: say it at the head, or with --{own[0]}")
    if limit is not None and job not in WHOLE:
        settings = {"limit": limit, **settings}
    settings = {option: _renamed(str(job), option, value, names) for option, value in settings.items()}
    arguments = ["--store", store, *_arguments(settings, options, where)]
    parsed = _parse(options, arguments, where)
    if parsed.limit is not None and parsed.limit < 1:
        raise InputError(f"{where}: limit: found {parsed.limit}, expected at least 1")
    return Step(number, count, str(job), main, parsed, arguments)


def _renamed(job: str, option: str, value: Any, names: Names) -> Any:
    """A setting, by the names of what earlier steps have made."""
    if isinstance(value, list):
        return [_renamed(job, option, one, names) for one in value]
    if job in WHOLE or (job, option) in OWN or not isinstance(value, str):
        return value
    if option in ("source", "sources"):
        if (own := names.get(("bm25", "bm25"), "bm25")) != "bm25":
            value = re.sub(r"\bbm25(?![\w:.-])", f"bm25:{own}", value)
        found = r"\b(exact|index|bm25):([\w.-]+)"
        return re.sub(found, lambda m: f"{m[1]}:{names.get((SOURCES[m[1]], m[2]), m[2])}", value)
    if option in MODELS:
        kind, _, name = value.partition("/")
        return f"models/{names.get((kind, name), name)}" if kind == "models" else value
    if option in TAKES:
        name = value.removeprefix("prompts/")
        return value.removesuffix(name) + names.get((TAKES[option], name), name)
    return value


def _open_job(name: str, where: str) -> tuple[Callable[[Any], Any], type[Common]]:
    """A job's main and its options. Raises InputError for what is no job."""
    known = {file.stem for file in JOBS.glob("*.py") if '__name__ == "__main__"' in file.read_text()} - {PIPELINE}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        raise InputError(f"{where}: unknown job {name!r}; {hint}")
    module = importlib.import_module(f"jobs.{name}")
    return module.main, options_of(module.main)


def _arguments(settings: dict, options: type[Common], where: str) -> list[str]:
    """A step's settings as command-line arguments, checked as any job's recipe is."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(settings, file)
        file.flush()
        try:
            return read_recipe(file.name, options)
        except InputError as error:
            raise InputError(str(error).replace(file.name, where, 1)) from None


def _parse(options: type[Common], arguments: list[str], where: str) -> Common:
    """The options. Raises InputError for what the command line would refuse with its usage."""
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
