"""Denoises a pool with a re-ranker and samples negatives from it (DPTDR, section 3.3).

scores/NAME/g0000    part-*.parquet   the pairs of the pool's part that a re-ranker scored; for margins and for teacher
                                      scores also those of the queries and their positives
negatives/NAME       part-*.parquet   the sampled negatives, a row for each query (sampling.sample)

A later generation of scores holds only pairs that no earlier one has, so no pair is scored twice. Each part records the
options that it was scored for, so that an abandoned generation can be completed with other options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from indexing.corpus.corpus import Corpus
from indexing.corpus.queries import Queries
from indexing.hit_sources.grammar import label
from indexing.mining import pools as mining
from indexing.mining import sampling
from indexing.mining.candidates import MiningQueries, PoolCandidates
from indexing.mining.copies import read_copies
from indexing.search.rescoring import (
    PairScorer,
    RerankerSpec,
    numerics_of_reranker,
    open_reranker,
    reranker_inputs,
)
from indexing.store.artifact import Artifact, Draft, fingerprint_of, sum_cuts
from indexing.store.keys import Key
from indexing.store.store import Store, artifact_key, generation
from indexing.work.tasks import ONE_CORE, Place, Report, Resources, Runner, ignore
from indexing.work.work import (
    Committed,
    Progress,
    StageDefaults,
    Target,
    Unit,
    WorkDefaults,
    complete_artifact,
    run_work,
    silent,
)
from retriever.cuts import Cuts
from retriever.errors import InputError

DIGITS = 6  # digits of the re-ranker's fingerprint in the name of its scores


@dataclass(frozen=True)
class NegativeOptions:
    """How many negatives are sampled for each query (DPTDR, section 4.1)."""

    GROUP: ClassVar = "negatives"

    pool_negatives: int = 30
    """Negatives per query that are sampled from the whole pool, denoised or not."""
    denoised_negatives: int = 30
    """Negatives per query that are sampled from the passages which the re-ranker considers irrelevant; 0 without a
    re-ranker. A passage that is samples in both ways is one negative, a denoised one."""
    denoise_threshold: float = 0.1
    """Probability of relevance below which the re-ranker considers a passage irrelevant."""
    score_all: bool = False
    """Score every pair, not only as many as are needed."""
    seed: int = 0
    """Seed of the sampling."""
    margins: mining.Margins = mining.NO_MARGINS
    teacher_scores: bool = False
    """Score all sampled negatives and the positives with the --reranker, and store the scores with the negatives, as
    train_retriever --loss kl and --loss margin-mse need them."""

    @property
    def needs_positives(self) -> bool:
        """Whether a re-ranker scores the positives too."""
        return bool(self.margins) or self.teacher_scores

    @property
    def needs(self) -> dict[str, Any]:
        """Returns what decides which pairs a re-ranker scores."""
        return {
            "denoised_negatives": self.denoised_negatives,
            "denoise_threshold": self.denoise_threshold,
            "score_all": self.score_all or bool(self.margins),
            "seed": self.seed,
            **({"positives": True} if self.needs_positives else {}),
            **({"pool_negatives": self.pool_negatives} if self.teacher_scores else {}),
        }

    def __post_init__(self) -> None:
        for name in ("pool_negatives", "denoised_negatives", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"parameter {name} {getattr(self, name)}: expected 0 or more")
        if not 0 < self.denoise_threshold <= 1:
            raise InputError(f"parameter denoise_threshold {self.denoise_threshold}: expected a probability above 0")


def check_scales(draw: NegativeOptions, num_sources: int) -> None:
    """Raises InputError for limits on the scores of several sources, which have different scales."""
    limits = {"max_score": draw.margins.max_score, "absolute_margin": draw.margins.absolute_margin}
    for name, value in limits.items():
        if value is not None and num_sources > 1:
            raise InputError(
                f"parameter {name} {value}: the scores of {num_sources} sources have different scales, expected one "
                "source or a re-ranker; give one of these, or parameter relative_margin instead"
            )


class ScoreCandidates(WorkDefaults):
    """The work that makes the next generation of scores/NAME: a re-ranker's scores of a pool's pairs.

    Several generations may be needed; see `score_candidates`.
    """

    def __init__(
        self,
        store: Store,
        candidates: Artifact,
        reranker: str,
        draw: NegativeOptions,
        *,
        numerics: str,
        parts: Mapping[str, MiningQueries] | None = None,
    ):
        """Opens the re-ranker and the existing generations.

        Args:
            store: The store.
            candidates: The pool.
            reranker: Name of the re-ranker.
            draw: The options that decide which pairs are scored.
            numerics: The numerics class of the scores.
            parts: The queries of each part of the pool, whose positives may be scored too.

        Raises:
            InputError: If the scores under this name are those of another re-ranker or pool.
        """
        self.store, self.candidates, self.draw = store, candidates, draw
        self.parts = parts if draw.needs_positives else None
        options, config = open_reranker(store, reranker)
        self.spec = RerankerSpec(store, reranker, options, config, numerics)
        self._inputs = {"candidates": candidates, **reranker_inputs(store, reranker)}
        pool, model = candidates.name, label(reranker.rstrip("/").rpartition("/")[2])
        self.name = f"{pool}-{model}-{fingerprint_of(config)[:DIGITS]}"  # a/model and b/model end alike
        self.previous = store.generations("scores", self.name)
        for artifact in self.previous:
            if artifact.inputs["candidates"]["fingerprint"] != candidates.fingerprint:
                raise InputError(f"{artifact.url} is of other candidates than {candidates.url}: remove it")
            if artifact.config["reranker"] != config:
                raise InputError(f"{artifact.url} was scored by another re-ranker than {reranker}: remove it")

    @property
    def complete(self) -> bool:
        """Whether the existing generations have all scores that the options need."""
        return self._suffice(self.previous)

    def _suffice(self, generations: Sequence[Artifact]) -> bool:
        """Whether each part was once scored for options that need as much as these."""
        done = {
            part.name for a in generations for part in a.group("part") if satisfies(part.facts["scored_for"], self.draw)
        }
        return bool(generations) and done == {part.name for part in self.candidates.group("part")}

    @property
    def generations(self) -> list[Artifact]:
        """The generations that the options need; later ones, for other options, do not change what is sampled."""
        enough = [n for n in range(1, len(self.previous) + 1) if self._suffice(self.previous[:n])]
        return self.previous[: enough[0]] if enough else self.previous

    def cuts(self) -> Cuts:
        """Returns how many pairs of the generations were cut to the re-ranker's length limit."""
        return sum_cuts(part for artifact in self.generations for part in artifact.group("part"))

    @property
    def targets(self) -> list[Target]:
        """Returns the next generation. Its fingerprint depends on the parts: which pairs they hold is up to each."""
        inputs = dict(self._inputs) | ({"previous": self.previous[-1]} if self.previous else {})
        config = {"reranker": self.spec.config, "numerics": self.spec.numerics}
        return [Target("scores", self._next, inputs, config, by_content=True)]

    @property
    def _next(self) -> str:
        """The name of the next generation."""
        return f"{self.name}/{generation(len(self.previous))}"

    def pin_numerics(self, runner: Runner) -> str:
        """Sets the numerics class of the scores, on the kind of device that began them, and returns it.

        Raises:
            InputError: If the user requests another kind of device than that of the generation.
        """
        key = artifact_key("scores", self._next)
        pinned = (self.store.pinned_config(key) or {}).get("numerics")
        count = len(self.candidates.group("part"))
        numerics = numerics_of_reranker(runner, count, pinned, f"{self.store.url}/{key}")
        self.spec = replace(self.spec, numerics=numerics)
        return numerics

    @property
    def stages(self) -> list[ScoreStage]:
        """Returns the one stage: scoring."""
        return [ScoreStage(self)]


