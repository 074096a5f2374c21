"""Runs a job: reads its options, and converts errors and signals to a one-line message and an exit status."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from riptide.base.errors import InputError
from riptide.base.wording import cut_words, shorten
from riptide.indexing.storage.storage import describe_os_error
from riptide.indexing.work.local_runner import has_unfinished_threads
from riptide.jobs.commands.command_line import UsageError, parse_arguments
from riptide.jobs.commands.stopping import Terminated, raise_on_sigterm
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.plans import run_or_plan
from riptide.jobs.common.printing import say_summary
from riptide.jobs.common.starting import COMMAND_LINE, finish, job_name, runs_one_job
from riptide.process.extras import find_missing_package
from riptide.process.memory import describe_lack_of_memory
from riptide.telemetry.logs import is_json, log, log_lines, write_line
from riptide.telemetry.spans import flush_spans, span
from riptide.telemetry.submission import submission_id

Options = TypeVar("Options", bound="Common")
# Environment variable of a process whose error messages another process converts to its own form.
KEEP_MARKS_VARIABLE = "RIPTIDE_KEEP_MARKS"


def run(main: Callable[[Options], Any], options: type[Options], argv: list[str] | None = None) -> None:
    """Parses the options `--config FILE.yaml --key value …`, runs the job and handles its errors.

    Exits with status 1 for bad input, 2 for bad usage, 130 after SIGINT and 143 after SIGTERM; returns (status 0) if
    the job succeeds. The line about a signal has the notes of the exception, which say what is kept (`resumable`).

    Args:
        main: The job; called with the parsed options.
        options: The class of the options.
        argv: The command line; default: that of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    store_url = ""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be valid UTF-8
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when huggingface_hub is imported
    # Read when OpenMP is loaded: threads that spin while they wait take the cores from other jobs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(log_lines("text", job_name()))  # so that errors in options have the inherited format
            check_locale(arguments)
            job_options = parse_arguments(options, arguments, main.__module__)
            store_url = job_options.store
            finish()
            stack.enter_context(log_lines(job_options.log_format, job_name()))
            stack.callback(flush_spans)
            with raise_on_sigterm(), span(job_name(), store=store_url, submission=submission_id()):
                run_or_plan(main, job_options)
                say_summary(store_url)
        except KeyboardInterrupt as end:
            name, status = ("terminated", 143) if isinstance(end, Terminated) else ("interrupted", 130)
            exit_with_error("; ".join([name, *dict.fromkeys(getattr(end, "__notes__", ()))]), status)
        except BrokenPipeError:
            _exit_at_once(141)
        except BaseException as error:
            cause = find_input_error(error)
            problem = f"{cause}" if cause is not None else describe_os_problem(error, store_url)
            if problem is None:
                if is_json() and isinstance(error, Exception):
                    log.critical("%s: %s", type(error).__name__, error, exc_info=error)
                    sys.exit(1)
                raise
            exit_with_error(problem, 2 if isinstance(cause, UsageError) else 1, getattr(cause, "__notes__", ()))


def check_locale(arguments: Sequence[str]) -> None:
    """Raises InputError for a non-ASCII argument if the locale's encoding is not UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding.lower() not in ("utf-8", "utf8") and (wrong := [each for each in arguments if not each.isascii()]):
        raise InputError(
            f"{os.fsencode(wrong[0]).decode(errors='replace')}: expected ASCII, as the locale of this process has the "
            f"encoding {encoding}; set the environment variable PYTHONUTF8=1 for texts in UTF-8"
        )


def describe_os_problem(error: BaseException, store_url: str) -> str | None:
    """Returns a line about memory, a disk or a folder that a user can fix, also behind Ray's wrappers, or None."""
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        error = inner
    if (problem := describe_lack_of_memory(error)) is not None:
        return problem
    if isinstance(error, FileNotFoundError) and error.filename is None:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the current folder was removed: change to another one, and run the command again"
    return describe_os_error(error, store_url) if isinstance(error, OSError) else None


def options_class_of(main: Callable[[Any], object]) -> type[Common]:
    """Returns the class of options that the main function of a job takes."""
    options: type[Common] = typing.get_type_hints(main)["options"]
    return options


def find_input_error(error: BaseException) -> InputError | None:
    """Returns the InputError that caused an exception, found through Ray's wrappers and causes, or None."""
    # Only the error itself is checked for a missing package: one among its causes was already handled.
    if (missing := find_missing_package(error)) is not None:
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
    """Prints an error line and one line per note to stderr, and exits. In JSON, the notes follow in the same line."""
    for line in map(cut_words, ["; ".join([message, *notes])] if is_json() else [f"error: {message}", *notes]):
        keeps_marks = KEEP_MARKS_VARIABLE in os.environ  # their values are short, and a cut would break them
        shown = " ".join((line if keeps_marks else COMMAND_LINE.render(line)).split())
        write_line(shown if keeps_marks else shorten(shown), logging.ERROR)
    if has_unfinished_threads() and threading.current_thread() is threading.main_thread() and runs_one_job():
        sys.stdout.flush()
        _exit_at_once(status)  # a normal exit waits up to a minute for the threads to finish their units
    sys.exit(status)


def _exit_at_once(status: int) -> typing.NoReturn:
    """Ends the process without waiting for its threads, once its spans are sent."""
    flush_spans()
    os._exit(status)
