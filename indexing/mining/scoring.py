"""Scores pairs of a pool with a re-ranker for denoising (DPTDR, section 3.3), and reads the scores.

scores/NAME/g0000    part-*.parquet   the pairs of the pool's part that a re-ranker scored; for margins and for teacher
                                      scores also those of the queries and their positives

A later generation of scores holds only pairs that no earlier one has, so no pair is scored twice. Each part records the
options that it was scored for, so that an abandoned generation can be completed with other options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.mining.candidates import MiningQueries
from riptide.indexing.mining.pools import list_keys, pair_keys
from riptide.indexing.mining.sampling import NegativeOptions, pairs_to_score
from riptide.indexing.queries.queries import Queries
from riptide.indexing.search.rescoring import PairScorer, RerankerSpec
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.draft import Draft, remove_command
from riptide.indexing.store.keys import Key
from riptide.indexing.store.sealed_json import fingerprint_of, sum_cuts
from riptide.indexing.store.store import Store, artifact_key, generation
from riptide.indexing.work.work import (
    ArtifactTarget,
    BaseStage,
    BaseWork,
    Committed,
    Progress,
    WorkUnit,
    hide_progress,
    run_work,
)
from riptide.indexing.work.worker_tasks import Allocation, Report, Runner, WorkerResources

DIGITS = 6  # number of hex digits of the re-ranker's fingerprint in the name of the scores


class ScoreCandidatesWork(BaseWork):
    """The work that builds the next generation of scores/NAME: a re-ranker's scores of a pool's pairs.

    Several generations may be needed; see `score_candidates`.
    """

    def __init__(
        self,
        store: Store,
        candidates: Artifact,
        reranker: RerankerSpec,
        options: NegativeOptions,
        *,
        parts: Mapping[str, MiningQueries] | None = None,
    ):
        """Opens the existing generations, and checks that they match the pool and the re-ranker.

        Args:
            store: The store.
            candidates: The pool.
            reranker: The re-ranker; without a numerics class, nothing can be scored.
            options: The options that decide which pairs are scored.
            parts: The queries of each part of the pool, whose positives may be scored too.

        Raises:
            InputError: If the scores under this name are those of another re-ranker or pool.
        """
        self.store, self.candidates, self.options = store, candidates, options
        self.parts = parts if options.needs_positives else None
        self.spec = reranker
        # The digits tell a/model from b/model, and dtypes of one model.
        self.name = f"{candidates.name}-{reranker.label}-{fingerprint_of(reranker.config)[:DIGITS]}"
        self.previous = store.generations("scores", self.name)
        remove = remove_command(store.storage, artifact_key("scores", self.name))
        remedy = f"give another name ({Parameter('candidates')}), or, if nobody needs it, remove it: {remove}"
        for artifact in self.previous:
            if artifact.inputs["candidates"]["fingerprint"] != candidates.fingerprint:
                raise InputError(f"{artifact.url} is of other candidates than {candidates.url}: {remedy}")
            if artifact.config["reranker"] != reranker.config:
                raise InputError(f"{artifact.url} was scored by another re-ranker than {reranker.name}: {remedy}")

    @property
    def is_complete(self) -> bool:
        """Whether the existing generations have all scores that the options need."""
        return self._are_sufficient(self.previous)

    def _are_sufficient(self, generations: Sequence[Artifact]) -> bool:
        """Returns whether each part was scored for options that need at least the pairs that these options need."""
        parts = [part for artifact in generations for part in artifact.numbered_parts("part")]
        sufficient = {part.name for part in parts if has_needed_pairs(part.facts["scored_for"], self.options)}
        return bool(generations) and sufficient == {part.name for part in self.candidates.numbered_parts("part")}

    @property
    def generations(self) -> list[Artifact]:
        """The generations that the options need. Later generations, for other options, do not affect the samples."""
        enough = [n for n in range(1, len(self.previous) + 1) if self._are_sufficient(self.previous[:n])]
        return self.previous[: enough[0]] if enough else self.previous

    def count_cuts(self) -> Cuts:
        """Returns how many pairs of the generations were cut to the re-ranker's length limit."""
        return sum_cuts(part for artifact in self.generations for part in artifact.numbered_parts("part"))

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns the only target: the next generation; its fingerprint depends on its parts, not on the options."""
        inputs = {"candidates": self.candidates, **self.spec.inputs}
        inputs |= {"previous": self.previous[-1]} if self.previous else {}
        config = {"reranker": self.spec.config, "numerics": self.spec.numerics}
        return [ArtifactTarget("scores", self._next_name, inputs, config, by_content=True)]

    @property
    def _next_name(self) -> str:
        """The name of the next generation: NAME/gNNNN."""
        return f"{self.name}/{generation(len(self.previous))}"

    def pin_numerics(self, runner: Runner) -> RerankerSpec:
        """Returns the re-ranker with the numerics class of the scores, on the device kind that began the generation.

        Raises:
            InputError: If the user requests another kind of device than that of the generation.
        """
        key = artifact_key("scores", self._next_name)
        pinned = (self.store.pinned_config(key) or {}).get("numerics")
        count = len(self.candidates.numbered_parts("part"))
        self.spec = self.spec.with_numerics(runner, count, pinned, f"{self.store.url}/{key}")
        return self.spec

    @property
    def stages(self) -> list[ScoreStage]:
        """Returns the only stage, which scores pairs."""
        return [ScoreStage(self)]


def score_candidates(
    store: Store,
    candidates: Artifact,
    reranker: RerankerSpec,
    options: NegativeOptions,
    runner: Runner,
    progress: Progress = hide_progress,
    *,
    parts: Mapping[str, MiningQueries] | None = None,
) -> ScoreCandidatesWork:
    """Adds generations of scores until all pairs that the options need are scored.

    A generation that was begun for other options, and abandoned, is resumed: its parts are kept, the others are scored
    for these options, and the pairs that its parts lack are scored in the next generation.

    Args:
        store: The store.
        candidates: The pool.
        reranker: The re-ranker; without a numerics class, it gets that of the workers.
        options: The options that decide which pairs are scored.
        runner: What spreads the parts over workers.
        progress: Shows the progress.
        parts: The queries of each part of the pool, whose positives may be scored too.

    Returns:
        The work, complete, with all generations.
    """
    while True:
        work = ScoreCandidatesWork(store, candidates, reranker, options, parts=parts)
        if work.is_complete:
            return work
        if reranker.numerics is None:
            reranker = work.pin_numerics(runner)
        run_work(store, work, runner, progress)


class ScoreStage(BaseStage):
    """The stage that scores pairs, one unit for each part of the pool."""

    title = "rerank"
    noun = "pairs"
    total: int | None = None

    def __init__(self, work: ScoreCandidatesWork):
        self.work = work

    def units(self, committed_parts: Committed) -> Iterator[WorkUnit]:
        """Yields a unit for each part of the pool; its number of pairs is known only after scoring."""
        for part in self.work.candidates.numbered_parts("part"):
            scored = committed_parts[0].get(part.name)
            queries = self.work.parts[part.name] if self.work.parts else None
            yield WorkUnit((part.name,), scored.rows if scored else 0, queries)

    def task(self, drafts: Sequence[Draft]) -> ScoreTask:
        """Returns the task whose workers score parts."""
        work = self.work
        queries = work.store.open(*Key.parse(work.candidates.inputs["queries"]["artifact"]))
        return ScoreTask(
            drafts[0],
            work.candidates,
            work.previous,
            Corpus.open(work.store),
            Queries(queries),
            work.spec,
            work.options,
        )

    def count_rows(self, unit: WorkUnit, result: int) -> int:
        """Returns the worker's result: the number of pairs that it scored."""
        return result


