"""Fusion of several sources: `A+B` by reciprocal rank, `w*A+v*B` by the weighted sum of normalised scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from indexing.exact import Hits
from indexing.hit_sources.grammar import fusion_text
from indexing.hit_sources.kind import HitSource
from indexing.store.artifact import Artifact
from indexing.work.tasks import Runner
from retriever.errors import InputError

CONSTANT = 60.0  # Cormack, Clarke and Buettcher (2009)


def reciprocal_rank(
    found: Sequence[Hits], k: int, *, constant: float = CONSTANT, weights: Sequence[float] | None = None
) -> Hits:
    """The best k by the sum over sources of weight / (constant + rank), ranks from 1 (Cormack et al. 2009).

    found: the sources' hits of the same questions, each [q, any]. Sums in float64; a tie goes to the smaller row.
    """
    weights = _weights(found, weights)
    parts = []
    for hits, weight in zip(found, weights, strict=True):
        ranks = np.arange(1, hits.rows.shape[1] + 1, dtype=np.float64)
        parts.append((hits.rows, np.broadcast_to(weight / (constant + ranks), hits.rows.shape)))
    return _summed(parts, k)


def weighted(
    found: Sequence[Hits],
    k: int,
    weights: Sequence[float],
    *,
    normalize: Literal["minmax", "zscore", "none"] = "minmax",
) -> Hits:
    """The best k by the weighted sum of scores, normalised within each question's hits of a source.

    minmax: (s - min) / (max - min), 1 where all are equal; zscore: (s - mean) / deviation, 0 where all are equal.
    A passage that a source did not find has that source's smallest score there, with minmax always 0; where the source
    found nothing, 0. Sums in float64; a tie goes to the smaller row.
    """
    parts, floors = [], np.zeros(len(found[0].rows) if found else 0)
    for hits, weight in zip(found, _weights(found, weights), strict=True):
        there = hits.rows >= 0
        scores = np.where(there, hits.scores.astype(np.float64), np.nan)
        counts = np.maximum(there.sum(axis=1, keepdims=True), 1)
        low = np.where(there, scores, np.inf).min(axis=1, keepdims=True, initial=np.inf)
        if normalize == "minmax":
            high = np.where(there, scores, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
            with np.errstate(invalid="ignore"):
                scores = np.where(high > low, (scores - low) / np.where(high > low, high - low, 1), 1.0)
        elif normalize == "zscore":
            mean = np.where(there, scores, 0).sum(axis=1, keepdims=True) / counts
            spread = np.sqrt(np.where(there, (scores - mean) ** 2, 0).sum(axis=1, keepdims=True) / counts)
            scores = np.where(spread > 0, (scores - mean) / np.where(spread > 0, spread, 1), 0.0)
        floor = np.where(there, scores, np.inf).min(axis=1, initial=np.inf)
        floor = np.where(np.isfinite(floor), floor, 0.0) if normalize != "minmax" else np.zeros(len(floor))
        parts.append((hits.rows, np.where(there, weight * (scores - floor[:, None]), 0.0)))
        floors = floors + weight * floor  # what every passage has at least
    return _summed(parts, k, floors)


def _weights(found: Sequence[Hits], weights: Sequence[float] | None) -> Sequence[float]:
    given = [1.0] * len(found) if weights is None else list(weights)
    if not found or len(given) != len(found) or not all(0 <= w < float("inf") for w in given) or not any(given):
        raise InputError(f"{len(found)} sources with the weights {given}: expected a number of 0 or more for each")
    return given


def _summed(parts: Sequence[tuple[np.ndarray, np.ndarray]], k: int, base: np.ndarray | None = None) -> Hits:
    """The best k of each question by the sum of a row's contributions: (rows [q, n], float64 [q, n]) of each source.

    base: what each of a question's rows has besides, float64 [q].
    """
    rows = np.concatenate([part for part, _ in parts], axis=1)
    values = np.concatenate([value for _, value in parts], axis=1)
    # Equal rows side by side, the sources in order: each sum is added up in the same order whatever else there is.
    order = np.argsort(rows, axis=1, kind="stable")
    rows = np.take_along_axis(rows, order, axis=1)
    values = np.take_along_axis(values, order, axis=1)
    width = rows.shape[1]
    first = np.ones(rows.shape, bool)
    first[:, 1:] = rows[:, 1:] != rows[:, :-1]
    sums = np.add.reduceat(values.ravel(), np.flatnonzero(first)) if width else np.empty(0)
    total = np.full(rows.shape, -np.inf)
    total[first] = sums
    if base is not None:
        total += base[:, None]
    total[rows < 0] = -np.inf
    best = np.argsort(-total, axis=1, kind="stable")[:, :k]  # stable: rows ascend
    scores, kept = np.take_along_axis(total, best, axis=1), np.take_along_axis(rows, best, axis=1)
    kept = np.where(np.isfinite(scores), kept, -1)
    missing = k - kept.shape[1]
    if missing > 0:
        kept = np.pad(kept, ((0, 0), (0, missing)), constant_values=-1)
        scores = np.pad(scores, ((0, 0), (0, missing)), constant_values=-np.inf)
    return Hits(scores.astype(np.float32), kept)


FUSION_DEPTH = 1_000  # least number of hits per source that a fusion sees: those of a usual run


def source_depth(k: int, num_sources: int) -> int:
    """Returns the number of hits of each source that a search for k hits needs."""
    return max(k, FUSION_DEPTH) if num_sources > 1 else k


def fuse(hits: Sequence[Hits], k: int, weights: Sequence[float] | None) -> Hits:
    """Returns the fused hits of the sources of a search; the hits of a single source as they are.

    Args:
        hits: The hits of each source for the same queries, each `source_depth` deep.
        k: Number of hits per query.
        weights: A weight per source; None: fusion by reciprocal rank.
    """
    if len(hits) == 1:
        return hits[0]
    return reciprocal_rank(hits, k) if weights is None else weighted(hits, k, weights)


@dataclass
class Fusion:
    """A fusion of sources, as a source."""

    parts: list[HitSource]
    weights: list[float] | None
    search_parameters: dict[str, Any]

    @property
    def source(self) -> str:
        return fusion_text([part.source for part in self.parts], self.weights)

    def inputs(self) -> dict[str, Artifact]:
        return {role: artifact for part in self.parts for role, artifact in part.inputs().items()}

    def search(self, texts: Sequence[str], k: int, runner: Runner) -> Hits:
        depth = source_depth(k, len(self.parts))
        return fuse([part.search(texts, depth, runner) for part in self.parts], k, self.weights)
