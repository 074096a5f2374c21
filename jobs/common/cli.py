"""Helpers of all jobs: options from YAML and the command line, progress lines, one-line errors for bad input."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from riptide.base.errors import InputError, shorten
from riptide.base.extras import find_missing_package
from riptide.base.memory import format_bytes as format_bytes
from riptide.base.options import option
from riptide.indexing.store.models import resolve_task
from riptide.indexing.store.storage import describe_os_error
from riptide.indexing.store.store import Store
from riptide.indexing.work.local import has_unfinished_threads
from riptide.indexing.work.nodes import parse_labels
from riptide.indexing.work.tasks import MAX_WORKERS, WorkerRequest
from riptide.indexing.work.work import Work, plan_stages
from riptide.jobs.common.command_line import UsageError, parse_arguments
from riptide.jobs.common.metrics import StageMetrics
from riptide.jobs.common.options import options_by_name
from riptide.jobs.common.starting import commands_as_started, finish, runs_one_job

Options = TypeVar("Options", bound="Common")


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every job."""

    GROUP: ClassVar = "every job"
    HELP_FIRST: ClassVar[tuple[str, ...]] = ()  # headings that --help lists before the others
    MAKES: ClassVar[tuple[str, ...]] = ()  # kinds of artifacts that the job makes; a task is a prompt or a model
    NAMED_BY: ClassVar[tuple[str, ...]] = ()  # options that give their name; the first one that is set counts
    READS: ClassVar[Mapping[str, str]] = {}  # options that name artifacts, or sources of hits, and their kinds

    store: str = option(metavar="STORE")
    """Where the artifacts are: a local folder or s3://bucket/prefix."""
    plan: bool = False
    """Print what the job would do (parts, rows, bytes, memory), and exit."""
    limit: int | None = None
    """Use only the first N rows. N is part of the fingerprint and not of the name: give a limited artifact another
    name or store."""

    def __post_init__(self) -> None:
        """Raises InputError for a limit below 1, or a text with a NUL character, which no path or name can contain."""
        if self.limit is not None and self.limit < 1:
            raise InputError(f"parameter limit {self.limit}: expected at least 1")
        for each in options_by_name(type(self)).values():
            value = each.value(self)
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str) and "\0" in text:
                    raise InputError(f"{each.flag} {text!r}: expected text without NUL characters")


@dataclass(frozen=True, kw_only=True)
class ClusterJob(Common):
    """Options of a job that may run on the nodes of a cluster."""

    GROUP: ClassVar = "workers"

    wait: int | None = None
    """On a cluster: seconds to wait for the nodes that the job needs; 0: they must be there now. Default: 1800 if the
    head of the cluster has no CPUs, as an autoscaler is then expected to add nodes, else 0."""
    node_label: tuple[str, ...] = option((), metavar="KEY=VALUE")
    """On a cluster: run on nodes with these labels, each as KEY=VALUE; for example, use one kind of several GPUs."""
    ray: bool = False
    """Start a Ray on this machine and run the job on it. Without it, a job runs in this process unless there is a
    cluster: RAY_ADDRESS, a submitted job, or a Ray that runs on this machine."""

    def __post_init__(self) -> None:
        """Raises InputError for impossible workers, also with --plan."""
        super().__post_init__()
        self.worker_request()

    def worker_request(self) -> WorkerRequest:
        """Returns what the options request of the workers. Raises InputError for impossible options."""
        return WorkerRequest(wait_s=self.wait, labels=parse_labels(self.node_label))


@dataclass(frozen=True, kw_only=True)
class Workers(ClusterJob):
    """Options of a job whose work is spread over workers."""

    GROUP: ClassVar = "workers"

    min_workers: int = 1
    """On a cluster: the job needs nodes for N workers; see --wait."""
    max_workers: int = MAX_WORKERS
    """The largest number of workers on a cluster. The job requests nodes for as many of them as it can use, and the
    limits of the cluster bound them too. Without a cluster, a job uses the cores of this machine."""

    def worker_request(self) -> WorkerRequest:
        """See ClusterJob."""
        return replace(super().worker_request(), min_workers=self.min_workers, max_workers=self.max_workers)


