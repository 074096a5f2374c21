"""Builds or plans an index by shards, for the jobs build_bm25 and build_index."""

from __future__ import annotations

from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import IndexBuild
from riptide.indexing.work.work import check_targets, run_work
from riptide.jobs.common.job_options import Workers
from riptide.jobs.common.printing import print_complete, print_stages, say
from riptide.jobs.common.session import open_runner
from riptide.jobs.common.stage_progress import StageProgress


def fill_shards(store: Store, options: Workers, build: IndexBuild) -> Artifact | None:
    """Fills the pending shards of an index and prints a report; with --plan, prints the plan only.

    Returns:
        The newest generation of the index; None with --plan.
    """
    work = build.work
    if options.plan and work.is_complete:
        print_complete(work.previous[-1].url)
        return None
    check_targets(store, work)
    if options.plan:
        say(*build.plan_lines)
        print_stages(work)
        say(f"memory   {build.memory_text}")
        return None
    generations = work.previous
    if not work.is_complete:
        runner = open_runner(store, options)
        build.prepare(runner)
        generations = run_work(store, work, runner, StageProgress)
    say(*build.report())
    return generations[-1]
