"""Prints the plan of a job with the estimate of its work, or runs the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import say, watch_for_complete
from riptide.jobs.common.session import num_gpus
from riptide.jobs.common.starting import job_name

if TYPE_CHECKING:
    from riptide.jobs.planning.planned_job import PlannedJob
    from riptide.jobs.planning.planner import Planner

CHAINS = ("pipeline", "reproduce")  # jobs that run other jobs, and print the estimates of these


def run_or_plan(main: Callable[[Any], Any], options: Common) -> None:
    """Runs a job. With --plan, prints its plan and its estimate; with --expect, which reads no data, the estimate only.

    Raises:
        InputError: If options of estimates are given to a job that has none.
    """
    job = main.__module__.rpartition(".")[2]
    job = job_name() if job == "__main__" else job
    if not options.plan or job in CHAINS:
        main(options)
        return
    from riptide.jobs.planning.planner import ESTIMATES

    if job not in ESTIMATES:
        if options.estimates.is_used:
            raise InputError(f"{Parameter('plan')}: {job} has no estimate; these have one: {', '.join(ESTIMATES)}")
        main(options)
        return
    planner = open_planner(options)
    with watch_for_complete() as complete:
        if not options.estimates.expect:
            main(options)
    if not complete:
        say(*planner.lines(planned_job(job, options)))


def open_planner(options: Common) -> Planner:
    """Returns the planner that the options of a job ask for. Raises InputError for a bad cluster file or size."""
    from riptide.jobs.planning.models import Models
    from riptide.jobs.planning.planned_job import Facts
    from riptide.jobs.planning.planner import Planner
    from riptide.jobs.planning.sizes import Sizes, parse_sizes

    wanted = options.estimates
    facts = Facts(Sizes(parse_sizes(wanted.expect)), Models(reads_stores=not wanted.expect))
    return Planner(wanted.cluster, num_gpus(), wanted.calibrate, facts)


def planned_job(job: str, options: Common) -> PlannedJob:
    """Returns a job as the planner takes it."""
    from riptide.jobs.planning.planned_job import PlannedJob

    values = {name: option.value(options) for name, option in options_by_name(type(options)).items()}
    label = next((values[name] for name in options.NAMED_BY if values[name] is not None), "")
    return PlannedJob(job, options.store, values, tuple(options.made_keys(label)))
