"""Measure runs against judgements, with a paired test of each; measure vectors.

    riptide evaluate --store data/squad --run minilm-exact minilm-dense other.trec --split test

Sources are searched first, as deep as the metrics need, and their runs are measured:

    riptide evaluate --store data/squad --source bm25 exact:minilm 0.5*bm25+0.5*exact:minilm

With --relevance category, a passage is relevant if it has a category in common with the query (Topic-DPR):

    riptide evaluate --store data/arxiv --run bm25 topics --split test --relevance category

The vectors of embeddings are measured with the judged pairs of the split, by alignment and uniformity (Wang and Isola
2020); lower is better:

    riptide evaluate --store data/squad --embeddings minilm --split test
"""

from __future__ import annotations

from jobs.common.cli import chosen_task, run, say, say_complete, say_stages

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.evaluation.categories import RANDOM, CategoryMeasure, category_measure
from jobs.evaluation.documents import passages_of
from jobs.evaluation.embeddings import MeasureWork, measure_embeddings, open_embeddings
from jobs.evaluation.measures import Measure, check_metrics, measure_of
from jobs.evaluation.options import Evaluate
from jobs.evaluation.rates import measure_rates
from jobs.evaluation.runs import EvaluationQueries, RunReference, check_passages, load_checked, measured_queries
from jobs.evaluation.searches import make_run, needed_depth, open_searches

import numpy as np
import pyarrow as pa

from indexing.corpus.corpus import Corpus
from indexing.corpus.queries import ALL, Queries
from indexing.measures.hits import ranked_hits
from indexing.measures.lengths import PassageLength, median_length
from indexing.measures.many_relevant import DEFAULT_METRICS as CATEGORY_METRICS
from indexing.measures.metrics import holm, paired_test
from indexing.store.documents import fingerprint_of
from indexing.store.result_files import whole_file
from indexing.store.store import Store
from indexing.work.work import check_targets, complete_artifact
from retriever.errors import InputError
from retriever.options.categories import FIELD

if TYPE_CHECKING:
    from indexing.search.retrieval import SearchQueries

METRICS = ("nDCG@10", "R@100", "RR@10")
DEEPEST = 1_000  # hits per query that a metric without a cutoff needs, as `search` finds them by default
NAME_LENGTH = 60  # characters of the runs' names in the name of the file


def main(options: Evaluate) -> None:
    check_options(options)
    by_category = options.relevance == "category"
    named = options.metrics if options.metrics is not None else CATEGORY_METRICS if by_category else METRICS
    metrics = [metric for word in named for metric in word.split()] if options.run or options.source else []
    check_metrics(metrics, by_category=by_category)
    store = Store(options.store).require()
    options = replace(options, task=chosen_task(store, options.task))
    queries = Queries.open(store, options.queries)
    measured = measured_queries(queries, options, [] if by_category else metrics)
    searches = open_searches(store, options, metrics)
    runs = [RunReference(name, Path(name).is_file()) for name in options.run]
    runs += [RunReference(search.name, is_file=False) for search in searches]
    works = {name: open_embeddings(store, name, queries, options) for name in options.embeddings}
    measure_category = None
    if by_category and metrics:  # before a search, which may take long
        qrels = None if options.split == ALL else measured.qrels
        field = options.categories_field or FIELD
        measure_category = category_measure(store, queries, qrels, measured.ids, metrics, field)
    if options.plan:
        say_plan(store, options, measured, searches, runs, metrics, works)
        return
    for search in searches:
        make_run(store, search, options)
    path = options.json or default_path(store, queries, options, runs, metrics)
    if options.rate_queries is not None and not options.overwrite and Path(path).exists():
        raise InputError(
            f"{path}: the file exists, and a rate differs from call to call: give --overwrite to replace it, or "
            "another --json"
        )
    num_queries = len(set(measured.ids))
    document: dict[str, Any] = {"queries": queries.artifact.key, "split": options.split, "num_queries": num_queries}
    if runs:
        document |= measure_runs(store, measured, options, runs, metrics, measure_category)
    if works:
        document["embeddings"] = measure_embeddings(store, works, options)
    if options.rate_queries is not None:
        document["rates"] = measure_rates(searches, options.rate_queries, options.rate_batch)
    with whole_file(path, overwrite=options.overwrite) as file:
        file.write_text(json.dumps(document, indent=1) + "\n")
    say(f"{num_queries:,} queries of {queries.artifact.key} {options.split}; figures in {path}")


