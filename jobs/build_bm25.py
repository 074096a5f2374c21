"""Index a corpus' words with Lucene, for BM25.

python jobs/build_bm25.py --store data/squad
"""

from __future__ import annotations

from dataclasses import dataclass

from jobs.cli import Common, Stage, human, run, say
from jobs.session import connect

from indexing.bm25 import Bm25, Bm25Building
from indexing.corpus import Corpus
from indexing.store import Store


@dataclass(frozen=True, kw_only=True)
class BuildBm25(Common):
    name: str = "bm25"
    k1: float = 0.9
    """How soon a word that comes again stops counting."""
    b: float = 0.4
    """How much a long passage is held against it, 0 to 1."""
    language: str = "en"
    """Of Anserini's analyzers: which words are dropped, and how the others are stemmed."""
    shards: int | None = None
    """Filled in parallel, searched as one; default: one for each million passages."""


def main(options: BuildBm25) -> None:
    store = Store(options.store).require()
    corpus = Corpus.open(store)
    building = Bm25Building(
        store,
        corpus,
        options.name,
        k1=options.k1,
        b=options.b,
        language=options.language,
        shards=options.shards,
        limit=options.limit,
    )
    rows = building.end - building.first_row
    if options.plan:
        text = sum(part.part.bytes for part in corpus.parts) * rows // max(1, corpus.num_rows)
        say(f"corpus   {rows:,} passages to index, {human(text)} of text")
        say(f"shards   {building.num_shards} of about {rows // building.num_shards:,} passages, a core each")
        say(f"writes   about {human(text * 0.2)} to {store.url}/bm25/{building.name}")
        say("memory   up to 2 GB of Java for each shard that is being filled")
        return
    if not building.complete:
        connect(store)
        with Stage("index words", rows) as stage:
            for kept, count in building.fill():
                stage.count(count, kept)
    made = Bm25.open(store, building.name, corpus)
    latest = made.generations[-1]
    say(
        f"{latest.url}: {made.num_rows:,} passages in {len(made.shards)} shards, k1 {made.k1:g}, b {made.b:g}, "
        f"Lucene {latest.config['lucene']}"
    )


if __name__ == "__main__":
    run(main, BuildBm25)
