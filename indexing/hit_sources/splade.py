"""The source `splade:NAME`: an impact index, which is searched with sparse query vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.vector_kind import IndexOptions
from riptide.indexing.exact import Hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.hit_sources.online_search import Files, OnlineSearch, PinnedArtifacts, SearcherScope, SearchTarget
from riptide.indexing.hit_sources.query_encoder import QueryEncoder
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.hit_sources.source_kind import IndexKind, SearchContext, VectorSource
from riptide.indexing.lucene.java import FILL_MEMORY
from riptide.indexing.lucene.segment_search import OpenSegments, segments_in_range
from riptide.indexing.sparse.index import ImpactIndex, search_impacts
from riptide.indexing.sparse.sparse_embeddings import SparseEmbeddings
from riptide.indexing.store.chain import RowRange, check_lineage
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import IndexBuild
from riptide.indexing.work.worker_tasks import Runner
from riptide.retriever.encoding.sparse_vectors import SparseVectors


class SpladeSource(VectorSource[SparseEmbeddings, ImpactIndex]):
    """An open source `splade:NAME` in a job."""

    index_kind = "splade"

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        vectors = self.encoder.encode(texts, runner)
        return search_impacts(self.index, vectors, k, self.corpus.deleted, runner, allowed_rows=allowed_rows)

    def explain(self, texts: Sequence[str], rows: RowsOfQueries, runner: Runner) -> list[dict[int, ScoreParts]]:
        vectors = self.encoder.encode(texts, runner)
        return _name_words(self.index.explain(vectors, rows), self.encoder)


def _name_words(
    scores: list[dict[int, ScoreParts]], encoder: QueryEncoder[SparseVectors]
) -> list[dict[int, ScoreParts]]:
    """Replaces the numbers of words by the tokens of the encoder's vocabulary, where it has them."""
    names = encoder.vocabulary

    def named(score: ScoreParts) -> ScoreParts:
        terms = [replace(each, term=names.get(int(each.term), each.term)) for each in score.terms or ()]
        return replace(score, terms=tuple(terms))

    return [{row: named(score) for row, score in by_row.items()} for by_row in scores]


class OpenImpacts(OpenSegments):
    """The opened segments of an index of impacts, for a service. Arguments as for `OpenSegments`.

    Args:
        encoder: The encoder of the queries, whose vocabulary names the terms of explanations.
    """

    def __init__(
        self,
        index: ImpactIndex,
        corpus: Corpus,
        rows: RowRange,
        threads: int,
        encoder: QueryEncoder[SparseVectors],
    ):
        super().__init__(index, corpus, rows, threads)
        self.encoder = encoder

    def explain(self, queries: SparseVectors, rows: RowsOfQueries) -> list[dict[int, ScoreParts]]:
        return _name_words(super().explain(queries, rows), self.encoder)


@dataclass(frozen=True)
class SpladeReaders:
    """The readers of a target: an impact index and the encoder of its queries."""

    index: ImpactIndex
    encoder: QueryEncoder[SparseVectors]


class OnlineSplade(OnlineSearch):
    """SPLADE search in a service. A target is the name of an impact index.

    The encoder of a release serves the dense sources. The queries of this part are encoded with the encoder and the
    task of the index's embeddings.
    """

    name = "splade"
    encodes = True

    def artifacts(self, target: SearchTarget) -> list[tuple[str, str]]:
        return [("index", str(target[0]))]

    def read(self, target: SearchTarget, pinned: PinnedArtifacts) -> SpladeReaders:
        [(kind, name)] = self.artifacts(target)
        generations = pinned.generations(kind, name)
        of = str(generations[-1].config["embeddings"])
        embeddings = SparseEmbeddings(of, pinned.generations("embeddings", of))
        check_lineage(generations, embeddings.generations)
        encoder = QueryEncoder[SparseVectors](pinned.store, embeddings, SearchOptions())
        for artifact in encoder.spec.inputs().values():
            pinned.generations(artifact.kind, artifact.name)  # raises InputError if it has changed since the release
        return SpladeReaders(ImpactIndex(name, generations, embeddings), encoder)

    def encoder(self, readers: SpladeReaders) -> QueryEncoder[SparseVectors]:
        return readers.encoder

    def open(self, readers: SpladeReaders, corpus: Corpus, scope: SearcherScope) -> OpenSegments:
        return OpenImpacts(readers.index, corpus, scope.rows, scope.threads or 1, readers.encoder)

    def files(self, readers: SpladeReaders, scope: SearcherScope) -> list[Files]:
        return [readers.index.shards[segments_in_range(readers.index, scope.rows)[0]]]

    def probe(self, searcher: OpenSegments) -> None:
        index: Any = searcher.index
        dim = index.embeddings.dim
        word = SparseVectors(np.array([dim // 2], np.int32), np.ones(1, np.float32), np.array([0, 1]), dim)
        searcher.search(word, 1)


class SpladeKind(IndexKind):
    """The kind of SPLADE sources, which search an impact index."""

    name = "splade"
    forms = ("splade:NAME",)
    label = "splade"
    queries = "texts"
    explains = True
    options = frozenset({"encoder", "task"})
    online = OnlineSplade()
    reader = SparseEmbeddings
    summary = "holds the impacts of sparse embeddings"
    unshaped = "whose index is Lucene's and not FAISS'"

    def is_index(self, config: Mapping[str, Any]) -> bool:
        return ImpactIndex.is_index(config)

    def open(self, context: SearchContext, name: str) -> SpladeSource:
        store = context.store
        embeddings = SparseEmbeddings.open(store, self.config_of(store, name)["embeddings"], context.corpus)
        index = ImpactIndex.open(store, name, embeddings)
        return SpladeSource(embeddings, index, context.corpus, context.query_encoder(embeddings))

    def build(self, store: Store, embeddings: SparseEmbeddings, name: str, options: IndexOptions) -> IndexBuild:
        from riptide.indexing.sparse.building import BuildImpactsWork

        work = BuildImpactsWork(store, embeddings, name, shards=options.shards)

        def report() -> list[str]:
            index = ImpactIndex.open(store, name, embeddings)
            latest = index.generations[-1]
            return [
                f"{latest.url}: {index.num_rows:,} vectors in {len(index.shards)} shards, "
                f"{index.num_postings / max(1, index.num_rows):,.1f} words each, impacts up to {index.largest:,}, "
                f"Lucene {latest.config['lucene']}"
            ]

        rows = work.end - work.first_row
        plan = [f"vectors  {rows:,} over {embeddings.dim:,} words in embeddings/{embeddings.name}"]
        return IndexBuild(work, plan, FILL_MEMORY, report, prepare=work.pin_versions)


SPLADE = SpladeKind()
