"""Makes the functions that compute the metrics of a run, from judgements (ir-measures) or from metadata of queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.measures.answers import ANSWER_ACCURACY, ANSWER_RANK
from riptide.indexing.measures.many_relevant import parse_metric
from riptide.indexing.measures.metadata_metric import MetadataMetric, cutoff_of
from riptide.indexing.measures.metrics import check_cutoff, metrics_per_query, parse_metrics
from riptide.indexing.measures.pages import PAGE_R_PRECISION
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.evaluation.document_runs import with_passage_ids

METADATA_METRICS: list[MetadataMetric] = [ANSWER_ACCURACY, ANSWER_RANK, PAGE_R_PRECISION]

RunMeasure = Callable[[pa.Table], dict[str, np.ndarray]]  # returns the values of a run per metric, float64 [queries]


def check_metrics(metrics: Sequence[str], *, by_category: bool) -> None:
    """Raises InputError for a metric that is unknown or that does not fit the kind of relevance."""
    for name in metrics:
        if by_category:
            parse_metric(name)
        elif needs_judgements(name):
            parse_metrics([name], metadata_forms())
        elif "@" in name:
            check_cutoff(name, cutoff_of(name))


def metadata_forms() -> list[str]:
    """Returns the forms of the metrics that compare hits with metadata of the queries, such as Answer@K."""
    return [metric.form for metric in METADATA_METRICS]


def needs_judgements(metric: str) -> bool:
    """Returns whether a metric is one of ir-measures and needs judgements; others need metadata of the queries."""
    return not any(each.matches(metric) for each in METADATA_METRICS)


def make_run_measure(
    store: Store, queries: Queries, qrels: pa.Table, query_ids: list[str], metrics: list[str]
) -> RunMeasure:
    """Returns a function that computes the values of a run per metric, in the form of `metrics_per_query`.

    Args:
        store: The store.
        queries: The query set.
        qrels: The judgements.
        query_ids: The queries that are measured: those with judgements, or all queries if there are none.
        metrics: Names of metrics.

    Raises:
        InputError: If no query has the metadata that a metric needs.
    """
    query_ids = sorted(set(query_ids))
    measures: list[RunMeasure] = []
    if others := [name for name in metrics if needs_judgements(name)]:
        measures.append(lambda run: metrics_per_query(qrels, run, others))
    for metric in METADATA_METRICS:
        if names := [name for name in metrics if metric.matches(name)]:
            measures.append(make_metadata_measure(store, queries, query_ids, metric, names))

    def measure(run: pa.Table) -> dict[str, np.ndarray]:
        values = {name: array for one in measures for name, array in one(run).items()}
        return {name: values[name] for name in metrics}

    return measure


def make_metadata_measure(
    store: Store, queries: Queries, query_ids: list[str], metric: MetadataMetric, names: list[str]
) -> RunMeasure:
    """Returns the function that computes a metric from metadata. Warns of queries without the metadata.

    Raises:
        InputError: If no query has the metadata; from the measure, if a passage lacks what the metric needs.
    """
    option = f"{Parameter('metrics', names[0])}"
    try:
        metadata = metric.read(queries, query_ids)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
    corpus = Corpus.open(store)
    if num_without := sum(not each for each in metadata.values()):
        say(
            f"warning: {num_without:,} of the {len(query_ids):,} queries of {queries.artifact.key} have no "
            f"{metric.metadata_name}, and count as 0 in {names[0]}"
        )

    def measure(run: pa.Table) -> dict[str, np.ndarray]:
        passage_run = with_passage_ids(run, option)
        try:
            return metric.values(passage_run, metadata, corpus, names)
        except InputError as error:
            raise InputError(f"{option}: {error}") from None

    return measure
