"""Compares the order of hits by a trained re-ranker with their order in a search source.

A pool of candidates leaves out the positives of a query, but keeps the ranks of the other hits. A rank that is missing
is therefore that of a positive, which restores the list as the source found it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from riptide.base.errors import InputError
from riptide.indexing.measures.metrics import metrics_per_query
from riptide.indexing.mining.negatives import read_groups
from riptide.indexing.mining.pools import sources_of
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.keys import Key
from riptide.indexing.store.store import Store

DEPTH = 20  # number of first hits of a list that the re-ranker orders
MAX_LISTS = 100  # maximum number of lists that are compared
MAX_PARTS = 8  # maximum number of parts of the candidates that are read
MIN_LISTS = 25  # minimum number of lists, even after a short training run
PAIRS_PER_SCORE = 5  # number of trained pairs per scored pair
METRICS = ("RR@10", "nDCG@10")

Score = Callable[[Sequence[str], Sequence[str], Sequence[str]], np.ndarray]


@dataclass(frozen=True)
class RankedLists:
    """The first hits of training queries in the order of a search source.

    Attributes:
        source: The source.
        queries: The texts of the queries.
        rows: For each query, the rows of its hits in the order of ranks, int64 [hits].
        relevant: For each query, whether each hit is a positive, bool [hits].
    """

    source: str
    queries: list[str]
    rows: list[np.ndarray]
    relevant: list[np.ndarray]


def count_lists(trained_pairs: int) -> int:
    """Returns the number of lists to score after training on a given number of pairs."""
    return max(MIN_LISTS, min(MAX_LISTS, trained_pairs // PAIRS_PER_SCORE // DEPTH))


def read_lists(
    store: Store, negatives: Artifact, queries: Queries, split: str, limit: int | None, count: int
) -> RankedLists | None:
    """Restores a source's lists of hits for the first training queries; None if no list can be restored.

    Args:
        store: The store of the negatives.
        negatives: negatives/NAME, whose candidates are read.
        queries: The query set.
        split: The training split.
        limit: Only the first queries of the split.
        count: Number of lists.

    Returns:
        The lists of the source with the best order. None if no list can be restored: the candidates were removed, they
        lack passages with an answer, or no list has all positives of its query.
    """
    entry = negatives.inputs.get("candidates")
    if entry is None:
        return None
    try:
        candidates = store.open(*Key.parse(entry["artifact"]))
    except InputError:
        return None
    if candidates.fingerprint != entry["fingerprint"] or candidates.config.get("drop_answers"):
        return None
    texts = dict(zip(*queries.split(split, limit), strict=True))
    groups = read_groups(negatives)
    # Queries with copies are left out, as a missing rank may belong to a copy, or to another passage of the same
    # document.
    positives = {id: rows for id, rows, _, copies in zip(*groups, strict=True) if not len(copies)}
    by_source: dict[str, RankedLists] = {}
    for part in candidates.numbered_parts("part")[:MAX_PARTS]:
        table = pq.read_table(candidates.local_path(part))
        for source in sources_of(table):
            lists = by_source.setdefault(source, RankedLists(source, [], [], []))
            _add_lists(lists, table, texts, positives)
        if any(len(lists.queries) >= count for lists in by_source.values()):
            break
    best = max(by_source.values(), key=lambda lists: sum(_reciprocal_ranks(lists)), default=None)
    if best is None or not best.queries:
        return None
    return RankedLists(best.source, best.queries[:count], best.rows[:count], best.relevant[:count])


def _add_lists(lists: RankedLists, table: pa.Table, texts: dict[str, str], positives: dict[str, np.ndarray]) -> None:
    """Adds the lists of those queries of a part whose positives are all among the first DEPTH hits of the source."""
    hits = table.filter(table[f"rank:{lists.source}"].is_valid())
    ids = np.asarray(hits["query_id"].to_pylist(), object)
    ranks, rows = hits[f"rank:{lists.source}"].to_numpy(), hits["row"].to_numpy()
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])) if len(ids) else np.empty(0, np.int64)
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        query, span = ids[start], slice(start, end)
        length = min(DEPTH, int(ranks[span].max()))
        order = np.full(length, -1, np.int64)
        first = ranks[span] <= length
        order[ranks[span][first] - 1] = rows[span][first]
        gaps = order < 0
        answers = positives.get(query, np.empty(0, np.int64))
        if query in texts and gaps.any() and gaps.sum() == len(answers):
            order[gaps] = answers  # missing ranks are positives, whose order does not matter
            lists.queries.append(texts[query])
            lists.rows.append(order)
            lists.relevant.append(gaps)


def _reciprocal_ranks(lists: RankedLists) -> list[float]:
    """Returns the reciprocal rank of the first positive in each list."""
    return [1 / (1 + int(np.argmax(relevant))) for relevant in lists.relevant]


def compare_orders(
    lists: RankedLists, passages: Callable[[np.ndarray], tuple[list[str], list[str]]], score: Score
) -> dict[str, Any]:
    """Measures the lists in the order of the source and in the order of a model's scores.

    Args:
        lists: The lists.
        passages: From rows int64 [n] to n titles and n texts.
        score: From n queries, titles and texts to scores [n], higher is better.

    Returns:
        JSON-able: "source", "lists" (their number), "depth", and "before" and "after": means of METRICS by name.
    """
    widths = [len(rows) for rows in lists.rows]
    queries = [query for query, width in zip(lists.queries, widths, strict=True) for _ in range(width)]
    scores = np.nan_to_num(score(queries, *passages(np.concatenate(lists.rows))), nan=-np.inf)
    before = [np.arange(width, 0.0, -1.0) for width in widths]
    # Equal scores keep the order of the source, as in re-ranking.
    after = [-np.argsort(np.argsort(-each, kind="stable")) for each in np.split(scores, np.cumsum(widths)[:-1])]
    return {
        "source": lists.source,
        "lists": len(widths),
        "depth": max(widths),
        "before": _mean_metrics(lists, before),
        "after": _mean_metrics(lists, [each.astype(float) for each in after]),
    }


def _mean_metrics(lists: RankedLists, scores: Sequence[np.ndarray]) -> dict[str, float]:
    """Returns the mean of each of METRICS over the lists, with hits ranked by these scores."""
    query_ids = np.repeat(np.arange(len(lists.rows)), [len(rows) for rows in lists.rows]).astype(str)
    table = pa.table(
        {"query_id": query_ids, "id": np.concatenate(lists.rows).astype(str), "score": np.concatenate(scores)}
    )
    relevant = table.filter(pa.array(np.concatenate(lists.relevant)))
    qrels = relevant.rename_columns(["query_id", "corpus_id", "score"])
    qrels = qrels.set_column(2, "score", pa.array(np.ones(len(qrels), np.int32)))
    return {name: float(values.mean()) for name, values in metrics_per_query(qrels, table, METRICS).items()}
