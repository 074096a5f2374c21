"""Compare two runs query by query, with tests, examples and a page of charts.

    riptide compare bm25 hybrid --store data/squad --html results/bm25-hybrid.html

The first run is the baseline: a difference above 0 is a gain of the second one. Runs are those of `riptide search` in
the store, or TREC files.
"""

from __future__ import annotations

from jobs.common.cli import Common, run, say

import json
from dataclasses import dataclass
from typing import ClassVar

from jobs.common.options import Heading
from jobs.comparison.comparing import compare_runs, open_comparison
from jobs.comparison.table import print_lines
from jobs.evaluation.evaluating import METRICS, EvaluationWork
from jobs.evaluation.runs import joined_names, run_contents

from indexing.store.documents import fingerprint_of
from indexing.store.result_files import whole_files
from indexing.store.store import Store
from retriever.errors import InputError
from retriever.options import option


@dataclass(frozen=True, kw_only=True)
class Compare(Common):
    GROUP: ClassVar = "comparison"
    NAMED_BY: ClassVar = ("second",)
    READS: ClassVar = {"first": "runs", "second": "runs"}

    first: str = option(positional=True, metavar="RUN")
    """The baseline: name of a run in the store, or a TREC file."""
    second: str = option(positional=True, metavar="RUN")
    """The run that is compared with it."""
    queries: str | None = None
    """Name of the query set; default: that of the runs. For two TREC files it may be left out if the store has only
    one."""
    split: str | None = None
    """The split of the queries whose judgements count; default: that of the runs, and test for two TREC files."""
    metrics: tuple[str, ...] = METRICS
    """Metrics, as evaluate takes them. The first one orders the queries. The p-values are adjusted for their number."""
    examples: int = 10
    """Number of the most won queries that are printed and on the page, and of the most lost ones."""
    OUTPUT: ClassVar = Heading("output")
    json: str | None = option(None, metavar="FILE")
    """Output file for all values, those of each query included; default: results/comparison-SPLIT-NAMES-DIGITS.json.
    The digits are a hash of what is compared."""
    html: str | None = option(None, metavar="FILE")
    """Output file for a page with charts and examples. It is one file that loads nothing else. Default: no page."""
    overwrite: bool = False
    """Replace the files of --json and --html if they have other content."""
    limit: int | None = None
    """Compare for the first N queries of the split."""


def main(options: Compare) -> None:
    if options.examples < 1:
        raise InputError(f"parameter examples {options.examples}: expected at least 1")
    store = Store(options.store).require()
    metrics = [metric for word in options.metrics for metric in word.split()]
    work = open_comparison(
        store,
        options.first,
        options.second,
        queries=options.queries,
        split=options.split,
        metrics=metrics,
        limit=options.limit,
    )
    path = options.json or default_path(work)
    if options.plan:
        say_plan(work, [path, options.html])
        return
    comparison = compare_runs(work)
    contents = {path: json.dumps(comparison.document(), indent=1, ensure_ascii=False) + "\n"}
    if options.html is not None:
        from jobs.comparison.page import render_page

        contents[options.html] = render_page(comparison, options.examples)
    with whole_files(list(contents), overwrite=options.overwrite) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write_text(content, encoding="utf-8")
    for line in print_lines(comparison, options.examples):
        say(line)
    say(f"\n{comparison.queries} {comparison.split}; all values in {path}")
    if options.html is not None:
        say(f"page: {options.html}")


def say_plan(work: EvaluationWork, files: list[str | None]) -> None:
    """Prints what a comparison measures and writes."""
    measured = work.queries
    say(
        f"{work.runs[0].label} and {work.runs[1].label}: {len(measured.ids):,} queries of "
        f"{measured.queries.artifact.key} {work.options.split}, {len(measured.qrels):,} judgements: "
        f"{', '.join(work.metrics)}"
    )
    for file in filter(None, files):
        say(f"writes   {file}")


def default_path(work: EvaluationWork) -> str:
    """Returns a separate file name for each comparison, so that repeating one finds its file."""
    options = work.options
    queries, contents = work.queries.queries.artifact, run_contents(work.store, work.runs)
    digits = fingerprint_of([queries.fingerprint, options.split, options.limit, work.metrics, contents])[:8]
    return f"results/comparison-{options.split}-{joined_names(work.runs)}-{digits}.json"


if __name__ == "__main__":
    run(main, Compare)
