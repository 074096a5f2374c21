"""Pools hits of several sources (DPTDR, section 3.3), orders pairs by a seed, and applies limits on scores.

Pure functions on Arrow tables. A pool holds one row for each query and passage that some source found:

    query int32 (the number of the query in its part), query_id, row int64, and for each source S
    `rank:S` int32 (from 1, as found) and `score:S` float32, null if S did not find the passage
    `positive:S` float32: the lowest score of the query's positives in S, -inf if S did not find one of them among its
    first hits (so it ranks below all of them), null if the query has no positive

ordered by query, then by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import xxhash

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.exact import Hits

SCORING, DRAWING = 0, 1  # numbers of independent random streams: the order of scoring, and of drawing from the pool
RERANKER = "reranker"  # stands for the re-ranker where limits are named by their scorer, as sources are
_SHIFT = 44  # number of bits for the row in a pair key
MAX_QUERIES = 1 << (63 - _SHIFT)  # maximum number of queries in a pool


@dataclass(frozen=True)
class ScoreMargins:
    """Limits on the scores of negatives, some relative to the positives; a candidate above any limit is dropped.

    The rules are those of sentence-transformers' mine_hard_negatives. NV-Retriever's 95 % rule (NeMo's `perc` 0.95) is
    a relative margin of 0.05. If a query has several positives, the one with the lowest score counts. With a re-ranker,
    all pairs and the positives are scored.
    """

    GROUP: ClassVar = "limits on the scores of negatives"

    max_score: float | None = None
    """Drop candidates with a score above this. The score is the re-ranker's probability if there is a --reranker,
    otherwise the score of the source. This and the next two options are those of sentence-transformers'
    mine_hard_negatives. The negatives record why each was dropped."""
    relative_margin: float | None = None
    """Drop candidates with a score above p - |p| x MARGIN, where p is the score of the query's positive (the lowest of
    several): 0.05 keeps candidates below 95 % of it (NV-Retriever; NeMo's perc 0.95). Without a --reranker, a candidate
    is compared in every source that found it, and a positive that a source did not find within --depth counts as below
    all of its candidates."""
    absolute_margin: float | None = None
    """Drop candidates with a score above p - MARGIN, where p is the score of the query's positive, as for
    --relative-margin."""

    def __post_init__(self) -> None:
        """Raises InputError for a limit that is not a finite number, or for a negative margin."""
        for name, value in vars(self).items():
            if value is None:
                continue
            if not math.isfinite(value):
                raise InputError(f"{Parameter(name, value)}: expected a finite number")
            if name != "max_score" and value < 0:
                raise InputError(f"{Parameter(name, value)}: expected 0 or more")

    def __bool__(self) -> bool:
        """Returns whether any limit is set."""
        return any(value is not None for value in vars(self).values())

    def exceeded_limits(self, scores: np.ndarray, positives: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name of each limit, and whether each candidate exceeds it.

        Args:
            scores: float32 [n], NaN for candidates without a score: they exceed no limit.
            positives: float32 [n], the score of the positive of each candidate's query; NaN: no positive, so no margin
                applies; -inf: below every candidate.

        Yields:
            The name of a limit, bool [n].
        """
        scores, positives = scores.astype(np.float64), positives.astype(np.float64)
        if self.absolute_margin is not None:
            yield "absolute_margin", scores > positives - self.absolute_margin
        if self.relative_margin is not None:
            magnitudes = np.where(np.isneginf(positives), 0, np.abs(positives))
            yield "relative_margin", scores > positives - magnitudes * self.relative_margin
        if self.max_score is not None:
            yield "max_score", scores > self.max_score


NO_MARGINS = ScoreMargins()


def pool_hits(
    query_ids: Sequence[str],
    hits_by_source: Mapping[str, Hits],
    positives: Sequence[np.ndarray],
    depth: int,
    copies: Sequence[np.ndarray] | None = None,
) -> pa.Table:
    """Joins the first `depth` hits of all sources per query, without the query's positives and their copies.

    Args:
        query_ids: The ids of the queries.
        hits_by_source: The hits of each source.
        positives: Rows of the relevant passages of each query, int64.
        depth: Hits of each source.
        copies: Rows of other passages with the text of a positive, int64; None: there are none.

    Raises:
        InputError: If there are more than MAX_QUERIES queries, whose numbers would not fit beside a row.
    """
    if len(query_ids) > MAX_QUERIES:
        raise InputError(f"{len(query_ids):,} queries in one pool: at most {MAX_QUERIES:,}, cut them into parts")
    pairs_by_source = {}
    for source, hits in hits_by_source.items():
        rows = hits.rows[:, :depth]
        queries, ranks = np.nonzero(rows >= 0)
        pairs_by_source[source] = (pair_keys(queries, rows[queries, ranks]), ranks + 1, hits.scores[queries, ranks])
    relevant = list_keys(positives)
    joined = np.sort(np.concatenate([np.empty(0, np.int64), *(key for key, _, _ in pairs_by_source.values())]))
    # The keys are sorted, so comparing neighbours is much faster than np.unique, which would hash them.
    joined = joined[np.diff(joined, prepend=-1) != 0]
    joined = joined[~np.isin(joined, relevant if copies is None else np.concatenate([relevant, list_keys(copies)]))]
    queries = joined >> _SHIFT
    columns: dict[str, pa.Array] = {
        "query": pa.array(queries.astype(np.int32)),
        "query_id": pa.array(query_ids, pa.string()).take(pa.array(queries)),
        "row": pa.array(joined & ((1 << _SHIFT) - 1)),
    }
    for source, (key, ranks, scores) in pairs_by_source.items():
        places = np.searchsorted(joined, key)
        inside = (
            (places < len(joined)) & (joined[np.minimum(places, len(joined) - 1)] == key)
            if len(joined)
            else (np.zeros(len(key), bool))
        )
        missing = np.ones(len(joined), bool)
        missing[places[inside]] = False
        rank, score = np.zeros(len(joined), np.int32), np.zeros(len(joined), np.float32)
        rank[places[inside]], score[places[inside]] = ranks[inside], scores[inside]
        columns[f"rank:{source}"] = pa.array(rank, mask=missing)
        columns[f"score:{source}"] = pa.array(score, mask=missing)
        lowest = _lowest_positive_scores(relevant, key, scores, len(query_ids))[queries]
        columns[f"positive:{source}"] = pa.array(lowest, mask=np.isnan(lowest))
    return pa.table(columns)


def _lowest_positive_scores(relevant: np.ndarray, key: np.ndarray, scores: np.ndarray, num_queries: int) -> np.ndarray:
    """Returns the lowest score of the positives among each query's hits: float32 [queries]; see `positive:S`."""
    order = np.argsort(key)
    key, scores = key[order], scores[order]
    places = np.minimum(np.searchsorted(key, relevant), max(0, len(key) - 1))
    known = key[places] == relevant if len(key) else np.zeros(len(relevant), bool)
    score = np.full(len(relevant), -np.inf, np.float32)
    score[known] = scores[places[known]]
    lowest = np.full(num_queries, np.nan, np.float32)
    np.fmin.at(lowest, relevant >> _SHIFT, score)
    return lowest


def sources_of(table: pa.Table) -> list[str]:
    """Returns the sources of a pool, in the order of its columns."""
    return [name.removeprefix("rank:") for name in table.column_names if name.startswith("rank:")]


def without_answers(table: pa.Table, contains: Callable[[int, np.ndarray], np.ndarray]) -> pa.Table:
    """Removes the passages for which `contains` is true from the pool.

    Args:
        table: The pool.
        contains: Called once per query with its number and rows int64 [n]; returns bool [n].
    """
    rows = table["row"].to_numpy()
    dropped = np.zeros(len(table), bool)
    for query, start, end in query_ranges(table):
        dropped[start:end] = contains(query, rows[start:end])
    return table.filter(pa.array(~dropped))


def seeded_order(seed: int, query_ids: Sequence[str] | pa.Array, rows: np.ndarray, stream: int) -> np.ndarray:
    """Returns pseudo-random sort keys uint64 [n] that depend on (seed, stream, query id, row) alone, for shuffling.

    So the order of a query depends on no other query, no part and no machine. The numbers are splitmix64 over xxh3 of
    the id.
    """
    ids = pa.array(query_ids, pa.string()).dictionary_encode()  # so that each distinct id is hashed once
    hashes = [xxhash.xxh3_64_intdigest(f"{stream} {id}".encode(), seed) for id in ids.dictionary.to_pylist()]
    state = np.array(hashes, np.uint64)[ids.indices.to_numpy()]
    with np.errstate(over="ignore"):
        state = state + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def find_exceeding(
    table: pa.Table, reranker_scores: np.ndarray | None, positives: np.ndarray | None, margins: ScoreMargins
) -> tuple[list[str], np.ndarray]:
    """Finds the candidates that exceed a limit, and the first limit that each of them exceeds.

    With re-ranker scores, these count. Otherwise the scores of each source count against the positive's score in the
    same source, and a candidate that exceeds a limit in one source is dropped.

    Args:
        table: The pool.
        reranker_scores: Scores of the re-ranker, float32 [pairs], NaN for none; None without a re-ranker.
        positives: The re-ranker's lowest score of each query's positives, float32 [queries], NaN for none.
        margins: The limits.

    Returns:
        Reasons "LIMIT:SCORER", and for each pair the number of its first reason, int64 [pairs]; -1: none.
    """
    names: list[str] = []
    first = np.full(len(table), -1, np.int64)
    if not margins:
        return names, first
    if reranker_scores is None:
        scorers = {
            source: (_column_as_floats(table, "score", source), _column_as_floats(table, "positive", source))
            for source in sources_of(table)
        }
    else:
        assert positives is not None, "margins on re-ranker scores need the scores of the positives"
        scorers = {RERANKER: (reranker_scores, positives[table["query"].to_numpy()])}
    for scorer, (scores, lowest) in scorers.items():
        for limit, exceeds in margins.exceeded_limits(scores, lowest):
            first[(first < 0) & exceeds] = len(names)
            names.append(f"{limit}:{scorer}")
    return names, first


def _column_as_floats(table: pa.Table, kind: str, source: str) -> np.ndarray:
    """Converts a column of the pool, `kind:source`, to float32 [pairs], with NaN for null."""
    return table[f"{kind}:{source}"].combine_chunks().to_numpy(zero_copy_only=False).astype(np.float32)


def pair_keys(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns a sortable key for each pair of a query and a row, int64 [n]: by query, then by row."""
    return (queries.astype(np.int64) << _SHIFT) | rows


def list_keys(lists: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the concatenated `pair_keys` of the lists, where list i has rows of query i: int64 [any]."""
    queries = np.repeat(np.arange(len(lists)), [len(rows) for rows in lists])
    return pair_keys(queries, np.concatenate([*lists, np.empty(0, np.int64)]))


def query_ranges(table: pa.Table) -> list[tuple[int, int, int]]:
    """Returns (number of the query, first position, end) for each query that has candidates."""
    queries = table["query"].to_numpy()
    starts = np.flatnonzero(np.diff(queries, prepend=-1)) if len(queries) else np.empty(0, np.int64)
    ends = np.append(starts, len(queries))[1:]
    return [(int(queries[a]), int(a), int(b)) for a, b in zip(starts, ends, strict=True)]
