"""Search all queries of a split as a run, or a few queries and print their hits.

riptide search --store data/squad --split test --k 100 --run results/squad.trec
riptide search --store data/squad --source 0.4*bm25+0.6*exact:minilm --split dev
riptide search --store data/squad --query "who wrote Dracula?" --query "who wrote Emma?"
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from riptide.base.errors import InputError
from riptide.base.option_fields import check_values, option
from riptide.base.wording import Parameter
from riptide.indexing.files.raw import short_repr
from riptide.indexing.hit_sources.grammar import check_options_used
from riptide.indexing.hit_sources.modes import default_source, expand_mode, source_of_mode
from riptide.indexing.hit_sources.registry import all_forms
from riptide.indexing.hit_sources.search_options import By, Mode, SearchOptions
from riptide.indexing.search.explanation_lines import explanation_lines
from riptide.indexing.search.explanations import HitExplanation
from riptide.indexing.search.few_queries import LocalSearch
from riptide.indexing.search.hit_tables import ShownHit
from riptide.indexing.search.rescoring import RerankerSpec, open_reranker
from riptide.indexing.search.retrieval import RERANK_DEPTH, RUN_HITS, SearchQueriesWork
from riptide.indexing.search.run_files import check_run_file, write_run_file
from riptide.indexing.search.runs import read_hits
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.result_files import check_result_file
from riptide.indexing.store.store import Store
from riptide.indexing.work.local_runner import LocalRunner
from riptide.indexing.work.work import check_targets, complete_artifact, run_work
from riptide.jobs.common.cut_counts import print_part_cuts, print_search_cuts
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.common.job_options import EstimatedJob, RerankWorkers, chosen_task
from riptide.jobs.common.printing import note_for_estimate, print_complete, print_stages, say, say_hits
from riptide.jobs.common.session import num_gpus, open_runner
from riptide.jobs.common.stage_progress import StageProgress

SOURCE_HELP = (
    f"Search source, instead of a mode: {', '.join(all_forms())}, A+B (reciprocal rank fusion), 0.4*A+0.6*B "
    "(weighted), or the name of a mode."
)
SHOWN = 10  # maximum number of queries without hits that are listed
SHOWN_HITS = 10  # default number of printed hits per query with --query
# Options without a meaning with --query, which makes no run and takes no queries from the store.
OF_RUNS = ("queries", "split", "run", "overwrite", "name", "limit", "drop_self")


@dataclass(frozen=True, kw_only=True)
class SearchJob(RerankWorkers, EstimatedJob):
    GROUP: ClassVar = "queries and sources"
    MAKES: ClassVar = ("runs",)
    NAMED_BY: ClassVar = ("name", "task", "embeddings", "source")
    READS: ClassVar = {
        "queries": "queries",
        "source": "sources",
        "mode": "sources",
        "embeddings": "embeddings",
        "index": "index",
        "rerank": "models",
        "task": "tasks",
    }

    query: tuple[str, ...] = option((), repeated=True)
    """Print the hits of this query with snippets. The search runs in this process and commits nothing. Give the option
    once per query, each query in quotes."""
    queries: str | None = None
    """Name of the query set in the store; may be left out if the store has only one."""
    split: str | None = None
    """A split of the query set's qrels, or all; default: test."""
    mode: Mode | None = None
    """dense: the FAISS index, whose candidates are scored again by the vectors; exact: all vectors; bm25: Lucene;
    hybrid: bm25 and dense with equal weights (exact if there is no index). Default: the first that the store has
    of hybrid, dense, exact, bm25 and a SPLADE index; a line says which."""
    source: str | None = option(None, help=SOURCE_HELP)
    embeddings: str | None = None
    """Dense embeddings to search: all vectors (exact), or their index (dense, hybrid); may be left out if the store
    has only one with dense vectors."""
    index: str | None = None
    """FAISS index to search (dense, hybrid); may be left out if the store has only one FAISS index."""
    k: int | None = option(None, minimum=1)
    """Hits per query; default: 1000, or 10 with --query."""
    filter: str | None = None
    """Return only passages whose metadata match, such as 'year >= 2000 and lang in (en, de)', or a JSON object. The
    fields are those of `riptide import-corpus --filters`; docs/data.md has the grammar."""
    by: By | None = None
    """What a hit is in a corpus of split documents. document (default): a document, shown by its best passage; the file
    of --run has ids of documents, which judgements name. passage: a passage. In other corpora, a hit is a passage."""
    explain: bool = False
    """With --query: print under each hit the terms and their weights, the score and rank of each source, its part of
    the fused score, the probed list of an index and the change of rank by the re-ranker."""
    drop_self: bool = False
    """Exclude a hit whose id equals the id of the query (ArguAna, Quora)."""
    OUTPUT: ClassVar = Heading("output")
    name: str | None = None
    """Name of the run in the store; default: queries-split-source, then the task unless the source has its name."""
    run: str | None = option(None, metavar="FILE")
    """Also write the hits to this file: in TREC format or, if it ends with .jsonl, as JSON lines (query_id, id, rank,
    score), whose ids may have white space."""
    overwrite: bool = False
    """Replace the file of --run if it has other content."""
    settings: SearchOptions = field(default_factory=SearchOptions)
    RERANKING: ClassVar = Heading("re-ranking")
    rerank: str | None = None
    """Re-rank the first hits with this cross-encoder: a Hugging Face name, a folder, or models/NAME of the store."""
    rerank_depth: int | None = option(None, minimum=1)
    """Hits per query that the cross-encoder re-ranks; lower hits keep their order, with -rank as their score. Default:
    100."""