def score_candidates(
    store: Store,
    candidates: Artifact,
    reranker: str,
    draw: NegativeOptions,
    runner: Runner,
    progress: Progress = silent,
    *,
    parts: Mapping[str, MiningQueries] | None = None,
) -> ScoreCandidates:
    """Scores the pairs of a pool, as new generations, until the options have all scores that they need.

    A generation that was begun for other options, and abandoned, is resumed: its parts are kept, the others are scored
    for these options, and the pairs that its parts lack are scored in the next generation.

    Args:
        store: The store.
        candidates: The pool.
        reranker: Name of the re-ranker.
        draw: The options that decide which pairs are scored.
        runner: What spreads the parts over workers.
        progress: Shows the progress.
        parts: The queries of each part of the pool, whose positives may be scored too.

    Returns:
        The work, complete, with all generations.
    """
    numerics = ""
    while True:
        work = ScoreCandidates(store, candidates, reranker, draw, numerics=numerics, parts=parts)
        if work.complete:
            return work
        numerics = numerics or work.pin_numerics(runner)
        run_work(store, work, runner, progress)


class ScoreStage(StageDefaults):
    """The stage that scores pairs, one unit for each part of the pool."""

    title = "rerank"
    noun = "pairs"
    total: int | None = None

    def __init__(self, work: ScoreCandidates):
        self.work = work

    def units(self, committed: Committed) -> Iterator[Unit]:
        """Returns a unit for each part of the pool. Its number of pairs is known only after scoring."""
        for part in self.work.candidates.group("part"):
            scored = committed[0].get(part.name)
            queries = self.work.parts[part.name] if self.work.parts else None
            yield Unit((part.name,), scored.rows if scored else 0, queries)

    def task(self, drafts: Sequence[Draft]) -> ScoreTask:
        """Returns the task of a worker."""
        work = self.work
        queries = work.store.open(*Key.parse(work.candidates.inputs["queries"]["artifact"]))
        return ScoreTask(
            drafts[0], work.candidates, work.previous, Corpus.open(work.store), Queries(queries), work.spec, work.draw
        )

    def rows_of(self, unit: Unit, result: int) -> int:
        """Returns the number of pairs that a unit scored."""
        return result


