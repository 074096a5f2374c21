"""Reads the hits and judgements of one query of a run from the artifacts that the run pins."""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from riptide.base.errors import InputError
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.measures.metrics import metrics_per_query
from riptide.indexing.queries.queries import ALL, Queries
from riptide.indexing.search.hit_tables import ShownHit
from riptide.indexing.search.run_files import strictly_falling
from riptide.indexing.search.runs import read_run
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.keys import Key
from riptide.indexing.store.store import Store

METRICS = ("nDCG@10", "RR@10")
_LISTED = 3  # number of query ids that the error for an unknown id lists


@dataclass(frozen=True)
class RunQuery:
    """The hits and judgements of one query of a run.

    Attributes:
        text: The query's text; None if the query set of the run no longer exists.
        hits: All hits, in the order of the run.
        missed: Relevant passages (relevance above 0) that the run lacks, the most relevant first.
        num_missed_irrelevant: Number of passages with relevance 0 or less that the run lacks.
        metrics: Metric -> value for this query; empty if the query is not judged.
        remarks: Sentences about data that could not be read, or has changed since the run.
    """

    text: str | None
    hits: list[ShownHit]
    missed: list[ShownHit]
    num_missed_irrelevant: int
    metrics: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def read_run_query(store: Store, run: Artifact, query_id: str) -> RunQuery:
    """Reads the hits and the judgements of one query of a run.

    Passages come from the corpus generations that the run pins: rows of a later or another corpus are never read
    instead. If the pinned artifacts no longer exist, ids and scores remain, and a remark says why there is no text.
    For a run of all queries, the judgements of all splits are used.

    Raises:
        InputError: If the run does not have the query.
    """
    remarks: list[str] = []
    queries, corpus = pinned_queries(store, run, remarks), pinned_corpus(store, run, remarks)
    table = hits_of(run, query_id)
    texts: dict[str, str] = {}
    if queries is not None:
        split = queries.split(run.config["split"], run.config["limit"])
        texts = dict(zip(split.ids, split.texts, strict=True))
    if query_id not in texts and not len(table):
        raise InputError(_unknown_query_message(run, query_id, list(texts)))
    qrels = judgements_of(queries, run.config["split"], query_id) if queries else None
    relevance = {} if qrels is None else dict(zip(*(qrels[c].to_pylist() for c in ("corpus_id", "score")), strict=True))

    ids, rows, scores = (table[column].to_pylist() for column in ("id", "row", "score"))
    passages = read_passages(corpus, ids, rows, remarks)
    if corpus is not None and corpus.is_split:  # judgements of a split corpus name documents
        ids = corpus.documents(np.array(rows, np.int64)).tolist()
        table = table.set_column(1, "id", pa.array(ids, pa.string()))
    if corpus is not None and (deleted := num_deleted_since(store, corpus, rows)):
        remarks.append(f"{deleted:,} of these hits have been deleted from the corpus since the run")
    hits = [
        ShownHit(rank, score, id, *passages[number], relevance.get(id))
        for rank, (number, id, score) in enumerate(zip(range(len(ids)), ids, scores, strict=True), 1)
    ]
    hit_ids = set(ids)
    missing = sorted((id for id in relevance if id not in hit_ids), key=lambda id: (-relevance[id], id))
    relevant = [id for id in missing if relevance[id] > 0]
    texts_of_missing = read_passages(corpus, relevant, None, [])
    missed = [
        ShownHit(None, None, id, *passage, relevance[id])
        for id, passage in zip(relevant, texts_of_missing, strict=True)
    ]
    metrics = {} if qrels is None or not len(qrels) else measure_hits(qrels, table)
    return RunQuery(texts.get(query_id), hits, missed, len(missing) - len(relevant), metrics, remarks)


def pinned_queries(store: Store, run: Artifact, remarks: list[str]) -> Queries | None:
    """Opens the query set of a run; returns None and adds a remark if the store no longer has it."""
    entry = run.inputs["queries"]
    kind, name = Key.parse(entry["artifact"])
    artifact = store.open(kind, name) if name in store.names(kind) else None
    if artifact is not None and artifact.fingerprint == entry["fingerprint"]:
        return Queries(artifact)
    state = "is another one now" if artifact else "is no longer in the store"
    remarks.append(f"{entry['artifact']} {state}: the query's text and its judgements are unknown")
    return None


