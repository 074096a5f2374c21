"""Build an index of embeddings, in parallel shards.

    riptide build-index --store data/squad --embeddings minilm --shards 4

Dense vectors get a FAISS index, whose recall is measured; sparse vectors get exact impacts in Lucene.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import math
from dataclasses import dataclass
from typing import ClassVar

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import filter_columns
from riptide.indexing.embeddings.vector_kind import IndexOptions, RecallQueries
from riptide.indexing.hit_sources.registry import find_index_kind
from riptide.indexing.hit_sources.source_kind import IndexKind
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.jobs.common.job_options import EstimatedJob, SizedWorkers
from riptide.jobs.common.shards import fill_shards


@dataclass(frozen=True, kw_only=True)
class BuildIndex(SizedWorkers, EstimatedJob):
    GROUP: ClassVar = "index"
    MAKES: ClassVar = ("index",)
    NAMED_BY: ClassVar = ("name", "embeddings")
    READS: ClassVar = {"embeddings": "embeddings"}

    embeddings: str | None = None
    """Name of the embeddings; may be left out if the store has only one."""
    name: str | None = None
    """Name of the index; default: the name of the embeddings."""
    factory: str = "auto"
    """With dense vectors: FAISS factory string: Flat, SQ…, IVF…, HNSW… or HNSW…,SQ…, after PCA, OPQ or RR; auto:
    chosen by size, --memory-gb and recall."""
    recall: float = 0.95
    """With dense vectors: recall of the exact top 100 to reach, after re-scoring; nprobe (of HNSW: ef_search) and
    depth are chosen for it.
    Search of sparse vectors is exact."""
    queries: str | None = option(None, metavar="NAME")
    """With dense vectors: measure recall with up to 1,000 queries of this query set. Default: with vectors of the
    corpus, whose neighbours an index finds more often than those of real queries."""
    split: str = "all"
    """A split of the qrels of --queries, or all."""
    filter_field: str | None = None
    """With --queries: metadata field of the queries that holds each one's filter, as a text or as an object. Recall is
    measured with these filters. Queries whose filter matches at most 100,000 passages of each shard are left out, as
    these passages are all scored."""
    memory_gb: float | None = None
    """With dense vectors: largest size in GB of all shards of a new index, with --factory auto; embeddings stay on
    disk. Default: what the recall requires."""
    shards: int = option(4, minimum=1)
    """Number of shards of a new index, which are filled and searched in parallel."""
    limit: int | None = None
    """Only accept embeddings of the first N passages (`riptide encode-corpus --limit N`)."""


def main(options: BuildIndex) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: BuildIndex) -> Artifact | None:
    """Builds the index. Returns its newest generation, or None with --plan."""
    store.require_not_empty()
    if not 0 < options.recall <= 1:
        raise InputError(f"{Parameter('recall', options.recall)}: expected more than 0, and at most 1")
    if options.memory_gb is not None and (options.factory != "auto" or not 0 < options.memory_gb * 1e9 < math.inf):
        raise InputError(
            f"{Parameter('memory_gb', options.memory_gb)}: expected a number above 0, and "
            f"{Parameter('factory', 'auto')}"
        )
    name = store.only_name("embeddings", options.embeddings)
    kind = find_index_kind(store.generations("embeddings", name)[0].config["encoder"])
    embeddings = kind.reader.open(store, name, Corpus.open(store))
    check_options(options, kind, name)
    queries = recall_queries(store, options)
    check_limit(options, name, embeddings.num_rows)
    index_options = IndexOptions(
        factory=options.factory,
        shards=options.shards,
        recall=options.recall,
        memory_bytes=None if options.memory_gb is None else int(options.memory_gb * 1e9),
        queries=queries,
    )
    return fill_shards(store, options, kind.build(store, embeddings, options.name or name, index_options))


def recall_queries(store: Store, options: BuildIndex) -> RecallQueries | None:
    """Reads the queries of a split; None without `queries`.

    Raises:
        InputError: If the query set or the split is missing or has no query, or if a filter does not parse.
    """
    name, split, field = options.queries, options.split, options.filter_field
    if name is None:
        return None
    queries = Queries.open(store, name)
    ids, texts = queries.split(split)
    if not texts:
        raise InputError(f"{Parameter('queries', name)}: found no query in the split {split}, expected at least one")
    filters = [] if field is None else queries.filters(ids, field, filter_columns(Corpus.open(store)))
    return RecallQueries(name, split, texts, field, filters)


def check_options(options: BuildIndex, kind: IndexKind, name: str) -> None:
    """Raises InputError if an option is set that has no effect on an index over such embeddings."""
    for of_queries in ("split", "filter_field"):
        value = getattr(options, of_queries)
        if options.queries is None and value != getattr(BuildIndex, of_queries):
            raise InputError(f"{Parameter(of_queries, value)}: expected {Parameter('queries', 'NAME')} with it")
    for unshaped in ("factory", "memory_gb", "recall", "queries", "split", "filter_field") if kind.unshaped else ():
        if getattr(options, unshaped) != getattr(BuildIndex, unshaped):
            vectors = kind.reader.kind.name
            raise InputError(
                f"{Parameter(unshaped)}: embeddings/{name} has {vectors} vectors, {kind.unshaped}: leave it out"
            )


def check_limit(options: BuildIndex, name: str, num_rows: int) -> None:
    """Raises InputError if the embeddings have more rows than --limit."""
    if options.limit is not None and num_rows > options.limit:
        raise InputError(
            f"{Parameter('limit', options.limit)}: embeddings/{name} has {num_rows:,} rows, and an index covers all of "
            f"them; encode the first rows with {Command('encode-corpus', limit='')}, under another name"
        )


if __name__ == "__main__":
    run(main, BuildIndex)
