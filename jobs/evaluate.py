"""Measure runs against judgements, with a paired test of each; measure vectors.

    riptide evaluate --store data/squad --run minilm-exact minilm-dense other.trec --split test

Sources are searched first, as deep as the metrics need, and their runs are measured:

    riptide evaluate --store data/squad --source bm25 exact:minilm 0.5*bm25+0.5*exact:minilm

With --relevance category, a passage is relevant if it has a category in common with the query (Topic-DPR):

    riptide evaluate --store data/arxiv --run bm25 topics --split test --relevance category

The vectors of embeddings are measured with the judged pairs of the split, by alignment and uniformity (Wang and Isola
2020); lower is better:

    riptide evaluate --store data/squad --embeddings minilm --split test

The recall of an index is measured against exact search, with a confidence interval; this needs no judgements:

    riptide evaluate --store data/squad --certify index:minilm --split all
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.store.result_files import write_files
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import check_targets, complete_artifact
from riptide.jobs.common.printing import describe_complete, note_for_estimate, print_stages, say
from riptide.jobs.evaluation.certified_sources import CertifiedSources, certify_sources, open_certified
from riptide.jobs.evaluation.evaluate_options import Evaluate
from riptide.jobs.evaluation.evaluated_runs import joined_names, run_contents
from riptide.jobs.evaluation.evaluating import EvaluationWork, check_options, measure_runs, open_evaluation
from riptide.jobs.evaluation.measured_embeddings import MeasureWork, measure_embeddings, open_embeddings
from riptide.jobs.evaluation.source_rates import measure_rates
from riptide.retriever.objectives.category_term import FIELD


def main(options: Evaluate) -> None:
    check_options(options)
    run_job(Store(options.store).require_not_empty(), options)


def run_job(store: Store, options: Evaluate) -> None:
    """Measures runs and embeddings, prints the tables, and writes the JSON file of results.

    Args:
        store: The store.
        options: The options of the job.

    Raises:
        InputError: As `open_evaluation`, or if the file exists with other content.
    """
    work = open_evaluation(store, options)
    options = work.options
    queries = work.queries.query_set
    works = {name: open_embeddings(store, name, queries, options) for name in options.embeddings}
    certified = open_certified(store, queries, options) if options.certify else None
    if options.plan:
        print_plan(work, works)
        for line in certified.plan() if certified else ():
            say(line)
        return
    work.search()
    path = options.json or default_results_path(work, certified)
    if options.rate_queries is not None and not options.overwrite and Path(path).exists():
        raise InputError(
            f"{path}: the file exists, and a rate differs from call to call: give {Parameter('overwrite')} to replace "
            f"it, or another {Parameter('json')}"
        )
    num_queries = len(set(work.queries.ids))
    document: dict[str, Any] = {"queries": queries.artifact.key, "split": options.split, "num_queries": num_queries}
    if work.runs:
        evaluation = measure_runs(work)
        say(str(evaluation))
        document |= evaluation.document()
    if works:
        document["embeddings"] = measure_embeddings(store, works, options)
    if certified:
        document["certified"] = certify_sources(certified)
    if options.rate_queries is not None:
        document["rates"] = measure_rates(work.searches, options.rate_queries, options.rate_batch)
    write_files([(path, json.dumps(document, indent=1) + "\n")], overwrite=options.overwrite)
    say(f"{num_queries:,} queries of {queries.artifact.key} {options.split}; figures in {path}")


def print_plan(work: EvaluationWork, works: Mapping[str, MeasureWork]) -> None:
    """Prints the plan of an evaluation: what is searched and measured."""
    options, evaluation_queries, pending = work.options, work.queries, list[str]()
    for search in work.searches:
        check_targets(work.store, search)
        say(f"source {search.source}: run {search.name}")
        if artifact := complete_artifact(work.store, search):
            say(describe_complete(artifact.url))
        else:
            print_stages(search)
            pending.append(search.source)
    note_for_estimate(pending=pending)
    if work.runs:
        names = work.metrics + ([f"median length of {options.median_length}"] if options.median_length else [])
        size = f"{len(evaluation_queries.ids):,} queries, {len(evaluation_queries.qrels):,} judgements"
        say(f"{len(work.runs)} runs x {size}: {', '.join(names)}")
    for name, each in works.items():
        say(f"embeddings {name}: {len(each.texts):,} queries to encode, {each.describe()}")


def default_results_path(work: EvaluationWork, certified: CertifiedSources | None = None) -> str:
    """Returns a results path that is unique to the evaluation.

    Its digits depend on the queries, the metrics, and the contents of runs and embeddings, so that repeating an
    evaluation finds its file and no other is replaced.
    """
    store, options = work.store, work.options
    queries, contents = work.queries.query_set.artifact, run_contents(store, work.runs)
    settings: list[Any] = [queries.fingerprint, options.split, options.limit, work.metrics, contents]
    if options.embeddings:
        fingerprints = [[g.fingerprint for g in store.generations("embeddings", name)] for name in options.embeddings]
        settings.append([fingerprints, options.task, options.sample, options.seed])
    if options.median_length is not None:
        settings.append({"median_length": options.median_length})
    if options.relevance == "category":
        settings.append({"relevance": options.categories_field or FIELD})
    if options.rate_queries is not None:
        settings.append({"rate_queries": options.rate_queries, "rate_batch": options.rate_batch})
    if certified:
        filters = options.certify_filter_field or options.certify_filters
        settings.append({"certify": [certified.fingerprints, certified.k, filters]})
    digits = fingerprint_of(settings)[:8]
    names = joined_names(work.runs, [*options.embeddings, *options.certify])
    return f"results/evaluation-{options.split}-{names}-{digits}.json"


if __name__ == "__main__":
    run(main, Evaluate)
