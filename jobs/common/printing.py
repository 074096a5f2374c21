"""Prints lines for the user of a job; if a program calls the job, prints warnings only."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from riptide.base.wording import LIBRARY, printable
from riptide.indexing.search.hit_tables import ShownHit, hit_table, style_for
from riptide.indexing.work.work import Work, plan_stages
from riptide.jobs.common.job_metrics import take_summary
from riptide.jobs.common.standard_output import print_line
from riptide.jobs.common.starting import COMMAND_LINE
from riptide.telemetry.logs import is_json, write_line


@dataclass
class PlanFindings:
    """What a job finds out while it prints its plan, for the estimate of its work.

    Attributes:
        is_complete: Whether its artifact is complete.
        values: Values by name that its options leave open, such as the source that a mode stands for.
    """

    is_complete: bool = False
    values: dict[str, Any] = field(default_factory=dict)


WARNING = "warning: "  # prefix of lines that are also printed for programs that call jobs
# Converts warnings for a program that calls jobs, for which nothing else is printed; None: a user runs the job.
_rewrite: ContextVar[Callable[[str], str] | None] = ContextVar("rewrite", default=None)
_findings: ContextVar[PlanFindings | None] = ContextVar("findings", default=None)
_only_results: ContextVar[bool] = ContextVar("only_results", default=False)


@contextlib.contextmanager
def print_only_warnings(rewrite: Callable[[str], str] = LIBRARY.render) -> Iterator[None]:
    """Context in which jobs print warnings only, converted by `rewrite`, to stderr: for programs that call jobs."""
    before = _rewrite.set(rewrite)
    try:
        yield
    finally:
        _rewrite.reset(before)


@contextlib.contextmanager
def print_only_results() -> Iterator[None]:
    """Context in which `say` prints warnings only, and `say_result` all lines: for jobs that run again and again."""
    before = _only_results.set(True)
    try:
        yield
    finally:
        _only_results.reset(before)


def is_run_by_user() -> bool:
    """Returns whether a user runs the job; False if a program calls it."""
    return _rewrite.get() is None


def say(*lines: str) -> None:
    """Prints lines to stdout for the user who runs the job; for a program that calls it, warnings only, to stderr."""
    for line in lines:
        if (rewrite := _rewrite.get()) is None:
            if line.startswith(WARNING) or not _only_results.get():
                print_line(printable(COMMAND_LINE.render(line), allowed="\n\t"))
        elif line.startswith(WARNING):
            print(printable(rewrite(line)), file=sys.stderr, flush=True)


def say_hits(hits: Sequence[ShownHit], query: str, *, with_judgements: bool = False) -> None:
    """Prints a table of hits for the user who runs the job, on a terminal with the words of the query in bold.

    Args:
        hits: The hits, in display order.
        query: The query.
        with_judgements: Adds a column with the relevance.
    """
    if is_run_by_user() and hits:
        for line in hit_table(hits, query, style_for(sys.stdout), with_judgements=with_judgements):
            print_line(line)


def say_event(line: str, artifact: str = "") -> None:
    """Prints a line about the run of a job as `say` does; with --log-format json, it goes to the log on stderr.

    Args:
        line: The line, about a stage, a node, or a retry.
        artifact: Key of the artifact that the line is about, if any.
    """
    if is_run_by_user() and is_json():
        level = logging.WARNING if line.startswith(WARNING) or " is lost" in line else logging.INFO
        write_line(COMMAND_LINE.render(line.removeprefix(WARNING)), level, artifact)
    else:
        say(line)


def say_result(line: str, artifact: str = "") -> None:
    """Prints a line as `say_event` does, also in the context `print_only_results`."""
    before = _only_results.set(False)
    try:
        say_event(line, artifact)
    finally:
        _only_results.reset(before)


def say_to_program(message: str) -> None:
    """Prints a line to stderr if a program calls the job; for a user, other lines say the same."""
    if (rewrite := _rewrite.get()) is not None:
        print(printable(rewrite(message)), file=sys.stderr, flush=True)


def say_on_stderr(message: str) -> None:
    """Prints a line to stderr about how the job runs; lines about its results go to stdout."""
    if is_run_by_user():
        write_line(COMMAND_LINE.render(message))


def say_summary(store_url: str) -> None:
    """Prints on stderr where the job has spent its time, and its losses, if it has had stages; see `take_summary`."""
    if line := take_summary(store_url):
        say_on_stderr(line)


@contextlib.contextmanager
def collect_findings() -> Iterator[PlanFindings]:
    """Context that yields what a job within it finds out for the estimate of its work."""
    findings = PlanFindings()
    before = _findings.set(findings)
    try:
        yield findings
    finally:
        _findings.reset(before)


def note_for_estimate(**values: Any) -> None:
    """Adds values to those of the options from which the work of the job is estimated; see `PlanFindings`."""
    if (findings := _findings.get()) is not None:
        findings.values |= values


def print_complete(url: str, *files: str | None) -> None:
    """Prints, for --plan, that the artifact of a job is complete, and names the files that the job also writes."""
    if (findings := _findings.get()) is not None:
        findings.is_complete = True
    say(describe_complete(url), *(f"writes   {file}" for file in files if file))


def describe_complete(url: str) -> str:
    """Returns the line of a plan about an artifact that is complete."""
    return f"nothing to make: {url} is complete"


def print_stages(work: Work) -> None:
    """Prints, for --plan, the stages of a work."""
    say(*(f"stage    {line}" for line in plan_stages(work)))
