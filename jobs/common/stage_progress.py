"""The progress of a stage of a job: prints a progress line and records metrics."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType

from riptide.base.wording import printable
from riptide.jobs.common.job_metrics import StageMetrics
from riptide.jobs.common.printing import is_run_by_user, say_event
from riptide.telemetry.logs import is_json, write_line
from riptide.telemetry.phases import Phase
from riptide.telemetry.spans import span


def _format_rate(rate: float) -> str:
    """Formats a rate per second for the progress line."""
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
        self.name, self.total, self.unit, self.artifact = name, total, unit, artifact
        self.metrics = StageMetrics(name, artifact)
        self.remark = ""  # text at the end of the progress line
        self.done = self.kept = self.unfinished = 0
        self.started = self._told = time.monotonic()
        self._open = False
        self._contexts = contextlib.ExitStack()

    def count(self, amount: int, is_kept: bool = False) -> None:
        """Adds `amount` finished units. `is_kept`: an earlier run made them, so they do not count in the rate."""
        if is_kept:
            self.kept += amount
            return
        self.done += amount
        self.unfinished = 0
        self.add("rows", amount)
        if self.unit == "pairs":
            self.add("pairs", amount)
        self.metrics.add_measures()
        self._print_if_due()

    def show(self, unfinished: int) -> None:
        """Updates the number of finished rows within unfinished units."""
        self.unfinished = unfinished
        self._print_if_due()

    def add(self, figure: str, amount: int, **tags: str) -> None:
        """Adds an amount to a counter of `riptide.jobs.common.job_metrics`."""
        self.metrics.add(figure, amount, **tags)

    def _print_if_due(self) -> None:
        now = time.monotonic()
        if now - self._told >= (0.5 if sys.stderr.isatty() else 10) and is_run_by_user():
            self._told = now
            self._print(now)

    def __enter__(self) -> StageProgress:
        self.metrics.set("running", 1)
        self._contexts.enter_context(span(self.name, artifact=self.artifact))
        self._contexts.enter_context(Phase("driver"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, trace)
        self.metrics.add_measures()
        self._clear()
        self.metrics.close()
        if kind is None:
            seconds = time.monotonic() - self.started
            reused = f" ({self.kept:,} kept)" if self.kept else ""
            rate = f", {_format_rate(self.done / seconds)}" if self.done and seconds > 0.05 else ""
            say_event(
                f"{self.name}: {self.done + self.kept:,} {self.unit}{reused} in {seconds:,.1f} s{rate}", self.artifact
            )

    def say(self, line: str) -> None:
        """Prints a separate line without breaking the progress line."""
        self._clear()
        say_event(line, self.artifact)

    def _clear(self) -> None:
        """Erases the progress line on a terminal."""
        if self._open:
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
        self._open = sys.stderr.isatty() and not is_json()
        if self._open:
            print(f"\r\033[K{printable(line)}", end="", file=sys.stderr, flush=True)
        else:
            write_line(line, artifact=self.artifact)
