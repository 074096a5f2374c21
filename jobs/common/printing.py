"""Prints lines for the user of a job; for a program that calls jobs, warnings only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from riptide.base.wording import LIBRARY
from riptide.indexing.work.work import Work, plan_stages
from riptide.jobs.common.starting import COMMAND_LINE

WARNING = "warning: "  # the start of a line that is printed for programs too
# Rewrites warnings for a program that calls jobs, which print nothing else then; None: a user runs a job.
_rewrite: ContextVar[Callable[[str], str] | None] = ContextVar("rewrite", default=None)


@contextlib.contextmanager
def print_only_warnings(rewrite: Callable[[str], str] = LIBRARY.render) -> Iterator[None]:
    """Within the block, jobs print warnings only, as `rewrite` returns them, to stderr: for programs that call jobs."""
    before = _rewrite.set(rewrite)
    try:
        yield
    finally:
        _rewrite.reset(before)


def is_run_by_user() -> bool:
    """Returns whether a user runs the job, and not a program that calls it."""
    return _rewrite.get() is None


def say(*lines: str) -> None:
    """Prints lines for the user who runs the job."""
    for line in lines:
        if (rewrite := _rewrite.get()) is None:
            encoding = sys.stdout.encoding or "utf-8"  # a program may print to a terminal without UTF-8
            shown = COMMAND_LINE.render(line)
            print(shown.encode(encoding, "backslashreplace").decode(encoding), flush=True)
        elif line.startswith(WARNING):
            print(rewrite(line), file=sys.stderr, flush=True)


def say_to_program(message: str) -> None:
    """Prints a line to stderr for a program that calls the job. A user who runs the job has the same in other lines."""
    if (rewrite := _rewrite.get()) is not None:
        print(rewrite(message), file=sys.stderr, flush=True)


def say_on_stderr(message: str) -> None:
    """Prints a line to stderr: about how the job runs, not about what it makes."""
    if is_run_by_user():
        print(COMMAND_LINE.render(message), file=sys.stderr, flush=True)


def print_complete(url: str, *files: str | None) -> None:
    """Prints for --plan that an artifact is complete, and the files that the job also writes."""
    say(f"nothing to make: {url} is complete", *(f"writes   {file}" for file in files if file))


def print_stages(work: Work) -> None:
    """Prints the stages of a work for --plan."""
    say(*(f"stage    {line}" for line in plan_stages(work)))
