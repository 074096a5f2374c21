"""Runs steps and records their time, or prints them as commands."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from riptide.jobs.commands.steps import JobStep
from riptide.jobs.common.printing import say
from riptide.jobs.pipeline import run_step


@dataclass
class Performer:
    """Runs or prints the steps of an experiment.

    Attributes:
        plan: Whether steps are printed and not performed.
        seconds: The time of each step by `step_key`, from an earlier experiment too: the longest, since a step whose
            artifact is complete takes no time.
        planned: The steps that were printed, by `step_key`.
        describe: Returns what is printed behind the command of a planned step.
    """

    plan: bool
    seconds: dict[str, float] = field(default_factory=dict)
    planned: dict[str, JobStep] = field(default_factory=dict)
    describe: Callable[[JobStep], str] | None = None

    def perform(self, step: JobStep) -> None:
        """Runs a step; with --plan, prints its command once. Raises InputError with the place of the step."""
        if self.plan:
            if step.step_key not in self.planned:
                note = self.describe(step) if self.describe is not None else ""
                say(f"$ {step.command}{f'  # {note}' if note else ''}")
            self.planned[step.step_key] = step
            return
        started = time.perf_counter()
        run_step(step)
        seconds = time.perf_counter() - started
        self.seconds[step.step_key] = round(max(seconds, self.seconds.get(step.step_key, 0.0)), 1)

    def estimate(self) -> str:
        """Returns a line: the number of planned steps per job that have not run, and their estimated time."""
        pending = Counter(step.job for key, step in self.planned.items() if key not in self.seconds)
        if not pending:
            return "all steps have run"
        counts = ", ".join(f"{count} {job}" for job, count in pending.items())
        by_job: dict[str, list[float]] = {}
        for key, seconds in self.seconds.items():
            job = key.split()[1].removeprefix("jobs/").removesuffix(".py")
            by_job.setdefault(job, []).append(seconds)
        total = sum(count * sum(by_job[job]) / len(by_job[job]) for job, count in pending.items() if job in by_job)
        unknown = [job for job in pending if job not in by_job]
        known = f"about {total / 60:,.0f} min, by the steps that have run" if total else "unknown time"
        return f"{counts}: {known}" + (f"; no {', '.join(unknown)} has run yet" if unknown else "")
