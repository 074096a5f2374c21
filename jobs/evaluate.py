"""Measure runs against qrels, side by side, with a paired test of each run against the first; measure embeddings.

    python jobs/evaluate.py --store data/squad --run minilm-exact minilm-dense other.trec --split test

Sources are searched first, as deep as the metrics need, and their runs are measured:

    python jobs/evaluate.py --store data/squad --source bm25 exact:minilm 0.5*bm25+0.5*exact:minilm --split test

With --relevance category, a passage is relevant if it has a category in common with the query (Topic-DPR):

    python jobs/evaluate.py --store data/arxiv --run bm25 topics --split test --relevance category

The vectors of embeddings are measured with the judged pairs of the split, by alignment and uniformity (Wang and Isola
2020); lower is better:

    python jobs/evaluate.py --store data/squad --embeddings minilm --split test
"""

from __future__ import annotations

from jobs.common.cli import run, say, say_complete, say_stages

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.evaluation.categories import RANDOM, CategoryMeasure, category_measure
from jobs.evaluation.embeddings import measure_embeddings, open_embeddings
from jobs.evaluation.measures import PAGE_R_PRECISION, Measure, check_metrics, measure_of, needs_judgements
from jobs.evaluation.options import Evaluate
from jobs.evaluation.rates import measure_rates
from jobs.evaluation.searches import make_run, open_searches

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indexing.corpus.corpus import Corpus
from indexing.corpus.queries import ALL, Queries
from indexing.measures.hits import ranked_hits
from indexing.measures.lengths import PassageLength, median_length
from indexing.measures.many_relevant import DEFAULT_METRICS as CATEGORY_METRICS
from indexing.measures.metrics import holm, paired_test
from indexing.search.runs import falling, read_run, read_trec
from indexing.store.artifact import fingerprint_of
from indexing.store.result_files import whole_file
from indexing.store.store import Store
from indexing.work.work import check_targets, complete_artifact
from retriever.errors import InputError
from retriever.options.categories import FIELD

METRICS = ("nDCG@10", "R@100", "RR@10")
SAMPLE = 1_000  # passages of a run without any relevant hit that are looked up in the corpus
NAME_LENGTH = 60  # characters of the runs' names in the name of the file


@dataclass(frozen=True)
class Run:
    """A run that is measured: a TREC file, or a run of the store."""

    name: str
    is_file: bool


