"""Search in float16 embeddings, with or without an index, for the sources `exact:EMB` and `index:NAME`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.dense.explained_rows import explain_rows
from riptide.indexing.dense.factory import is_flat
from riptide.indexing.dense.index import Index
from riptide.indexing.dense.shard import DenseShard, OpenShards, searched_row_ranges, shards_in_range
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.exact import Hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.hit_sources.online_search import Files, OnlineSearch, PinnedArtifacts, SearcherScope, SearchTarget
from riptide.indexing.hit_sources.source_kind import VectorSource
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.work.worker_tasks import Runner


@dataclass
class DenseSource(VectorSource[Embeddings, Index | None]):
    """An open source `exact:EMB` or `index:NAME` in a job.

    Attributes:
        stays_open: Whether the files of vectors and of the index stay open between searches.
    """

    stays_open: bool = False

    index_kind = "index"

    @functools.cached_property
    def _shards(self) -> OpenShards:
        return OpenShards(self.embeddings, self.corpus.deleted, stays_open=self.stays_open)

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        return self.search_vectors(self.encoder.encode(texts, runner), k, runner, allowed_rows)

    def search_vectors(
        self, vectors: np.ndarray, k: int, runner: Runner, allowed_rows: np.ndarray | None = None
    ) -> Hits:
        """Searches encoded queries, float32 [q, dim]; as `search`."""
        from riptide.indexing.dense.dense_search import search_dense, search_exact

        if self.index is None:
            return search_exact(self._shards, vectors, k, runner, allowed_rows=allowed_rows)
        effort, depth = self.search_parameters[self.index.effort_name], self.search_parameters["depth"]
        return search_dense(
            self.index, self._shards, vectors, k, runner, allowed_rows=allowed_rows, effort=effort, depth=depth
        )

    def explain(self, texts: Sequence[str], rows: RowsOfQueries, runner: Runner) -> list[dict[int, ScoreParts]]:
        vectors: np.ndarray = self.encoder.encode(texts, runner)
        trained, effort = None, 0
        if self.index is not None and not is_flat(self.index.factory):
            from riptide.indexing.dense.faiss_index import read_index

            artifact, part = self.index.quantizer
            trained = read_index(artifact.local_path(part), mmap=True)
            effort = self.search_parameters[self.index.effort_name]
        return explain_rows(self.embeddings, vectors, rows, trained, effort)


@dataclass(frozen=True)
class SearchSpace:
    """The embeddings of a target and the index over them; without an index, every vector is scored."""

    embeddings: Embeddings
    index: Index | None

    @property
    def names(self) -> tuple[str, str | None]:
        return self.embeddings.name, self.index.name if self.index else None

    @property
    def generations(self) -> list[Artifact]:
        return [*self.embeddings.generations, *(self.index.generations if self.index else [])]


class OnlineDense(OnlineSearch):
    """Dense search in a service. A target names the embeddings and the index over them (None: exact search)."""

    name = "dense"

    def artifacts(self, target: SearchTarget) -> list[tuple[str, str]]:
        return [(kind, name) for kind, name in zip(("embeddings", "index"), target, strict=True) if name]

    def read(self, target: SearchTarget, pinned: PinnedArtifacts) -> SearchSpace:
        (_, embeddings), *indexes = self.artifacts(target)
        index = [Index(name, pinned.generations(kind, name)) for kind, name in indexes]
        return SearchSpace(
            Embeddings(embeddings, pinned.generations("embeddings", embeddings)), index[0] if index else None
        )

    def open(self, readers: SearchSpace, corpus: Corpus, scope: SearcherScope) -> DenseShard:
        return DenseShard(corpus, readers.embeddings, readers.index, scope.rows, scope.threads)

    def files(self, readers: SearchSpace, scope: SearcherScope) -> list[Files]:
        """Returns two groups of files: the shards of the index, and the vectors that score the candidates."""
        vectors, index = readers.embeddings, readers.index
        ranges = searched_row_ranges(vectors, index, scope.rows)
        # Searches do not read the shards of a Flat index.
        shards = [] if index is None or is_flat(index.factory) else shards_in_range(index, scope.rows)
        parts = [
            part for part in vectors.parts if any(first < part.end and part.first_row < end for first, end in ranges)
        ]
        return [[(each.artifact, each.part) for each in group] for group in (shards, parts)]

    def probe(self, searcher: DenseShard) -> None:
        vectors, index = searcher.embeddings, searcher.index
        if vectors.num_rows:
            vectors.take(np.zeros(1, np.int64))
        if index is not None and not is_flat(index.factory):  # a Flat index would score every vector
            searcher.search(np.ones((1, vectors.dim), np.float32), 1)


ONLINE = OnlineDense()