def run(main: Callable[[Options], Any], options: type[Options], argv: list[str] | None = None) -> None:
    """Parses `--config FILE.yaml --key value …`, runs the job and handles its errors.

    Exits with status 1 for bad input, 2 for bad usage, 130 after SIGINT and 143 after SIGTERM; returns (status 0) if
    the job succeeds. The line about a signal has the notes of the exception, which say what is kept (`resumable`).

    Args:
        main: The job; called with the parsed options.
        options: The class of the options.
        argv: The command line; default: that of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    place = ""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be valid UTF-8
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too; read when they are imported
    try:
        check_locale(arguments)
        parsed = parse_arguments(options, arguments, main.__module__)
        place = parsed.store
        finish()
        with raise_on_sigterm():
            main(parsed)
    except KeyboardInterrupt as end:
        name, status = ("terminated", 143) if isinstance(end, Terminated) else ("interrupted", 130)
        exit_with_error("; ".join([name, *dict.fromkeys(getattr(end, "__notes__", ()))]), status)
    except BrokenPipeError:
        os._exit(141)
    except BaseException as error:
        cause = find_input_error(error)
        problem = str(cause) if cause is not None else describe_os_problem(error, place)
        if problem is None:
            raise
        exit_with_error(problem, 2 if isinstance(cause, UsageError) else 1, getattr(cause, "__notes__", ()))


def check_locale(arguments: Sequence[str]) -> None:
    """Raises InputError for arguments that the locale of this process does not read as UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding.lower() not in ("utf-8", "utf8") and (wrong := [each for each in arguments if not each.isascii()]):
        raise InputError(
            f"{os.fsencode(wrong[0]).decode(errors='replace')}: expected ASCII, as the locale of this process has the "
            f"encoding {encoding}; set the environment variable PYTHONUTF8=1 for texts in UTF-8"
        )


class Terminated(KeyboardInterrupt):
    """SIGTERM: it ends a job as Ctrl-C does, so that temporary files are removed and workers end."""


def raise_terminated(*_: object) -> None:
    """The handler of SIGTERM: raises Terminated. A second SIGTERM ends the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raises Terminated in the main thread when SIGTERM arrives within the block; a second SIGTERM ends the process.

    A program that calls a job and handles SIGTERM itself keeps its handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def describe_os_problem(error: BaseException, place: str) -> str | None:
    """Returns one line for an operating-system error that a user can fix, through Ray's wrappers; otherwise None."""
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        error = inner
    return describe_os_error(error, place) if isinstance(error, OSError) else None


def options_class_of(main: Callable[[Any], object]) -> type[Common]:
    """Returns the class of the options that a job's main takes."""
    options: type[Common] = typing.get_type_hints(main)["options"]
    return options


def find_input_error(error: BaseException) -> InputError | None:
    """Returns the InputError behind an exception, through Ray's wrappers and causes; None if there is no such error."""
    if (missing := find_missing_package(error)) is not None:  # not one that was handled before another error
        return missing
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = getattr(error, "cause", None)  # Ray's wrapper is an InputError too, but prints the worker's whole trace
        if isinstance(error, InputError) and inner is None:
            return error
        inner = inner or error.__cause__ or error.__context__
        if not isinstance(inner, BaseException):
            return None
        error = inner
    return None


def exit_with_error(message: str, status: int, notes: Sequence[str] = ()) -> typing.NoReturn:
    """Prints a line to stderr, a line below it for each note, and exits."""
    for line in [f"error: {message}", *notes]:
        print(shorten(" ".join(as_options(line).split())), file=sys.stderr, flush=True)
    if has_unfinished_threads() and threading.current_thread() is threading.main_thread() and runs_one_job():
        sys.stdout.flush()
        os._exit(status)  # Python would wait for the units that threads have begun, up to a minute
    sys.exit(status)


def as_options(message: str) -> str:
    """Returns a message of the library for the user of a job.

    `parameter NAME` becomes the option --name, and `riptide JOB` the form in which the user starts jobs.
    """
    named = re.sub(r"\bparameter ([a-z_]+)", lambda match: "--" + match[1].replace("_", "-"), message)
    return commands_as_started(named)


WARNING = "warning: "  # the start of a line that is printed for programs too
# Rewrites warnings for a program that calls jobs, which print nothing else then; None: a user runs a job.
_rewrite: ContextVar[Callable[[str], str] | None] = ContextVar("rewrite", default=None)


@contextlib.contextmanager
def print_only_warnings(rewrite: Callable[[str], str] = str) -> Iterator[None]:
    """Within the block, jobs print warnings only, as `rewrite` returns them, to stderr: for programs that call jobs."""
    before = _rewrite.set(rewrite)
    try:
        yield
    finally:
        _rewrite.reset(before)


