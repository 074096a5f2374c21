"""The source `exact:EMBEDDINGS`: every vector of the embeddings is scored."""

from __future__ import annotations

from indexing.embeddings import Embeddings
from indexing.hit_sources.dense import DenseSource, open_dense
from indexing.hit_sources.kind import SearchContext, SourceKind


class ExactKind(SourceKind):
    """Exact dense search."""

    name = "exact"
    forms = ("exact:EMBEDDINGS",)
    label = "exact"
    queries = "vectors"
    options = frozenset({"encoder", "task"})

    def open(self, context: SearchContext, name: str) -> DenseSource:
        return open_dense(context, Embeddings.open(context.store, name, context.corpus), None, {})


EXACT = ExactKind()
