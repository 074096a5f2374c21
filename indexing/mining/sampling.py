"""Samples the negatives of each query from a pool: some after denoising, others from the whole pool.

Pure functions on Arrow tables; the columns of a pool are those of `riptide.indexing.mining.pools`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.mining.pools import (
    DRAWING,
    NO_MARGINS,
    SCORING,
    ScoreMargins,
    find_exceeding,
    query_ranges,
    seeded_order,
    sources_of,
)


@dataclass(frozen=True)
class NegativeOptions:
    """How many negatives are sampled for each query (DPTDR, section 4.1)."""

    GROUP: ClassVar = "negatives"

    pool_negatives: int = 30
    """Negatives per query that are sampled from the whole pool, denoised or not."""
    denoised_negatives: int = 30
    """Negatives per query that are sampled from the passages which the re-ranker considers irrelevant; 0 without a
    re-ranker. A passage that is sampled in both ways is one negative, a denoised one."""
    denoise_threshold: float = 0.1
    """Probability of relevance below which the re-ranker considers a passage irrelevant."""
    score_all: bool = False
    """Score every pair, not only as many as are needed."""
    seed: int = 0
    """Seed of the sampling."""
    margins: ScoreMargins = NO_MARGINS
    teacher_scores: bool = False
    """Score all sampled negatives and the positives with the --reranker, and store the scores with the negatives, as
    `riptide train-retriever --loss kl` and --loss margin-mse need them."""

    @property
    def needs_positives(self) -> bool:
        """Whether the re-ranker must also score the positives."""
        return bool(self.margins) or self.teacher_scores

    @property
    def scoring_settings(self) -> dict[str, Any]:
        """Returns the settings that determine the pairs that a re-ranker scores."""
        return {
            "denoised_negatives": self.denoised_negatives,
            "denoise_threshold": self.denoise_threshold,
            "score_all": self.score_all or bool(self.margins),
            "seed": self.seed,
            **({"positives": True} if self.needs_positives else {}),
            **({"pool_negatives": self.pool_negatives} if self.teacher_scores else {}),
        }

    def __post_init__(self) -> None:
        for name in ("pool_negatives", "denoised_negatives", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{Parameter(name, getattr(self, name))}: expected 0 or more")
        if not 0 < self.denoise_threshold <= 1:
            raise InputError(
                f"{Parameter('denoise_threshold', self.denoise_threshold)}: expected a probability above 0"
            )


def check_scales(options: NegativeOptions, num_sources: int) -> None:
    """Raises InputError if one limit applies to scores of several sources, whose scales differ."""
    limits = {"max_score": options.margins.max_score, "absolute_margin": options.margins.absolute_margin}
    for name, value in limits.items():
        if value is not None and num_sources > 1:
            raise InputError(
                f"{Parameter(name, value)}: the scores of {num_sources} sources have different scales, expected one "
                f"source or a re-ranker; give one of these, or {Parameter('relative_margin')} instead"
            )


def pairs_to_score(table: pa.Table, known_scores: np.ndarray, options: NegativeOptions) -> np.ndarray:
    """Returns the positions of the pairs that a re-ranker scores next: int64, empty when no needed score is missing.

    The pairs of each query are scored in its seeded order, as many at a time as are certain to be needed, until enough
    of them are below the threshold or all are scored. So the result of `sample_negatives` is the same regardless of
    earlier scores, also those for another seed or threshold. If the options need scores of the negatives from the whole
    pool (`teacher_scores`), the pairs that `sample_negatives` draws first are scored too.

    Args:
        table: The pool.
        known_scores: float32 [pairs], NaN for pairs without a score.
        options: The options of the negatives.
    """
    is_unknown = np.isnan(known_scores)
    if options.scoring_settings["score_all"]:
        return np.flatnonzero(is_unknown)
    may_be_negative = is_unknown | (known_scores < options.denoise_threshold)
    ids, rows = table["query_id"].combine_chunks(), table["row"].to_numpy()
    scoring, drawing = (seeded_order(options.seed, ids, rows, stream) for stream in (SCORING, DRAWING))
    is_needed = np.zeros(len(table), bool)
    for _, start, end in query_ranges(table):
        order = start + np.argsort(scoring[start:end], kind="stable")
        # The first `denoised_negatives` pairs that may be negative need a score in any case.
        is_needed[order[np.cumsum(may_be_negative[order]) <= options.denoised_negatives]] = True
        if options.teacher_scores:
            is_needed[start + np.argsort(drawing[start:end], kind="stable")[: options.pool_negatives]] = True
    return np.flatnonzero(is_needed & is_unknown)


class SampledNegatives(NamedTuple):
    """The sampled negatives of each query as positions in the pool, denoised ones first.

    positions: int64 [any]; is_denoised, is_from_pool: bool, for each of them; dropped: positions of the candidates that
    exceed a limit.
    """

    positions: list[np.ndarray]
    is_denoised: list[np.ndarray]
    is_from_pool: list[np.ndarray]
    dropped: list[np.ndarray]


def sample_negatives(
    table: pa.Table,
    reranker_scores: np.ndarray | None,
    options: NegativeOptions,
    *,
    query_ids: Sequence[str],
    positives: Sequence[np.ndarray],
    copies: Sequence[np.ndarray] | None = None,
    reranked_positives: np.ndarray | None = None,
    teacher_positives: Sequence[np.ndarray] | None = None,
) -> pa.Table:
    """Samples the negatives of each query and returns them as a table.

    Candidates that exceed a limit of the options are dropped first. The denoised negatives are the first of the
    remaining candidates below the threshold, in the order in which they were scored. The un-denoised negatives are the
    first of all remaining candidates, denoised or not, in another seeded order. A passage that is drawn in both groups
    is one negative: it stands among the denoised ones, and is_from_pool is true as well. So a query may have fewer
    negatives than the sum of both numbers.

    Args:
        table: The pool of the queries.
        reranker_scores: Scores of the re-ranker, float32 [pairs], NaN for none; None without a re-ranker.
        options: The options of the negatives.
        query_ids: The ids of the queries.
        positives: Rows of the relevant passages of each query.
        copies: Rows of other passages with the text of a positive, per query; None: there are none.
        reranked_positives: The re-ranker's lowest score of each query's positives, float32 [queries], NaN for none;
            needed for margins on re-ranker scores.
        teacher_positives: The re-ranker's scores of each query's positives, float32 [any], as training by distillation
            needs them; None: they are not stored.

    Returns:
        One row per query, with empty lists if it has no candidate: query_id, positives list<int64>, with
        `teacher_positives` also positive_probability list<float32> (null: never scored), copies list<int64>, negatives
        list<int64> (denoised ones first), is_denoised list<bool>, is_from_pool list<bool>, probability
        list<float32> (null: never scored), for each source S `rank:S` list<int32> (null: not found), and the candidates
        that exceed a limit: dropped list<int64>, dropped_by list<string> ("LIMIT:SCORER").
    """
    rows = table["row"].to_numpy()
    scored = np.full(len(table), np.nan, np.float32) if reranker_scores is None else reranker_scores
    reasons, reason = find_exceeding(table, reranker_scores, reranked_positives, options.margins)
    samples = _draw_negatives(table, scored, reason >= 0, len(query_ids), options)
    none = np.empty(0, np.int64)
    positions, no_flags = samples.positions, np.empty(0, bool)
    every, left_out = np.concatenate([*positions, none]), np.concatenate([*samples.dropped, none])
    probability = scored[every]
    drop_reasons = pa.array(reasons, pa.string()).take(pa.array(reason[left_out]))
    columns = {"query_id": pa.array(query_ids, pa.string()), "positives": _row_lists(positives)}
    if teacher_positives is not None:
        values = np.concatenate([*teacher_positives, np.empty(0, np.float32)])
        columns["positive_probability"] = _as_lists(pa.array(values, pa.float32(), mask=np.isnan(values)), positives)
    columns |= {
        "copies": _row_lists([none] * len(query_ids) if copies is None else copies),
        "negatives": _as_lists(pa.array(rows[every]), positions),
        "is_denoised": _as_lists(pa.array(np.concatenate([*samples.is_denoised, no_flags])), positions),
        "is_from_pool": _as_lists(pa.array(np.concatenate([*samples.is_from_pool, no_flags])), positions),
        "probability": _as_lists(pa.array(probability, mask=np.isnan(probability)), positions),
    }
    for source in sources_of(table):
        ranks = table[f"rank:{source}"].combine_chunks().take(pa.array(every))
        columns[f"rank:{source}"] = _as_lists(ranks, positions)
    columns |= {
        "dropped": _as_lists(pa.array(rows[left_out]), samples.dropped),
        "dropped_by": _as_lists(drop_reasons, samples.dropped),
    }
    return pa.table(columns)


def _draw_negatives(
    table: pa.Table, scored: np.ndarray, is_dropped: np.ndarray, num_queries: int, options: NegativeOptions
) -> SampledNegatives:
    """Draws the negatives of `sample_negatives` from the candidates that are not dropped."""
    ids, rows = table["query_id"].combine_chunks(), table["row"].to_numpy()
    scoring, drawing = (seeded_order(options.seed, ids, rows, stream) for stream in (SCORING, DRAWING))
    positions, flags = np.empty(0, np.int64), np.empty(0, bool)  # the values of a query without candidates
    samples = SampledNegatives(
        [positions] * num_queries, [flags] * num_queries, [flags] * num_queries, [positions] * num_queries
    )
    for query, start, end in query_ranges(table):
        remaining = start + np.flatnonzero(~is_dropped[start:end])
        order = remaining[np.argsort(scoring[remaining], kind="stable")]
        low = order[scored[order] < options.denoise_threshold][: options.denoised_negatives]
        from_pool = remaining[np.argsort(drawing[remaining], kind="stable")][: options.pool_negatives]
        rest = from_pool[~np.isin(from_pool, low)]
        samples.positions[query] = np.concatenate([low, rest])
        samples.is_denoised[query] = np.arange(len(low) + len(rest)) < len(low)
        samples.is_from_pool[query] = np.concatenate([np.isin(low, from_pool), np.ones(len(rest), bool)])
        samples.dropped[query] = start + np.flatnonzero(is_dropped[start:end])
    return samples


def queries_with_too_few(table: pa.Table, pool_negatives: int, denoised_negatives: int) -> list[str]:
    """Returns the ids of the queries with fewer denoised negatives, or fewer from the pool, than requested."""
    ids = table["query_id"].to_pylist()
    pooled, denoised = _count_true(table, "is_from_pool"), _count_true(table, "is_denoised")
    few = (pooled < pool_negatives) | (denoised < denoised_negatives)
    return [ids[number] for number in np.flatnonzero(few)]


def _count_true(table: pa.Table, name: str) -> np.ndarray:
    """Returns the number of true values in each list of a column of lists."""
    lists = table[name].combine_chunks()
    totals = np.concatenate([[0], np.cumsum(lists.values.to_numpy(zero_copy_only=False), dtype=np.int64)])
    return np.diff(totals[lists.offsets.to_numpy()])


def _row_lists(lists: Sequence[np.ndarray]) -> pa.Array:
    """Converts lists of rows to an Arrow array of lists."""
    return _as_lists(pa.array(np.concatenate([*lists, np.empty(0, np.int64)])), lists)


def _as_lists(values: pa.Array, lists: Sequence[np.ndarray]) -> pa.Array:
    """Splits values into an Arrow array of lists that have the lengths of `lists`."""
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)