@dataclass(frozen=True)
class ScoreTask:
    """Scores the pairs of a part of a pool and commits the scores."""

    draft: Draft
    candidates: Artifact
    previous: Sequence[Artifact]
    corpus: Corpus
    queries: Queries
    spec: RerankerSpec
    draw: NegativeOptions
    reports: bool = True

    @property
    def resources(self) -> Resources:
        """The resources of a worker."""
        return self.spec.resources

    def open(self, place: Place) -> Callable[[Unit, Report], int]:
        """Returns the worker, with the re-ranker opened."""
        scorer = self.spec.open(place)
        shared = (self.draft, self.candidates, self.previous, self.corpus, self.queries, scorer, self.draw)
        return lambda unit, report: score_part(unit.names[0], *shared, report=report, mined=unit.payload)


def satisfies(done: dict[str, Any], draw: NegativeOptions) -> bool:
    """Whether a part that was scored for the options `done` has all pairs that `draw` needs."""
    needs = draw.needs
    if "positives" in needs and not done.get("positives"):
        return False
    return done["score_all"] or (
        not needs["score_all"]
        and done["seed"] == draw.seed
        and done["denoised_negatives"] >= draw.denoised_negatives
        and done["denoise_threshold"] <= draw.denoise_threshold
        and done.get("pool_negatives", 0) >= needs.get("pool_negatives", 0)
    )


def score_part(
    name: str,
    draft: Draft,
    candidates: Artifact,
    previous: Sequence[Artifact],
    corpus: Corpus,
    queries: Queries,
    scorer: PairScorer,
    draw: NegativeOptions,
    *,
    report: Report = ignore,
    mined: MiningQueries | None = None,
) -> int:
    """Scores a part's pairs in each query's seeded order until enough of them are negatives.

    Args:
        name: The part.
        draft: The generation of scores.
        candidates: The pool.
        previous: The generations before.
        corpus: The corpus.
        queries: The query set.
        scorer: The re-ranker.
        draw: The options that decide which pairs are scored.
        report: Called with the number of pairs that are scored so far.
        mined: The queries of the part, whose positives are scored too; None: they are not.

    Returns:
        The number of pairs that were scored.
    """
    if done := draft.find(name):
        return done.rows
    table = read_part(candidates, name)
    known = probabilities(table, name, previous)
    fresh = np.zeros(len(table), bool)
    texts, cuts = query_texts(queries, table), Cuts()
    while len(
        chosen := mining.to_score(
            table,
            known,
            wanted=draw.denoised_negatives,
            threshold=draw.denoise_threshold,
            seed=draw.seed,
            all_pairs=draw.needs["score_all"],
            pool_negatives=draw.needs.get("pool_negatives", 0),
        )
    ):
        pairs = [texts[id] for id in table["query_id"].take(chosen).to_pylist()]
        known[chosen], cut = scorer.score(pairs, corpus, table["row"].to_numpy()[chosen])
        cuts += cut
        fresh[chosen] = True
        report(int(fresh.sum()))
    at = np.flatnonzero(fresh)
    scored = table.select(["query", "row"]).take(at).append_column("probability", pa.array(known[at], pa.float32()))
    if mined is not None and (positives := _unscored_positives(mined, name, previous)):
        numbers, rows = np.array(positives).T
        probabilities_of_positives, cut = scorer.score([mined.texts[number] for number in numbers], corpus, rows)
        cuts += cut
        pairs = [pa.array(numbers, pa.int32()), pa.array(rows), pa.array(probabilities_of_positives, pa.float32())]
        scored = pa.concat_tables([scored, pa.table(pairs, schema=scored.schema)])
    draft.commit(
        name,
        ".parquet",
        lambda path: pq.write_table(scored, path, compression="zstd"),
        rows=len(scored),
        scored_for=draw.needs,
        cuts=cuts.stored(),
    )
    return len(scored)


