"""A kind of vector that the project does not have: several vectors per text, compared by MaxSim, with its own index.

The score of a passage is the sum, over the vectors of the query, of the largest product with a vector of the passage.
A vector of the encoder is cut into pieces of PIECE numbers, and short texts have fewer pieces. The index is brute force
over copies of the vectors. This module is all that the kind needs; `several_kind` registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from riptide.indexing.corpus.corpus import save_array
from riptide.indexing.dense.dense_search import merge_results
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.vector_kind import PartTexts, VectorKind
from riptide.indexing.exact import Hits
from riptide.indexing.hit_sources import registry
from riptide.indexing.hit_sources.online_search import OnlineSearch
from riptide.indexing.hit_sources.source_kind import IndexKind, SearchContext, VectorSource
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import check_lineage, open_chain
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import IndexBuild, count_shards, next_target
from riptide.indexing.work.work import ArtifactTarget, BaseWork, TaskStage, WorkUnit, shard_units
from riptide.indexing.work.worker_tasks import ONE_CORE, Allocation, Report, Runner, WorkerResources
from riptide.retriever.options import VECTORS

PIECE = 8  # numbers of a vector
TOKENS = 8  # a text has one vector, and one more for each so many tokens

Vectors = list[np.ndarray]  # of each text: float32 [vectors, PIECE]


def pieces(vectors: np.ndarray, lengths: np.ndarray) -> Vectors:
    """Returns the vectors of texts. vectors: of the encoder, float32 [n, dim]. lengths: their tokens, int [n]."""
    counts = np.minimum(1 + np.asarray(lengths) // TOKENS, vectors.shape[1] // PIECE)
    return [row.reshape(-1, PIECE)[:count] for row, count in zip(vectors, counts, strict=True)]


def max_sim(query: np.ndarray, passage: np.ndarray) -> float:
    """Returns the score of a passage for a query: float32 [vectors, PIECE] both."""
    return float((query @ passage.T).max(axis=1).sum())


class SeveralEncoder:
    """Encodes queries to several vectors each."""

    def __init__(self, encoder: Any):
        self.encoder = encoder

    def forward(self, tokens: Any, **arguments: Any) -> Vectors:
        return pieces(self.encoder.forward(tokens, **arguments), tokens.lengths)


class SeveralKind(VectorKind):
    name = "several"
    poolings = ("several",)
    remedy = "encode the corpus with pooling several"
    suffix = ".npy"

    def write(self, texts: PartTexts, path: Path) -> None:
        vectors = texts.run(lambda: self.query_encoder(texts.encoder).forward(texts.tokens, **texts.arguments))
        vectors, rows = [*vectors, *texts.copied_vectors], np.concatenate([texts.rows, texts.copied_rows])
        numbers = np.repeat(rows, [len(each) for each in vectors])
        save_array(np.column_stack([numbers.astype(np.float32), np.concatenate(vectors)]), path)

    def read(self, path: Path, rows: int, dim: int, label: str) -> Vectors:
        table = np.load(path)
        return [table[table[:, 0] == row, 1:] for row in range(rows)]

    def query_encoder(self, encoder: Any) -> SeveralEncoder:
        return SeveralEncoder(encoder)

    def describe_vectors(self, encoder_settings: Mapping[str, Any]) -> str:
        return f"passages with up to {encoder_settings['dim'] // PIECE} vectors"

    def describe_size(self, encoder_settings: Mapping[str, Any], rows: int) -> str:
        return f"up to {rows * encoder_settings['dim'] // PIECE:,} vectors of {PIECE}"


class SeveralEmbeddings(EmbeddingsReader):
    kind = SeveralKind()

    def take(self, rows: np.ndarray) -> Vectors:
        every = [vectors for part in self.parts for vectors in self.vectors(part)]
        return [every[row] for row in rows]

    def open_vector_reader(self) -> Callable[[np.ndarray], np.ndarray]:
        raise NotImplementedError


class SeveralIndex:
    def __init__(self, name: str, generations: Sequence[Artifact]):
        self.name, self.generations = name, list(generations)
        self.shards = [(made, part) for made in generations for part in made.numbered_parts("shard")]
        self.num_rows = sum(part.rows for _, part in self.shards)


class BuildSeveralWork(BaseWork):
    """The work that makes index/NAME: shards with copies of the vectors."""

    def __init__(self, store: Store, embeddings: SeveralEmbeddings, name: str, shards: int):
        self.embeddings, self.name = embeddings, name
        self.previous = store.generations("index", name)
        check_lineage(self.previous, embeddings.generations)
        self.config = {"embeddings": embeddings.name, "several": PIECE, "shards": shards}
        self.first_row = SeveralIndex(name, self.previous).num_rows
        self.is_complete = bool(self.previous) and self.first_row >= embeddings.num_rows

    @property
    def targets(self) -> list[ArtifactTarget]:
        if self.is_complete:
            return []
        return [next_target("index", self.name, self.embeddings.generations, self.previous, self.config)]

    @property
    def stages(self) -> list[TaskStage]:
        end = self.embeddings.num_rows
        units = shard_units(self.first_row, end, count_shards(self.config["shards"], end - self.first_row, 0))
        return [TaskStage("copy", "passages", units, lambda drafts: CopyTask(drafts[0], self.embeddings))]


@dataclass(frozen=True)
class CopyTask:
    draft: Draft
    embeddings: SeveralEmbeddings
    resources: WorkerResources = ONE_CORE

    def open(self, allocation: Allocation) -> Callable[[WorkUnit, Report], None]:
        def copy(unit: WorkUnit, report: Report) -> None:
            [name], (first, end) = unit.names, unit.payload
            rows = np.arange(first, end)
            vectors = self.embeddings.take(rows)
            table = np.column_stack([np.repeat(rows, [len(each) for each in vectors]), np.concatenate(vectors)])
            self.draft.commit(name, ".npy", lambda path: save_array(table, path), rows=end - first)

        return copy


@dataclass(frozen=True)
class SearchTask:
    """Searches a shard by brute force."""

    queries: Vectors
    k: int
    deleted: np.ndarray
    allowed_rows: np.ndarray | None
    resources: WorkerResources = ONE_CORE

    def open(self, allocation: Allocation) -> Callable[[tuple[Artifact, ArtifactPart], Report], Hits]:
        return lambda shard, report: self._search(np.load(shard[0].local_path(shard[1])))

    def _search(self, table: np.ndarray) -> Hits:
        rows = np.setdiff1d(table[:, 0].astype(np.int64), self.deleted)
        rows = rows if self.allowed_rows is None else np.intersect1d(rows, self.allowed_rows)
        passages = [table[table[:, 0] == row, 1:].astype(np.float32) for row in rows]
        scores = np.array([[max_sim(query, passage) for passage in passages] for query in self.queries], np.float32)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.k]
        return Hits(np.take_along_axis(scores, order, 1), rows[order])


class SeveralSource(VectorSource[SeveralEmbeddings, SeveralIndex]):
    index_kind = "several"

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        task = SearchTask(self.encoder.encode(texts, runner), k, self.corpus.deleted, allowed_rows)
        return merge_results((hits for _, hits in runner.run(task, self.index.shards)), k)


class NotServed(OnlineSearch):
    """The kind is not served."""

    name = "several"

    def artifacts(self, target: Any) -> Any:
        raise NotImplementedError

    read = open = probe = artifacts


class SeveralSourceKind(IndexKind):
    name = "several"
    forms = ("several:NAME",)
    label = "several"
    queries = "texts"
    options = frozenset({"encoder", "task"})
    online = NotServed()
    reader = SeveralEmbeddings
    summary = "holds several vectors per passage"
    unshaped = "whose index is brute force"

    def is_index(self, config: Mapping[str, Any]) -> bool:
        return "several" in config

    def open(self, context: SearchContext, name: str) -> SeveralSource:
        store = context.store
        embeddings = SeveralEmbeddings.open(store, self.config_of(store, name)["embeddings"], context.corpus)
        index = SeveralIndex(name, open_chain(store, "index", name, embeddings.generations))
        return SeveralSource(embeddings, index, context.corpus, context.query_encoder(embeddings))

    def build(self, store: Store, embeddings: SeveralEmbeddings, name: str, options: Any) -> IndexBuild:
        work = BuildSeveralWork(store, embeddings, name, options.shards)
        plan = [f"vectors  of {embeddings.num_rows:,} passages in embeddings/{embeddings.name}"]
        report = [f"index/{name}: {embeddings.num_rows} passages"]
        return IndexBuild(work, plan, "the vectors of a shard", lambda: report)


@contextmanager
def several_kind() -> Iterator[None]:
    """Registers the kind and its pooling, and nothing else, while the context is open."""
    kind = SeveralSourceKind()
    registry.KINDS.append(kind)
    registry.register_poolings()
    try:
        yield
    finally:
        registry.KINDS.remove(kind)
        del VECTORS["several"]
