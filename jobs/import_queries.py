"""Import a further question set over a store's corpus.

python jobs/import_queries.py --store data/wiki --source raw/nq/nq-dev.qa.csv --queries nq-dev
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.cli import Common, run, say

from indexing.queries import import_queries
from indexing.sources import detect_queries
from indexing.store import Store


@dataclass(frozen=True, kw_only=True)
class ImportQueries(Common):
    source: str
    """A BEIR or MS MARCO folder, or a file of BEIR, MS MARCO, DPR or KILT questions."""
    queries: str | None = None
    """The set's name; default: the folder's or file's."""
    format: Literal["auto", "beir", "msmarco", "dpr", "kilt"] = "auto"


def main(options: ImportQueries) -> None:
    store = Store(options.store).require()
    source = detect_queries(options.source, options.format)
    if options.plan:
        say(f"would read {', '.join(source.queries)}; splits with qrels: {', '.join(source.qrels) or 'none'}")
        return
    name = options.queries or source.name
    queries = import_queries(
        store, source, name if options.limit is None else f"{name}-limit{options.limit}", limit=options.limit
    )
    say(f"{queries.artifact.url}: {queries.artifact.rows:,} queries ({', '.join(queries.splits) or 'no qrels'})")


if __name__ == "__main__":
    run(main, ImportQueries)
