"""Fill an index from embeddings, in parallel shards: a FAISS index, whose recall is measured, or Lucene's impacts.

python jobs/build_index.py --store data/squad --embeddings minilm --shards 4
"""

from __future__ import annotations

from jobs.common.cli import Stage, human, run, say, say_complete, say_stages

import math
from dataclasses import dataclass

from jobs.common.session import open_runner
from jobs.common.shards import fill_shards
from jobs.common.workers import SizedWorkers

from indexing.corpus.corpus import Corpus
from indexing.dense.building import BuildIndex as BuildWork
from indexing.dense.building import IndexOptions
from indexing.dense.faiss_index import training_size
from indexing.dense.index import Index
from indexing.embeddings.embeddings import Embeddings, is_sparse
from indexing.embeddings.sparse import SparseEmbeddings
from indexing.lucene.impact_building import BuildImpacts
from indexing.lucene.impact_index import ImpactIndex
from indexing.store.store import Store
from indexing.work.work import run_work
from retriever.errors import InputError


@dataclass(frozen=True, kw_only=True)
class BuildIndex(SizedWorkers):
    """--limit N only accepts embeddings of the first N passages (encode_corpus --limit N)."""

    embeddings: str | None = None
    """Name of the embeddings; may be left out if the store has only one."""
    name: str | None = None
    """Name of the index; default: the name of the embeddings."""
    factory: str = "auto"
    """With dense vectors: FAISS factory string: Flat, SQ… or IVF…, after PCA, OPQ or RR; auto: chosen by size,
    --memory-gb and recall."""
    shards: int = 4
    """Number of shards of a new index, which are filled and searched in parallel."""
    recall: float = 0.95
    """With dense vectors: recall of the exact top 100 to reach, after re-scoring; nprobe and depth are chosen for it.
    Search of sparse vectors is exact."""
    memory_gb: float | None = None
    """With dense vectors: largest size in GB of all shards of a new index, with --factory auto; embeddings stay on
    disk. Default: what the recall requires."""


def main(options: BuildIndex) -> None:
    store = Store(options.store).require()
    if options.shards < 1 or not 0 < options.recall <= 1:
        raise InputError(
            f"--shards {options.shards} --recall {options.recall}: expected at least 1, and 0 < recall <= 1"
        )
    if options.memory_gb is not None and (options.factory != "auto" or not 0 < options.memory_gb * 1e9 < math.inf):
        raise InputError(f"--memory-gb {options.memory_gb}: expected a number above 0, and --factory auto")
    name = store.only("embeddings", options.embeddings)
    if is_sparse(store.generations("embeddings", name)[0].config["encoder"]):
        return build_impacts(store, options, SparseEmbeddings.open(store, name, Corpus.open(store)))
    embeddings = Embeddings.open(store, name, Corpus.open(store))
    check_limit(options, embeddings.name, embeddings.num_rows)
    shape = IndexOptions(
        factory=options.factory,
        shards=options.shards,
        recall=options.recall,
        memory_bytes=None if options.memory_gb is None else int(options.memory_gb * 1e9),
    )
    work = BuildWork(store, embeddings, options.name or embeddings.name, shape)
    if options.plan and work.complete:
        return say_complete(work.previous[-1].url)
    if options.plan:
        rows = training_size(work.factory, embeddings.num_rows)
        say(f"vectors  {embeddings.num_rows:,} of {embeddings.dim} in embeddings/{embeddings.name}")
        say(f"factory  {work.factory}, trained on {rows:,} vectors")
        say_stages(work)
        say(f"memory   {human(rows * embeddings.dim * 4)} to train")
        return None
    if not work.complete:
        run_work(store, work, open_runner(store, options), Stage)
    index = Index.open(store, work.name, embeddings)
    recall = ", ".join(f"recall@{k} {value:.4f}" for k, value in index.recall.items())
    say(f"{index.generations[-1].url}: {index.num_rows:,} vectors in {len(index.shards)} shards, {index.factory}")
    say(f"  {recall} of exact search at nprobe {index.nprobe}, {index.depth} candidates a shard")
    if not index.generations[-1].notes["reaches_recall"]:
        say(f"  this factory does not reach recall {options.recall}: use finer codes (SQ8, Flat) or more lists")
    return None


def build_impacts(store: Store, options: BuildIndex, embeddings: SparseEmbeddings) -> None:
    """Builds an index of sparse embeddings; it is exact, so that no recall is measured."""
    flags = {
        "factory": options.factory != "auto",
        "memory-gb": options.memory_gb is not None,
        "recall": options.recall != BuildIndex.recall,
    }
    for flag, is_set in flags.items():
        if is_set:
            raise InputError(
                f"--{flag}: embeddings/{embeddings.name} has sparse vectors, whose index is Lucene's and "
                "not FAISS': leave it out"
            )
    check_limit(options, embeddings.name, embeddings.num_rows)
    work = BuildImpacts(store, embeddings, options.name or embeddings.name, shards=options.shards)
    rows = work.end - work.first_row
    plan = [f"vectors  {rows:,} over {embeddings.dim:,} words in embeddings/{embeddings.name}"]
    if fill_shards(store, options, work, plan):
        index = ImpactIndex.open(store, work.name, embeddings)
        latest = index.generations[-1]
        say(
            f"{latest.url}: {index.num_rows:,} vectors in {len(index.shards)} shards, "
            f"{index.num_postings / max(1, index.num_rows):,.1f} words each, impacts up to {index.largest:,}, Lucene "
            f"{latest.config['lucene']}"
        )


def check_limit(options: BuildIndex, name: str, num_rows: int) -> None:
    """Raises InputError if embeddings have more rows than --limit."""
    if options.limit is not None and num_rows > options.limit:
        raise InputError(
            f"--limit {options.limit}: embeddings/{name} has {num_rows:,} rows, and an index covers all of them; "
            "encode the first rows with encode_corpus --limit, under another name"
        )


if __name__ == "__main__":
    run(main, BuildIndex)
