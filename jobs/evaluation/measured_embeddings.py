"""Opens and measures the embeddings of an evaluation, and prints the results as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.retriever.objectives.category_term import FIELD

if TYPE_CHECKING:
    from riptide.indexing.measures.embedding_measures import EmbeddingMeasures
    from riptide.indexing.work.worker_tasks import Runner
    from riptide.jobs.evaluation.evaluate_options import Evaluate


class MeasureWork(Protocol):
    """The interface of the work that measures embeddings, by judged pairs or by category."""

    texts: list[str]

    def describe(self) -> str:
        """Returns a description of the measurement for --plan."""

    def run(self, runner: Runner) -> EmbeddingMeasures:
        """Encodes the queries and returns the measures."""


def open_embeddings(store: Store, name: str, queries: Queries, options: Evaluate) -> MeasureWork:
    """Opens and checks embeddings to measure. Raises InputError if they do not fit the queries."""
    from riptide.indexing.hit_sources.search_options import SearchOptions

    search = SearchOptions(encoder=options.encoder, task=options.task)
    bounds: dict[str, Any] = {"limit": options.limit, "sample": options.sample, "seed": options.seed}
    if options.relevance == "category":
        from riptide.indexing.measures.embeddings_by_category import MeasureByCategoryWork

        field = options.categories_field or FIELD
        return MeasureByCategoryWork(store, name, queries, options.split, field, search, **bounds)
    from riptide.indexing.measures.embedding_measures import MeasureEmbeddingsWork

    return MeasureEmbeddingsWork(store, name, queries, options.split, search, **bounds)


def measure_embeddings(store: Store, works: Mapping[str, MeasureWork], options: Evaluate) -> dict[str, Any]:
    """Measures embeddings, prints their table, and returns the results for the JSON file."""
    from riptide.jobs.common.session import open_runner

    runner = open_runner(store, options)
    results = {name: work.run(runner) for name, work in works.items()}
    say(format_measures(results))
    for name, work in works.items():
        say(f"embeddings {name}: {work.describe()}")
    return {name: measures.document() for name, measures in results.items()}


def format_measures(results: Mapping[str, EmbeddingMeasures]) -> str:
    """Returns a table with a line per embeddings and form of their vectors, and a column per measure."""
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
