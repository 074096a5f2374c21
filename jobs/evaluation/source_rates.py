"""Measures the queries per second of the sources of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from riptide.jobs.common.printing import say

if TYPE_CHECKING:
    from riptide.indexing.exact import Hits
    from riptide.indexing.measures.rates import SearchRate
    from riptide.indexing.search.retrieval import SearchQueriesWork
    from riptide.indexing.work.worker_tasks import Runner


def measure_rates(searches: Sequence[SearchQueriesWork], num_queries: int, batch: int) -> dict[str, dict[str, Any]]:
    """Measures and prints the queries per second of sources in this process; returns JSON values of the rates by run.

    Args:
        searches: The searches of the sources.
        num_queries: The number of queries, from the start of the split.
        batch: Number of queries that are searched at once.
    """
    from riptide.indexing.work.local_runner import LocalRunner
    from riptide.jobs.common.session import num_gpus

    runner = LocalRunner(gpus=num_gpus())
    rates = {}
    for search in searches:
        depth = min(search.k, max(1, search.corpus.num_rows))
        rate = measure_source_rate(search, depth, search.split.texts[:num_queries], batch, runner)
        say(
            f"{search.name}: {rate.queries_per_s:,.4g} queries/s for the first {depth:,} hits, with {rate.queries:,} "
            f"queries in batches of {min(batch, rate.queries):,}"
        )
        rates[search.name] = asdict(rate) | {"hits": depth}
    return rates


def measure_source_rate(
    search: SearchQueriesWork, depth: int, texts: Sequence[str], batch: int, runner: Runner
) -> SearchRate:
    """Opens the source of a search again and measures its rate, with `depth` hits per query."""
    from riptide.indexing.hit_sources.opened_sources import HitSources
    from riptide.indexing.measures.rates import measure_rate
    from riptide.indexing.search.document_search import search_documents

    source = HitSources(search.store, search.corpus, search.sources.options).open(search.source)

    def search_batch(some: Sequence[str]) -> Hits:
        if search.documents is not None:
            return search_documents(source, some, depth, runner, search.documents, allowed_rows=search.allowed_rows)
        return source.search(some, depth, runner, search.allowed_rows)

    return measure_rate(search_batch, texts, batch)
