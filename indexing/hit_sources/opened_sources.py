"""Opens the sources of a job by their names in the grammar."""

from __future__ import annotations

from riptide.indexing.hit_sources.fusion import FUSION_DEPTH, Fusion
from riptide.indexing.hit_sources.grammar import parse_source
from riptide.indexing.hit_sources.modes import expand_mode
from riptide.indexing.hit_sources.registry import open_source
from riptide.indexing.hit_sources.source_kind import HitSource, SearchContext


class HitSources(SearchContext):
    """Opens sources over one corpus; sources over the same embeddings share query encoders and vectors."""

    def open(self, source: str) -> HitSource:
        """Opens a source, a fusion, or the source of a mode.

        Raises InputError if the text is not in the grammar, if an artifact is missing, or if it has another corpus.
        """
        expression = parse_source(expand_mode(source, self.store))
        sources = [open_source(term.kind, self, term.name) for term in expression.terms]
        if len(sources) == 1:
            return sources[0]
        expression.check_distinct([each.source_text for each in sources])
        search_parameters = {each.source_text: each.search_parameters for each in sources if each.search_parameters}
        weights = list(expression.weights) if expression.weights else None
        return Fusion(sources, weights, {**search_parameters, "fusion_depth": FUSION_DEPTH})