def say(message: str) -> None:
    """Prints a line for the user who runs the job."""
    if (rewrite := _rewrite.get()) is None:
        encoding = sys.stdout.encoding or "utf-8"  # a program may print to a terminal without UTF-8
        print(message.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    elif message.startswith(WARNING):
        print(rewrite(message), file=sys.stderr, flush=True)


def say_to_program(message: str) -> None:
    """Prints a line to stderr for a program that calls the job. A user who runs the job has the same in other lines."""
    if (rewrite := _rewrite.get()) is not None:
        print(rewrite(message), file=sys.stderr, flush=True)


def say_on_stderr(message: str) -> None:
    """Prints a line to stderr: about how the job runs, not about what it makes."""
    if _rewrite.get() is None:
        print(message, file=sys.stderr, flush=True)


def chosen_task(store: Store, name: str | None) -> str | None:
    """Returns the value of --task; for a sweep, the task that it chose, which is printed."""
    if name is None:
        return None
    task = resolve_task(store, name)
    if task != name:
        say(f"task     {task}, chosen by sweeps/{name.removeprefix('sweeps/')}")
    return task


def print_complete(url: str, *files: str | None) -> None:
    """Prints for --plan that an artifact is complete, and the files that the job also writes."""
    say(f"nothing to make: {url} is complete")
    for file in filter(None, files):
        say(f"writes   {file}")


def print_stages(work: Work) -> None:
    """Prints the stages of a work for --plan."""
    for line in plan_stages(work):
        say(f"stage    {line}")


def _format_rate(rate: float) -> str:
    """Formats a rate per second."""
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"


class StageProgress:
    """Prints one line of progress: `encode 12,000 of 20,958 passages, 310/s, 29 s left`.

    On a terminal, the line is rewritten in place. On Ray, the stage is also measured.

    Args:
        name: Name of the stage.
        total: Number of units; None if unknown.
        unit: Plural name of the unit.
        artifact: Key of the artifact that the stage makes.
    """

    def __init__(self, name: str, total: int | None = None, unit: str = "passages", artifact: str = ""):
        self.name, self.total, self.unit = name, total, unit
        self.metrics = StageMetrics(name, artifact)
        self.remark = ""  # appended to the line
        self.done = self.kept = self.unfinished = 0
        self.started = self._told = time.monotonic()
        self._open = False

    def count(self, amount: int, is_kept: bool = False) -> None:
        """Adds `amount` units. `is_kept` marks the work of an earlier run, which does not count in the rate."""
        if is_kept:
            self.kept += amount
            return
        self.done += amount
        self.unfinished = 0
        self.add("rows", amount)
        if self.unit == "pairs":
            self.add("pairs", amount)
        self._print_if_due()

    def show(self, unfinished: int) -> None:
        """Receives the number of units that are done within parts that are not."""
        self.unfinished = unfinished
        self._print_if_due()

    def add(self, figure: str, amount: int, **tags: str) -> None:
        """Adds to a counter of `riptide.jobs.common.metrics`."""
        self.metrics.add(figure, amount, **tags)

    def _print_if_due(self) -> None:
        now = time.monotonic()
        if now - self._told >= (0.5 if sys.stderr.isatty() else 10) and _rewrite.get() is None:
            self._told = now
            self._print(now)

    def __enter__(self) -> StageProgress:
        self.metrics.set("running", 1)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._clear()
        self.metrics.close()
        if kind is None:
            seconds = time.monotonic() - self.started
            kept = f" ({self.kept:,} kept)" if self.kept else ""
            rate = f", {_format_rate(self.done / seconds)}" if self.done and seconds > 0.05 else ""
            say(f"{self.name}: {self.done + self.kept:,} {self.unit}{kept} in {seconds:,.1f} s{rate}")

    def say(self, line: str) -> None:
        """Prints a separate line next to the progress."""
        self._clear()
        say(line)

    def _clear(self) -> None:
        """Removes the progress line from a terminal."""
        if self._open and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _print(self, now: float) -> None:
        done = self.done + self.unfinished
        rate = done / max(now - self.started, 1e-9)
        line = f"{self.name}: {done + self.kept:,}"
        if self.total:
            line += f" of {self.total:,}"
        line += f" {self.unit}, {_format_rate(rate)}"
        if self.total and done:
            line += f", {(self.total - done - self.kept) / rate:,.0f} s left"
        if self.remark:
            line += f", {self.remark}"
        end = "" if sys.stderr.isatty() else "\n"
        print(f"\r\033[K{line}" if not end else line, end=end, file=sys.stderr, flush=True)
        self._open = True