def _unscored_positives(mined: MiningQueries, name: str, generations: Sequence[Artifact]) -> list[tuple[int, int]]:
    """Returns the pairs (number of the query in its part, row of a positive) that no generation has scored."""
    scores = positive_scores(mined, name, generations)
    return [
        (number, row)
        for number, (rows, known) in enumerate(zip(mined.positives, scores, strict=True))
        for row, score in zip(rows.tolist(), known.tolist(), strict=True)
        if np.isnan(score)
    ]


def positive_scores(mined: MiningQueries, name: str, generations: Sequence[Artifact]) -> list[np.ndarray]:
    """Returns the re-ranker's scores of the positives of each query of a part: float32 [any], NaN if unknown."""
    lengths = [len(rows) for rows in mined.positives]
    queries = np.repeat(np.arange(len(lengths)), lengths)
    wanted = _pair_keys(queries, np.concatenate([*mined.positives, np.empty(0, np.int64)]))
    scores = np.full(len(wanted), np.nan, np.float32)
    for artifact in generations:
        table = pq.read_table(artifact.local(name))
        keys = _keys(table)
        order = np.argsort(keys)
        places = np.searchsorted(keys[order], wanted)
        known = np.flatnonzero(np.append(keys[order], -1)[places] == wanted)
        scores[known] = table["probability"].to_numpy()[order[places[known]]]
    return np.split(scores, np.cumsum(lengths)[:-1]) if lengths else []


def read_part(candidates: Artifact, name: str) -> pa.Table:
    """Returns a part of a pool."""
    return pq.read_table(candidates.local(name))


def probabilities(table: pa.Table, name: str, generations: Sequence[Artifact]) -> np.ndarray:
    """Returns the known probabilities of a part's pairs, in the order of its table: float32 [pairs], NaN if unknown."""
    known = np.full(len(table), np.nan, np.float32)
    keys = _keys(table)
    for artifact in generations:
        scored = pq.read_table(artifact.local(name))
        scored_keys = _keys(scored)
        places = np.searchsorted(keys, scored_keys)
        is_candidate = np.append(keys, -1)[places] == scored_keys  # other pairs are those of positives
        known[places[is_candidate]] = scored["probability"].to_numpy()[is_candidate]
    return known


def _keys(table: pa.Table) -> np.ndarray:
    """Returns an ascending number for each pair (query, row) of a part."""
    return _pair_keys(table["query"].to_numpy(), table["row"].to_numpy())


