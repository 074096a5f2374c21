"""Hash every file of a store again, and name the damaged and missing ones.

    riptide verify --store data/squad

The exit status is 1 if a file is damaged or missing.
"""

from __future__ import annotations

from riptide.jobs.common.cli import exit_with_error, run

import itertools
from dataclasses import dataclass

from riptide.base.memory import format_bytes
from riptide.indexing.erasure.receipts import check_receipts
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.store import Store
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import say
from riptide.jobs.common.stage_progress import StageProgress


@dataclass(frozen=True, kw_only=True)
class Verify(Common):
    limit: int | None = None
    """Hash at most N parts of each artifact."""


def main(options: Verify) -> None:
    store = Store(options.store).require_not_empty()
    files = list(store.storage.list(""))
    if options.plan:
        say(f"{store.url}: would read {len(files):,} files, {format_bytes(sum(size for _, size in files))}")
        return
    problems = 0
    with StageProgress("verify", unit="bytes") as stage:
        for finding in itertools.chain(verify(store, options.limit), check_receipts(store)):
            stage.count(finding.bytes)
            if finding.problem:
                problems += 1
                say(f"bad: {finding.problem}")
    for key in store.incomplete_keys():
        say(f"incomplete: {store.url}/{key}: the command that makes it resumes it")
    if problems:
        remedy = "restore them, or remove their artifacts and make them again"
        exit_with_error(f"{store.url}: {problems} bad or missing files; {remedy}", 1)
    say(f"{store.url}: {len(store.keys()):,} artifacts are as they were committed")


if __name__ == "__main__":
    run(main, Verify)
