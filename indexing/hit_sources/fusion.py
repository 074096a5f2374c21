"""Fusion of several sources: `A+B` by reciprocal rank, `w*A+v*B` by the weighted sum of normalised scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.exact import Hits, pad_hits
from riptide.indexing.hit_sources.grammar import fusion_text
from riptide.indexing.hit_sources.source_kind import HitSource
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.work.worker_tasks import Runner

Normalization = Literal["minmax", "zscore", "none"]
SourceParts = tuple[np.ndarray, np.ndarray]  # the rows of a source, int64 [q, n], and their contributions, float64
CONSTANT = 60.0  # Cormack, Clarke and Buettcher (2009)
FUSION_DEPTH = 1_000  # a fusion reads at least this many hits per source, as in a usual run


def reciprocal_rank(
    hits: Sequence[Hits], k: int, *, constant: float = CONSTANT, weights: Sequence[float] | None = None
) -> Hits:
    """Returns the top k passages by the sum over sources of weight / (constant + rank) (Cormack et al. 2009).

    Ranks count from 1. Sums are in float64, and equal sums are ordered by row.

    Args:
        hits: The hits of each source for the same q queries, each [q, any].
        k: Number of hits per query.
        constant: The constant of the formula.
        weights: A weight per source; None: all are 1.

    Returns:
        Scores float32 [q, k], falling, and rows int64 [q, k]; -1 where fewer than k passages have hits.

    Raises:
        InputError: If the weights are not as many finite numbers of 0 or more as there are sources, or all are 0.
    """
    return _top_sums(_rank_parts(hits, _check_weights(hits, weights), constant), k)


def _rank_parts(hits: Sequence[Hits], weights: Sequence[float], constant: float = CONSTANT) -> list[SourceParts]:
    """Returns the rows of each source and weight / (constant + rank) for each of them."""
    parts = []
    for source_hits, weight in zip(hits, weights, strict=True):
        ranks = np.arange(1, source_hits.rows.shape[1] + 1, dtype=np.float64)
        parts.append((source_hits.rows, np.broadcast_to(weight / (constant + ranks), source_hits.rows.shape)))
    return parts


def weighted(
    hits: Sequence[Hits],
    k: int,
    weights: Sequence[float],
    *,
    normalize: Normalization = "minmax",
) -> Hits:
    """Returns the top k passages by the weighted sum of scores, which are normalised per query and source.

    A passage that a source did not find gets the source's smallest score of the query, which is 0 with "minmax"; a
    source without hits adds 0. Sums are in float64 and leave out the smallest scores until passages are ordered, so a
    large score that all passages have does not hide small differences; equal sums are ordered by row.

    Args:
        hits: The hits of each source for the same q queries, each [q, any].
        k: Number of hits per query.
        weights: A weight per source.
        normalize: "minmax": (s - min) / (max - min), 1 if all scores are equal; "zscore": (s - mean) / deviation, 0 if
            all scores are equal; "none": the scores as they are.

    Returns:
        As `reciprocal_rank`.

    Raises:
        InputError: As `reciprocal_rank`.
    """
    parts, floors = _score_parts(hits, _check_weights(hits, weights), normalize)
    return _top_sums(parts, k, floors)


def _score_parts(
    hits: Sequence[Hits], weights: Sequence[float], normalize: Normalization
) -> tuple[list[SourceParts], np.ndarray]:
    """Returns the rows of each source and their weighted scores above its smallest one; and the sums of these."""
    parts, floors = [], np.zeros(len(hits[0].rows) if hits else 0)
    for source_hits, weight in zip(hits, weights, strict=True):
        is_hit = source_hits.rows >= 0
        scores = np.where(is_hit, source_hits.scores.astype(np.float64), np.nan)
        counts = np.maximum(is_hit.sum(axis=1, keepdims=True), 1)
        low = np.where(is_hit, scores, np.inf).min(axis=1, keepdims=True, initial=np.inf)
        if normalize == "minmax":
            high = np.where(is_hit, scores, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
            with np.errstate(invalid="ignore"):
                scores = np.where(high > low, (scores - low) / np.where(high > low, high - low, 1), 1.0)
        elif normalize == "zscore":
            mean = np.where(is_hit, scores, 0).sum(axis=1, keepdims=True) / counts
            spread = np.sqrt(np.where(is_hit, (scores - mean) ** 2, 0).sum(axis=1, keepdims=True) / counts)
            scores = np.where(spread > 0, (scores - mean) / np.where(spread > 0, spread, 1), 0.0)
        floor = np.where(is_hit, scores, np.inf).min(axis=1, initial=np.inf)
        floor = np.where(np.isfinite(floor), floor, 0.0) if normalize != "minmax" else np.zeros(len(floor))
        parts.append((source_hits.rows, np.where(is_hit, weight * (scores - floor[:, None]), 0.0)))
        floors = floors + weight * floor  # the lowest possible sum of a passage, per query
    return parts, floors


def _check_weights(hits: Sequence[Hits], weights: Sequence[float] | None) -> Sequence[float]:
    """Returns a weight per source. Raises InputError unless each source has a finite one of at least 0, not all 0."""
    values = [1.0] * len(hits) if weights is None else list(weights)
    if not hits or len(values) != len(hits) or not all(0 <= w < float("inf") for w in values) or not any(values):
        raise InputError(f"{len(hits)} sources with the weights {values}: expected a number of 0 or more for each")
    return values


def _top_sums(parts: Sequence[SourceParts], k: int, base: np.ndarray | None = None) -> Hits:
    """Returns the top k passages of each query by the sum of their contributions from all sources.

    Args:
        parts: The rows of each source, int64 [q, n], and their contributions, float64 [q, n].
        k: Number of hits per query.
        base: Added to the sums of a query after they are ordered, float64 [q]; None: 0.
    """
    rows = np.concatenate([part for part, _ in parts], axis=1)
    values = np.concatenate([value for _, value in parts], axis=1)
    # A stable sort puts equal rows side by side in source order, so other rows do not change the order of a sum.
    order = np.argsort(rows, axis=1, kind="stable")
    rows = np.take_along_axis(rows, order, axis=1)
    values = np.take_along_axis(values, order, axis=1)
    width = rows.shape[1]
    first = np.ones(rows.shape, bool)
    first[:, 1:] = rows[:, 1:] != rows[:, :-1]
    sums = np.add.reduceat(values.ravel(), np.flatnonzero(first)) if width else np.empty(0)
    total = np.full(rows.shape, -np.inf)
    total[first] = sums
    total[rows < 0] = -np.inf
    best = np.argsort(-total, axis=1, kind="stable")[:, :k]  # stable, so ties stay in ascending row order
    scores, top = np.take_along_axis(total, best, axis=1), np.take_along_axis(rows, best, axis=1)
    top = np.where(np.isfinite(scores), top, -1)
    if base is not None:
        scores = scores + base[:, None]
    return pad_hits(Hits(scores.astype(np.float32), top), k)


def source_depth(k: int, num_sources: int) -> int:
    """Returns the number of hits that a search for k hits takes from each source."""
    return max(k, FUSION_DEPTH) if num_sources > 1 else k


def fuse(hits: Sequence[Hits], k: int, weights: Sequence[float] | None) -> Hits:
    """Fuses the hits of the sources of a search into the top k; returns the hits of a single source unchanged.

    Args:
        hits: The hits of each source for the same queries, each `source_depth` deep.
        k: Number of hits per query.
        weights: A weight per source; None: fusion by reciprocal rank.
    """
    if len(hits) == 1:
        return hits[0]
    return reciprocal_rank(hits, k) if weights is None else weighted(hits, k, weights)


def fusion_parts(hits: Sequence[Hits], weights: Sequence[float] | None) -> list[dict[int, float]]:
    """Returns what each source adds to the fused scores of one query, by row; the score of a single source.

    The sum over all sources is the score that `fuse` returns.

    Args:
        hits: The hits [1, any] of each source.
        weights: A weight per source; None: fusion by reciprocal rank.
    """
    if len(hits) == 1:
        parts = [(hits[0].rows, hits[0].scores)]
    elif weights is None:
        parts = _rank_parts(hits, [1.0] * len(hits))
    else:
        parts, _ = _score_parts(hits, weights, "minmax")  # whose smallest scores are 0
    return [
        {row: part for row, part in zip(rows[0].tolist(), values[0].tolist(), strict=True) if row >= 0}
        for rows, values in parts
    ]


@dataclass
class Fusion:
    """A source that fuses the hits of several sources."""

    sources: list[HitSource]
    weights: list[float] | None
    search_parameters: dict[str, Any]

    @property
    def source_text(self) -> str:
        return fusion_text([source.source_text for source in self.sources], self.weights)

    def inputs(self) -> dict[str, Artifact]:
        return {role: artifact for source in self.sources for role, artifact in source.inputs().items()}

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        return fuse(self.source_hits(texts, k, runner, allowed_rows), k, self.weights)

    def source_hits(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None) -> list[Hits]:
        """Returns the hits of each source that the top k are fused from; arguments as for `search`."""
        depth = source_depth(k, len(self.sources))
        return [source.search(texts, depth, runner, allowed_rows) for source in self.sources]
