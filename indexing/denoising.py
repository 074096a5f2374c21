"""Denoising and drawing (DPTDR, section 3.3): a re-ranker's scores of a pool's pairs, and negatives drawn by them.

scores/NAME/g0000    part-*.parquet   the pairs of the pool's part that a re-ranker scored, once and for all
negatives/NAME       part-*.parquet   what was drawn, a row for each question (mining.sample)

A later generation of scores holds only pairs that no earlier one has: another threshold needs no pair twice. Each
part says for which options it was scored, so that a generation which was abandoned is ended with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from indexing import mining
from indexing.artifact import Artifact, Draft, fingerprint_of
from indexing.candidates import Asked, Mining
from indexing.corpus import Corpus
from indexing.queries import Queries
from indexing.rescoring import RerankWorker, open_reranker, rerank_resources, reranker_inputs
from indexing.retrieval import label
from indexing.store import Store, generation
from indexing.tasks import run_tasks
from retriever.errors import InputError

DIGITS = 6  # of the re-ranker's fingerprint, in the name of its scores


@dataclass(frozen=True)
class DrawOptions:
    """What is drawn from the pool (DPTDR, section 4.1). Without a re-ranker nothing is denoised."""

    undenoised: int = 30
    denoised: int = 30
    threshold: float = 0.1  # a pair whose probability is smaller is a denoised negative
    score_all: bool = False  # also the pairs that are not needed
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("undenoised", "denoised", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"--{name} {getattr(self, name)}: expected 0 or more")
        if not 0 < self.threshold <= 1:
            raise InputError(f"--denoise-threshold {self.threshold}: expected a probability above 0")


class Scores:
    """What a re-ranker has to say about the pairs of a pool, and is still to say for some options."""

    def __init__(self, store: Store, candidates: Artifact, reranker: str, draw: DrawOptions, *, numerics: str):
        """Raises InputError where the scores under this name are another re-ranker's or pool's."""
        self.store, self.candidates, self.draw = store, candidates, draw
        self.reranker = reranker
        self._options, self.config = open_reranker(store, reranker)
        self._inputs = {"candidates": candidates, **reranker_inputs(store, reranker)}
        pool, model = candidates.key.partition("/")[2], label(reranker.rstrip("/").rpartition("/")[2])
        self.name = f"{pool}-{model}-{fingerprint_of(self.config)[:DIGITS]}"  # a/model and b/model end alike
        self.numerics = numerics
        for artifact in store.generations("scores", self.name):
            if artifact.inputs["candidates"]["fingerprint"] != candidates.fingerprint:
                raise InputError(f"{artifact.url} is of other candidates than {candidates.url}: remove it")
            if artifact.config["reranker"] != self.config:
                raise InputError(f"{artifact.url} was scored by another re-ranker than {reranker}: remove it")

    @property
    def complete(self) -> bool:
        """Whether the generations scored all that these options need."""
        return self._suffice(self.store.generations("scores", self.name))

    def _suffice(self, generations: Sequence[Artifact]) -> bool:
        """Whether each part was once scored for options that need as much as these."""
        done = {part.name for a in generations for part in a.group("part") if satisfies(part.facts["draw"], self.draw)}
        return bool(generations) and done == {part.name for part in self.candidates.group("part")}

    def run(self) -> Iterator[tuple[bool, int]]:
        """Score what is left as new generations; yields (kept, pairs).

        One that was begun for other options, and left, is gone on with: its parts are kept, the others scored for
        these; what its own lack for them comes with the next.
        """
        while not self._suffice(previous := self.store.generations("scores", self.name)):
            yield from self._run_one(previous)

    def _run_one(self, previous: list[Artifact]) -> Iterator[tuple[bool, int]]:
        inputs = dict(self._inputs)
        if previous:
            inputs["previous"] = previous[-1]
        name = f"{self.name}/{generation(len(previous))}"
        config = {"reranker": self.config, "numerics": self.numerics}
        # By content: which pairs are scored is up to each part.
        with self.store.create("scores", name, inputs=inputs, config=config, by_content=True) as draft:
            committed = draft.committed()
            yield True, sum(part.rows for part in committed.values())
            corpus = Corpus.open(self.store)
            queries = self.store.open(*self.candidates.inputs["queries"]["artifact"].split("/", 1))
            worker = RerankWorker(self.store, self.reranker, self._options, self.config, self.numerics)
            shared = (draft, self.candidates, previous, corpus, Queries(queries), worker, self.draw)
            names = [part.name for part in self.candidates.group("part") if part.name not in committed]
            for _, pairs in run_tasks(score_part, names, *shared, **rerank_resources()):
                yield False, pairs

    @property
    def generations(self) -> list[Artifact]:
        """Those that these options need: later ones, for other options, change nothing that is drawn."""
        every = self.store.generations("scores", self.name)
        enough = [number for number in range(1, len(every) + 1) if self._suffice(every[:number])]
        return every[: enough[0]] if enough else every


def satisfies(done: dict[str, Any], draw: DrawOptions) -> bool:
    """Whether all pairs that `draw` needs of a part are scored where it was scored for the options `done`."""
    return done["score_all"] or (
        not draw.score_all
        and done["seed"] == draw.seed
        and done["denoised"] >= draw.denoised
        and done["threshold"] <= draw.threshold
    )


def score_part(
    name: str,
    draft: Draft,
    candidates: Artifact,
    previous: Sequence[Artifact],
    corpus: Corpus,
    queries: Queries,
    worker: RerankWorker,
    draw: DrawOptions,
) -> int:
    """One task: score a part's pairs in each question's seeded order, until enough are negatives. Returns the pairs."""
    if done := draft.find(name):
        return done.rows
    table = read_part(candidates, name)
    known = probabilities(table, name, previous)
    fresh = np.zeros(len(table), bool)
    texts = question_texts(queries, table)
    while len(
        chosen := mining.to_score(
            table, known, wanted=draw.denoised, threshold=draw.threshold, seed=draw.seed, all_pairs=draw.score_all
        )
    ):
        asked = [texts[id] for id in table["query_id"].take(chosen).to_pylist()]
        known[chosen] = worker.score(asked, corpus, table["row"].to_numpy()[chosen])
        fresh[chosen] = True
    at = np.flatnonzero(fresh)
    scored = table.select(["query", "row"]).take(at).append_column("probability", pa.array(known[at], pa.float32()))
    asked_for = {k: v for k, v in asdict(draw).items() if k != "undenoised"}
    draft.commit(
        name, ".parquet", lambda path: pq.write_table(scored, path, compression="zstd"), rows=len(scored),
        draw=asked_for,
    )  # fmt: skip
    return len(scored)


def read_part(candidates: Artifact, name: str) -> pa.Table:
    return pq.read_table(candidates.local(name))


def probabilities(table: pa.Table, name: str, generations: Sequence[Artifact]) -> np.ndarray:
    """What is known of a part's pairs, in the order of its table: float32 [pairs], NaN where nothing is."""
    known = np.full(len(table), np.nan, np.float32)
    keys = _keys(table)
    for artifact in generations:
        scored = pq.read_table(artifact.local(name))
        known[np.searchsorted(keys, _keys(scored))] = scored["probability"].to_numpy()
    return known


