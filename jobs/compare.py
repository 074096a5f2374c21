"""Compare two runs query by query, with tests, examples and a page of charts.

    riptide compare bm25 hybrid --store data/squad --html results/bm25-hybrid.html

The first run is the baseline: a difference above 0 is a gain of the second one. Runs are those of `riptide search` in
the store, or files of TREC or of JSON lines.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import json

from riptide.indexing.store.result_files import write_files
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.comparison.compare_options import Compare
from riptide.jobs.comparison.comparing import compare_runs, open_comparison
from riptide.jobs.comparison.printed_table import print_lines
from riptide.jobs.evaluation.evaluated_runs import joined_names, run_contents
from riptide.jobs.evaluation.evaluating import EvaluationWork


def main(options: Compare) -> None:
    work = open_comparison(Store(options.store).require_not_empty(), options)
    path = options.json or default_results_path(work)
    if options.plan:
        print_plan(work, [path, options.html])
        return
    comparison = compare_runs(work)
    contents: list[tuple[str, str | bytes]] = [
        (path, json.dumps(comparison.document(), indent=1, ensure_ascii=False) + "\n")
    ]
    if options.html is not None:
        from riptide.jobs.comparison.comparison_page import render_page

        contents.append((options.html, render_page(comparison, options.examples)))
    write_files(contents, overwrite=options.overwrite)
    say(*print_lines(comparison, options.examples))
    say(f"\n{comparison.queries} {comparison.split}; all values in {path}")
    if options.html is not None:
        say(f"page: {options.html}")


def print_plan(work: EvaluationWork, files: list[str | None]) -> None:
    """Prints the plan of a comparison: what is measured, and which files are written."""
    evaluation_queries = work.queries
    say(
        f"{work.runs[0].label} and {work.runs[1].label}: {len(evaluation_queries.ids):,} queries of "
        f"{evaluation_queries.query_set.artifact.key} {work.options.split}, "
        f"{len(evaluation_queries.qrels):,} judgements: {', '.join(work.metrics)}"
    )
    say(*(f"writes   {file}" for file in files if file))


def default_results_path(work: EvaluationWork) -> str:
    """Returns a results path that is unique to the comparison, so that repeating it finds its file."""
    options = work.options
    queries, contents = work.queries.query_set.artifact, run_contents(work.store, work.runs)
    digits = fingerprint_of([queries.fingerprint, options.split, options.limit, work.metrics, contents])[:8]
    return f"results/comparison-{options.split}-{joined_names(work.runs)}-{digits}.json"


if __name__ == "__main__":
    run(main, Compare)
