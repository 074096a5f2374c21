"""Plans an index in Lucene shards, or fills its pending shards: for build_bm25 and build_index."""

from __future__ import annotations

from jobs.common.cli import Stage, Workers, say, say_complete, say_stages

from collections.abc import Sequence
from typing import Protocol

from jobs.common.session import open_runner

from indexing.store.artifact import Artifact
from indexing.store.store import Store
from indexing.work.tasks import Runner
from indexing.work.work import Work, run_work


class LuceneWork(Work, Protocol):
    """A work that fills Lucene shards.

    Attributes:
        previous: The existing generations.
        complete: Whether they cover all rows.
    """

    previous: list[Artifact]
    complete: bool

    def pin_versions(self, runner: Runner) -> None:
        """Adds the versions of Lucene and Anserini to the configuration, as a worker reports them."""


def fill_shards(store: Store, options: Workers, work: LuceneWork, plan: Sequence[str]) -> bool:
    """Fills the pending shards of an index, or prints its plan with --plan.

    Args:
        store: The store.
        options: The options of the job.
        work: The work that makes the index.
        plan: Lines about the shards for --plan.

    Returns:
        Whether the index is complete and can be opened; False with --plan.
    """
    if options.plan:
        if work.complete:
            say_complete(work.previous[-1].url)
            return False
        for line in plan:
            say(line)
        say_stages(work)
        say("memory   up to 2 GB of Java per process that fills shards")
        return False
    if not work.complete:
        runner = open_runner(store, options)
        work.pin_versions(runner)
        run_work(store, work, runner, Stage)
    return True