@dataclass(frozen=True)
class ScoreTask:
    """A worker task that scores pairs of a part of the pool and commits the scores.

    Attributes:
        draft: The generation of scores.
        candidates: The pool.
        previous: The generations before.
        corpus: The corpus.
        queries: The query set.
        spec: The re-ranker.
        options: The options that decide which pairs are scored.
    """

    draft: Draft
    candidates: Artifact
    previous: Sequence[Artifact]
    corpus: Corpus
    queries: Queries
    spec: RerankerSpec
    options: NegativeOptions
    reports_progress: bool = True

    @property
    def resources(self) -> WorkerResources:
        """The resources of a worker: all cores, or the GPU of the re-ranker's numerics class."""
        return self.spec.resources

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], int]:
        """Opens the re-ranker; returns a function that scores a part and returns the number of scored pairs."""
        scorer = self.spec.open(allocation)
        return lambda unit, report: self._score(scorer, unit, report)

    def _score(self, scorer: PairScorer, unit: WorkUnit, report: Report) -> int:
        """Scores pairs of a part, per query in seeded order, until enough of them are negatives.

        If the unit has queries, scores their positives too.
        """
        [name], queries = unit.names, unit.payload
        if part := self.draft.find_part(name):
            return part.rows
        table = pq.read_table(self.candidates.local_path(name))
        known = known_probabilities(table, name, self.previous)
        is_new = np.zeros(len(table), bool)
        texts, cuts = self._query_texts(table), Cuts()
        while len(chosen := pairs_to_score(table, known, self.options)):
            pairs = [texts[id] for id in table["query_id"].take(chosen).to_pylist()]
            known[chosen], cut = scorer.score(pairs, self.corpus, table["row"].to_numpy()[chosen])
            cuts += cut
            is_new[chosen] = True
            report(int(is_new.sum()))
        scored = table.select(["query", "row"]).take(np.flatnonzero(is_new))
        scored = scored.append_column("probability", pa.array(known[is_new], pa.float32()))
        if queries is not None:
            numbers, rows = self._unscored_positives(queries, name)
            if len(rows):
                scores, cut = scorer.score([queries.texts[number] for number in numbers], self.corpus, rows)
                cuts += cut
                columns = [pa.array(numbers, pa.int32()), pa.array(rows), pa.array(scores, pa.float32())]
                scored = pa.concat_tables([scored, pa.table(columns, schema=scored.schema)])
        self.draft.commit(
            name,
            ".parquet",
            lambda path: pq.write_table(scored, path, compression="zstd"),
            rows=len(scored),
            scored_for=self.options.scoring_settings,
            cuts=cuts.to_dict(),
        )
        return len(scored)

    def _unscored_positives(self, queries: MiningQueries, part_name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pairs of query and positive that have no score: numbers of queries, and rows, int64 [n] each."""
        keys = list_keys(queries.positives)
        is_unknown = np.isnan(_known_scores(keys, part_name, self.previous))
        numbers = np.repeat(np.arange(len(queries.ids)), [len(rows) for rows in queries.positives])
        return numbers[is_unknown], np.concatenate([*queries.positives, np.empty(0, np.int64)])[is_unknown]

    def _query_texts(self, table: pa.Table) -> dict[str, str]:
        """Returns the texts of a part's queries by id."""
        texts = self.queries.table.select(["id", "text"])
        texts = texts.filter(pc.is_in(texts["id"], table["query_id"].combine_chunks().unique()))
        return dict(zip(texts["id"].to_pylist(), texts["text"].to_pylist(), strict=True))


def has_needed_pairs(scored_for: Mapping[str, Any], options: NegativeOptions) -> bool:
    """Returns whether a part has all pairs that the options need. scored_for: settings for which it was scored."""
    needs = options.scoring_settings
    if "positives" in needs and not scored_for.get("positives"):
        return False
    return scored_for["score_all"] or (
        not needs["score_all"]
        and scored_for["seed"] == options.seed
        and scored_for["denoised_negatives"] >= options.denoised_negatives
        and scored_for["denoise_threshold"] <= options.denoise_threshold
        and scored_for.get("pool_negatives", 0) >= needs.get("pool_negatives", 0)
    )


def known_probabilities(table: pa.Table, part_name: str, generations: Sequence[Artifact]) -> np.ndarray:
    """Reads the probabilities of a part's pairs, in the order of `table`: float32 [pairs], NaN if unknown."""
    return _known_scores(_table_keys(table), part_name, generations)


def known_positive_scores(queries: MiningQueries, part_name: str, generations: Sequence[Artifact]) -> list[np.ndarray]:
    """Reads the scores of the positives of each query of a part: float32 [positives] each, NaN if unknown."""
    ends = np.cumsum([len(rows) for rows in queries.positives])
    return np.split(_known_scores(list_keys(queries.positives), part_name, generations), ends[:-1]) if len(ends) else []


def _known_scores(keys: np.ndarray, part_name: str, generations: Sequence[Artifact]) -> np.ndarray:
    """Reads the scores of pairs (`pair_keys`, int64 [n]) of a part: float32 [n], NaN if no generation has a score."""
    scores = np.full(len(keys), np.nan, np.float32)
    for artifact in generations:
        table = pq.read_table(artifact.local_path(part_name))
        scored_keys = _table_keys(table)
        order = np.argsort(scored_keys)
        places = np.searchsorted(scored_keys[order], keys)
        is_known = np.append(scored_keys[order], -1)[places] == keys
        scores[is_known] = table["probability"].to_numpy()[order[places[is_known]]]
    return scores


def _table_keys(table: pa.Table) -> np.ndarray:
    """Returns the `pair_keys` of a table's pairs."""
    return pair_keys(table["query"].to_numpy(), table["row"].to_numpy())
