"""Build a Lucene index of a corpus for BM25.

riptide build-bm25 --store data/squad
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from dataclasses import dataclass
from typing import ClassVar

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.lucene.bm25_index import Bm25, BuildBm25Work
from riptide.indexing.lucene.java import FILL_MEMORY
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import IndexBuild
from riptide.jobs.common.job_options import EstimatedJob, Workers
from riptide.jobs.common.shards import fill_shards
from riptide.process.memory import format_bytes


@dataclass(frozen=True, kw_only=True)
class BuildBm25(Workers, EstimatedJob):
    GROUP: ClassVar = "index"
    MAKES: ClassVar = ("bm25",)
    NAMED_BY: ClassVar = ("name",)

    name: str = "bm25"
    """Name of the index in the store."""
    k1: float = 0.9
    """Term-frequency saturation: the larger, the more each further occurrence of a term counts."""
    b: float = 0.4
    """Length normalisation, 0 (none) to 1 (full)."""
    language: str = "en"
    """Language of Anserini's analyzer, which removes stop words and stems the others."""
    shards: int | None = None
    """Number of shards, which are filled in parallel and searched as one; default: one per million passages."""


def main(options: BuildBm25) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: BuildBm25) -> Artifact | None:
    """Builds the index. Returns its newest generation, or None with --plan."""
    store.require_not_empty()
    corpus = Corpus.open(store)
    work = BuildBm25Work(
        store,
        corpus,
        options.name,
        k1=options.k1,
        b=options.b,
        language=options.language,
        shards=options.shards,
        limit=options.limit,
    )
    rows = work.end - work.first_row
    text = sum(part.part.bytes for part in corpus.parts) * rows // max(1, corpus.num_rows)
    plan = [
        f"corpus   {rows:,} passages to index, {format_bytes(text)} of text",
        f"shards   {work.num_shards} of about {rows // work.num_shards:,} passages, a core each",
        f"writes   about {format_bytes(text * 0.2)} to {store.url}/bm25/{work.name}",
    ]

    def report() -> list[str]:
        index = Bm25.open(store, work.name, corpus)
        latest = index.generations[-1]
        return [
            f"{latest.url}: {index.num_rows:,} passages in {len(index.shards)} shards, k1 {index.k1:g}, "
            f"b {index.b:g}, Lucene {latest.config['lucene']}"
        ]

    return fill_shards(store, options, IndexBuild(work, plan, FILL_MEMORY, report, prepare=work.pin_versions))


if __name__ == "__main__":
    run(main, BuildBm25)
