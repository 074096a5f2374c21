"""Compares the old and the new embeddings of a migration, and makes a release with the new ones live."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter
from riptide.indexing.dense.index import Index
from riptide.indexing.embeddings.corpus_encoding import find_equal_embeddings
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.named_encoders import describe_differences
from riptide.indexing.hit_sources.modes import find_index_over, mode_sources
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.migration.requirements import Decision, Requirement, decide, overlaps
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.jobs.evaluation.evaluate_options import Evaluate
from riptide.jobs.evaluation.evaluated_runs import (
    EvaluationQueries,
    RunReference,
    read_checked_run,
    read_evaluation_queries,
)
from riptide.jobs.evaluation.measures import check_metrics, make_run_measure
from riptide.jobs.evaluation.searches import make_run, needed_depth, open_searches
from riptide.jobs.migration.both_encoders import BothEncoders
from riptide.jobs.migration.migrate_options import Migrate
from riptide.serve.release.planning import BASE, plan_release
from riptide.serve.release.release import Release

if TYPE_CHECKING:
    from riptide.indexing.search.retrieval import SearchQueriesWork


def find_new_embeddings(both: BothEncoders, options: Migrate) -> Embeddings:
    """Returns the embeddings that the new encoder has made of the whole corpus.

    Raises:
        InputError: If there are none, several, or others under the given name.
    """
    store, task = both.store, both.spec.task
    names = [
        name
        for name in find_equal_embeddings(store, both.settings, None)
        if name != both.old.name and store.generations("embeddings", name)[-1].notes["task"] == task
    ]
    if options.to_embeddings is not None:
        names = [name for name in names if name == options.to_embeddings]
    if not names:
        raise InputError(describe_missing(both, options))
    if len(names) > 1:
        raise InputError(
            f"{both.store.url} has several embeddings of {both.spec.named_by[1]}: {', '.join(names)}; name one with "
            f"{Parameter('to_embeddings')}"
        )
    return Embeddings.open(both.store, names[0], both.corpus)


def describe_missing(both: BothEncoders, options: Migrate) -> str:
    """Returns the error for a missing encoding: the command that makes it, and how existing embeddings differ."""
    parameter, value = both.spec.named_by
    settings = {
        each.name: setting
        for each in fields(options.vectors)
        if (setting := getattr(options.vectors, each.name)) != each.default
    }
    words = {
        name if setting is not False else f"no_{name}": "" if isinstance(setting, bool) else setting
        for name, setting in settings.items()
    }
    name, remark = options.to_embeddings or both.new_name, ""
    if name in both.store.names("embeddings") and name != both.old.name:
        config = both.store.generations("embeddings", name)[-1].config
        if config["limit"] is not None:
            remark = f" (embeddings/{name} have the first {config['limit']:,} passages alone)"
        elif differ := describe_differences(config["encoder"], both.settings):
            remark = f" (expected {differ} of embeddings/{name})"
        words["name"] = f"{name}-2"
    command = Command("encode-corpus", store=both.store.url, **{parameter: value}, **words)
    where = f"embeddings/{options.to_embeddings}" if options.to_embeddings else both.store.url
    return f"{where}: no complete embeddings of {value} with these settings{remark}: make them ({command})"


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


@dataclass(frozen=True)
class Comparison:
    """The searches of the old and of the new embeddings, before they run.

    Attributes:
        options: Both sources, the old one first, the queries and the split.
        queries: The queries with their judgements.
        searches: The search of each source.
        requirements: The requirements.
    """

    options: Evaluate
    queries: EvaluationQueries
    searches: list[SearchQueriesWork]
    requirements: list[Requirement]


def open_comparison(both: BothEncoders, options: Migrate, new: Embeddings) -> Comparison:
    """Opens the queries and the sources that are compared, without a search.

    Raises:
        InputError: If a metric is unknown, or needs judgements that the split lacks, or if a source cannot be searched.
    """
    metrics = list(dict.fromkeys(each.metric for each in options.requirements if not each.is_overlap))
    names = list(dict.fromkeys(each.metric for each in options.requirements))
    check_metrics(metrics, by_category=False)
    evaluation = Evaluate(
        store=both.store.url,
        source=compared_sources(both, new),
        queries=options.queries,
        split=options.split,
        limit=options.limit,
        metrics=tuple(names),
    )
    queries = read_evaluation_queries(Queries.open(both.store, options.queries), evaluation, metrics)
    searches = open_searches(both.store, evaluation, names)
    return Comparison(evaluation, queries, searches, options.requirements)


def decide_all(store: Store, comparison: Comparison) -> list[Decision]:
    """Searches the queries with both embeddings, and decides on the requirements."""
    values = paired_values(store, comparison)
    return [decide(each, array) for each, array in zip(comparison.requirements, values, strict=True)]


def paired_values(store: Store, comparison: Comparison) -> list[np.ndarray]:
    """Returns the values of requirements for each query. Runs that the store lacks are made.

    Returns:
        For each requirement the difference of its metric, new minus old, or the overlap of the hits: float64 [queries].
    """
    options, queries, requirements = comparison.options, comparison.queries, comparison.requirements
    for search in comparison.searches:
        make_run(store, search, options)
    depth = needed_depth([each.metric for each in requirements], None, 1)
    tables = [
        read_checked_run(store, RunReference(search.name, is_file=False), queries, options.split, depth)
        for search in comparison.searches
    ]
    metrics = list(dict.fromkeys(each.metric for each in requirements if not each.is_overlap))
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
        InputError: If the new encoder is a prompt, which is served as a task, if a task of the live release does not
            fit the new encoder and would be lost, if the new index has fewer shards than the live one, or if the BM25
            index of the release is ambiguous.
    """
    if both.spec.task is not None:
        raise InputError(
            f"{Parameter('task', both.spec.task)}: a prompt is served as a task next to others over its backbone and "
            f"needs no switch; leave out {Parameter('switch')}, and make a release with {Command('serve-search')}"
        )
    base = both.live.task(BASE) if both.live else None
    index = find_index_over(both.store, new.name, "remove all but one of them")
    check_shards(both, new, index)
    bm25 = base.bm25 if base else None
    if bm25 is None and len(names := both.store.names("bm25")) > 1:
        raise InputError(
            f"{both.store.url} has several BM25 indexes ({', '.join(names)}), and the live release has none of them: "
            f"make a release with one of them first "
            f"({Command('serve-search', store=both.store.url, bm25=names[0], renew='')}), or remove all but one"
        )
    release, excluded = plan_release(
        both.store,
        embeddings=new.name,
        index=index,
        bm25=bm25,
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


def check_shards(both: BothEncoders, new: Embeddings, index: str | None) -> None:
    """Raises InputError if the new index has fewer shards than that of the live release, and so fewer row ranges."""
    base = both.live.task(BASE) if both.live else None
    if both.live is None or base is None or base.index is None or index is None:
        return
    live_shards = len(Index(base.index, both.live.generations(both.store, "index", base.index)).shards)
    shards = len(Index.open(both.store, index, new).shards)
    if shards < live_shards:
        command = Command("build-index", store=both.store.url, embeddings=new.name, shards=live_shards)
        raise InputError(
            f"index/{index} has {shards} shards, and index/{base.index} of the live release has {live_shards}: a "
            f"server with so many row ranges could not open it; remove it, and build it again ({command})"
        )
