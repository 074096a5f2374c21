"""Compares two runs for the queries of a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs.comparison.comparison import Comparison, MetricComparison
from jobs.comparison.rows import Judgements, MeasuredRun, make_rows
from jobs.evaluation.evaluating import DEEPEST, METRICS, EvaluationWork, open_evaluation
from jobs.evaluation.measures import measure_of, needs_judgements
from jobs.evaluation.options import Evaluate
from jobs.evaluation.runs import load_checked
from jobs.evaluation.searches import needed_depth

import numpy as np

from indexing.corpus.queries import ALL, Queries
from indexing.measures.metrics import bootstrap_interval, holm, paired_test, parse_metrics
from indexing.store.store import Store
from retriever.errors import InputError


def compare(
    store: Store,
    first: str,
    second: str,
    *,
    queries: str | None = None,
    split: str | None = None,
    metrics: Sequence[str] = METRICS,
    limit: int | None = None,
) -> Comparison:
    """Compares two runs for the queries of a split.

    Args:
        store: The store.
        first: Name of the first run, the baseline, or of a TREC file.
        second: Name of the second run, or of a TREC file.
        queries: Name of the query set; None: that of the runs, or the only one.
        split: A split with judgements; None: that of the runs, or test.
        metrics: Names of metrics; the first one orders the queries.
        limit: Compare for the first N queries of the split; None: all.

    Returns:
        The comparison.

    Raises:
        InputError: If a run is missing, if the runs are over other queries, or if a metric or a split is unknown.
    """
    work = open_comparison(store, first, second, queries=queries, split=split, metrics=metrics, limit=limit)
    return compare_runs(work)


def open_comparison(
    store: Store,
    first: str,
    second: str,
    *,
    queries: str | None = None,
    split: str | None = None,
    metrics: Sequence[str] = METRICS,
    limit: int | None = None,
) -> EvaluationWork:
    """Returns the evaluation of two runs that can be compared, without reading their hits; see `compare`."""
    if not metrics:
        raise InputError("parameter metrics: expected at least one metric, which orders the queries; name one")
    if first == second:
        raise InputError(f"{first}: the same run twice, expected two runs to compare; name another one")
    name, split_of_runs = queries_of(store, [run for run in (first, second) if not Path(run).is_file()])
    split = split or split_of_runs
    if split == ALL:
        have = ", ".join(Queries.open(store, queries or name).splits) or "none"
        raise InputError(
            f"parameter split {ALL}: the split {ALL} has no judgements, which a comparison needs; name a split with "
            f"judgements ({have})"
        )
    options = Evaluate(
        store=store.url,
        run=(first, second),
        queries=queries or name,
        split=split,
        metrics=tuple(dict.fromkeys(metrics)),
        limit=limit,
    )
    return open_evaluation(store, options)


def queries_of(store: Store, runs: Sequence[str]) -> tuple[str | None, str]:
    """Returns the query set and the split of runs of the store; without runs, None and test.

    Raises:
        InputError: If a run is missing, or if two runs are over other query sets or splits.
    """
    artifacts = [store.open("runs", store.only("runs", run)) for run in runs]
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
    """Returns the comparison of two opened runs, after warnings about queries and passages that are missing."""
    measured, metrics, split = work.queries, work.metrics, work.options.split
    judgements = Judgements.of(measured.qrels, relevant_level(metrics[0]))
    measure = measure_of(work.store, measured.queries, measured.qrels, measured.ids, metrics)
    depth = needed_depth(metrics, None, DEEPEST)
    tables = [load_checked(work.store, run, measured, split, depth) for run in work.runs]
    first, second = (MeasuredRun.of(table, measure(table), judgements) for table in tables)
    queries = measured.queries.table
    texts = dict(zip(queries["id"].to_pylist(), queries["text"].to_pylist(), strict=True))
    return Comparison(
        queries=measured.queries.artifact.key,
        split=split,
        first=work.runs[0].label,
        second=work.runs[1].label,
        metrics=compare_means(first.values, second.values),
        rows=make_rows(work.store, texts, first, second, judgements),
        recall_first=first.recall(judgements),
        recall_second=second.recall(judgements),
    )


def compare_means(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> tuple[MetricComparison, ...]:
    """Returns the comparison of each metric of two runs.

    Args:
        first: The values of the first run by metric, float64 [queries].
        second: The values of the second run, for the same queries.
    """
    p_values = {metric: paired_test(first[metric], second[metric]) for metric in first}
    adjusted = holm(p_values)
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
    """Returns the grade from which a passage is relevant to a metric: 2 for AP(rel=2), and 1 by default."""
    if not needs_judgements(metric):
        return 1
    [measure] = parse_metrics([metric])
    return int(measure.params.get("rel", 1))
