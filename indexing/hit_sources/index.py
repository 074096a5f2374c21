"""The source `index:NAME`: a FAISS index, whose candidates are scored again by the vectors."""

from __future__ import annotations

from indexing.dense.index import Index
from indexing.embeddings.embeddings import Embeddings, holds_impacts
from indexing.hit_sources.dense import DENSE, DenseSource, open_dense
from indexing.hit_sources.kind import SearchContext, ServedNames, SourceKind
from indexing.hit_sources.online import Target
from retriever.errors import InputError


class IndexKind(SourceKind):
    """Dense search with an index."""

    name = "index"
    forms = ("index:NAME",)
    label = "dense"
    queries = "vectors"
    options = frozenset({"encoder", "task", "nprobe", "depth"})
    online = DENSE

    def open(self, context: SearchContext, name: str) -> DenseSource:
        store, options = context.store, context.options
        name = store.only("index", name)
        [latest] = store.generations("index", name)[-1:]
        if holds_impacts(latest.config):
            raise InputError(
                f"index/{name} holds the impacts of sparse embeddings: search it by the source splade:{name}"
            )
        embeddings = Embeddings.open(store, latest.config["embeddings"], context.corpus)
        index = Index.open(store, name, embeddings)
        search_parameters = {"nprobe": options.nprobe or index.nprobe, "depth": options.depth or index.depth}
        return open_dense(context, embeddings, index, search_parameters)

    def target(self, name: str, task: ServedNames) -> Target:
        return task.embeddings, name


INDEX = IndexKind()