def main(options: SearchJob) -> None:
    run_job(Store(options.store).require_not_empty(), options)


def run_job(store: Store, options: SearchJob) -> Artifact | None:
    """Makes a run and returns it, or prints the hits of --query and returns None.

    Args:
        store: The store.
        options: The options of the job.

    Raises:
        InputError: If options contradict each other, or if an artifact is missing or does not fit the others.
    """
    check_options(options)
    settings = replace(options.settings, task=chosen_task(store, options.settings.task))
    options = replace(options, settings=settings)
    source = choose_source(store, options)
    note_for_estimate(source=source)
    names = () if options.rerank else ("rerank_depth", "rerank_dtype", "gpus")
    values = {name: value for name in names if (value := getattr(options, name)) not in (None, "auto")}
    unused = {name: (value, f"{Parameter('rerank')}") for name, value in values.items()}
    check_options_used(source, options.settings, unused)
    reranker = open_reranker(store, options.rerank, options.rerank_dtype) if options.rerank else None
    if options.query:
        show_hits(store, source, options, reranker)
        return None
    return search_split(store, source, options, reranker)


def search_split(store: Store, source: str, options: SearchJob, reranker: RerankerSpec | None) -> Artifact | None:
    """Searches the queries of a split, prints a report, and returns the run, or None with --plan."""
    split, k = options.split or "test", options.k or RUN_HITS
    work = SearchQueriesWork(
        store,
        source=source,
        split=split,
        k=k,
        name=options.name,
        queries=options.queries,
        options=options.settings,
        drop_self=options.drop_self,
        reranker=reranker,
        rerank_depth=options.rerank_depth or RERANK_DEPTH,
        limit=options.limit,
        filter=options.filter,
        by=options.by,
    )
    artifact = complete_artifact(store, work)
    if options.run:
        check_run_file(options.run, work.split.ids, work.corpus, by_document=work.documents is not None)
        check_result_file(options.run, overwrite=options.overwrite or artifact is not None)
        if options.plan and artifact is not None and os.path.exists(options.run) and not options.overwrite:
            # Raises InputError if the file has other content; equal content is not written again.
            export_run(work, artifact, options)
    if options.plan:
        print_plan(work, artifact, options.run)
        return None
    if artifact is None:
        [artifact] = run_work(store, work, open_runner(store, options), StageProgress)
    say(f"{artifact.url}: {artifact.notes['hits']:,} hits of {len(work.split.ids):,} queries in {work.source}")
    if queries_without_hits := work.queries_without_hits():
        more = f" and {len(queries_without_hits) - SHOWN} more" if len(queries_without_hits) > SHOWN else ""
        texts = dict(zip(work.split.ids, work.split.texts, strict=True))
        shown = "; ".join(short_repr(texts[id]) for id in queries_without_hits[:SHOWN])
        say(f"  {len(queries_without_hits):,} queries have no hits: {shown}{more}")
    print_part_cuts(artifact.numbered_parts("part"), work.sources)
    if options.run:
        export_run(work, artifact, options)
        say(options.run)
    return artifact


def export_run(work: SearchQueriesWork, artifact: Artifact, options: SearchJob) -> None:
    """Writes a complete run to the file that --run names."""
    write_run_file(read_hits(artifact, work.corpus), options.run or "", work.name, overwrite=options.overwrite)


