"""Reproduce a table of a paper, and show our figures next to the paper's.

    riptide reproduce --table dptdr-3 --scale small --raw raw
    riptide reproduce --table dptdr-3 --scale paper --plan

A table is a file of jobs/tables. The paper's scale needs its data, its backbone and GPUs; --plan needs none of them: it
checks every option, estimates the time and price of every step, and says which data to download. An interrupted
reproduction is resumed by the same command. Tables share stores, so what one of them has made is not made again.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.store.result_files import write_files
from riptide.indexing.work.work import resumable
from riptide.jobs.commands.steps import JobStep
from riptide.jobs.common.job_options import EstimatedJob
from riptide.jobs.common.plans import calibration_warning, open_planner, planned_jobs
from riptide.jobs.common.printing import say
from riptide.jobs.experiments import (
    ENDING,
    STORE,
    ExperimentRun,
    Performer,
    check_name,
    check_results,
    identity,
    preparing_steps,
    read_results,
    results_bytes,
)
from riptide.jobs.reproduction.page import RAW, html_page_of, licences, markdown_page, page_blocks
from riptide.jobs.reproduction.raw_data import add_sizes, data_of, is_imported, missing_data
from riptide.jobs.reproduction.table import Scale, Table, find_table, read_table

if TYPE_CHECKING:
    from riptide.jobs.planning.planner import Planner

CLUSTERS = {"paper": "a100x8", "small": None}  # the machines of estimates by default; None: this machine


@dataclass(frozen=True, kw_only=True)
class Reproduce(EstimatedJob):
    GROUP: ClassVar = "table"

    table: str
    """The table: its paper and number, for example dptdr-3, or a YAML file of your own with the form of those in
    jobs/tables."""
    scale: Scale = "small"
    """small: a part of the data and a small backbone, in minutes to hours on a CPU; paper: the paper's data and
    backbone."""
    raw: str = option("raw", metavar="FOLDER")
    """Folder of the raw data, local or s3://; --plan lists which of them are missing."""
    seeds: tuple[int, ...] = ()
    """Seeds of the training runs of all arms; default: as the table says."""
    results: str | None = option(None, metavar="FILE")
    """File of the results, FILE.json.gz: options, the values of each query, machine and commit. The page is written
    next to it as .html and .md. Default: results/TABLE-SCALE.json.gz."""
    overwrite: bool = False
    """Replace a file of --results that holds results of other options."""
    store: str = option("data/reproduce", metavar="STORE")
    """Folder of the stores of all tables, local or s3://; each data set of a scale has a store there."""
    limit: int | None = option(None, hidden=True)
    """Is refused: the table defines the sizes."""


def main(options: Reproduce) -> None:
    if options.limit is not None:
        raise InputError(f"{Parameter('limit', options.limit)}: the table defines the sizes; copy it and change them")
    table = read_table(find_table(options.table))
    path = options.results or f"results/{table.name}-{options.scale}{ENDING}"
    check_name(path)
    store = f"{options.store.rstrip('/')}/{options.scale}"
    experiment = table.experiment(options.scale, store, options.raw).with_seeds(options.seeds)
    described = table.experiment(options.scale, STORE, RAW).with_seeds(options.seeds)
    expected = identity(described, table=table.name, scale=options.scale)
    if not options.overwrite:
        check_results(path, expected)
    missing = missing_data(preparing_steps(experiment, table.path), options.raw)
    planner = open_planner(options, CLUSTERS[options.scale]) if options.plan else None
    performer = Performer(options.plan, describe=None if planner is None else partial(describe, planner, options.raw))
    stem = path.removesuffix(ENDING)
    experiment_run = ExperimentRun(experiment, table.path, Path(stem), performer, {})
    experiment_run.check()
    if options.plan:
        say(table.heading, *missing)
    elif missing:
        more = f"; and {len(missing) - 1} more, which {Parameter('plan')} lists" if len(missing) > 1 else ""
        raise InputError(f"{missing[0]}{more}")
    with resumable():
        experiment_run.prepare()
        for arm in experiment.arms:
            if experiment.sets_of(arm):
                experiment_run.measure(arm)
    if planner is not None:
        say(*planner.take_notes(), *planner.total(), *calibration_warning(planner))
        return
    content = results_bytes(expected, experiment_run.results, experiment_run.notes, experiment.sets)
    write_files([(path, content)], overwrite=True)
    write_pages(table, options.scale, path)


def describe(planner: Planner, raw: str, step: JobStep) -> str:
    """Adds a step to a plan. Returns its time and price as text; "" for a step without an estimate or work.

    Args:
        planner: The planner.
        raw: Folder of the raw data, whose declared sizes count until they are imported.
        step: The step; the steps are given in their order.
    """
    from riptide.jobs.planning.estimate import NOTHING

    if data_of(step, raw) is not None and not is_imported(step):
        add_sizes(planner.facts.sizes, step, raw)
    if not isinstance(step.options, EstimatedJob):
        return ""
    estimate = planner.plan(planned_jobs(step.job, step.options))
    if estimate is None:
        return "unknown time"
    return "" if estimate is NOTHING else estimate.describe_cost(planner.planned[-1][1])


def write_pages(table: Table, scale: Scale, path: str) -> None:
    """Writes the page of a file of results next to it, as HTML and Markdown, and prints it."""
    blocks = [*page_blocks(table, scale, read_results(path)), *licences(table, scale)]
    stem = path.removesuffix(ENDING)
    text = markdown_page(table.heading, blocks)
    write_files([(f"{stem}.md", text), (f"{stem}.html", html_page_of(table.heading, blocks))], overwrite=True)
    say(text, f"page: {stem}.html; values of each query: {path}")


if __name__ == "__main__":
    run(main, Reproduce)