def main(options: Evaluate) -> None:
    if not options.run and not options.source and not options.embeddings:
        raise InputError("no --run, no --source and no --embeddings: expected something to measure; name at least one")
    for option in ("encoder", "task"):
        if getattr(options, option) is not None and not options.source and not options.embeddings:
            raise InputError(
                f"--{option} {getattr(options, option)}: expected --embeddings or --source too; a run "
                "is measured without an encoder"
            )
    if options.median_length is not None and (options.median_length < 1 or not (options.run or options.source)):
        raise InputError(
            f"--median-length {options.median_length}: expected at least 1, and --run or --source: it is the "
            "number of passages per query of a run; correct it or name a run"
        )
    check_rate_options(options)
    if options.categories_field is not None and options.relevance != "category":
        raise InputError(
            f"--categories-field {options.categories_field}: is for relevance by category: give --relevance category, "
            "or leave it out"
        )
    by_category = options.relevance == "category"
    named = options.metrics if options.metrics is not None else CATEGORY_METRICS if by_category else METRICS
    metrics = [metric for word in named for metric in word.split()] if options.run or options.source else []
    check_metrics(metrics, by_category=by_category)
    store = Store(options.store).require()
    queries = Queries.open(store, options.queries)
    qrels = judgements(queries, options.split, [] if by_category else metrics)
    searches = open_searches(store, options, metrics)
    runs = [Run(name, Path(name).is_file()) for name in options.run]
    runs += [Run(search.name, is_file=False) for search in searches]
    works = {name: open_embeddings(store, name, queries, options) for name in options.embeddings}
    judged = set(queries.split(ALL).ids if options.split == ALL else qrels["query_id"].to_pylist())
    ids = queries.split(options.split, options.limit).ids
    qrels = qrels.filter(pc.is_in(qrels["query_id"], pa.array(ids, pa.string())))
    measure_category = None
    if by_category and metrics:  # before a search, which may take long
        measure_category = category_measure(
            store, queries, None if options.split == ALL else qrels, ids, metrics, options.categories_field or FIELD
        )
    if options.plan:
        for search in searches:
            check_targets(store, search)
            say(f"source {search.source}: run {search.name}")
            if artifact := complete_artifact(store, search):
                say_complete(artifact.url)
            else:
                say_stages(search)
        if runs:
            names = metrics + ([f"median length of {options.median_length}"] if options.median_length else [])
            say(f"{len(runs)} runs x {len(ids):,} queries, {len(qrels):,} judgements: {', '.join(names)}")
        for name, work in works.items():
            say(f"embeddings {name}: {len(work.texts):,} queries to encode, {work.describe()}")
        return
    for search in searches:
        make_run(store, search, options)
    path = options.json or default_path(store, queries, options, runs, metrics)
    if options.rate_queries is not None and not options.overwrite and Path(path).exists():
        raise InputError(
            f"{path}: the file exists, and a rate differs from call to call: give --overwrite to replace it, or "
            "another --json"
        )
    document: dict[str, Any] = {"queries": queries.artifact.key, "split": options.split, "num_queries": len(set(ids))}
    if runs:
        document |= measure_runs(store, queries, qrels, options, runs, metrics, ids, judged, measure_category)
    if works:
        document["embeddings"] = measure_embeddings(store, works, options)
    if options.rate_queries is not None:
        document["rates"] = measure_rates(searches, options.rate_queries, options.rate_batch)
    with whole_file(path, overwrite=options.overwrite) as file:
        file.write_text(json.dumps(document, indent=1) + "\n")
    say(f"{len(set(ids)):,} queries of {queries.artifact.key} {options.split}; figures in {path}")


def check_rate_options(options: Evaluate) -> None:
    """Raises InputError if a rate cannot be measured as the options say."""
    if options.rate_queries is not None and (options.rate_queries < 1 or not options.source):
        raise InputError(
            f"--rate-queries {options.rate_queries}: expected at least 1, and --source: the rate of a search is "
            "measured, not of a run; correct it or name a source"
        )
    if options.rate_batch < 1:
        raise InputError(f"--rate-batch {options.rate_batch}: expected at least 1")


def measure_runs(
    store: Store,
    queries: Queries,
    qrels: pa.Table,
    options: Evaluate,
    runs: list[Run],
    metrics: list[str],
    ids: list[str],
    judged: set[str],
    measure_category: CategoryMeasure | None,
) -> dict[str, Any]:
    """Measures the runs, prints warnings and the table, and returns the figures for the JSON file.

    Args:
        store: The store.
        queries: The query set.
        qrels: The judgements of the queries that are measured.
        options: The options of the job.
        runs: The runs, the first of which the others are compared with.
        metrics: Names of metrics.
        ids: The queries that are measured.
        judged: Ids of all queries that the split judges.
        measure_category: Measures runs by category; None: they are measured by judgements.
    """
    measure: Measure
    expected: dict[str, dict[str, np.ndarray]] = {}
    if measure_category is not None:
        measure = measure_category
        expected[RANDOM] = measure_category.of_random_ranking()
    else:
        measure = measure_of(store, queries, qrels, ids, metrics)
    values: dict[str, dict[str, np.ndarray]] = {}
    lengths: dict[str, PassageLength] = {}
    for measured in runs:
        name, is_file = measured.name, measured.is_file
        table = load(store, name, queries, options.split, is_file=is_file)
        where = f"{queries.artifact.key} {options.split}"
        noun = "queries" if options.split == ALL else "judged queries"
        for warning in check_queries(table, name, judged, set(ids), where, is_file=is_file, noun=noun):
            say(f"warning: {warning}")
        if options.median_length is not None:
            lengths[name] = measure_length(store, table, name, ids, options.median_length)
        values[name] = measure(table)
        without_hits = metrics and not any(metric_values.any() for metric_values in values[name].values())
        if without_hits and (hint := check_passages(store, table)):
            say(f"warning: {name}: {hint}")
    first, *others = [run.name for run in runs]
    tests = {m: {name: paired_test(values[first][m], values[name][m]) for name in others} for m in metrics}
    p_values = {metric: holm(metric_tests) for metric, metric_tests in tests.items()}
    if metrics:
        say(format_table({**values, **expected}, p_values, metrics))
    for name, length in lengths.items():
        say(
            f"{name}: median length {length.words:g} words, of the {length.passages:,} passages among the first "
            f"{length.depth} of each query"
        )
    document: dict[str, Any] = {
        "mean": {name: {m: float(v.mean()) for m, v in run_values.items()} for name, run_values in values.items()},
        "p_against_first": p_values,
        "query_ids": sorted(set(ids)),
        "per_query": {name: {m: v.tolist() for m, v in run_values.items()} for name, run_values in values.items()},
    }
    if expected:
        document["relevance"] = {"category": options.categories_field or FIELD}
        document["random_ranking"] = {metric: float(v.mean()) for metric, v in expected[RANDOM].items()}
    if lengths:
        document["median_length"] = {name: asdict(length) for name, length in lengths.items()}
    return document