def check_options(options: Evaluate) -> None:
    """Raises InputError if options contradict each other, or name nothing to measure."""
    if not options.run and not options.source and not options.embeddings:
        raise InputError("no --run, no --source and no --embeddings: expected something to measure; name at least one")
    for option in ("encoder", "task"):
        if getattr(options, option) is not None and not options.source and not options.embeddings:
            raise InputError(
                f"--{option} {getattr(options, option)}: expected --embeddings or --source too; a run "
                "is measured without an encoder"
            )
    if options.median_length is not None and (options.median_length < 1 or not (options.run or options.source)):
        raise InputError(
            f"--median-length {options.median_length}: expected at least 1, and --run or --source: it is the "
            "number of passages per query of a run; correct it or name a run"
        )
    if options.rate_queries is not None and (options.rate_queries < 1 or not options.source):
        raise InputError(
            f"--rate-queries {options.rate_queries}: expected at least 1, and --source: the rate of a search is "
            "measured, not of a run; correct it or name a source"
        )
    if options.rate_batch < 1:
        raise InputError(f"--rate-batch {options.rate_batch}: expected at least 1")
    if options.categories_field is not None and options.relevance != "category":
        raise InputError(
            f"--categories-field {options.categories_field}: is for relevance by category: give --relevance category, "
            "or leave it out"
        )


def say_plan(
    store: Store,
    options: Evaluate,
    measured: EvaluationQueries,
    searches: Sequence[SearchQueries],
    runs: Sequence[RunReference],
    metrics: list[str],
    works: Mapping[str, MeasureWork],
) -> None:
    """Prints what an evaluation searches and measures."""
    for search in searches:
        check_targets(store, search)
        say(f"source {search.source}: run {search.name}")
        if artifact := complete_artifact(store, search):
            say_complete(artifact.url)
        else:
            say_stages(search)
    if runs:
        names = metrics + ([f"median length of {options.median_length}"] if options.median_length else [])
        say(f"{len(runs)} runs x {len(measured.ids):,} queries, {len(measured.qrels):,} judgements: {', '.join(names)}")
    for name, work in works.items():
        say(f"embeddings {name}: {len(work.texts):,} queries to encode, {work.describe()}")


def measure_runs(
    store: Store,
    measured: EvaluationQueries,
    options: Evaluate,
    runs: list[RunReference],
    metrics: list[str],
    measure_category: CategoryMeasure | None,
) -> dict[str, Any]:
    """Measures the runs, prints warnings and the table, and returns the figures for the JSON file.

    Args:
        store: The store.
        measured: The queries.
        options: The options of the job.
        runs: The runs, the first of which the others are compared with.
        metrics: Names of metrics.
        measure_category: Measures runs by category; None: they are measured by judgements.
    """
    measure: Measure
    expected: dict[str, dict[str, np.ndarray]] = {}
    if measure_category is not None:
        measure = measure_category
        expected[RANDOM] = measure_category.of_random_ranking()
    else:
        measure = measure_of(store, measured.queries, measured.qrels, measured.ids, metrics)
    depth = needed_depth(metrics, None, DEEPEST)
    values: dict[str, dict[str, np.ndarray]] = {}
    lengths: dict[str, PassageLength] = {}
    for each in runs:
        name, table = each.name, load_checked(store, each, measured, options.split, depth)
        if options.median_length is not None:
            passages = passages_of(table, f"--median-length {options.median_length}")
            lengths[name] = measure_length(store, passages, name, measured.ids, options.median_length)
        values[name] = measure(table)
        without_hits = metrics and not any(metric_values.any() for metric_values in values[name].values())
        if without_hits and (hint := check_passages(store, table)):
            say(f"warning: {name}: {hint}")
    first, *others = [run.name for run in runs]
    tests = {m: {name: paired_test(values[first][m], values[name][m]) for name in others} for m in metrics}
    p_values = {metric: holm(metric_tests) for metric, metric_tests in tests.items()}
    if metrics:
        say(format_table({**values, **expected}, metrics))
        if others:
            say(format_tests(first, p_values))
    for name, length in lengths.items():
        say(
            f"{name}: median length {length.words:g} words, of the {length.passages:,} passages among the first "
            f"{length.depth} of each query"
        )
    document: dict[str, Any] = {
        "mean": {name: {m: float(v.mean()) for m, v in run_values.items()} for name, run_values in values.items()},
        "p_against_first": p_values,
        "query_ids": sorted(set(measured.ids)),
        "per_query": {name: {m: v.tolist() for m, v in run_values.items()} for name, run_values in values.items()},
    }
    if expected:
        document["relevance"] = {"category": options.categories_field or FIELD}
        document["random_ranking"] = {metric: float(v.mean()) for metric, v in expected[RANDOM].items()}
    if lengths:
        document["median_length"] = {name: asdict(length) for name, length in lengths.items()}
    return document


