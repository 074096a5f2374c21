"""Prints the plan of a job with the estimate of its work, or runs the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from riptide.base.wording import Parameter
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.common.job_options import Common, EstimatedJob
from riptide.jobs.common.printing import collect_findings, say
from riptide.jobs.common.session import num_gpus
from riptide.jobs.common.starting import job_name

if TYPE_CHECKING:
    from riptide.jobs.planning.planned_job import PlannedJob
    from riptide.jobs.planning.planner import Planner

CHAINS = ("pipeline", "reproduce")  # jobs that run other jobs, and print the estimates of these


def run_or_plan(main: Callable[[Any], Any], options: Common) -> None:
    """Runs a job. With --plan, prints its plan, and its estimate if it has one."""
    job = main.__module__.rpartition(".")[2]
    job = job_name() if job == "__main__" else job
    if not options.plan or job in CHAINS or not isinstance(options, EstimatedJob):
        main(options)
        return
    planner = open_planner(options)
    print_estimate(planner, job, options, lambda: main(options))
    say(*calibration_warning(planner))


def print_estimate(planner: Planner, job: str, options: Common, print_plan: Callable[[], object]) -> None:
    """Prints the plan of a job, then its estimate unless its artifact is complete.

    Sizes that the user expects take the place of the store, so the job does not print its own plan then.

    Args:
        planner: The planner.
        job: Name of the job, with underscores.
        options: Its options.
        print_plan: Prints the job's own plan.
    """
    with collect_findings() as findings:
        if not planner.facts.sizes.expected:
            print_plan()
    if isinstance(options, EstimatedJob) and not findings.is_complete:
        say(*planner.lines(planned_jobs(job, options, findings.values)))


def calibration_warning(planner: Planner) -> list[str]:
    """Returns a warning if this machine was to be measured and no job runs a model; [] otherwise."""
    if not planner.is_calibrated or planner.measured:
        return []
    return [f"warning: {Parameter('calibrate')}: nothing was measured, as no pending work runs a known model"]


def open_planner(options: EstimatedJob, cluster: str | None = None) -> Planner:
    """Returns the planner that the options of a job ask for.

    Args:
        options: The options.
        cluster: The description of the machines if the options name none; None: this machine.

    Raises:
        InputError: For a bad cluster file or size.
    """
    from riptide.jobs.planning.models import Models
    from riptide.jobs.planning.planned_job import Facts
    from riptide.jobs.planning.planner import Planner
    from riptide.jobs.planning.sizes import Sizes, parse_sizes

    wanted = options.estimates
    facts = Facts(Sizes(parse_sizes(wanted.expect)), Models(reads_stores=not wanted.expect))
    cluster = wanted.cluster or (None if wanted.calibrate else cluster)
    return Planner(cluster, num_gpus(), wanted.calibrate, facts)


def planned_jobs(job: str, options: EstimatedJob, findings: Mapping[str, Any] | None = None) -> list[PlannedJob]:
    """Returns the jobs of which a job consists, as the planner takes them.

    Args:
        job: Name of the job, with underscores.
        options: Its options.
        findings: Values that replace those of its options, or are added to them.
    """
    from riptide.jobs.planning.planned_job import PlannedJob

    planned = []
    for name, each in options.estimated_as(job):
        values = {name: option.value(each) for name, option in options_by_name(type(each)).items()}
        label = next((values[name] for name in each.NAMED_BY if values[name] is not None), "")
        planned.append(PlannedJob(name, each.store, values | dict(findings or {}), tuple(each.made_keys(label))))
    return planned
