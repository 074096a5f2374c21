"""Searches the sources of an evaluation; each makes a run whose name no other run has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.store.keys import default_name
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import MAX_NAME, Store
from riptide.indexing.work.work import check_targets, complete_artifact, run_work
from riptide.jobs.common.stage_progress import StageProgress

if TYPE_CHECKING:
    from riptide.indexing.search.retrieval import SearchQueriesWork
    from riptide.jobs.evaluation.evaluate_options import Evaluate

_CUTOFF = re.compile(r"@([1-9]\d*)$")


def open_searches(store: Store, options: Evaluate, metrics: list[str]) -> list[SearchQueriesWork]:
    """Returns the work that searches each source, with distinct names of runs.

    Args:
        store: The store.
        options: The options of the job.
        metrics: Names of metrics.

    Raises:
        InputError: If a source cannot be searched or is given twice, or if its run has the name of another one.
    """
    if not options.source:
        return []
    from riptide.indexing.hit_sources.grammar import parse_source
    from riptide.indexing.hit_sources.modes import expand_mode
    from riptide.indexing.hit_sources.search_options import NEEDS, SearchOptions
    from riptide.indexing.search.retrieval import RUN_HITS, SearchQueriesWork

    search = SearchOptions(encoder=options.encoder, task=options.task)
    sources = [expand_mode(source, store) for source in options.source]
    unused = set.intersection(*(set(parse_source(source).unused_options(search)) for source in sources))
    for name in () if options.embeddings else sorted(unused):
        names = " ".join(options.source)
        raise InputError(
            f"{Parameter(name, getattr(search, name))}: {names} has no use for it, it goes with {NEEDS[name]}"
        )
    shared: dict[str, Any] = {"split": options.split, "queries": options.queries, "limit": options.limit}
    depth = needed_depth(metrics, options.median_length, RUN_HITS)
    searches: list[SearchQueriesWork] = []
    for source in sources:
        work = SearchQueriesWork(store, source=source, k=max(depth, RUN_HITS), options=search, **shared)
        if any(work.source == other.source for other in searches):
            raise InputError(f"{Parameter('source', source)}: a source is given twice; leave one of them out")
        if complete_artifact(store, work) is None:
            work = SearchQueriesWork(store, source=source, k=depth, options=search, **shared)
            first = [f"first{options.limit}"] if options.limit is not None else []
            work.name = default_name(work.name, f"top{depth}", *first)
            make_unique(store, work, {other.name for other in searches})
        if work.name in options.run:
            raise InputError(
                f"{Parameter('run', work.name)}: the run of {Parameter('source', source)} has this name too; leave one "
                f"of them out, or give a file as ./{work.name}"
            )
        searches.append(work)
    return searches


def needed_depth(metrics: list[str], median_length: int | None, max_depth: int) -> int:
    """Returns the number of hits per query that the metrics and the median length need.

    Args:
        metrics: Names of metrics.
        median_length: Hits per query whose length is measured; None: none.
        max_depth: The number that a metric without a cutoff needs.
    """
    cutoffs = [_CUTOFF.search(metric) for metric in metrics]
    return max([median_length or 1, *(int(match[1]) if match else max_depth for match in cutoffs)])


def make_unique(store: Store, search: SearchQueriesWork, taken_names: set[str]) -> None:
    """Renames the run of a search if a run with other inputs or settings has its name.

    The digits that are added are a hash of the run's inputs and settings, so the next evaluation finds the run.

    Args:
        store: The store.
        search: The search.
        taken_names: Names that other searches of this evaluation have.
    """
    try:
        check_targets(store, search)
        is_free = search.name not in taken_names
    except InputError:  # the name is taken by another run, or too long
        is_free = False
    if not is_free:
        [target] = search.targets
        inputs = {role: artifact.fingerprint for role, artifact in target.inputs.items()}
        search.name = f"{search.name[: MAX_NAME - 9]}-{fingerprint_of([inputs, target.config])[:8]}"


def make_run(store: Store, search: SearchQueriesWork, options: Evaluate) -> None:
    """Searches a source unless its run exists, and prints how many queries were cut."""
    from riptide.jobs.common.cut_counts import print_part_cuts
    from riptide.jobs.common.session import open_runner

    artifact = complete_artifact(store, search)
    if artifact is None:
        [artifact] = run_work(store, search, open_runner(store, options), StageProgress)
    print_part_cuts(artifact.numbered_parts("part"), search.sources)