def measure_length(store: Store, run: pa.Table, name: str, ids: list[str], depth: int) -> PassageLength:
    """Returns the median length of the first passages of a run, after a warning about passages without a text.

    Raises:
        InputError: If the corpus has none of the passages.
    """
    try:
        length = median_length(ranked_hits(run, ids), Corpus.open(store), depth)
    except InputError as error:
        raise InputError(f"--median-length {depth}: {name}: {error}") from None
    if length.missing:
        say(
            f"warning: {name}: {length.missing:,} of its first {depth} passages per query are not in the corpus, and "
            "are left out of the median length"
        )
    return length


def default_path(
    store: Store, queries: Queries, options: Evaluate, runs: list[RunReference], metrics: list[str]
) -> str:
    """Returns a separate file name for each evaluation.

    Its digits depend on the queries, the metrics, and the contents of runs and embeddings, so that repeating an
    evaluation finds its file and no other is replaced.

    Args:
        store: The store.
        queries: The query set.
        options: The options of the job.
        runs: The runs.
        metrics: Names of metrics.
    """
    contents = [
        [run.name, hashlib.sha256(Path(run.name).read_bytes()).hexdigest()]
        if run.is_file
        else [run.name, store.open("runs", store.only("runs", run.name)).fingerprint]
        for run in runs
    ]
    measured: list[Any] = [queries.artifact.fingerprint, options.split, options.limit, metrics, contents]
    if options.embeddings:
        fingerprints = [[g.fingerprint for g in store.generations("embeddings", name)] for name in options.embeddings]
        measured.append([fingerprints, options.task, options.sample, options.seed])
    if options.median_length is not None:
        measured.append({"median_length": options.median_length})
    if options.relevance == "category":
        measured.append({"relevance": options.categories_field or FIELD})
    if options.rate_queries is not None:
        measured.append({"rate_queries": options.rate_queries, "rate_batch": options.rate_batch})
    digits = fingerprint_of(measured)[:8]
    parts = [*(Path(run.name).stem if run.is_file else run.name for run in runs), *options.embeddings]
    names = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))[:NAME_LENGTH]
    return f"results/evaluation-{options.split}-{names}-{digits}.json"


def format_table(values: dict[str, Any], metrics: list[str]) -> str:
    """Returns one line per run with its metrics in columns."""
    means = {name: [f"{run_values[metric].mean():.4f}" for metric in metrics] for name, run_values in values.items()}
    return _columns("run", means, metrics)


def format_tests(first: str, p_values: dict[str, dict[str, float]]) -> str:
    """Returns one line per run with the p-value of each metric against the first run."""
    metrics = list(p_values)
    names = p_values[metrics[0]]
    rows = {name: [f"{p_values[metric][name]:.4f}" for metric in metrics] for name in names}
    corrected = ", adjusted for the number of tests in each column (Holm)" if len(names) > 1 else ""
    title = f"p-values against {first}: two-sided paired randomisation test over the queries{corrected}"
    return f"\n{title}\n{_columns('run', rows, metrics)}"


def _columns(title: str, rows: Mapping[str, Sequence[str]], headings: Sequence[str]) -> str:
    """Returns a table of rows by name, each column as wide as needed."""
    width = max(map(len, [title, *rows]))
    widths = [max(len(heading), 6) for heading in headings]
    lines = {title: headings} | dict(rows)
    cells = ((name, zip(row, widths, strict=True)) for name, row in lines.items())
    return "\n".join(name.ljust(width) + "".join(f"  {cell:>{size}}" for cell, size in row) for name, row in cells)


if __name__ == "__main__":
    run(main, Evaluate)
