"""Search a split's queries and commit the run: an index, every vector, BM25, or several of them fused.

python jobs/search.py --store data/squad --mode dense --split test --k 100 --run results/dense.trec
python jobs/search.py --store data/squad --source 0.4*bm25+0.6*exact:minilm --split dev
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.cli import Common, Stage, run, say
from jobs.session import connect

from indexing.retrieval import RERANK_DEPTH, Retrieval, source_of
from indexing.retrievers import SearchOptions
from indexing.runs import read_run, write_trec
from indexing.store import Store
from retriever.errors import InputError

SHOWN = 10  # queries without a hit that are named


@dataclass(frozen=True, kw_only=True)
class Search(Common):
    mode: Literal["dense", "exact", "bm25", "hybrid"] = "dense"
    """dense: probe the index, score again by the vectors; exact: score every vector; bm25: Lucene; hybrid: bm25 and
    dense (exact where there is no index), half and half."""
    source: str | None = None
    """Instead of a mode: bm25, bm25:NAME, exact:EMB, index:NAME, A+B (reciprocal rank), 0.4*A+0.6*B (weighted)."""
    split: str = "test"
    """A split of the queries' qrels, or all."""
    k: int = 1000
    """Hits of each query."""
    run: str | None = None
    """Also export the hits to this file, in TREC form."""
    name: str | None = None
    """The run's name in the store; default: queries-split-source."""
    queries: str | None = None
    """These names may be left out where the store has one only."""
    embeddings: str | None = None
    index: str | None = None
    encoder: str | None = None
    """Where the encoder is now; default: where it was when the corpus was encoded."""
    task: str | None = None
    """A tuned task whose questions these are; default: the one that the corpus was encoded for, if any."""
    nprobe: int | None = None
    """Lists probed; default: what the build measured for its recall."""
    depth: int | None = None
    """Candidates of each shard that are scored again; default: what the build measured."""
    rerank: str | None = None
    """Order the first hits by this cross-encoder: a Hugging Face name, a folder, or models/NAME of the store."""
    rerank_depth: int | None = None
    """How many hits of each query (100); those below stay below, with -rank for a score."""
    drop_self: bool = False
    """Drop a hit whose id is the query's (ArguAna, Quora)."""


def main(options: Search) -> None:
    store = Store(options.store).require()
    for name in ("k", "nprobe", "depth", "rerank_depth"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    source = options.source or source_of(options.mode, store, options.embeddings, options.index)
    check_dials(options, source)
    retrieval = Retrieval(
        store,
        source=source,
        split=options.split,
        k=options.k,
        name=options.name,
        queries=options.queries,
        options=SearchOptions(encoder=options.encoder, task=options.task, nprobe=options.nprobe, depth=options.depth),
        drop_self=options.drop_self,
        reranker=options.rerank,
        rerank_depth=options.rerank_depth or RERANK_DEPTH,
        limit=options.limit,
    )
    source = retrieval.retriever.source
    if options.plan:
        say(f"run      {store.url}/runs/{retrieval.name}")
        say(f"queries  {len(retrieval.split.ids):,} of {retrieval.queries.artifact.key} {options.split}")
        say(f"source   {source}, over {retrieval.corpus.num_rows:,} passages")
        say(f"hits     up to {len(retrieval.split.ids) * options.k:,}")
        return
    if not retrieval.draft().complete:
        connect(store)
        with Stage("search", len(retrieval.split.ids), "queries") as stage:
            for kept, found in retrieval.run():
                stage.count(found, kept)
    artifact = store.open("runs", retrieval.name)
    say(f"{artifact.url}: {artifact.notes['hits']:,} hits of {len(retrieval.split.ids):,} queries in {source}")
    if unanswered := retrieval.unanswered():
        more = f" and {len(unanswered) - SHOWN} more" if len(unanswered) > SHOWN else ""
        say(f"  {len(unanswered):,} queries found nothing: {', '.join(unanswered[:SHOWN])}{more}")
    if options.run:
        write_trec(read_run(artifact), options.run, retrieval.name)
        say(options.run)


def check_dials(options: Search, source: str) -> None:
    """Raises InputError for an option that what is searched has no use for."""
    probed, dense = "index:" in source, "index:" in source or "exact:" in source
    uses = {"nprobe": (probed, "an index"), "depth": (probed, "an index"), "encoder": (dense, "vectors"),
            "task": (dense, "vectors"), "rerank_depth": (options.rerank is not None, "--rerank")}  # fmt: skip
    for name, (used, needed) in uses.items():
        if not used and (value := getattr(options, name)) is not None:
            option = f"--{name.replace('_', '-')} {value}"
            raise InputError(f"{option}: {source} has no use for it, it goes with {needed}")


if __name__ == "__main__":
    run(main, Search)
