"""Denoises a pool by the scores of a re-ranker and samples negatives from it (DPTDR, section 3.3).

negatives/NAME       part-*.parquet   the sampled negatives, a row for each query (`sample_negatives`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from riptide.indexing.mining.candidates import PoolCandidatesWork
from riptide.indexing.mining.copies import read_copies
from riptide.indexing.mining.sampling import NegativeOptions, sample_negatives
from riptide.indexing.mining.scoring import ScoreCandidatesWork, known_positive_scores, known_probabilities
from riptide.indexing.search.rescoring import RerankerSpec
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.store import Store
from riptide.indexing.work.work import (
    ArtifactTarget,
    BaseWork,
    Progress,
    TaskStage,
    WorkUnit,
    check_targets,
    complete_artifact,
)
from riptide.indexing.work.worker_tasks import ONE_CORE, Allocation, Report, Runner, WorkerResources


class SampleNegativesWork(BaseWork):
    """The work that builds negatives/NAME from a pool and the scores of its pairs."""

    def __init__(
        self,
        pool: PoolCandidatesWork,
        scores: ScoreCandidatesWork | None,
        options: NegativeOptions,
        name: str | None = None,
    ):
        self.pool, self.options = pool, options
        self.candidates = pool.store.open("candidates", pool.name)
        self.scores = scores.generations if scores else []
        self.name = name or pool.name
        self.num_denoised = options.denoised_negatives if scores else 0
        self.config: dict[str, Any] = {
            **asdict(options),
            **{limit: value for limit, value in asdict(options.margins).items() if value is not None},
            "denoised_negatives": self.num_denoised,
            "pool_draws": "all candidates",
        }
        del self.config["score_all"], self.config["margins"]
        if not options.teacher_scores:
            del self.config["teacher_scores"]

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the only target: negatives/NAME."""
        inputs = {
            "queries": self.pool.queries.artifact,
            "corpus": self.pool.corpus.generations[-1],
            "candidates": self.candidates,
        }
        inputs |= {f"scores/{number}": artifact for number, artifact in enumerate(self.scores)}
        return [ArtifactTarget("negatives", self.name, inputs, self.config)]

    @property
    def stages(self) -> list[TaskStage]:
        """Returns the only stage, which samples negatives."""
        units = [WorkUnit((name,), len(queries.ids), queries) for name, queries in self.pool.parts()]
        return [TaskStage("sample", "queries", units, self._sample_task)]

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Adds the numerics classes of the scores to the notes; later generations of scores may have another one."""
        if self.scores:
            [draft] = drafts
            draft.add_notes(score_numerics=self.score_numerics)

    @property
    def score_numerics(self) -> list[str]:
        """The numerics classes of the scores, in the order of their generations; empty without a re-ranker."""
        return list(dict.fromkeys(artifact.config["numerics"] for artifact in self.scores))

    def _sample_task(self, drafts: Sequence[Draft]) -> SampleTask:
        """Returns the task whose workers sample negatives."""
        return SampleTask(drafts[0], self.candidates, self.scores, self.options)

    def pools(self) -> Iterator[tuple[pa.Table, np.ndarray | None]]:
        """Yields each part of the pool with the probabilities of its pairs, float32 (NaN: unknown; None: no scores)."""
        for name, _ in self.pool.parts():
            table = pq.read_table(self.candidates.local_path(name))
            yield table, known_probabilities(table, name, self.scores) if self.scores else None

    def tables(self) -> Iterator[pa.Table]:
        """Yields the tables of the complete negatives, part by part, in order."""
        artifact = self.pool.store.open("negatives", self.name)
        for part in artifact.numbered_parts("part"):
            yield pq.read_table(artifact.local_path(part))


def complete_negatives(
    store: Store, pool: PoolCandidatesWork, reranker: RerankerSpec | None, options: NegativeOptions, name: str | None
) -> Artifact | None:
    """Returns negatives/NAME if it, its pool and its scores are complete; otherwise None.

    Raises:
        InputError: If the pool and the scores are complete and the name is that of other negatives.
    """
    candidates = complete_artifact(store, pool)
    if candidates is None:
        return None
    scores = None if reranker is None else ScoreCandidatesWork(store, candidates, reranker, options)
    if scores and not scores.is_complete:
        return None
    work = SampleNegativesWork(pool, scores, options, name)
    check_targets(store, work)
    return complete_artifact(store, work)


@dataclass(frozen=True)
class SampleTask:
    """A worker task that samples the negatives of a part's queries and commits them."""

    draft: Draft
    candidates: Artifact
    scores: Sequence[Artifact]
    options: NegativeOptions
    resources: WorkerResources = ONE_CORE

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        """Returns a function that samples and commits a part."""
        return self._sample

    def _sample(self, unit: WorkUnit, report: Report) -> None:
        [name], queries = unit.names, unit.payload
        table = pq.read_table(self.candidates.local_path(name))
        of_positives = known_positive_scores(queries, name, self.scores)
        lowest = [scores.min() if len(scores) else np.nan for scores in of_positives]
        samples = sample_negatives(
            table,
            known_probabilities(table, name, self.scores) if self.scores else None,
            self.options,
            query_ids=queries.ids,
            positives=queries.positives,
            copies=queries.copies_of_positives(read_copies(self.candidates)),
            reranked_positives=np.array(lowest, np.float32) if self.scores else None,
            teacher_positives=of_positives if self.options.teacher_scores else None,
        )
        self.draft.commit(
            name, ".parquet", lambda path: pq.write_table(samples, path, compression="zstd"), rows=len(samples)
        )
