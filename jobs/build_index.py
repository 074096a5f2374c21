"""Fill a FAISS index from embeddings, in parallel shards, and measure its recall.

python jobs/build_index.py --store data/squad --embeddings minilm --shards 4
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jobs.cli import Common, Stage, human, run, say
from jobs.session import connect

from indexing.building import SAMPLE_QUERIES, Building, IndexOptions
from indexing.corpus import Corpus
from indexing.embeddings import Embeddings
from indexing.faiss_index import training_size
from indexing.index import Index
from indexing.store import Store
from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class BuildIndex(Common):
    """--limit N takes the embeddings that encode_corpus --limit N made (NAME-limitN), for an index NAME-limitN."""

    embeddings: str | None = None
    """May be left out where the store has one only."""
    name: str | None = None
    """The index' name; default: the embeddings'."""
    factory: str = "auto"
    """FAISS' factory string: Flat, SQ… or IVF…, after PCA, OPQ or RR; auto: from size, --memory-gb and recall."""
    shards: int = 4
    recall: float = 0.95
    """Of the exact top 100, after re-scoring; nprobe and depth are set to reach it."""
    memory_gb: float | None = None
    """Of all shards, at most, with --factory auto, when an index is new; embeddings stay on disk. Default: what recall
    asks for."""


def main(options: BuildIndex) -> None:
    store = Store(options.store).require()
    if options.shards < 1 or not 0 < options.recall <= 1:
        raise InputError(
            f"--shards {options.shards} --recall {options.recall}: expected at least 1, and 0 < recall <= 1"
        )
    if options.memory_gb is not None and (options.factory != "auto" or not 0 < options.memory_gb * 1e9 < math.inf):
        raise InputError(f"--memory-gb {options.memory_gb}: expected a number above 0, and --factory auto")
    chosen, ending = options.embeddings, ""
    if options.limit is not None:
        ending = f"-limit{options.limit}"
        limited = [name for name in store.names("embeddings") if name.endswith(ending)]
        if chosen is None and len(limited) != 1:
            raise InputError(f"--limit {options.limit}: {len(limited)} embeddings end with {ending}; name --embeddings")
        chosen = f"{chosen}{ending}" if chosen is not None else limited[0]
    embeddings = Embeddings.open(store, chosen, Corpus.open(store))
    shape = IndexOptions(factory=options.factory, shards=options.shards, recall=options.recall,
                         memory_bytes=None if options.memory_gb is None else int(options.memory_gb * 1e9))  # fmt: skip
    name = f"{options.name}{ending}" if options.name else embeddings.name
    if options.plan:
        from indexing.faiss_index import check_factory

        grown = store.generations("index", name) if options.factory == "auto" else []
        factory = grown[0].config["factory"] if grown else shape.chosen(embeddings)
        check_factory(factory, embeddings.dim)
        say(f"vectors  {embeddings.num_rows:,} of {embeddings.dim} in embeddings/{embeddings.name}")
        say(f"factory  {factory}, trained on {training_size(factory, embeddings.num_rows):,} vectors")
        say(f"shards   {options.shards} of about {embeddings.num_rows // options.shards:,} vectors")
        say(f"memory   {human(training_size(factory, embeddings.num_rows) * embeddings.dim * 4)} to train")
        return
    building = Building(store, embeddings, name, shape)
    if not building.complete:
        connect(store)
        with Stage(f"train {building.factory}", unit="vectors") as stage:
            stage.count(building.train())
        with Stage("fill", building.end - building.first_row, unit="vectors") as stage:
            for kept, rows in building.fill():
                stage.count(rows, kept)
        with Stage("measure recall", unit="queries") as stage:
            building.finish()
            stage.count(min(SAMPLE_QUERIES, building.end))
    index = Index.open(store, building.name, embeddings)
    recall = ", ".join(f"recall@{k} {value:.4f}" for k, value in index.recall.items())
    say(f"{index.generations[-1].url}: {index.num_rows:,} vectors in {len(index.shards)} shards, {index.factory}")
    say(f"  {recall} of exact search at nprobe {index.nprobe}, {index.depth} candidates a shard")
    if not index.generations[-1].notes["reached"]:
        say(f"  recall {options.recall} is out of this factory's reach: take finer codes (SQ8, Flat) or more lists")


if __name__ == "__main__":
    run(main, BuildIndex)
