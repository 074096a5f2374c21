"""Compare two runs by few verdicts of people on pairs that they rank differently.

    riptide judge bm25 hybrid --store data/squad
    riptide judge bm25 hybrid --store data/squad --verdicts ~/Downloads/verdicts-*.jsonl

The first call writes a page and a file with the passages to judge. Each later call adds verdicts and prints the
difference of the runs with an interval, and whether that is enough. The split needs no judgements.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.judging.judge_options import Judge
from riptide.jobs.judging.judging import judge, open_judging, print_lines, print_plan


def main(options: Judge) -> None:
    work = open_judging(Store(options.store).require_not_empty(), options)
    say(*(print_plan(work) if options.plan else print_lines(judge(work))))


if __name__ == "__main__":
    run(main, Judge)
