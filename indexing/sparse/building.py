"""Builds an index of sparse embeddings by filling Lucene shards with the impacts of the vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from riptide.indexing.lucene.segments import check_lucene_versions, commit_segment, query_versions
from riptide.indexing.sparse.csr_file import blocks
from riptide.indexing.sparse.impacts import SCALE, document_texts, quantise
from riptide.indexing.sparse.lucene_search import write_impacts
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import NextGenerationWork, count_shards
from riptide.indexing.work.work import TaskStage, WorkUnit, check_same_config, shard_units
from riptide.indexing.work.worker_tasks import JVM_CORE, Allocation, Report, Runner, WorkerResources
from riptide.process.temporary_folders import TemporaryFolder


class BuildImpactsWork(NextGenerationWork):
    """The work that builds index/NAME over sparse embeddings, or its next generation.

    Attributes:
        num_shards: The number of shards that are filled in parallel.

    Args:
        store: The store.
        embeddings: The sparse embeddings.
        name: The name of the index.
        shards: Number of shards of the first generation.

    Raises:
        InputError: If the existing generations were built from other embeddings, or with other options.
    """

    def __init__(self, store: Store, embeddings: SparseEmbeddings, name: str, *, shards: int):
        super().__init__(store, "index", name, embeddings.generations)
        self.embeddings = embeddings
        self.config = {"embeddings": embeddings.name, "impacts": SCALE, "shards": shards}
        if self.previous:
            check_same_config(self.previous[0], self.config)
        self.end = embeddings.num_rows
        first_rows = self.previous[0].rows if self.previous else 0
        self.num_shards = count_shards(shards, self.end - self.first_row, first_rows)

    def pin_versions(self, runner: Runner) -> None:
        """Adds the versions of Lucene and Anserini to the configuration. Raises the errors of `query_versions`."""
        self.config |= query_versions(runner, self.previous, "en", self.num_shards)

    @property
    def stages(self) -> list[TaskStage]:
        """Returns the only stage, which fills the shards."""
        units = shard_units(self.first_row, self.end, self.num_shards)
        return [
            TaskStage("index impacts", "vectors", units, lambda drafts: FillImpactsTask(drafts[0], self.embeddings))
        ]


@dataclass(frozen=True)
class FillImpactsTask:
    """A worker task that writes the impacts of a range of rows to a Lucene segment and commits the segment."""

    draft: Draft
    embeddings: SparseEmbeddings
    resources: WorkerResources = JVM_CORE
    reports_progress: bool = True

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Returns a function that fills a shard. Raises InputError if the Lucene version is not the pinned one."""
        check_lucene_versions(self.draft)
        return self._fill

    def _vector_label(self, first_row: int, number: int) -> str:
        return f"embeddings/{self.embeddings.name}: passage {first_row + number}"

    def _fill(self, unit: WorkUnit, report: Report) -> None:
        [name] = unit.names
        first, end = unit.payload
        if self.draft.find_part(name):  # an earlier attempt, whose acknowledgement was lost, has committed the part
            return
        largest = postings = 0

        def texts() -> Iterator[str]:
            nonlocal largest, postings
            for first_row, vectors in self.embeddings.read_range(first, end):
                for start, stop in blocks(vectors.offsets):
                    row = first_row + start
                    report(row - first)
                    impacts = quantise(vectors.between(start, stop), partial(self._vector_label, row))
                    largest = max(largest, int(impacts.impacts.max(initial=0)))
                    postings += len(impacts.words)
                    yield from document_texts(impacts)

        with TemporaryFolder("lucene") as folder:
            segment = write_impacts(texts(), Path(folder))
            commit_segment(self.draft, name, segment, Path(folder), first, end, largest=largest, postings=postings)
