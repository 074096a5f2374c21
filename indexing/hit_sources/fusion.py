"""Fusion of several sources: `A+B` by reciprocal rank, `w*A+v*B` by the weighted sum of normalised scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from indexing.exact import Hits
from indexing.hit_sources.fused_lists import reciprocal_rank, weighted
from indexing.hit_sources.grammar import fusion_text
from indexing.hit_sources.kind import HitSource
from indexing.store.artifact import Artifact
from indexing.work.tasks import Runner

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
