"""Compares two runs on the queries of a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.measures.metrics import adjust_p_values, bootstrap_interval, paired_p_value, parse_metrics
from riptide.indexing.queries.queries import ALL, Queries
from riptide.indexing.store.store import Store
from riptide.jobs.comparison.compare_options import Compare
from riptide.jobs.comparison.compared_rows import Judgements, MeasuredRun, make_rows
from riptide.jobs.comparison.comparison import Comparison
from riptide.jobs.comparison.values import MetricComparison
from riptide.jobs.evaluation.evaluate_options import Evaluate
from riptide.jobs.evaluation.evaluated_runs import read_checked_run
from riptide.jobs.evaluation.evaluating import DEEPEST, EvaluationWork, open_evaluation
from riptide.jobs.evaluation.measures import make_run_measure, needs_judgements
from riptide.jobs.evaluation.searches import needed_depth


def compare(store: Store, options: Compare) -> Comparison:
    """Compares two runs; see `open_comparison` for the errors."""
    return compare_runs(open_comparison(store, options))


def open_comparison(store: Store, options: Compare) -> EvaluationWork:
    """Checks that two runs can be compared, and returns their evaluation. Reads no hits.

    Args:
        store: The store.
        options: The options of the job.

    Raises:
        InputError: If a run is missing, if the runs are over other queries, or if a metric or a split is unknown.
    """
    files = [run for run in (options.first, options.second) if Path(run).is_file()]
    name, split = queries_of(store, [run for run in (options.first, options.second) if run not in files])
    name, split = options.queries or name, options.split or split
    if split == ALL:
        have = ", ".join(Queries.open(store, name).splits) or "none"
        raise InputError(
            f"{Parameter('split', ALL)}: the split {ALL} has no judgements, which a comparison needs; name a split "
            f"with judgements ({have})"
        )
    metrics = dict.fromkeys(metric for word in options.metrics for metric in word.split())
    evaluated = Evaluate(
        store=options.store,
        run=(options.first, options.second),
        queries=name,
        split=split,
        metrics=tuple(metrics),
        limit=options.limit,
    )
    return open_evaluation(store, evaluated)


def queries_of(store: Store, runs: Sequence[str]) -> tuple[str | None, str]:
    """Returns the query set and the split that runs of the store share; (None, "test") without runs.

    Raises:
        InputError: If a run is missing, or if two runs are over other query sets or splits.
    """
    artifacts = [store.open("runs", store.only_name("runs", run)) for run in runs]
    if not artifacts:
        return None, "test"
    inputs, splits = [each.inputs["queries"] for each in artifacts], [each.config["split"] for each in artifacts]
    if len({each["fingerprint"] for each in inputs}) > 1 or len({*splits} - {ALL}) > 1:
        described = " and ".join(
            f"{artifact.key} is a run of {each['artifact']} {split}"
            for artifact, each, split in zip(artifacts, inputs, splits, strict=True)
        )
        raise InputError(
            f"{described}: expected two runs of the same queries; search the same split of a query set for both"
        )
    name = inputs[0]["artifact"].removeprefix("queries/")
    return name, next((split for split in splits if split != ALL), "test")


def compare_runs(work: EvaluationWork) -> Comparison:
    """Compares two opened runs. Warns of queries and passages that are missing."""
    evaluation_queries, metrics, split = work.queries, work.metrics, work.options.split
    judgements = Judgements.from_qrels(evaluation_queries.qrels, relevant_level(metrics[0]))
    measure = make_run_measure(
        work.store, evaluation_queries.query_set, evaluation_queries.qrels, evaluation_queries.ids, metrics
    )
    depth = needed_depth(metrics, None, DEEPEST)
    tables = [read_checked_run(work.store, run, evaluation_queries, split, depth) for run in work.runs]
    first, second = (MeasuredRun.from_table(table, measure(table), judgements) for table in tables)
    queries = evaluation_queries.query_set.table
    texts = dict(zip(queries["id"].to_pylist(), queries["text"].to_pylist(), strict=True))
    return Comparison(
        queries=evaluation_queries.query_set.artifact.key,
        split=split,
        first=work.runs[0].label,
        second=work.runs[1].label,
        metrics=compare_means(first.values, second.values),
        rows=make_rows(work.store, texts, first, second, judgements),
        recall_first=first.recall(judgements),
        recall_second=second.recall(judgements),
    )


def compare_means(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> tuple[MetricComparison, ...]:
    """Compares each metric of two runs: means, differences and tests.

    Args:
        first: The values of the first run by metric, float64 [queries].
        second: The values of the second run, for the same queries.
    """
    p_values = {metric: paired_p_value(first[metric], second[metric]) for metric in first}
    adjusted = adjust_p_values(p_values)
    compared = []
    for metric, p_value in p_values.items():
        differences = second[metric] - first[metric]
        interval = bootstrap_interval([differences])
        compared.append(
            MetricComparison(
                metric=metric,
                first=float(first[metric].mean()),
                second=float(second[metric].mean()),
                difference=interval.mean,
                low=interval.low,
                high=interval.high,
                p_value=p_value,
                adjusted_p_value=adjusted[metric],
                won=int((differences > 0).sum()),
                equal=int((differences == 0).sum()),
                lost=int((differences < 0).sum()),
            )
        )
    return tuple(compared)


def relevant_level(metric: str) -> int:
    """Returns the minimum grade of a relevant passage for a metric: 2 for AP(rel=2), 1 by default."""
    if not needs_judgements(metric):
        return 1
    [measure] = parse_metrics([metric])
    return int(measure.params.get("rel", 1))
