"""Reads the queries and runs of an evaluation, and checks that they belong together and to the corpus."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.base.wording import Parameter, alternatives
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.queries.queries import ALL, Queries
from riptide.indexing.search.run_files import read_run_file, strictly_falling
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.store import Store
from riptide.jobs.common.printing import WARNING, say
from riptide.jobs.evaluation.document_runs import group_by_document
from riptide.jobs.evaluation.evaluate_options import Evaluate
from riptide.jobs.evaluation.measures import metadata_forms, needs_judgements

NAME_LENGTH = 60  # maximum number of characters of run names in the name of a results file
SAMPLE = 1_000  # passages that are looked up in the corpus, for a run without any relevant hit


@dataclass(frozen=True)
class RunReference:
    """A run to measure: the file of a run, or a run of the store.

    Attributes:
        name: Name of the run, or of the file.
        is_file: Whether it is a file.
        title: What results and warnings call the run; empty: its name.
    """

    name: str
    is_file: bool
    title: str = ""

    @property
    def label(self) -> str:
        """The name of the run in results and warnings."""
        return self.title or self.name


@dataclass(frozen=True)
class EvaluationQueries:
    """The queries to measure and their judgements.

    query_set: the query set; ids: the measured queries; judged_ids: all queries that the split judges, more than `ids`
    with a limit; qrels: the judgements of the measured queries. A use without judgements has no qrels, and all queries
    of the split as judged_ids.
    """

    query_set: Queries
    ids: list[str]
    judged_ids: set[str]
    qrels: pa.Table


def read_evaluation_queries(queries: Queries, options: Evaluate, metrics: list[str]) -> EvaluationQueries:
    """Reads the queries of a split, the first --limit of them, and their judgements; see `read_judgements`."""
    qrels = read_judgements(queries, options.split, metrics)
    judged_ids = set(queries.split(ALL).ids if options.split == ALL else qrels["query_id"].to_pylist())
    ids = queries.split(options.split, options.limit).ids
    return EvaluationQueries(
        queries, ids, judged_ids, qrels.filter(pc.is_in(qrels["query_id"], pa.array(ids, pa.string())))
    )


def read_judgements(queries: Queries, split: str, metrics: list[str]) -> pa.Table:
    """Returns the judgements of a split; an empty table for "all", which only metrics from metadata can measure.

    Raises:
        InputError: If the split is missing, or if a metric needs judgements that it lacks.
    """
    if split != ALL:
        return queries.qrels(split)
    if others := [name for name in metrics if needs_judgements(name)]:
        have = ", ".join(queries.splits) or "none"
        raise InputError(
            f"{Parameter('split', ALL)}, {Parameter('metrics', others[0])}: the split {ALL} has no judgements, "
            f"expected {alternatives(metadata_forms())} alone; give such metrics, or a split with judgements ({have})"
        )
    return pa.table({"query_id": pa.array([], pa.string())})


def read_checked_run(
    store: Store, run: RunReference, evaluation_queries: EvaluationQueries, split: str, depth: int
) -> pa.Table:
    """Reads a run as `read_run_table` does. Warns of queries that it lacks or that are not judged.

    If the corpus is split, the hits are documents, as `group_by_document` returns them.

    Args:
        store: The store.
        run: The run.
        evaluation_queries: The queries.
        split: Their split.
        depth: Number of hits per query that the metrics need, for a warning.
    """
    table = read_run_table(store, run.name, evaluation_queries.query_set, split, is_file=run.is_file)
    corpus, num_shallow = Corpus(store.generations("corpus")), 0
    if corpus.is_split:
        table, num_shallow = group_by_document(table, corpus, depth)
    max_hits = depth if run.is_file else store.open("runs", run.name).config["k"]
    if num_shallow:
        say(
            f"warning: {run.label}: it is a run of passages, and has fewer than {depth:,} documents for "
            f"{num_shallow:,} queries; search by document"
        )
    elif max_hits < min(depth, corpus.num_rows):
        say(
            f"warning: {run.label}: it has at most {max_hits:,} hits per query, and the metrics count {depth:,}; "
            f"search with --k {depth}"
        )
    where = f"{evaluation_queries.query_set.artifact.key} {split}"
    noun = "judged queries" if evaluation_queries.qrels.num_rows else "queries"
    warnings = check_queries(
        table,
        run.label,
        evaluation_queries.judged_ids,
        set(evaluation_queries.ids),
        where,
        is_file=run.is_file,
        noun=noun,
    )
    say(*(f"{WARNING}{warning}" for warning in warnings))
    return table


def read_run_table(store: Store, name: str, queries: Queries, split: str, *, is_file: bool = False) -> pa.Table:
    """Reads a run of the store or the file of a run: columns query_id, id, score, and row for a run of the store.

    Args:
        store: The store.
        name: Name of the run, or of the file.
        queries: The query set.
        split: The split of the queries.
        is_file: Whether the run is a file.

    Raises:
        InputError: If the run in the store is over other queries.
    """
    if is_file:
        return read_run_file(name)
    artifact = store.open("runs", store.only_name("runs", name))
    run_queries = artifact.inputs["queries"]
    if run_queries["fingerprint"] != queries.artifact.fingerprint or artifact.config["split"] not in (split, ALL):
        raise InputError(
            f"{artifact.url} is a run of {run_queries['artifact']} {artifact.config['split']}, not of "
            f"{queries.artifact.key} "
            f"{split}: name those with {Parameter('queries')} and {Parameter('split')}, or search these"
        )
    blocks = []
    for block in read_run(artifact):
        # The ranks of the run decide. Metrics would order equal scores in their own way, so scores are made strictly
        # decreasing.
        same = np.concatenate([[False], pc.equal(block["query_id"][1:], block["query_id"][:-1]).to_numpy()])
        blocks.append(
            block.set_column(3, "score", pa.array(strictly_falling(block["score"].to_numpy(), same.astype(np.int8))))
        )
    return pa.concat_tables(blocks)


def check_queries(
    table: pa.Table,
    name: str,
    judged_ids: set[str],
    measured_ids: set[str],
    where: str,
    *,
    is_file: bool,
    noun: str = "judged queries",
) -> list[str]:
    """Checks that a run has the judged queries, and returns warnings about differences.

    Args:
        table: The run.
        name: Its name or file.
        judged_ids: Ids of all queries that the split judges, or has.
        measured_ids: Ids of those that are measured, fewer than `judged_ids` with a limit.
        where: The query set and its split, for messages.
        is_file: Whether the run is a file. A run of the store is known to be of these queries.
        noun: What `judged_ids` are, for messages.

    Returns:
        One-line warnings: one if the run has queries without judgements, another if it lacks measured queries.

    Raises:
        InputError: If no query of a file is judged.
    """
    run_ids = set(table["query_id"].unique().to_pylist())
    judged = "judged in" if noun == "judged queries" else "in"
    warnings = []
    if is_file and not run_ids & judged_ids:
        raise InputError(
            f"{name}: none of its {len(run_ids):,} queries (such as {min(run_ids)!r}) is {judged} {where} "
            f"({len(judged_ids):,} queries, such as {min(judged_ids)!r}): name the queries of this run with "
            f"{Parameter('queries')} and {Parameter('split')}, or give a run of these"
        )
    if is_file and (others := run_ids - judged_ids):
        warnings.append(
            f"{name}: {len(others):,} of its {len(run_ids):,} queries are not {judged} {where}, and do not count"
        )
    if missing := measured_ids - run_ids:
        warnings.append(
            f"{name}: {len(missing):,} of the {len(measured_ids):,} {noun} are missing from the run, and count as 0"
        )
    return warnings


def run_contents(store: Store, runs: Sequence[RunReference]) -> list[list[str]]:
    """Returns the name of each run with the hash of its content."""
    return [
        [run.name, hashlib.sha256(Path(run.name).read_bytes()).hexdigest()]
        if run.is_file
        else [run.name, store.open("runs", store.only_name("runs", run.name)).fingerprint]
        for run in runs
    ]


def joined_names(runs: Sequence[RunReference], others: Sequence[str] = ()) -> str:
    """Returns the names of runs and other artifacts as part of the name of a results file."""
    names = [*(Path(run.name).stem if run.is_file else run.name for run in runs), *others]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(names))[:NAME_LENGTH]


def check_passages(store: Store, table: pa.Table) -> str | None:
    """Returns a warning if none of the first SAMPLE passages of a run is in the corpus; otherwise None."""
    ids = table["id"].slice(0, SAMPLE).to_pylist()
    if not ids or (Corpus.open(store).rows_of_documents(ids)[0] >= 0).any():
        return None
    return (
        f"none of its first {len(ids):,} passages (such as {ids[0]!r}) is in the corpus of "
        f"{store.url}: is it a run over another corpus?"
    )
