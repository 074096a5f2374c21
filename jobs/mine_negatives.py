"""Mine hard negatives: pool several sources' hits, denoise them with a re-ranker, draw some for each question.

    python jobs/mine_negatives.py --store data/squad --split train --sources bm25 exact:minilm --depth 200
    python jobs/mine_negatives.py --store data/squad --split train --sources bm25 --reranker models/reranker

Each step is kept: the pool (candidates/NAME), every score (scores/NAME-RERANKER-DIGITS, those of its fingerprint),
what was drawn (negatives/NAME).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.cli import Common, Stage, run, say
from jobs.session import connect

from indexing.candidates import Mining, MiningOptions
from indexing.denoising import Drawing, DrawOptions, Scores
from indexing.exports import export_sentence_transformers, export_tevatron
from indexing.mining import short
from indexing.mining_report import Statistics, read_examples, write_report
from indexing.rescoring import numerics_of_reranker, open_reranker
from indexing.retrievers import SearchOptions
from indexing.store import Store

SHOWN = 10  # questions with too few negatives that are named
EXAMPLES = 20  # of the report


@dataclass(frozen=True, kw_only=True)
class MineNegatives(Common):
    """--limit N: the split's first N questions."""

    sources: list[str] = field(default_factory=lambda: ["bm25"])
    """As search --source takes them: bm25, exact:EMB, index:NAME, …"""
    queries: str | None = None
    """May be left out where the store has one set only."""
    split: str = "train"
    depth: int = 200
    """Hits of each source."""
    drop_answers: bool = False
    """Leave out passages that contain an answer which is known for the question (its metadata's `answers`)."""
    part_queries: int = 512
    """Questions of a part, the unit of work and of resume."""
    candidates: str | None = None
    """The pool's name; default: queries-split-sources."""
    name: str | None = None
    """The negatives' name; default: the pool's."""
    reranker: str | None = None
    """A cross-encoder (Hugging Face name, folder, or models/NAME of the store) that denoises; none: no denoising."""
    undenoised: int = 30
    """Negatives of each question drawn from the whole pool."""
    denoised: int = 30
    """Negatives of each question drawn from what the re-ranker holds for irrelevant."""
    denoise_threshold: float = 0.1
    """The probability below which it does."""
    score_all: bool = False
    """Score every pair, not only as many as are needed."""
    seed: int = 0
    tevatron: str | None = None
    """Also export to this file, in Tevatron's training format (JSON lines)."""
    sentence_transformers: str | None = None
    """Also export to this file, in sentence-transformers' (Parquet: query, positive, negative_1, …)."""
    report: str | None = None
    """Write a page with pictures of the pool and of the denoising to this folder."""
    encoder: str | None = None
    """Where the encoder of dense sources is now."""
    task: str | None = None
    """A tuned task whose questions these are, as search takes it."""


def main(options: MineNegatives) -> None:
    store = Store(options.store).require()
    shape = MiningOptions(tuple(options.sources), options.depth, options.drop_answers, options.part_queries)
    search = SearchOptions(encoder=options.encoder, task=options.task)
    mining = Mining(
        store, options.queries, options.split, shape, name=options.candidates, search=search, limit=options.limit
    )
    draw = DrawOptions(options.undenoised, options.denoised, options.denoise_threshold, options.score_all, options.seed)
    if options.reranker is not None:
        open_reranker(store, options.reranker)  # what is none is told before hours of searching
    questions = len(mining.asked.ids)
    if options.plan:
        pairs = questions * options.depth * len(shape.sources)
        say(f"pool     {questions:,} questions x {len(shape.sources)} sources x {options.depth}: up to {pairs:,} pairs")
        say(f"         in {len(mining.parts()):,} parts of {store.url}/candidates/{mining.name}")
        least = 0 if options.reranker is None else pairs if options.score_all else questions * options.denoised
        say(f"scores   {least:,} pairs at least")
        say(f"draws    up to {questions * (draw.undenoised + (draw.denoised if options.reranker else 0)):,} negatives")
        return
    connect(store)
    if not mining.draft().complete:
        with Stage("pool", questions, "questions") as stage:
            for kept, count in mining.pool():
                stage.count(count, kept)
    scores = None
    if options.reranker is not None:
        scores = Scores(store, mining.candidates(), options.reranker, draw, numerics=numerics_of_reranker())
        if not scores.complete:
            with Stage("rerank", unit="pairs") as stage:
                for kept, count in scores.run():
                    stage.count(count, kept)
    drawing = Drawing(mining, scores, draw, options.name and mining.limited(options.name))
    if not drawing.draft().complete:
        with Stage("draw", questions, "questions") as stage:
            for kept, count in drawing.run():
                stage.count(count, kept)
    asked = draw.undenoised + (draw.denoised if scores else 0)
    tell(mining, drawing, asked)
    export(options, mining, drawing, asked)


def tell(mining: Mining, drawing: Drawing, asked: int) -> None:
    """What was made, and for which questions it is less than was asked for."""
    few: list[str] = []
    total = 0
    for table in drawing.tables():
        few += short(table, asked)
        total += len(table["negatives"].combine_chunks().flatten())
    pool = mining.candidates()
    say(f"{pool.url}: {pool.rows:,} candidates of {len(mining.asked.ids):,} questions")
    say(f"{mining.store.url}/negatives/{drawing.name}: {total:,} negatives")
    without = [id for id, rows in zip(mining.asked.ids, mining.asked.positives, strict=True) if not len(rows)]
    name_some(f"have fewer than {asked} negatives", few)
    name_some("have no relevant passage in the corpus", without)


def name_some(what: str, ids: list[str]) -> None:
    if ids:
        more = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
        say(f"  {len(ids):,} questions {what}: {', '.join(ids[:SHOWN])}{more}")


def export(options: MineNegatives, mining: Mining, drawing: Drawing, asked: int) -> None:
    """Write the files and the report that were asked for."""
    questions = dict(zip(mining.asked.ids, mining.asked.texts, strict=True))
    if options.tevatron:
        rows, left_out = export_tevatron(drawing.tables(), questions, mining.corpus, options.tevatron)
        say(f"{options.tevatron}: {rows:,} questions")
        name_some("are left out of it: no positive, or no negative", left_out)
    if options.sentence_transformers:
        path = options.sentence_transformers
        rows, left_out = export_sentence_transformers(
            drawing.tables(), questions, mining.corpus, path, num_negatives=asked
        )
        say(f"{path}: {rows:,} rows of {asked} negatives")
        name_some("are left out of it: no positive, or too few negatives", left_out)
    if options.report:
        statistics = Statistics()
        for table, known in drawing.pools():
            statistics.add(table, known)
        examples = read_examples(next(drawing.tables()), questions, mining.corpus, EXAMPLES)
        say(str(write_report(options.report, statistics, examples, title=f"Negatives of {drawing.name}")))


if __name__ == "__main__":
    run(main, MineNegatives)
