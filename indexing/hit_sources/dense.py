"""Search in float16 embeddings, with or without an index: what the sources `exact:EMB` and `index:NAME` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from indexing.artifact import Artifact
from indexing.corpus import Corpus
from indexing.embeddings import Embeddings
from indexing.exact import Hits
from indexing.hit_sources.kind import SearchContext
from indexing.hit_sources.query_encoder import QueryEncoder
from indexing.index import Index
from indexing.work.tasks import Runner


@dataclass
class DenseSource:
    """`exact:EMB`, or `index:NAME`."""

    embeddings: Embeddings
    index: Index | None
    corpus: Corpus
    encoder: QueryEncoder
    search_parameters: dict[str, Any]

    @property
    def source(self) -> str:
        return f"index:{self.index.name}" if self.index else f"exact:{self.embeddings.name}"

    def inputs(self) -> dict[str, Artifact]:
        inputs = {f"embeddings:{self.embeddings.name}/{n}": g for n, g in enumerate(self.embeddings.generations)}
        inputs |= {f"{role}:{self.embeddings.name}": artifact for role, artifact in self.encoder.spec.inputs().items()}
        if self.index:
            inputs |= {f"{self.source}/{n}": g for n, g in enumerate(self.index.generations)}
        return inputs

    def search(self, texts: Sequence[str], k: int, runner: Runner) -> Hits:
        from indexing.searching import search_dense, search_exact

        vectors, deleted = self.encoder.encode(texts, runner), self.corpus.deleted
        if self.index is None:
            return search_exact(self.embeddings, vectors, k, deleted, runner)
        return search_dense(self.index, self.embeddings, vectors, k, deleted, runner, **self.search_parameters)


def open_dense(
    context: SearchContext, embeddings: Embeddings, index: Index | None, search_parameters: dict[str, Any]
) -> DenseSource:
    """Opens a source over embeddings, with the encoder that all sources over them share.

    Raises InputError if the encoder is not the one that made the embeddings.
    """
    encoder = context.query_encoder(embeddings.name, lambda: QueryEncoder(context.store, embeddings, context.options))
    return DenseSource(embeddings, index, context.corpus, encoder, search_parameters)