def pinned_corpus(store: Store, run: Artifact, remarks: list[str]) -> Corpus | None:
    """Opens the corpus up to the generation that a run pins; None, with a remark, if the store no longer has it."""
    entry = run.inputs["corpus"]
    generations = store.generations("corpus")
    for number, artifact in enumerate(generations):
        if artifact.key == entry["artifact"]:
            chain = generations[: number + 1]
            if artifact.fingerprint == entry["fingerprint"] and _is_chain(chain):
                return Corpus(chain)
    state = "has changed since the run" if generations else "is no longer in the store"
    remarks.append(f"the corpus {state} ({entry['artifact']} was {entry['fingerprint'][:12]}): hits have ids only")
    return None


def _is_chain(generations: list[Artifact]) -> bool:
    """Returns whether each generation was made from the previous one."""
    pairs = itertools.pairwise(generations)
    return all(later.inputs["previous"]["fingerprint"] == earlier.fingerprint for earlier, later in pairs)


def num_deleted_since(store: Store, corpus: Corpus, rows: list[int]) -> int:
    """Returns how many of `rows` of a pinned corpus are deleted by later generations of the store's corpus."""
    latest = Corpus(store.generations("corpus"))
    return int(np.isin(rows, np.setdiff1d(latest.deleted, corpus.deleted)).sum())


def hits_of(run: Artifact, query_id: str) -> pa.Table:
    """Reads the hits of one query, best first: query_id, id, row, score. All hits of a query are in one block."""
    for block in read_run(run):
        hits = block.filter(pc.equal(block["query_id"], query_id))
        if len(hits):
            return hits
    return block.slice(0, 0) if run.parts else pa.table({"query_id": [], "id": [], "row": [], "score": []})


def judgements_of(queries: Queries, split: str, query_id: str) -> pa.Table:
    """Returns the judgements of one query, query_id, corpus_id, score; for the split `all`, from every split."""
    tables = [queries.qrels(name) for name in (queries.splits if split == ALL else [split])]
    selected = [table.filter(pc.equal(table["query_id"], query_id)) for table in tables]
    return pa.concat_tables(selected) if selected else pa.table({"query_id": [], "corpus_id": [], "score": []})


def read_passages(
    corpus: Corpus | None, ids: list[str], rows: list[int] | None, remarks: list[str]
) -> list[tuple[str | None, str | None]]:
    """Reads (title, text) of each passage, (None, None) if it cannot be read; adds a remark if the corpus lacks some.

    rows: None to look up the ids; in a split corpus these are ids of documents, whose first passages are read.
    """
    passages: list[tuple[str | None, str | None]] = [(None, None)] * len(ids)
    if corpus is None or not ids:
        return passages
    wanted = corpus.rows_of_documents(ids)[0] if rows is None else np.asarray(rows, np.int64)
    places = np.flatnonzero((wanted >= 0) & (wanted < corpus.num_rows))
    for place, passage in zip(places.tolist(), corpus.passages(wanted[places]), strict=True):
        if rows is None or passage.id == ids[place]:
            passages[place] = (passage.title, passage.text)
    if unread := [id for id, (_, text) in zip(ids, passages, strict=True) if text is None]:
        remarks.append(f"{len(unread)} hits are not at their rows of the corpus ({unread[0]} is the first)")
    return passages


def measure_hits(qrels: pa.Table, hits: pa.Table) -> dict[str, float]:
    """Computes METRICS for one judged query. Equal scores are made strictly decreasing, to keep the run's ranks."""
    scores = strictly_falling(hits["score"].to_numpy(), np.arange(len(hits)))
    run = pa.table({"query_id": hits["query_id"], "id": hits["id"], "score": pa.array(scores, pa.float32())})
    firsts = np.unique(hits["id"].to_numpy(), return_index=True)[1]  # a document has the rank of its best passage
    run = run.take(pa.array(np.sort(firsts)))
    return {name: float(values[0]) for name, values in metrics_per_query(qrels, run, METRICS).items()}


def _unknown_query_message(run: Artifact, query_id: str, ids: list[str]) -> str:
    """Returns the error message for a query that the run does not have."""
    if not ids:
        ids = list(dict.fromkeys(id for block in read_run(run) for id in block["query_id"].unique().to_pylist()))
    near = difflib.get_close_matches(query_id, ids, _LISTED) if len(ids) < 100_000 else []
    listed = list(dict.fromkeys([*near, *ids]))[:_LISTED]
    more = f" and {len(ids) - len(listed):,} more" if len(ids) > len(listed) else ""
    return f"{run.url}: no query {query_id!r}; it has {', '.join(listed) or 'no queries'}{more}"
