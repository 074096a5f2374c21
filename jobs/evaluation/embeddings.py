"""Embeddings that an evaluation measures: opened, measured, and printed as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.cli import say

from indexing.queries import Queries
from indexing.store import Store

if TYPE_CHECKING:
    from jobs.evaluate import Evaluate

    from indexing.measures.embeddings import EmbeddingMeasures, MeasureEmbeddings


def open_embeddings(store: Store, name: str, queries: Queries, options: Evaluate) -> MeasureEmbeddings:
    """Opens and checks embeddings that are measured. Raises InputError if they do not fit the queries."""
    from indexing.hit_sources.options import SearchOptions
    from indexing.measures.embeddings import MeasureEmbeddings

    search = SearchOptions(encoder=options.encoder, task=options.task)
    return MeasureEmbeddings(
        store,
        name,
        queries,
        options.split,
        search,
        limit=options.limit,
        sample=options.sample,
        seed=options.seed,
    )


def describe_counts(work: MeasureEmbeddings) -> str:
    """Returns what is measured, in words."""
    return (
        f"alignment of {len(work.query_rows):,} pairs, uniformity of {len(work.queries):,} queries and of "
        f"{len(work.passages):,} passages"
    )


def measure_embeddings(store: Store, works: Mapping[str, MeasureEmbeddings], options: Evaluate) -> dict[str, Any]:
    """Measures the embeddings, prints their table, and returns the figures for the JSON file."""
    from jobs.session import open_runner

    runner = open_runner(store, private=options.ray)
    results = {name: work.run(runner) for name, work in works.items()}
    say(format_measures(results))
    for name, work in works.items():
        say(f"embeddings {name}: {describe_counts(work)}")
    return {name: measures.document() for name, measures in results.items()}


def format_measures(results: Mapping[str, EmbeddingMeasures]) -> str:
    """Returns one line per embeddings and form of their vectors, with the measures in columns."""
    columns = {
        "alignment": "alignment",
        "uniformity_queries": "uniformity queries",
        "uniformity_passages": "uniformity passages",
        "cosine_relevant": "cosine relevant",
        "cosine_other": "cosine other",
    }
    width = max(len("embeddings"), *(len(name) for name in results))
    lines = ["embeddings".ljust(width) + "  vectors" + "".join(f"  {title:>19}" for title in columns.values())]
    for name, measures in results.items():
        for form, values in (("unit", measures.unit), ("raw", measures.raw)):
            if values is not None:
                numbers = [getattr(values, column) for column in columns]
                cells = ["-" if number is None else f"{number:.4f}" for number in numbers]
                lines.append(name.ljust(width) + f"  {form:7}" + "".join(f"  {cell:>19}" for cell in cells))
    return "\n".join(lines)
