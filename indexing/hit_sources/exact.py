"""The source `exact:EMBEDDINGS`, which scores every vector of the embeddings."""

from __future__ import annotations

import numpy as np

from riptide.indexing.corpus.filters import Filter
from riptide.indexing.dense.shard import DenseShard
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.exact import Hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.hit_sources.dense import ONLINE, DenseSource
from riptide.indexing.hit_sources.online_search import SearchTarget
from riptide.indexing.hit_sources.source_kind import SearchContext, SourceKind


class ExactKind(SourceKind):
    """The kind of exact dense sources."""

    name = "exact"
    forms = ("exact:EMBEDDINGS",)
    label = "exact"
    queries = "vectors"
    explains = True
    options = frozenset({"encoder", "task"})
    online = ONLINE

    def open(self, context: SearchContext, name: str) -> DenseSource:
        embeddings = Embeddings.open(context.store, name, context.corpus)
        encoder = context.query_encoder(embeddings)
        return DenseSource(embeddings, None, context.corpus, encoder, stays_open=context.stays_open)

    def search_target(self, name: str, *, embeddings: str | None, index: str | None) -> SearchTarget:
        return name, index if name == embeddings else None

    def search_online(
        self, searcher: DenseShard, queries: np.ndarray, k: int, filter: Filter | None, effort: int | None = None
    ) -> Hits:
        return searcher.search(queries, k, filter, exact=True)

    def explain_online(
        self, searcher: DenseShard, queries: np.ndarray, rows: RowsOfQueries, effort: int | None = None
    ) -> list[dict[int, ScoreParts]]:
        return searcher.explain(queries, rows, exact=True)


EXACT = ExactKind()