def _keys(table: pa.Table) -> np.ndarray:
    """One ascending number for each pair of a part: (question, row)."""
    return (table["query"].to_numpy().astype(np.int64) << 44) | table["row"].to_numpy()


def question_texts(queries: Queries, table: pa.Table) -> dict[str, str]:
    """id -> text of the questions of a part."""
    every = queries.table.select(["id", "text"])
    mine = every.filter(pc.is_in(every["id"], table["query_id"].combine_chunks().unique()))
    return dict(zip(mine["id"].to_pylist(), mine["text"].to_pylist(), strict=True))


class Drawing:
    """negatives/NAME, begun: the last, cheap step."""

    def __init__(self, mining_: Mining, scores: Scores | None, draw: DrawOptions, name: str | None = None):
        self.mining, self.draw = mining_, draw
        self.candidates = mining_.candidates()
        self.scores = scores.generations if scores else []
        self.name = name or mining_.name
        config: dict[str, Any] = {**asdict(draw), "denoised": draw.denoised if scores else 0}
        del config["score_all"]
        inputs = {
            "queries": mining_.queries.artifact,
            "corpus": mining_.corpus.generations[-1],
            "candidates": self.candidates,
        }
        inputs |= {f"scores/{number}": artifact for number, artifact in enumerate(self.scores)}
        self._lineage: dict[str, Any] = {"inputs": inputs, "config": config}

    def draft(self) -> Draft:
        return self.mining.store.create("negatives", self.name, **self._lineage)

    def run(self) -> Iterator[tuple[bool, int]]:
        """Draw the parts that are left; yields (kept, questions)."""
        with self.draft() as draft:
            committed = draft.committed()
            yield True, sum(part.rows for part in committed.values())
            items = [(name, part) for name, part in self.mining.parts() if name not in committed]
            for (_, part), _ in run_tasks(draw_part, items, draft, self.candidates, self.scores, self.draw, num_cpus=1):
                yield False, len(part.ids)

    def pools(self) -> Iterator[tuple[pa.Table, np.ndarray | None]]:
        """What was drawn from, part by part: (pool, probabilities float32 with NaN for none; None without scores)."""
        for name, _ in self.mining.parts():
            table = read_part(self.candidates, name)
            yield table, probabilities(table, name, self.scores) if self.scores else None

    def tables(self) -> Iterator[pa.Table]:
        """The parts of the complete artifact, in order."""
        artifact = self.mining.store.open("negatives", self.name)
        for part in artifact.group("part"):
            yield pq.read_table(artifact.local(part))


def draw_part(
    item: tuple[str, Asked], draft: Draft, candidates: Artifact, scores: Sequence[Artifact], draw: DrawOptions
) -> None:
    """One task: draw the negatives of a part's questions, and commit them."""
    name, asked = item
    table = read_part(candidates, name)
    known = probabilities(table, name, scores) if scores else None
    drawn = mining.sample(
        table, known, query_ids=asked.ids, positives=asked.positives, undenoised=draw.undenoised,
        denoised=draw.denoised if scores else 0, threshold=draw.threshold, seed=draw.seed,
    )  # fmt: skip

    def write(path: Path) -> None:
        pq.write_table(drawn, path, compression="zstd")

    draft.commit(name, ".parquet", write, rows=len(drawn))