def _pair_keys(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns a number for each pair of a query and a row."""
    return (queries.astype(np.int64) << 44) | rows


def query_texts(queries: Queries, table: pa.Table) -> dict[str, str]:
    """Returns the texts of a part's queries by id."""
    every = queries.table.select(["id", "text"])
    mine = every.filter(pc.is_in(every["id"], table["query_id"].combine_chunks().unique()))
    return dict(zip(mine["id"].to_pylist(), mine["text"].to_pylist(), strict=True))


class SampleNegatives(WorkDefaults):
    """The work that makes negatives/NAME from a pool and its scores."""

    def __init__(
        self, pool: PoolCandidates, scores: ScoreCandidates | None, draw: NegativeOptions, name: str | None = None
    ):
        self.pool, self.draw = pool, draw
        self.candidates = pool.store.open("candidates", pool.name)
        self.scores = scores.generations if scores else []
        self.name = name or pool.name
        self.num_denoised = draw.denoised_negatives if scores else 0
        self.config: dict[str, Any] = {
            **asdict(draw),
            **{limit: value for limit, value in asdict(draw.margins).items() if value is not None},
            "denoised_negatives": self.num_denoised,
            "pool_draws": "all candidates",
        }
        del self.config["score_all"], self.config["margins"]
        if not draw.teacher_scores:
            del self.config["teacher_scores"]

    @property
    def targets(self) -> list[Target]:
        """Returns the negatives."""
        inputs = {
            "queries": self.pool.queries.artifact,
            "corpus": self.pool.corpus.generations[-1],
            "candidates": self.candidates,
        }
        inputs |= {f"scores/{number}": artifact for number, artifact in enumerate(self.scores)}
        return [Target("negatives", self.name, inputs, self.config)]

    @property
    def stages(self) -> list[SampleStage]:
        """Returns the one stage: sampling."""
        return [SampleStage(self)]

    def pools(self) -> Iterator[tuple[pa.Table, np.ndarray | None]]:
        """Yields each part of the pool with its probabilities, float32, NaN for none; None without scores."""
        for name, _ in self.pool.parts():
            table = read_part(self.candidates, name)
            yield table, probabilities(table, name, self.scores) if self.scores else None

    def tables(self) -> Iterator[pa.Table]:
        """Yields the parts of the complete artifact, in order."""
        artifact = self.pool.store.open("negatives", self.name)
        for part in artifact.group("part"):
            yield pq.read_table(artifact.local(part))


def complete_negatives(
    store: Store, pool: PoolCandidates, reranker: str | None, draw: NegativeOptions, name: str | None
) -> Artifact | None:
    """Returns the negatives if they are complete, with the pool and the scores that they need; otherwise None."""
    candidates = complete_artifact(store, pool)
    if candidates is None:
        return None
    scores = None if reranker is None else ScoreCandidates(store, candidates, reranker, draw, numerics="")
    if scores and not scores.complete:
        return None
    return complete_artifact(store, SampleNegatives(pool, scores, draw, name))


class SampleStage(StageDefaults):
    """The stage that samples negatives, one unit for each part of the pool."""

    title = "sample"
    noun = "queries"

    def __init__(self, work: SampleNegatives):
        self.work = work
        self.total: int | None = len(work.pool.mined.ids)

    def units(self, committed: Committed) -> Iterator[Unit]:
        """Returns a unit for each part of the pool."""
        for name, queries in self.work.pool.parts():
            yield Unit((name,), len(queries.ids), queries)

    def task(self, drafts: Sequence[Draft]) -> SampleTask:
        """Returns the task of a worker."""
        return SampleTask(drafts[0], self.work.candidates, self.work.scores, self.work.draw)


@dataclass(frozen=True)
class SampleTask:
    """Samples the negatives of a part's queries and commits them."""

    draft: Draft
    candidates: Artifact
    scores: Sequence[Artifact]
    draw: NegativeOptions
    resources: Resources = ONE_CORE

    def open(self, place: Place) -> Callable[[Unit, Report], None]:
        """Returns the worker."""
        shared = (self.draft, self.candidates, self.scores, self.draw)
        return lambda unit, report: draw_part((unit.names[0], unit.payload), *shared)


def draw_part(
    item: tuple[str, MiningQueries],
    draft: Draft,
    candidates: Artifact,
    scores: Sequence[Artifact],
    draw: NegativeOptions,
) -> None:
    """Samples the negatives of a part's queries and commits them."""
    name, queries = item
    table = read_part(candidates, name)
    known = probabilities(table, name, scores) if scores else None
    samples = sampling.sample(
        table,
        known,
        query_ids=queries.ids,
        positives=queries.positives,
        pool_negatives=draw.pool_negatives,
        denoised_negatives=draw.denoised_negatives if scores else 0,
        threshold=draw.denoise_threshold,
        seed=draw.seed,
        copies=queries.copies(read_copies(candidates)),
        margins=draw.margins,
        reranked_positives=_lowest_positives(queries, name, scores) if scores else None,
        teacher_positives=positive_scores(queries, name, scores) if draw.teacher_scores else None,
    )

    def write(path: Path) -> None:
        pq.write_table(samples, path, compression="zstd")

    draft.commit(name, ".parquet", write, rows=len(samples))


def _lowest_positives(queries: MiningQueries, name: str, scores: Sequence[Artifact]) -> np.ndarray:
    """Returns the re-ranker's lowest score of each query's positives: float32 [queries], NaN for none."""
    known = positive_scores(queries, name, scores)
    return np.array([values.min() if len(values) else np.nan for values in known], np.float32)
