"""The metrics of a run: those of ir-measures, Answer@K from the answers of the queries, PageRprec from provenance."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.queries import Queries
from riptide.indexing.measures.answers import answer_ranks, answers_of
from riptide.indexing.measures.hits import ranked_hits
from riptide.indexing.measures.many_relevant import parse_metric
from riptide.indexing.measures.metrics import check_cutoff, metrics_per_query, parse_metrics
from riptide.indexing.measures.pages import page_r_precision, page_sets
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.evaluation.documents import with_passage_ids

PAGE_R_PRECISION = "PageRprec"  # not Rprec, which ir-measures has: R-precision of judged passages
_ANSWER = re.compile(r"Answer@(0|[1-9]\d{0,49})", re.ASCII)

RunMeasure = Callable[[pa.Table], dict[str, np.ndarray]]  # maps a run to its values per metric, float64 [queries]


def check_metrics(metrics: Sequence[str], *, by_category: bool) -> None:
    """Raises InputError for a metric that cannot be measured, by category or by judgements and metadata."""
    for name in metrics:
        if by_category:
            parse_metric(name)
        elif match := _ANSWER.fullmatch(name):
            check_cutoff(name, int(match[1]))
        elif needs_judgements(name):
            parse_metrics([name])


def needs_judgements(metric: str) -> bool:
    """Returns whether a metric is one of ir-measures: the others compare the hits with metadata of the queries."""
    return metric != PAGE_R_PRECISION and not _ANSWER.fullmatch(metric)


def make_run_measure(
    store: Store, queries: Queries, qrels: pa.Table, query_ids: list[str], metrics: list[str]
) -> RunMeasure:
    """Returns a function that maps a run to its values per metric, as `metrics_per_query` returns them.

    Args:
        store: The store.
        queries: The query set.
        qrels: The judgements.
        query_ids: The queries that are measured: those with judgements, or all queries if there are none.
        metrics: Names of metrics.

    Raises:
        InputError: If no query has the answers or the provenance that a metric needs.
    """
    query_ids = sorted(set(query_ids))
    measures: list[RunMeasure] = []
    if others := [name for name in metrics if needs_judgements(name)]:
        measures.append(lambda run: metrics_per_query(qrels, run, others))
    if depths := {name: int(match.group(1)) for name in metrics if (match := _ANSWER.fullmatch(name))}:
        measures.append(make_answer_measure(store, queries, query_ids, depths))
    if PAGE_R_PRECISION in metrics:
        measures.append(make_page_measure(store, queries, query_ids))

    def measure(run: pa.Table) -> dict[str, np.ndarray]:
        values = {name: array for one in measures for name, array in one(run).items()}
        return {name: values[name] for name in metrics}

    return measure


def make_answer_measure(store: Store, queries: Queries, query_ids: list[str], depths: Mapping[str, int]) -> RunMeasure:
    """Returns the measure of metrics Answer@K (name -> K). Raises InputError if no query has answers."""
    metadata = dict(zip(*(queries.table[column].to_pylist() for column in ("id", "metadata")), strict=True))
    answers = {id: answers_of(metadata[id]) for id in query_ids}
    if not any(answers.values()):
        raise InputError(
            f"{Parameter('metrics', next(iter(depths)))}: no query of {queries.artifact.key} has answers: they are its "
            'metadata, {"answers": ["a", "b"]}'
        )
    corpus = Corpus.open(store)

    def measure(run: pa.Table) -> dict[str, np.ndarray]:
        passages = with_passage_ids(run, f"{Parameter('metrics', next(iter(depths)))}")
        ranks = answer_ranks(passages, answers, corpus, max(depths.values()))
        first = np.array([ranks[id] for id in query_ids])
        return {name: ((first > 0) & (first <= depth)).astype(float) for name, depth in depths.items()}

    return measure


def make_page_measure(store: Store, queries: Queries, query_ids: list[str]) -> RunMeasure:
    """Returns the measure of PageRprec, after a warning about queries without provenance.

    Raises:
        InputError: If no query has provenance; from the measure, if a passage names no page.
    """
    try:
        provenance = page_sets(queries, query_ids)
    except InputError as error:
        raise InputError(f"{Parameter('metrics', PAGE_R_PRECISION)}: {error}") from None
    corpus = Corpus.open(store)
    if num_without := sum(not sets for sets in provenance.values()):
        say(
            f"warning: {num_without:,} of the {len(query_ids):,} queries of {queries.artifact.key} have no provenance, "
            f"and count as 0 in {PAGE_R_PRECISION}"
        )

    def measure(run: pa.Table) -> dict[str, np.ndarray]:
        try:
            passage_run = with_passage_ids(run, f"{Parameter('metrics', PAGE_R_PRECISION)}")
            values = page_r_precision(ranked_hits(passage_run, query_ids), provenance, corpus)
        except InputError as error:
            raise InputError(f"{Parameter('metrics', PAGE_R_PRECISION)}: {error}") from None
        return {PAGE_R_PRECISION: np.array([values[id] for id in query_ids])}

    return measure
