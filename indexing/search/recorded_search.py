"""A fusion that keeps the hits of its sources, so that they can be explained after the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources.fusion import Fusion
from riptide.indexing.hit_sources.query_encoder import SelectedTexts
from riptide.indexing.hit_sources.source_kind import HitSource
from riptide.indexing.work.worker_tasks import Runner


@dataclass
class RecordedFusion(Fusion):
    """A source, or a fusion of several, that keeps the hits of the last search of each query.

    Attributes:
        hits: By number of the query, the hits [1, any] of each source.
        depths: By number of the query, the number of hits of the fusion.
    """

    hits: dict[int, list[Hits]] = field(default_factory=dict)
    depths: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, source: HitSource) -> RecordedFusion:
        """Returns a source that finds the same hits as `source`."""
        if isinstance(source, Fusion):
            return cls(source.sources, source.weights, source.search_parameters)
        return cls([source], None, source.search_parameters)

    def source_hits(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None) -> list[Hits]:
        hits = super().source_hits(texts, k, runner, allowed_rows)
        numbers = texts.numbers.tolist() if isinstance(texts, SelectedTexts) else range(len(texts))
        for place, number in enumerate(numbers):
            self.hits[number] = [Hits(each.scores[place : place + 1], each.rows[place : place + 1]) for each in hits]
            self.depths[number] = k
        return hits
