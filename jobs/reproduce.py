"""Reproduce a table of a paper, and show our figures next to the paper's.

    riptide reproduce --table dptdr-3 --scale small --raw raw
    riptide reproduce --table dptdr-3 --scale paper --plan

A table is a file of jobs/tables. The paper's scale needs its data, its backbone and GPUs; --plan needs none of them: it
checks every option, estimates the hours of every step, and says which data to download. An interrupted reproduction is
resumed by the same command. Tables share stores, so what one of them has made is not made again.
"""

from __future__ import annotations

from riptide.jobs.common.cli import run

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.store.result_files import write_files
from riptide.indexing.work.work import resumable
from riptide.jobs.common.job_options import Common
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
from riptide.jobs.reproduction.costs import Costs
from riptide.jobs.reproduction.page import RAW, html_page_of, licences, markdown_page, page_blocks
from riptide.jobs.reproduction.raw_data import missing_data
from riptide.jobs.reproduction.table import Scale, Table, find_table, read_table

# 40% of the bfloat16 peak of an A100, 312 TFLOP/s; float32 of two cores of a server CPU.
RATES = {"paper": 125.0, "small": 0.3}


@dataclass(frozen=True, kw_only=True)
class Reproduce(Common):
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
    tflops: float | None = option(None, positive=True)
    """With --plan: the rate for the estimate of hours, in 10^12 operations per second of one device. Default: 125 at
    the scale of the paper, which is 40% of an A100's peak in bfloat16; 0.3 at the small scale, which is two cores of a
    CPU."""
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
    costs = Costs(options.raw, options.tflops or RATES[options.scale])
    performer = Performer(options.plan, describe=costs.describe)
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
    if options.plan:
        say(f"estimate: {costs.total()}")
        return
    content = results_bytes(expected, experiment_run.results, experiment_run.notes, experiment.sets)
    write_files([(path, content)], overwrite=True)
    write_pages(table, options.scale, path)


def write_pages(table: Table, scale: Scale, path: str) -> None:
    """Writes the page of a file of results next to it, as HTML and Markdown, and prints it."""
    blocks = [*page_blocks(table, scale, read_results(path)), *licences(table, scale)]
    stem = path.removesuffix(ENDING)
    text = markdown_page(table.heading, blocks)
    write_files([(f"{stem}.md", text), (f"{stem}.html", html_page_of(table.heading, blocks))], overwrite=True)
    say(text, f"page: {stem}.html; values of each query: {path}")


if __name__ == "__main__":
    run(main, Reproduce)
