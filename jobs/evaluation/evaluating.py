"""Evaluates runs of the store, run files and sources: searches the sources, then computes the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.measures.lengths import PassageLength, median_length
from riptide.indexing.measures.many_relevant import DEFAULT_METRICS as CATEGORY_METRICS
from riptide.indexing.measures.metrics import adjust_p_values, paired_p_value
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.queries.queries import ALL, Queries
from riptide.indexing.store.store import Store
from riptide.jobs.common.job_options import chosen_task
from riptide.jobs.common.printing import say
from riptide.jobs.evaluation.category_metrics import CategoryMeasure, make_category_measure
from riptide.jobs.evaluation.document_runs import with_passage_ids
from riptide.jobs.evaluation.evaluate_options import Evaluate
from riptide.jobs.evaluation.evaluated_runs import (
    EvaluationQueries,
    RunReference,
    check_passages,
    read_checked_run,
    read_evaluation_queries,
)
from riptide.jobs.evaluation.evaluation import Evaluation
from riptide.jobs.evaluation.measures import RunMeasure, check_metrics, make_run_measure
from riptide.jobs.evaluation.searches import make_run, needed_depth, open_searches
from riptide.retriever.objectives.category_term import FIELD

if TYPE_CHECKING:
    from riptide.indexing.search.retrieval import SearchQueriesWork

METRICS = ("nDCG@10", "R@100", "RR@10")
DEEPEST = 1_000  # hits per query for a metric without a cutoff; also the default of `search`


@dataclass
class EvaluationWork:
    """An evaluation whose queries, sources and metrics have been checked.

    Attributes:
        store: The store.
        options: The options of the job; the task that a sweep chose stands for the sweep.
        queries: The measured queries.
        metrics: Names of metrics.
        searches: The searches of the sources.
        runs: The runs, the first of which the others are compared with.
        category: Measures runs by category; None: they are measured by judgements.
    """

    store: Store
    options: Evaluate
    queries: EvaluationQueries
    metrics: list[str]
    searches: list[SearchQueriesWork]
    runs: list[RunReference]
    category: CategoryMeasure | None

    def search(self) -> None:
        """Searches those sources whose runs are missing in the store."""
        for search in self.searches:
            make_run(self.store, search, self.options)


def evaluate(store: Store, options: Evaluate) -> Evaluation:
    """Searches the sources and measures all runs; see `open_evaluation`."""
    work = open_evaluation(store, options)
    work.search()
    return measure_runs(work)


def open_evaluation(store: Store, options: Evaluate) -> EvaluationWork:
    """Opens and checks the queries, runs, sources and metrics of an evaluation.

    Args:
        store: The store.
        options: The options of the job.

    Raises:
        InputError: If options contradict each other, or if a run, a source, a metric or a query set is missing, or does
            not fit the others.
    """
    check_options(options)
    options = replace(options, task=chosen_task(store, options.task))
    metrics, by_category = metrics_of(options), options.relevance == "category"
    queries = Queries.open(store, options.queries)
    evaluation_queries = read_evaluation_queries(queries, options, [] if by_category else metrics)
    searches = open_searches(store, options, metrics)
    runs = [RunReference(name, Path(name).is_file()) for name in options.run]
    runs += [RunReference(search.name, is_file=False) for search in searches]
    category = None
    if by_category and metrics:  # before the searches, which may take long, as it may raise InputError
        qrels = None if options.split == ALL else evaluation_queries.qrels
        field = options.categories_field or FIELD
        category = make_category_measure(store, queries, qrels, evaluation_queries.ids, metrics, field)
    return EvaluationWork(store, options, evaluation_queries, metrics, searches, runs, category)


def metrics_of(options: Evaluate) -> list[str]:
    """Returns the names of the metrics of runs; [] if there are no runs."""
    default = CATEGORY_METRICS if options.relevance == "category" else METRICS
    named = default if options.metrics is None else options.metrics
    return [metric for word in named for metric in word.split()] if options.run or options.source else []


def check_options(options: Evaluate) -> None:
    """Raises InputError if options contradict each other, name nothing to measure, or have an impossible metric."""
    if not options.run and not options.source and not options.embeddings and not options.certify:
        raise InputError(
            f"no {Parameter('run')}, no {Parameter('source')}, no {Parameter('embeddings')} and no "
            f"{Parameter('certify')}: expected something to measure; name at least one"
        )
    for option, value in (
        ("certify_filters", next(iter(options.certify_filters), None)),
        ("certify_filter_field", options.certify_filter_field),
        ("certify_k", options.certify_k),
    ):
        if value is not None and not options.certify:
            raise InputError(
                f"{Parameter(option, value)}: expected {Parameter('certify')} too: name sources with an index"
            )
    if options.certify_filters and options.certify_filter_field is not None:
        raise InputError(
            f"{Parameter('certify_filters', options.certify_filters[0])} with "
            f"{Parameter('certify_filter_field', options.certify_filter_field)}: expected one of them; leave one out"
        )
    for option in ("encoder", "task"):
        if getattr(options, option) is not None and not (options.source or options.embeddings or options.certify):
            raise InputError(
                f"{Parameter(option, getattr(options, option))}: expected {Parameter('embeddings')}, "
                f"{Parameter('source')} or {Parameter('certify')} too; a run is measured without an encoder"
            )
    if options.median_length is not None and (options.median_length < 1 or not (options.run or options.source)):
        raise InputError(
            f"{Parameter('median_length', options.median_length)}: expected at least 1, and {Parameter('run')} or "
            f"{Parameter('source')}: it is the number of passages per query of a run; correct it or name a run"
        )
    if options.rate_queries is not None and (options.rate_queries < 1 or not options.source):
        raise InputError(
            f"{Parameter('rate_queries', options.rate_queries)}: expected at least 1, and {Parameter('source')}: the "
            "rate of a search is measured, not of a run; correct it or name a source"
        )
    if options.categories_field is not None and options.relevance != "category":
        raise InputError(
            f"{Parameter('categories_field', options.categories_field)}: is for relevance by category: give "
            f"{Parameter('relevance', 'category')}, or leave it out"
        )
    check_metrics(metrics_of(options), by_category=options.relevance == "category")


def measure_runs(work: EvaluationWork) -> Evaluation:
    """Computes the metrics of the runs, and prints warnings about suspicious results.

    Args:
        work: The evaluation, whose sources are searched.

    Raises:
        InputError: If a run is missing or of other queries, or lacks what a metric needs.
    """
    options, evaluation_queries, metrics = work.options, work.queries, work.metrics
    measure: RunMeasure = work.category or make_run_measure(
        work.store, evaluation_queries.query_set, evaluation_queries.qrels, evaluation_queries.ids, metrics
    )
    depth = needed_depth(metrics, None, DEEPEST)
    values: dict[str, dict[str, np.ndarray]] = {}
    lengths: dict[str, PassageLength] = {}
    for run in work.runs:
        table = read_checked_run(work.store, run, evaluation_queries, options.split, depth)
        if options.median_length is not None:
            passages = with_passage_ids(table, f"{Parameter('median_length', options.median_length)}")
            lengths[run.label] = measure_length(
                work.store, passages, run, evaluation_queries.ids, options.median_length
            )
        values[run.label] = measure(table)
        without_hits = metrics and not any(metric_values.any() for metric_values in values[run.label].values())
        if without_hits and (hint := check_passages(work.store, table)):
            say(f"warning: {run.label}: no relevant hit, and {hint}")
    random_ranking = work.category.of_random_ranking() if work.category else {}
    return Evaluation(
        queries=evaluation_queries.query_set.artifact.key,
        split=options.split,
        query_ids=sorted(set(evaluation_queries.ids)),
        metrics=metrics,
        per_query=values,
        p_values=compare_with_first(values, [run.label for run in work.runs], metrics),
        random_ranking={metric: float(expected.mean()) for metric, expected in random_ranking.items()},
        categories_field=None if work.category is None else options.categories_field or FIELD,
        median_lengths=lengths,
    )


def compare_with_first(
    values: dict[str, dict[str, np.ndarray]], runs: Sequence[str], metrics: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Tests each run against the first one: returns p-values by metric, adjusted for the number of runs."""
    first, *others = runs
    return {
        m: adjust_p_values({name: paired_p_value(values[first][m], values[name][m]) for name in others})
        for m in metrics
    }


def measure_length(store: Store, table: pa.Table, run: RunReference, ids: list[str], depth: int) -> PassageLength:
    """Returns the median length of the first passages of a run. Warns of passages that the corpus lacks.

    Raises:
        InputError: If the corpus has none of the passages.
    """
    try:
        length = median_length(ranked_hits(table, ids), Corpus.open(store), depth)
    except InputError as error:
        raise InputError(f"{Parameter('median_length', depth)}: {run.label}: {error}") from None
    if length.missing:
        say(
            f"warning: {run.label}: {length.missing:,} of its first {depth} passages per query are not in the corpus, "
            "and are left out of the median length"
        )
    return length
