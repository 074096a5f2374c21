"""Compares the old and the new embeddings of a migration, and makes a release with the new ones live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.queries import Queries
from riptide.indexing.embeddings.corpus_encoding import find_equal_embeddings
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.hit_sources.modes import find_index_over, mode_sources
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.migration.requirements import Decision, Requirement, decide, overlaps
from riptide.indexing.store.store import Store
from riptide.jobs.evaluation.evaluate_options import Evaluate
from riptide.jobs.evaluation.evaluated_runs import RunReference, read_checked_run, read_evaluation_queries
from riptide.jobs.evaluation.measures import check_metrics, make_run_measure
from riptide.jobs.evaluation.searches import make_run, needed_depth, open_searches
from riptide.jobs.migration.both_encoders import BothEncoders
from riptide.jobs.migration.migrate_options import Migrate
from riptide.serve.release.planning import BASE, plan_release
from riptide.serve.release.release import Release


def find_new_embeddings(both: BothEncoders, options: Migrate) -> Embeddings:
    """Returns the embeddings that the new encoder has made of the whole corpus.

    Raises:
        InputError: If there are none, several, or others under the given name.
    """
    names = find_equal_embeddings(both.store, both.settings, None)
    names = [name for name in names if name != both.old.name]
    if options.to_embeddings is not None:
        names = [name for name in names if name == options.to_embeddings]
    if not names:
        parameter, value = both.spec.named_by
        command = Command("encode-corpus", store=both.store.url, **{parameter: value})
        where = f"embeddings/{options.to_embeddings}" if options.to_embeddings else both.store.url
        raise InputError(f"{where}: no complete embeddings of {value} with these settings: make them ({command})")
    if len(names) > 1:
        raise InputError(
            f"{both.store.url} has several embeddings of {both.spec.named_by[1]}: {', '.join(names)}; name one with "
            f"{Parameter('to_embeddings')}"
        )
    return Embeddings.open(both.store, names[0], both.corpus)


def compared_sources(both: BothEncoders, new: Embeddings) -> tuple[str, str]:
    """Returns the dense sources that a release serves: of the old embeddings, and of the new ones."""
    base = both.live.task(BASE) if both.live else None
    if base is not None and base.embeddings == both.old.name:
        old_index = base.index
    else:
        old_index = find_index_over(both.store, both.old.name, "remove all but one of them")
    new_index = find_index_over(both.store, new.name, "remove all but one of them")
    old, new_source = (
        mode_sources(name, index, None)["dense"] for name, index in ((both.old.name, old_index), (new.name, new_index))
    )
    return old, new_source


def decide_all(both: BothEncoders, options: Migrate, new: Embeddings) -> list[Decision]:
    """Searches the queries with both embeddings, and decides on the requirements."""
    evaluated = Evaluate(
        store=both.store.url,
        source=compared_sources(both, new),
        queries=options.queries,
        split=options.split,
        limit=options.limit,
    )
    values = paired_values(both.store, evaluated, options.requirements)
    return [decide(each, array) for each, array in zip(options.requirements, values, strict=True)]


def paired_values(store: Store, options: Evaluate, requirements: Sequence[Requirement]) -> list[np.ndarray]:
    """Returns the values of requirements for each query of a split. Runs that the store lacks are made.

    Args:
        store: The store.
        options: Two sources, the old one first, the queries and the split; the metrics are those of the requirements.
        requirements: The requirements.

    Returns:
        For each requirement the difference of its metric, new minus old, or the overlap of the hits: float64 [queries].

    Raises:
        InputError: If a metric is unknown, or needs judgements that the split lacks.
    """
    names = list(dict.fromkeys(each.metric for each in requirements))
    metrics = list(dict.fromkeys(each.metric for each in requirements if not each.is_overlap))
    check_metrics(metrics, by_category=False)
    queries = read_evaluation_queries(Queries.open(store, options.queries), options, metrics)
    searches = open_searches(store, replace(options, metrics=tuple(names)), names)
    for search in searches:
        make_run(store, search, options)
    depth = needed_depth(names, None, 1)
    tables = [
        read_checked_run(store, RunReference(search.name, is_file=False), queries, options.split, depth)
        for search in searches
    ]
    measure = make_run_measure(store, queries.query_set, queries.qrels, queries.ids, metrics)
    old, new = (measure(table) for table in tables)
    first, second = (list(ranked_hits(table, queries.ids, depth).values()) for table in tables)
    return [
        overlaps(first, second, needed_depth([each.metric], None, 1))
        if each.is_overlap
        else new[each.metric] - old[each.metric]
        for each in requirements
    ]


def plan_switch(both: BothEncoders, new: Embeddings) -> Release:
    """Returns the release with the new embeddings.

    Raises:
        InputError: If the new encoder is a prompt, which is served as a task, or if a task of the live release does not
            fit the new encoder and would be lost.
    """
    if both.spec.task is not None:
        raise InputError(
            f"{Parameter('task', both.spec.task)}: a prompt is served as a task next to others over its backbone and "
            f"needs no switch; leave out {Parameter('switch')}, and make a release with {Command('serve-search')}"
        )
    base = both.live.task(BASE) if both.live else None
    release, excluded = plan_release(
        both.store,
        embeddings=new.name,
        index=find_index_over(both.store, new.name, "remove all but one of them"),
        bm25=base.bm25 if base else None,
        reranker=both.live.reranker if both.live else None,
        live=both.live,
    )
    for task in both.live.tasks if both.live else ():
        if release.task(task.name) is None:
            raise InputError(
                f"{excluded.get(task.name, f'task {task.name}: does not fit the new encoder')}: the switch would end "
                "this task of the live release; train it over the new encoder, or remove it from the release first"
            )
    return release