def print_plan(work: SearchQueriesWork, artifact: Artifact | None, file: str | None) -> None:
    """Prints the plan of a search.

    Args:
        work: The search.
        artifact: Its run, if it is complete.
        file: The file of the run to write.
    """
    if artifact is not None:
        print_complete(artifact.url, file)
        return
    check_targets(work.store, work)
    say(f"run      {work.store.url}/runs/{work.name}")
    say(f"queries  {len(work.split.ids):,} of {work.queries.artifact.key} {work.config['split']}")
    say(f"source   {work.source}, over {work.corpus.num_rows:,} passages")
    print_filter(work.allowed_rows)
    say(f"hits     up to {len(work.split.ids) * work.k:,}")
    print_stages(work)


def choose_source(store: Store, options: SearchJob) -> str:
    """Returns the source to search; without --source and --mode, prints which default source is used.

    Raises:
        InputError: If the store lacks what a mode searches, or has several artifacts of a kind.
    """
    if options.source is not None:
        return expand_mode(options.source, store)
    if options.mode is not None:
        return source_of_mode(options.mode, store, options.embeddings, options.index)
    source = default_source(store, options.embeddings, options.index)
    say(f"no {Parameter('mode')} given: searching {source}")
    return source


def show_hits(store: Store, source: str, options: SearchJob, reranker: RerankerSpec | None) -> None:
    """Prints a table of hits for each --query. Searches in this process, without Ray, and writes nothing."""
    runner = LocalRunner(gpus=num_gpus(), request=options.worker_request())
    search = LocalSearch(store, source, options.settings, runner, reranker=reranker, by=options.by)
    allowed_rows = search.matching_rows(options.filter)
    k, depth = options.k or SHOWN_HITS, options.rerank_depth or RERANK_DEPTH
    print_filter(allowed_rows)
    if options.plan:
        say(f"queries  {len(options.query):,}, in this process")
        say(f"source   {search.source}, over {search.corpus.num_rows:,} passages")
        say(f"hits     up to {len(options.query) * k:,}, printed only")
        return
    explanations: list[list[HitExplanation]] = [[] for _ in options.query]
    limits: dict[str, Any] = {"rerank_depth": depth, "allowed_rows": allowed_rows}
    if options.explain:
        results, explanations = search.search_and_explain(options.query, k, filter=options.filter, **limits)
    else:
        results = search.search(options.query, k, **limits)
    for number, query in enumerate(options.query):
        rows = results.rows[number][results.rows[number] >= 0]
        passages = search.corpus.passages(rows)
        ids = search.corpus.ids(rows) if search.documents is None else search.corpus.documents(rows)
        scores = results.scores[number].tolist()
        lines: list[list[str]] = [explanation_lines(each, rank) for rank, each in enumerate(explanations[number], 1)]
        hits = [
            ShownHit(rank, score, id, passage.title, passage.text, explanation=below)
            for rank, (score, id, passage, below) in enumerate(
                zip(scores, ids, passages, lines or [[]] * len(rows), strict=False), 1
            )
        ]
        say(f"{'' if number == 0 else chr(10)}{' '.join(query.split())}  ({search.source}, {len(hits)} hits)")
        say_hits(hits, query)
    print_search_cuts(search.count_cuts(), search.sources)


def print_filter(allowed_rows: np.ndarray | None) -> None:
    """Prints how many passages match the filter. allowed_rows: their rows; None: there is no filter."""
    if allowed_rows is not None:
        say(f"filter   {len(allowed_rows):,} passages match")


def check_options(options: SearchJob) -> None:
    """Raises InputError for invalid options, or for options that do not go together.

    Raises:
        InputError: For a number below its minimum, an empty query, or an option of a run together with --query.
    """
    check_values(options.settings)
    if options.mode is not None and options.source is not None:
        raise InputError(
            f"{Parameter('mode', options.mode)} and {Parameter('source', options.source)}: a mode is a source; "
            f"leave one of them out"
        )
    for query in options.query:
        if not query.strip():
            raise InputError(f"{Parameter('query', repr(query))}: the query is empty; expected some words")
    if options.explain and not options.query:
        raise InputError(f"{Parameter('explain')}: explains the hits of {Parameter('query')}; give one")
    for name in OF_RUNS if options.query else ():
        if (value := getattr(options, name)) not in (None, False):
            raise InputError(
                f"{Parameter('query')} with {Parameter(name, value)}: {Parameter('query')} searches its own text and "
                "makes no run; leave one out"
            )


if __name__ == "__main__":
    run(main, SearchJob)