def measure_length(store: Store, run: pa.Table, name: str, ids: list[str], depth: int) -> PassageLength:
    """Returns the median length of the first passages of a run, after a warning about passages without a text.

    Raises:
        InputError: If the corpus has none of the passages.
    """
    try:
        length = median_length(ranked_hits(run, ids), Corpus.open(store), depth)
    except InputError as error:
        raise InputError(f"--median-length {depth}: {name}: {error}") from None
    if length.missing:
        say(
            f"warning: {name}: {length.missing:,} of its first {depth} passages per query are not in the corpus, and "
            "are left out of the median length"
        )
    return length


def judgements(queries: Queries, split: str, metrics: list[str]) -> pa.Table:
    """Returns the judgements of a split; none for "all", which only Answer@K and PageRprec can measure.

    Raises:
        InputError: If the split is missing, or if a metric needs judgements that it lacks.
    """
    if split != ALL:
        return queries.qrels(split)
    if others := [name for name in metrics if needs_judgements(name)]:
        have = ", ".join(queries.splits) or "none"
        raise InputError(
            f"--split {ALL} --metrics {others[0]}: the split {ALL} has no judgements, expected Answer@K or "
            f"{PAGE_R_PRECISION} alone; give such metrics, or a split with judgements ({have})"
        )
    return pa.table({"query_id": pa.array([], pa.string())})


def default_path(store: Store, queries: Queries, options: Evaluate, runs: list[Run], metrics: list[str]) -> str:
    """Returns a separate file name for each evaluation.

    Its digits depend on the queries, the metrics, and the contents of runs and embeddings, so that repeating an
    evaluation finds its file and no other is replaced.

    Args:
        store: The store.
        queries: The query set.
        options: The options of the job.
        runs: The runs.
        metrics: Names of metrics.
    """
    contents = [
        [run.name, hashlib.sha256(Path(run.name).read_bytes()).hexdigest()]
        if run.is_file
        else [run.name, store.open("runs", store.only("runs", run.name)).fingerprint]
        for run in runs
    ]
    measured: list[Any] = [queries.artifact.fingerprint, options.split, options.limit, metrics, contents]
    if options.embeddings:
        fingerprints = [[g.fingerprint for g in store.generations("embeddings", name)] for name in options.embeddings]
        measured.append([fingerprints, options.task, options.sample, options.seed])
    if options.median_length is not None:
        measured.append({"median_length": options.median_length})
    if options.relevance == "category":
        measured.append({"relevance": options.categories_field or FIELD})
    if options.rate_queries is not None:
        measured.append({"rate_queries": options.rate_queries, "rate_batch": options.rate_batch})
    digits = fingerprint_of(measured)[:8]
    parts = [*(Path(run.name).stem if run.is_file else run.name for run in runs), *options.embeddings]
    names = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))[:NAME_LENGTH]
    return f"results/evaluation-{options.split}-{names}-{digits}.json"


