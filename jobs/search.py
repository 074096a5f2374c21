"""Search a split's queries and commit the run: through an index (dense) or past all vectors (exact).

    python jobs/search.py --store data/squad --mode dense --split test --k 100 --run results/dense.trec
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.cli import Common, Stage, human, run, say
from jobs.session import connect

from indexing.retrieval import QUERY_BLOCK, Retrieval
from indexing.runs import read_run, write_trec
from indexing.store import Store
from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Search(Common):
    mode: Literal["dense", "exact"] = "dense"
    """dense: probe the index, score again by the float16 vectors; exact: score every vector."""
    split: str = "test"
    """A split of the queries' qrels, or all."""
    k: int = 1000
    """Hits of each query."""
    run: str | None = None
    """Also export the hits to this file, in TREC form."""
    name: str | None = None
    """The run's name in the store; default: queries-split-mode-index."""
    queries: str | None = None
    """These names may be left out where the store has one only."""
    embeddings: str | None = None
    index: str | None = None
    encoder: str | None = None
    """Where the encoder is now; default: where it was when the corpus was encoded."""
    nprobe: int | None = None
    """Lists probed; default: what the build measured for its recall."""
    depth: int | None = None
    """Candidates of each shard that are scored again; default: what the build measured."""
    drop_self: bool = False
    """Drop a hit whose id is the query's (ArguAna, Quora)."""


def main(options: Search) -> None:
    store = Store(options.store).require()
    for name in ("k", "nprobe", "depth"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name} {value}: expected at least 1")
    retrieval = Retrieval(
        store,
        mode=options.mode,
        split=options.split,
        k=options.k,
        name=options.name,
        queries=options.queries,
        embeddings=options.embeddings,
        index=options.index,
        encoder=options.encoder,
        nprobe=options.nprobe,
        depth=options.depth,
        drop_self=options.drop_self,
        limit=options.limit,
    )
    if options.plan:
        vectors = retrieval.embeddings
        say(f"run      {store.url}/runs/{retrieval.name}")
        say(f"queries  {len(retrieval.split.ids):,} of {retrieval.queries.artifact.key} {options.split}")
        say(f"source   {retrieval.source}: {vectors.num_rows:,} vectors of {vectors.dim}")
        say(
            f"reads    {human(vectors.num_rows * vectors.dim * 2)} of vectors every {QUERY_BLOCK:,} queries (exact)"
        )
        return
    if not retrieval.draft().complete:
        connect(store)
        with Stage("search", len(retrieval.split.ids), "queries") as stage:
            for kept, found in retrieval.run():
                stage.count(found, kept)
    artifact = store.open("runs", retrieval.name)
    say(
        f"{artifact.url}: {artifact.notes['hits']:,} hits of {len(retrieval.split.ids):,} queries in {retrieval.source}"
    )
    if options.run:
        write_trec(read_run(artifact), options.run, retrieval.name)
        say(options.run)


if __name__ == "__main__":
    run(main, Search)
