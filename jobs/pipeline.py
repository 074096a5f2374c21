"""Run a chain of jobs from a recipe, and resume at the first pending step.

    riptide pipeline --config jobs/recipes/pipeline-squad.yaml
    riptide pipeline --config jobs/recipes/pipeline-squad.yaml --plan
    riptide pipeline --config jobs/recipes/pipeline-squad.yaml --only "encode_corpus squad"

A recipe names the store and a list of steps, each a job with that job's own options:

    store: data/squad
    steps:
      - import_corpus: {source: examples/squad}
      - build_bm25: {}

A recipe may have `values: {set: scifact}`; {set} in it is then replaced by scifact, or by what --values gives.

The options of every step are checked before the first one runs. Each job finds what an earlier run has committed, so
the steps that are complete take seconds. All steps run in this process, so Ray and torch start once.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import find_input_error, run

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.storage.storage import explain_disk_errors
from riptide.indexing.store.conflicts import TakenNameError
from riptide.indexing.work.work import resumable
from riptide.jobs.commands.steps import JobStep, find_step, read_steps
from riptide.jobs.common.job_options import EstimatedJob
from riptide.jobs.common.plans import calibration_warning, open_planner, print_estimate
from riptide.jobs.common.printing import say, say_summary
from riptide.telemetry.spans import span

if TYPE_CHECKING:
    from riptide.jobs.planning.planner import Planner


@dataclass(frozen=True, kw_only=True)
class Pipeline(EstimatedJob):
    GROUP: ClassVar = "steps"

    store: str = option("", metavar="STORE")
    """Replaces the store of the recipe: a local folder, or s3://, gs:// or az://bucket/prefix."""
    config: str = option(metavar="FILE")
    """YAML file with the steps."""
    only: str | None = None
    """Run this step alone. Give its number, its job, the name of what it makes, or job and name, as the lines `==` show
    them; several steps must not have it in common."""
    values: dict[str, str] = field(default_factory=dict)
    """Replace values of the recipe, each as name and value: --values set scifact. A {NAME} in the recipe stands for the
    value of NAME, whose default is under `values` of the recipe."""
    until: str | None = None
    """Run the steps up to this one."""
    limit: int | None = None
    """The limit of each step that sets none, except imports. Use a separate store for a limited chain: names are not
    changed."""


def main(options: Pipeline) -> None:
    steps = read_steps(options.config, options.store, options.limit, options.values)
    planner = open_planner(options) if options.plan else None
    for done, step in enumerate(choose_steps(steps, options.only, options.until)):
        say(f"== {step.place}")
        if planner is not None:
            print_plan(step, steps, planner)
            continue
        # Completed steps are skipped when the command runs again.
        with resumable() if done else contextlib.nullcontext():
            run_step(step)
    if planner is not None:
        say(*planner.total(), *calibration_warning(planner))


def choose_steps(steps: Sequence[JobStep], only: str | None, until: str | None) -> Sequence[JobStep]:
    """Returns the steps to run. Raises InputError if --only or --until does not name exactly one step."""
    if only is not None and until is not None:
        raise InputError(f"{Parameter('only')} and {Parameter('until')}: expected one of them")
    if only is not None:
        return [find_step(steps, only)]
    return steps if until is None else steps[: find_step(steps, until).number]


def run_step(step: JobStep) -> None:
    """Runs the job of a step. Raises InputError with the place of the step and the message of the job."""
    try:
        with explain_disk_errors(Path(step.options.store)), span(step.title, store=step.options.store):
            step.main(step.options)
            say_summary(step.options.store)
    except SystemExit as end:  # the job has already printed the error
        if end.code:
            raise InputError(f"step {step.place}: ended with status {end.code}") from None
    except Exception as error:
        cause = find_input_error(error)
        if cause is None:
            error.add_note(f"in step {step.place}")
            raise
        located = InputError(f"step {step.place}: {cause}")
        for note in getattr(cause, "__notes__", ()):
            located.add_note(note)
        raise located from error


def print_plan(step: JobStep, steps: Sequence[JobStep], planner: Planner) -> None:
    """Prints the command of a step, its job's plan, or the step that has to run first and the reason, and its estimate.

    Raises:
        InputError: If the run ends with this error whatever its earlier steps make.
    """

    def print_own_plan() -> None:
        try:
            run_step(dataclasses.replace(step, options=dataclasses.replace(step.options, plan=True)))
        except InputError as error:
            if step.number == 1 or isinstance(find_input_error(error.__cause__ or error), TakenNameError):
                raise
            say(f"after step {step.after(steps)}; now: {f'{error}'.removeprefix(f'step {step.place}: ')}")

    say(f"$ {step.command}")
    print_estimate(planner, step.job, step.options, print_own_plan)


if __name__ == "__main__":
    run(main, Pipeline)
