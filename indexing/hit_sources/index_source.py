"""The source `index:NAME`: a FAISS index finds candidates, whose exact scores come from the vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.dense.index import Index
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.embeddings.vector_kind import IndexOptions
from riptide.indexing.hit_sources.dense import ONLINE, DenseSource
from riptide.indexing.hit_sources.online_search import SearchTarget
from riptide.indexing.hit_sources.query_encoder import QueryEncoder
from riptide.indexing.hit_sources.search_options import COUNTS, SearchOptions
from riptide.indexing.hit_sources.source_kind import IndexKind, SearchContext
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import IndexBuild
from riptide.process.memory import format_bytes


class FaissKind(IndexKind):
    """The kind of dense sources with a FAISS index."""

    name = "index"
    forms = ("index:NAME",)
    label = "dense"
    queries = "vectors"
    explains = True
    options = frozenset({"encoder", "task", *COUNTS})
    online = ONLINE
    reader = Embeddings
    summary = "is a FAISS index of dense embeddings"

    def is_index(self, config: Mapping[str, Any]) -> bool:
        return Index.is_index(config)

    def open(self, context: SearchContext, name: str) -> DenseSource:
        store, options = context.store, context.options
        embeddings = Embeddings.open(store, self.config_of(store, name)["embeddings"], context.corpus)
        index = Index.open(store, name, embeddings)
        efforts = {effort: getattr(options, effort) for effort in ("nprobe", "ef_search")}
        unused = [effort for effort, value in efforts.items() if value is not None and effort != index.effort_name]
        if unused and efforts[index.effort_name] is None:
            raise InputError(
                f"{Parameter(unused[0], efforts[unused[0]])}: index/{name} is {index.factory} and has no use for it; "
                f"give {Parameter(index.effort_name, efforts[unused[0]])} instead"
            )
        effort = {index.effort_name: efforts[index.effort_name] or index.effort}
        search_parameters = {**effort, "depth": options.depth or index.depth}
        encoder = context.query_encoder(embeddings)
        return DenseSource(embeddings, index, context.corpus, encoder, search_parameters, context.stays_open)

    def search_target(self, name: str, *, embeddings: str | None, index: str | None) -> SearchTarget:
        return embeddings, name

    def build(self, store: Store, embeddings: Embeddings, name: str, options: IndexOptions) -> IndexBuild:
        from riptide.indexing.dense.building import BuildIndexWork
        from riptide.indexing.dense.factory import training_size
        from riptide.indexing.dense.faiss_index import row_bytes

        queries = options.queries
        encoder = QueryEncoder[np.ndarray](store, embeddings, SearchOptions()) if queries else None
        work = BuildIndexWork(store, embeddings, name, options, encoder.encode if encoder else None)
        trained = training_size(work.factory, embeddings.num_rows)

        def report() -> list[str]:
            index = Index.open(store, name, embeddings)
            recall = ", ".join(f"recall@{k} {value:.4f}" for k, value in index.recall.items())
            lines = [
                f"{index.generations[-1].url}: {index.num_rows:,} vectors in {len(index.shards)} shards, "
                f"{index.factory}",
                f"  {recall} of exact search at {index.effort_name} {index.effort}, {index.depth} candidates a shard",
            ]
            notes = index.generations[-1].notes
            if queries:
                lines[-1] += f", with {notes['queries']:,} queries of queries/{queries.name}"
                lines[-1] += f" (filters: {notes['filters']:,})" if queries.filter_field is not None else ""
            if not notes["reaches_recall"]:
                lines.append(
                    f"  this factory does not reach recall {options.recall}: use finer codes (SQ8, Flat) or more lists"
                )
            return lines

        plan = [
            f"vectors  {embeddings.num_rows:,} of {embeddings.dim} in embeddings/{embeddings.name}",
            f"factory  {work.factory}, trained on {trained:,} vectors",
        ]
        if queries:
            plan.append(f"recall   of up to 1,000 queries of queries/{queries.name} {queries.split}")
        rows = -(-(work.end - work.first_row) // max(1, work.num_shards))
        to_fill = format_bytes(rows * row_bytes(work.factory, embeddings.dim))
        to_train = format_bytes(trained * embeddings.dim * 4)
        return IndexBuild(work, plan, f"{to_train} to train, {to_fill} for each shard that is filled", report)


INDEX = FaissKind()