def check_queries(
    table: pa.Table,
    name: str,
    judged: set[str],
    measured: set[str],
    where: str,
    *,
    is_file: bool,
    noun: str = "judged queries",
) -> list[str]:
    """Checks that the queries of a run are those that are judged.

    Args:
        table: The run.
        name: Its name or file.
        judged: Ids of all queries that the split judges.
        measured: Ids of those that are measured, fewer than `judged` with a limit.
        where: The query set and its split, for messages.
        is_file: Whether the run is a TREC file. A run of the store is known to be of these queries.
        noun: What `judged` are, for messages.

    Returns:
        One-line warnings: one if the run has queries without judgements, another if it lacks measured queries.

    Raises:
        InputError: If no query of a file is judged.
    """
    run_ids = set(table["query_id"].unique().to_pylist())
    warnings = []
    if is_file and not run_ids & judged:
        raise InputError(
            f"{name}: none of its {len(run_ids):,} queries (such as {min(run_ids)!r}) is judged in {where} "
            f"({len(judged):,} queries, such as {min(judged)!r}): name the queries of this run with "
            "--queries and --split, or give a run of these"
        )
    if is_file and (others := run_ids - judged):
        warnings.append(
            f"{name}: {len(others):,} of its {len(run_ids):,} queries are not judged in {where}, and do not count"
        )
    if missing := measured - run_ids:
        warnings.append(
            f"{name}: {len(missing):,} of the {len(measured):,} {noun} are missing from the run, and count as 0"
        )
    return warnings


def check_passages(store: Store, table: pa.Table) -> str | None:
    """Returns a warning if none of the first passages of a run is in the corpus."""
    ids = table["id"].slice(0, SAMPLE).to_pylist()
    if not ids or (Corpus.open(store).rows_of(ids) >= 0).any():
        return None
    return (
        f"no relevant hit, and none of its first {len(ids):,} passages (such as {ids[0]!r}) is in the corpus of "
        f"{store.url}: is it a run over another corpus?"
    )


def load(store: Store, name: str, queries: Queries, split: str, *, is_file: bool = False) -> pa.Table:
    """Returns a run of the store, or a TREC file, as columns query_id, id, score.

    Args:
        store: The store.
        name: Name of the run, or of the file.
        queries: The query set.
        split: The split of the queries.
        is_file: Whether the run is a TREC file.

    Raises:
        InputError: If the run in the store is over other queries.
    """
    if is_file:
        return read_trec(name)
    artifact = store.open("runs", store.only("runs", name))
    run_queries = artifact.inputs["queries"]
    if run_queries["fingerprint"] != queries.artifact.fingerprint or artifact.config["split"] not in (split, ALL):
        raise InputError(
            f"{artifact.url} is a run of {run_queries['artifact']} {artifact.config['split']}, not of "
            f"{queries.artifact.key} "
            f"{split}: name those with --queries and --split, or search these"
        )
    blocks = []
    for block in read_run(artifact):
        # The ranks of the run decide. Equal scores are made strictly decreasing, because the metrics would otherwise
        # order them in their own way.
        same = np.concatenate([[False], pc.equal(block["query_id"][1:], block["query_id"][:-1]).to_numpy()])
        blocks.append(block.set_column(3, "score", pa.array(falling(block["score"].to_numpy(), same.astype(np.int8)))))
    return pa.concat_tables(blocks)


def format_table(values: dict[str, Any], p_values: dict[str, Any], metrics: list[str]) -> str:
    """Returns one line per run with its metrics in columns, each followed by the p-value against the first run."""
    width = max(len("run"), *(len(name) for name in values))
    lines = ["run".ljust(width) + "".join(f"  {metric:>18}" for metric in metrics)]
    for name, run_values in values.items():
        cells = []
        for metric in metrics:
            p = p_values[metric].get(name)
            cells.append(f"{run_values[metric].mean():.4f}" + (f" (p={p:.4f})" if p is not None else ""))
        lines.append(name.ljust(width) + "".join(f"  {cell:>18}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    run(main, Evaluate)
