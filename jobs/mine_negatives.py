"""Mine hard negatives: pool hits of several sources, denoise, sample per query.

    riptide mine-negatives --store data/squad --split train --sources bm25 exact:minilm --depth 200
    riptide mine-negatives --store data/squad --sources bm25 --reranker models/reranker

A re-ranker denoises the pool. The store keeps the output of each step: the pool (candidates/NAME), all scores
(scores/NAME-RERANKER-DIGITS, where the digits come from the fingerprint of the re-ranker), and the sampled negatives
(negatives/NAME).
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.mining.candidates import MiningOptions, PoolCandidatesWork
from riptide.indexing.mining.denoising import SampleNegativesWork, complete_negatives
from riptide.indexing.mining.exports import export_sentence_transformers, export_tevatron
from riptide.indexing.mining.report import PoolStatistics, read_examples, write_report
from riptide.indexing.mining.sampling import NegativeOptions, check_scales, queries_with_too_few
from riptide.indexing.mining.scoring import score_candidates
from riptide.indexing.search.rescoring import open_reranker
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store, check_name
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import check_targets, resumable, run_work
from riptide.jobs.common.cut_counts import print_pair_cuts, print_part_cuts
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.common.job_options import EstimatedJob, RerankWorkers, chosen_task
from riptide.jobs.common.printing import print_complete, print_stages, say
from riptide.jobs.common.session import open_runner
from riptide.jobs.common.stage_progress import StageProgress
from riptide.process.extras import require

SHOWN = 10  # number of queries with too few negatives whose ids are printed
EXAMPLES = 20  # number of example queries in the report


@dataclass(frozen=True, kw_only=True)
class MineNegatives(RerankWorkers, EstimatedJob):
    GROUP: ClassVar = "queries"
    HELP_FIRST: ClassVar = ("queries", "pool", "re-ranking", "negatives", "output")
    MAKES: ClassVar = ("negatives",)
    NAMED_BY: ClassVar = ("name",)
    READS: ClassVar = {"queries": "queries", "sources": "sources", "reranker": "models", "task": "tasks"}

    queries: str | None = None
    """Name of the query set; may be left out if the store has only one."""
    split: str = "train"
    """The split to mine."""
    pool: MiningOptions = field(default_factory=MiningOptions)
    RERANKING: ClassVar = Heading("re-ranking")
    reranker: str | None = None
    """Cross-encoder (Hugging Face name, folder, or models/NAME of the store) that denoises the pool; without it, there
    is no denoising."""
    negatives: NegativeOptions = field(default_factory=NegativeOptions)
    ENCODER: ClassVar = Heading("encoder of dense sources")
    encoder: str | None = None
    """Where the encoder of dense sources is now; default: where it was when the corpus was encoded."""
    task: str | None = None
    """The tuned task of the queries, as search takes it."""
    OUTPUT: ClassVar = Heading("output")
    candidates: str | None = None
    """Name of the pool; default: queries-split-sources."""
    name: str | None = None
    """Name of the negatives; default: the name of the pool."""
    tevatron: str | None = option(None, metavar="FILE")
    """Also export to this file, in the training format of Tevatron (JSON lines)."""
    sentence_transformers: str | None = option(None, metavar="FILE")
    """Also export to this file, in the format of sentence-transformers (Parquet: query, positive, negative_1, …)."""
    report: str | None = option(None, metavar="FOLDER")
    """Write an HTML report with charts of the pool and of the denoising to this folder."""
    overwrite: bool = False
    """Replace exported files and a report if they have other content."""
    limit: int | None = None
    """Mine the first N queries of the split."""


def main(options: MineNegatives) -> None:
    run_job(Store(options.store), options)


def run_job(store: Store, options: MineNegatives) -> Artifact | None:
    """Mines negatives. Returns them, or None with --plan."""
    store.require_not_empty()
    if options.report is not None:
        require("a report", "matplotlib")
    shape, draw = options.pool, options.negatives
    search = SearchOptions(encoder=options.encoder, task=chosen_task(store, options.task))
    pool = PoolCandidatesWork(
        store, options.queries, options.split, shape, name=options.candidates, search=search, limit=options.limit
    )
    if options.reranker is None:
        check_scales(draw, len(shape.sources))
        if draw.teacher_scores:
            raise InputError(
                f"{Parameter('teacher_scores')} without {Parameter('reranker')}: expected a re-ranker, which "
                f"computes the scores"
            )
        if options.gpus is not None:
            raise InputError(
                f"{Parameter('gpus', options.gpus)} without {Parameter('reranker')}: expected a re-ranker, which "
                f"may use a GPU"
            )
        if options.rerank_dtype != "auto":
            raise InputError(
                f"{Parameter('rerank_dtype', options.rerank_dtype)} without {Parameter('reranker')}: expected a "
                f"re-ranker, whose dtype it is"
            )
    reranker = None if options.reranker is None else open_reranker(store, options.reranker, options.rerank_dtype)
    check_targets(store, pool)
    check_name("negatives", options.name or pool.name)  # fails for an invalid name here, before hours of searching
    if options.plan and (artifact := complete_negatives(store, pool, reranker, draw, options.name)):
        print_complete(artifact.url, options.tevatron, options.sentence_transformers, options.report)
        return None
    if options.plan:
        print_plan(store, options, pool)
        return None
    runner = open_runner(store, options)
    if reranker and isinstance(runner, LocalRunner):
        reranker.check_machine()  # fails here, before hours of searching
    [candidates] = run_work(store, pool, runner, StageProgress)
    scores = None
    with resumable():  # the same command resumes after the candidates
        if reranker is not None:
            parts = dict(pool.parts()) if draw.needs_positives else None
            scores = score_candidates(store, candidates, reranker, draw, runner, StageProgress, parts=parts)
        negatives = SampleNegativesWork(pool, scores, draw, options.name)
        [artifact] = run_work(store, negatives, runner, StageProgress)
    print_summary(candidates, negatives)
    print_part_cuts(candidates.numbered_parts("part"), pool.sources)
    if scores is not None:
        print_pair_cuts(scores.count_cuts())
    write_exports(options, negatives)
    return artifact


def print_plan(store: Store, options: MineNegatives, pool: PoolCandidatesWork) -> None:
    """Prints the plan: the size of the pool, of the scores and of the negatives."""
    shape, draw, num_queries = options.pool, options.negatives, len(pool.mined.ids)
    pairs = num_queries * shape.depth * len(shape.sources)
    sources = f"{len(shape.sources)} sources x {shape.depth}"
    say(f"pool     {num_queries:,} queries x {sources}: up to {pairs:,} pairs")
    say(f"         in {len(pool.parts()):,} parts of {store.url}/candidates/{pool.name}")
    print_stages(pool)
    every = draw.scoring_settings["score_all"]
    per_query = max(draw.denoised_negatives, draw.pool_negatives if draw.teacher_scores else 0)
    minimum = 0 if options.reranker is None else pairs if every else num_queries * per_query
    say(f"scores   {minimum:,} pairs at least")
    per_query = draw.pool_negatives + (draw.denoised_negatives if options.reranker else 0)
    say(f"draws    up to {num_queries * per_query:,} negatives")


def print_summary(candidates: Artifact, negatives: SampleNegativesWork) -> None:
    """Prints the number of candidates and of negatives, and the queries with too few of them."""
    requested = (negatives.options.pool_negatives, negatives.num_denoised)
    few: list[str] = []
    total = num_copies = 0
    dropped: Counter[str] = Counter()
    for table in negatives.tables():
        few += queries_with_too_few(table, *requested)
        total += len(table["negatives"].combine_chunks().flatten())
        num_copies += len(table["copies"].combine_chunks().flatten())
        dropped.update(table["dropped_by"].combine_chunks().flatten().to_pylist())
    queries = negatives.pool.mined
    say(f"{candidates.url}: {candidates.rows:,} candidates of {len(queries.ids):,} queries")
    if num_copies:
        others = " or of its document" if negatives.pool.corpus.is_split else ""
        say(f"  {num_copies:,} passages with the title and text of a positive{others} are no negatives")
    for reason, count in sorted(dropped.items()):
        limit, _, scorer = reason.partition(":")
        say(f"  {count:,} candidates exceed {Parameter(limit)} by the scores of {scorer}")
    of_scores = "".join(f", scores: {numerics}" for numerics in negatives.score_numerics)
    say(f"{negatives.pool.store.url}/negatives/{negatives.name}: {total:,} negatives{of_scores}")
    without_positive = [id for id, rows in zip(queries.ids, queries.positives, strict=True) if not len(rows)]
    denoised = f" from the pool, or fewer than {requested[1]} denoised ones" if requested[1] else ""
    print_some_ids(f"have fewer than {requested[0]} negatives{denoised}", few)
    print_some_ids("have no relevant passage in the corpus", without_positive)


def count_export_columns(negatives: SampleNegativesWork) -> int:
    """Returns the number of negatives per row in an export format with a fixed number of columns.

    A passage that is drawn both denoised and from the whole pool is one negative, so queries have different numbers of
    them. The result is the smallest number among the queries for which both draws were complete.
    """
    pool_negatives, denoised_negatives = requested = (negatives.options.pool_negatives, negatives.num_denoised)
    smallest = pool_negatives + denoised_negatives
    if min(requested):
        for table in negatives.tables():
            few = set(queries_with_too_few(table, *requested))
            lengths = pc.list_value_length(table["negatives"]).to_pylist()
            complete = (n for id, n in zip(table["query_id"].to_pylist(), lengths, strict=True) if id not in few)
            smallest = min([smallest, *complete])
    return smallest


def print_some_ids(what: str, ids: list[str]) -> None:
    """Prints the number of queries and the ids of the first ones; prints nothing without queries."""
    if ids:
        more = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
        say(f"  {len(ids):,} queries {what}: {', '.join(ids[:SHOWN])}{more}")


def write_exports(options: MineNegatives, negatives: SampleNegativesWork) -> None:
    """Writes the export files and the report that the options name."""
    corpus, mined = negatives.pool.corpus, negatives.pool.mined
    queries = dict(zip(mined.ids, mined.texts, strict=True))
    if options.tevatron:
        rows, left_out = export_tevatron(
            negatives.tables(), queries, corpus, options.tevatron, overwrite=options.overwrite
        )
        say(f"{options.tevatron}: {rows:,} queries")
        print_some_ids("are left out of it: no positive, or no negative", left_out)
    if options.sentence_transformers:
        path = options.sentence_transformers
        num_negatives = count_export_columns(negatives)
        rows, left_out = export_sentence_transformers(
            negatives.tables(), queries, corpus, path, num_negatives=num_negatives, overwrite=options.overwrite
        )
        say(f"{path}: {rows:,} rows of {num_negatives} negatives")
        print_some_ids("are left out of it: no positive, or too few negatives", left_out)
    if options.report:
        statistics = PoolStatistics()
        for table, known in negatives.pools():
            statistics.add(table, known)
        for table in negatives.tables():
            statistics.add_dropped(table)
        examples = read_examples(next(negatives.tables()), queries, corpus, EXAMPLES)
        title = f"Negatives of {negatives.name}"
        say(str(write_report(options.report, statistics, examples, title=title, overwrite=options.overwrite)))


if __name__ == "__main__":
    run(main, MineNegatives)
