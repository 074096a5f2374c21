"""Compares two runs by a sample of verdicts: opens the runs and the folder, and estimates the difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from riptide.base.arguments import refuse_unknown_names
from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.judging.difference import DifferenceEstimate, estimate_difference, needed_verdicts
from riptide.indexing.judging.judging_order import JudgingOrder
from riptide.indexing.judging.judging_pool import JudgingPool, parse_measure, pool_runs
from riptide.indexing.judging.verdicts import Pair, verdict_array
from riptide.indexing.measures.ranked_lists import ranked_hits
from riptide.indexing.queries.queries import ALL, Queries
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import say
from riptide.jobs.comparison.comparing import queries_of
from riptide.jobs.evaluation.document_runs import best_passages
from riptide.jobs.evaluation.evaluated_runs import (
    EvaluationQueries,
    RunReference,
    check_passages,
    joined_names,
    read_checked_run,
    run_contents,
)
from riptide.jobs.judging.judge_options import Judge
from riptide.jobs.judging.judging_files import PAGE, PAIRS, PEOPLE, JudgingFolder, pair_texts


@dataclass(frozen=True)
class JudgingWork:
    """A judging whose runs, queries and folder have been checked.

    Attributes:
        store: The store.
        options: The options of the job.
        runs: Both runs.
        queries: The query set.
        split: The split of the queries, or all.
        texts: The text of each query by id.
        pool: The pairs that the runs rank differently.
        passages: The passage to show for a pair of a query and a document: the best one, by the run that ranks the
            document higher.
        folder: Its folder.
    """

    store: Store
    options: Judge
    runs: tuple[RunReference, RunReference]
    queries: Queries
    split: str
    texts: Mapping[str, str]
    pool: JudgingPool
    passages: Mapping[Pair, str]
    folder: JudgingFolder


@refuse_unknown_names
@dataclass(frozen=True)
class Judging:
    """The state of a judging.

    Attributes:
        first: Name of the first run, the baseline.
        second: Name of the second run.
        measure: The measure.
        queries: Key of the query set and the split.
        num_queries: Number of queries.
        num_pooled: Number of pairs of a query and a passage among the first hits of both runs.
        num_deciding: Number of pairs that the runs rank differently.
        num_verdicts: Number of verdicts of people.
        num_skipped: Number of these that are skips.
        num_model_verdicts: Number of verdicts of a model.
        num_pending: Number of pairs of the current round without a verdict; 0: all pairs are judged.
        estimate: The estimate after the last complete round; None: the first round is not complete.
        num_needed: About how many further verdicts decide; 0: it is decided, or all pairs are judged; None: unknown.
        folder: The folder with the pairs, the page and the verdicts.
        identity: A hash of what is compared, which the page puts into the names of the files that it saves.
    """

    first: str
    second: str
    measure: str
    queries: str
    num_queries: int
    num_pooled: int
    num_deciding: int
    num_verdicts: int
    num_skipped: int
    num_model_verdicts: int
    num_pending: int
    estimate: DifferenceEstimate | None
    num_needed: int | None
    folder: str
    identity: str

    @property
    def decision(self) -> str | None:
        """Name of the better run, "equal", or None: not enough verdicts."""
        decision = self.estimate.decision if self.estimate else None
        return {"first": self.first, "second": self.second, "equal": "equal"}[decision] if decision else None


def open_judging(store: Store, options: Judge) -> JudgingWork:
    """Checks that two runs can be compared, and pools them. Prints warnings of missing queries.

    Args:
        store: The store.
        options: The options of the job.

    Raises:
        InputError: If a run is missing, if the runs are over other queries or have the same hits, if the
            corpus lacks the hits of a run, or if the folder is that of another judging.
    """
    rank_values = parse_measure(options.measure)
    references = (options.first, options.second)
    runs = tuple(RunReference(name, Path(name).is_file()) for name in references)
    stored = [run.name for run in runs if not run.is_file]
    name, split = queries_of(store, stored)
    queries = Queries.open(store, options.queries or name)
    of_runs = {store.open("runs", store.only_name("runs", run)).config["split"] for run in stored}
    if of_runs == {ALL} or not queries.splits:  # queries without judgements
        split = ALL
    split = options.split or split
    ids, texts = queries.split(split, options.limit)
    known = EvaluationQueries(
        queries, ids, set(queries.split(split).ids), pa.table({"query_id": pa.array([], pa.string())})
    )
    tables = [read_checked_run(store, run, known, split, len(rank_values)) for run in runs]
    for run, table in zip(runs, tables, strict=True):
        if message := check_passages(store, table):
            raise InputError(f"{run.label}: {message}")
    first, second = (ranked_hits(table, ids, len(rank_values)) for table in tables)
    pool = pool_runs(first, second, rank_values)
    if not len(pool):
        raise InputError(
            f"{options.first} and {options.second}: the same first {len(rank_values)} hits for all {len(ids):,} "
            "queries, expected runs that differ: no verdict could decide; name another run"
        )
    contents = [content for _, content in run_contents(store, runs)]
    settings = [options.measure, options.seed, options.round_size]
    digits = fingerprint_of([queries.artifact.fingerprint, split, options.limit, settings, contents])
    path = Path(options.folder or f"results/judging-{joined_names(runs)}-{digits[:8]}")
    folder = JudgingFolder(path, digits[:16])
    passages = best_passages(tables[0])
    of_second = best_passages(tables[1])
    for pair, gain in zip(pool.positions(), pool.gains.tolist(), strict=True):
        if pair in of_second and (gain > 0 or pair not in passages):
            passages[pair] = of_second[pair]
    return JudgingWork(
        store, options, (runs[0], runs[1]), queries, split, dict(zip(ids, texts, strict=True)), pool, passages, folder
    )


def judge(work: JudgingWork) -> Judging:
    """Adds verdicts to the folder of a judging, estimates the difference, and writes the pairs of the next round.

    Raises:
        InputError: For verdicts that are malformed, on unknown pairs, or that contradict each other.
    """
    options, pool, pairs = work.options, work.pool, work.pool.positions()
    people, model, num_new = work.folder.read_verdicts(options.verdicts, options.model_verdicts, pairs)
    if options.verdicts and not num_new:
        say(
            f"warning: {Parameter('verdicts', ' '.join(options.verdicts))}: all these verdicts are in "
            f"{work.folder.path / PEOPLE} already; give the file that the page saved last"
        )
    predictions = None
    if model:
        predictions = verdict_array(model, pairs)
        predictions = np.where(np.isnan(predictions), np.nanmean(predictions), predictions)
    order = JudgingOrder(pool, options.seed, options.round_size, predictions)
    verdicts = verdict_array(people, pairs)
    is_pending = np.isnan(verdicts[order.numbers])
    num_complete = int(np.argmax(np.append(is_pending, True)))  # verdicts without a gap from the start of the order
    round = sum(end <= num_complete for end in order.ends)
    estimate, needed = None, None
    if round:
        estimate = estimate_difference(pool, order, verdicts, round, options.margin)
        needed = 0
        if not estimate.decision:
            until = estimate.num_verdicts + needed_verdicts(pool, order, estimate, options.margin)
            needed = int(is_pending[:until].sum())
    end = order.ends[min(round, len(order.ends) - 1)]
    pending = order.numbers[:end][is_pending[:end]]
    judging = Judging(
        first=work.runs[0].label,
        second=work.runs[1].label,
        measure=options.measure,
        queries=f"{work.queries.artifact.key} {work.split}",
        num_queries=pool.num_queries,
        num_pooled=pool.num_pooled,
        num_deciding=len(pool),
        num_verdicts=len(people),
        num_skipped=sum(verdict.is_skip for verdict in people.values()),
        num_model_verdicts=len(model),
        num_pending=len(pending),
        estimate=estimate,
        num_needed=needed,
        folder=str(work.folder.path),
        identity=work.folder.identity,
    )
    rows = pair_texts(work.store, work.texts, pool, pending, work.passages)
    everything = (
        pair_texts(work.store, work.texts, pool, np.arange(len(pool)), work.passages) if options.all_pairs else None
    )
    work.folder.write(asdict(judging), people, model, rows, everything)
    if model and len(model) < len(pool):
        say(
            f"warning: the model has no verdict on {len(pool) - len(model):,} of {len(pool):,} pairs, which count as "
            "its mean verdict"
        )
    return judging


def print_lines(judging: Judging) -> Iterator[str]:
    """Yields the report of a judging."""
    yield (
        f"{judging.second} against {judging.first}, {judging.measure} of {judging.num_queries:,} queries of "
        f"{judging.queries}: {judging.num_pooled:,} pooled pairs, {judging.num_deciding:,} ranked differently"
    )
    model = f", and {judging.num_model_verdicts:,} of a model" if judging.num_model_verdicts else ""
    yield f"{judging.num_verdicts:,} verdicts of people{model}"
    if (estimate := judging.estimate) is None:
        yield f"too few verdicts: {judging.num_pending:,} pairs of the first round are pending"
    else:
        yield (
            f"round {estimate.round}, {estimate.num_verdicts:,} verdicts: difference {estimate.difference:+.4f}, 95% "
            f"interval {estimate.low:+.4f} to {estimate.high:+.4f} of what verdicts on all pairs give"
        )
        if estimate.decision:
            is_equal = estimate.decision == "equal"
            yield f"enough: {'the runs are equal within the margin' if is_equal else f'{judging.decision} is better'}"
            return
        if judging.num_pending:
            yield f"not enough, about {judging.num_needed:,} more verdicts"
        elif judging.num_skipped:
            yield "all pairs are judged: the runs do not differ by more than the skipped pairs"
        else:
            yield "all pairs are judged: the runs do not differ"
    if judging.num_pending:
        yield f"judge {judging.num_pending:,} pairs: {judging.folder}/{PAGE}, or {judging.folder}/{PAIRS}"
        yield f"then run the same command with {Parameter('verdicts')} verdicts-{judging.identity}-*.jsonl"


def print_plan(work: JudgingWork) -> Iterator[str]:
    """Yields what the job would do."""
    ends = JudgingOrder(work.pool, 0, work.options.round_size).ends
    yield (
        f"{work.runs[0].label} and {work.runs[1].label}, {work.options.measure}: {work.pool.num_queries:,} queries, "
        f"{work.pool.num_pooled:,} pooled pairs, {len(work.pool):,} ranked differently"
    )
    yield f"rounds   after {', '.join(f'{end:,}' for end in ends[:6])}{', …' if len(ends) > 6 else ''} verdicts"
    yield f"writes   {work.folder.path}"
