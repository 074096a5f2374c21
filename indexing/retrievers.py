"""Sources of hits, and the grammar that names them in search, mining, serving and evaluation.

bm25  bm25:NAME          Lucene's BM25; without a name the one called bm25, or the only one
exact:EMB                every vector of embeddings EMB
index:NAME               a FAISS index, its candidates scored again by the vectors
A+B+…                    several of these, by reciprocal rank
0.4*A+0.6*B              several, by the weighted sum of their scores, min-max normalised for each query
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from indexing.artifact import Artifact
from indexing.bm25 import DEFAULT, Bm25, search_bm25
from indexing.corpus import Corpus
from indexing.embeddings import Embeddings
from indexing.encoders import EncoderSpec, differing, spec_of
from indexing.exact import Hits
from indexing.fusion import reciprocal_rank, weighted
from indexing.index import Index
from indexing.store import Store
from indexing.work.tasks import ALL_CORES, Place, Report, Resources, Runner
from retriever.errors import InputError
from retriever.options import EncoderOptions

FUSION_DEPTH = 1_000  # least number of hits per source that a fusion sees: those of a usual run
_ENCODED = 2  # blocks of queries whose vectors are kept, for sources over the same embeddings
_WEIGHTED = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\*(.+)")


class Retriever(Protocol):
    """Finds passages for queries."""

    search_parameters: dict[str, Any]  # search parameters that shape its hits

    @property
    def source(self) -> str:
        """Returns its name in the grammar."""

    def inputs(self) -> dict[str, Artifact]:
        """Returns the artifacts that its hits depend on, by role."""

    def search(self, texts: Sequence[str], k: int, runner: Runner) -> Hits:
        """Returns the top k of each query; deleted passages are excluded."""


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search. None: as the artifacts say.

    Attributes:
        encoder: Where the encoder is now.
        task: The task whose encoder the queries use; it must encode passages as the embeddings were encoded.
        nprobe: Lists to probe.
        depth: Candidates of each shard that are scored again.
    """

    encoder: str | None = None
    task: str | None = None
    nprobe: int | None = None
    depth: int | None = None


@dataclass
class Bm25Retriever:
    """`bm25:NAME`."""

    bm25: Bm25
    corpus: Corpus
    search_parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return "bm25" if self.bm25.name == DEFAULT else f"bm25:{self.bm25.name}"

    def inputs(self) -> dict[str, Artifact]:
        return {f"{self.source}/{n}": artifact for n, artifact in enumerate(self.bm25.generations)}

    def search(self, texts: Sequence[str], k: int, runner: Runner) -> Hits:
        return search_bm25(self.bm25, texts, k, self.corpus.deleted, runner)


class QueryEncoder:
    """The encoder of some embeddings, for queries.

    Raises:
        InputError: If the encoder is not the one that made the embeddings.
    """

    def __init__(self, store: Store, embeddings: Embeddings, options: SearchOptions):
        self.embeddings = embeddings
        own = EncoderOptions(**embeddings.encoder_options)
        if options.task is not None:
            spec = spec_of(store, None, options.task, own)
        else:
            spec = EncoderSpec(store, options.encoder or embeddings.encoder_name, own, embeddings.task)
        self.spec = replace(spec, options=replace(spec.options, compile="never"))
        self._kept: list[tuple[Sequence[str], np.ndarray]] = []
        # A task may encode queries differently from the embeddings' encoder, with its prompt or prefix.
        made, found = embeddings.config["encoder"], spec.describe("passage")
        if differ := differing(made, found, passages=options.task is not None):
            what, parameter = (f"task {options.task}", "task") if options.task else (f"encoder {spec.name}", "encoder")
            raise InputError(
                f"{what} is not the one that made embeddings/{embeddings.name} ({', '.join(differ)} differ): name "
                f"that one with parameter {parameter}, or encode the corpus with this one"
            )
        self.described = spec.describe("query")
        self.numerics: str | None = None  # the class of the vectors so far, here or in an earlier run
        self._task = EncodeQueriesTask(self.spec, self.described)

    def encode(self, texts: Sequence[str], runner: Runner) -> np.ndarray:
        """Returns the vectors of queries, float32 [q, dim]. Raises InputError for another numerics class."""
        for kept, vectors in self._kept:
            if kept is texts:
                return vectors
        [(_, (vectors, numerics))] = runner.run(self._task, [list(texts)])
        if self.numerics not in (None, numerics):
            raise InputError(
                f"the queries' vectors are of the numerics class `{self.numerics}`, this worker's are `{numerics}`: "
                "resume on the kind of machine that began it"
            )
        self.numerics = numerics
        self._kept = [*self._kept, (texts, vectors)][-_ENCODED:]
        return vectors


@dataclass(frozen=True)
class EncodeQueriesTask:
    """Encodes a list of queries: float32 [q, dim] and their numerics class. pinned: the encoder's description."""

    spec: EncoderSpec
    pinned: Mapping[str, Any]
    resources: Resources = ALL_CORES
    stays_open: bool = True

    def open(self, place: Place) -> Callable[[list[str], Report], tuple[np.ndarray, str]]:
        """Returns the worker. Raises InputError if its encoder is not the pinned one."""
        from indexing.encoding import check_encoder

        encoder = self.spec.open(side="query", device=place.device, threads=place.cores)
        check_encoder(self.spec.config_of(encoder, "query"), self.pinned)
        return lambda texts, report: (encoder.encode(texts, side="query", task=self.spec.task), encoder.numerics)


@dataclass
class DenseRetriever:
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
        found = {f"embeddings:{self.embeddings.name}/{n}": g for n, g in enumerate(self.embeddings.generations)}
        found |= {f"{role}:{self.embeddings.name}": artifact for role, artifact in self.encoder.spec.inputs().items()}
        if self.index:
            found |= {f"{self.source}/{n}": g for n, g in enumerate(self.index.generations)}
        return found

    def search(self, texts: Sequence[str], k: int, runner: Runner) -> Hits:
        from indexing.searching import search_dense, search_exact

        vectors, deleted = self.encoder.encode(texts, runner), self.corpus.deleted
        if self.index is None:
            return search_exact(self.embeddings, vectors, k, deleted, runner)
        return search_dense(self.index, self.embeddings, vectors, k, deleted, runner, **self.search_parameters)


@dataclass
class Fusion:
    """`A+B` by reciprocal rank, `w*A+v*B` by weighted scores."""

    parts: list[Retriever]
    weights: list[float] | None
    search_parameters: dict[str, Any]

    @property
    def source(self) -> str:
        if self.weights is None:
            return "+".join(part.source for part in self.parts)
        weights = [np.format_float_positional(weight, trim="-") for weight in self.weights]
        return "+".join(f"{weight}*{part.source}" for weight, part in zip(weights, self.parts, strict=True))

    def inputs(self) -> dict[str, Artifact]:
        return {role: artifact for part in self.parts for role, artifact in part.inputs().items()}

    def search(self, texts: Sequence[str], k: int, runner: Runner) -> Hits:
        found = [part.search(texts, max(k, self.search_parameters["fusion_depth"]), runner) for part in self.parts]
        return reciprocal_rank(found, k) if self.weights is None else weighted(found, k, self.weights)


class Retrievers:
    """Opens sources over one corpus; sources over the same embeddings share the vectors of the queries."""

    def __init__(self, store: Store, corpus: Corpus, options: SearchOptions = SearchOptions()):
        self.store, self.corpus, self.options = store, corpus, options
        self._encoders: dict[str, QueryEncoder] = {}

    def numerics(self) -> dict[str, dict[str, str]]:
        """Returns the numerics classes of the queries' vectors so far, as facts of a part.

        They are {"query_numerics": {embeddings: class}}; empty if no source searches vectors.
        """
        found = {name: encoder.numerics for name, encoder in self._encoders.items() if encoder.numerics}
        return {"query_numerics": found} if found else {}

    def pin(self, facts: Mapping[str, Any]) -> None:
        """Pins the numerics classes of a committed part."""
        for name, numerics in facts.get("query_numerics", {}).items():
            if name in self._encoders:
                self._encoders[name].numerics = numerics

    def open(self, source: str) -> Retriever:
        """Opens a source. Raises InputError if the grammar or the store lacks it, or if its corpus is another one."""
        pieces = source.split("+")
        if len(pieces) == 1:
            return self._open(source)
        matches = [_WEIGHTED.fullmatch(piece) for piece in pieces]
        if any(matches) and not all(matches):
            raise InputError(f"source {source!r}: give every one of the sources a weight, or none")
        names = [match[2] if match else piece for match, piece in zip(matches, pieces, strict=True)]
        parts = [self._open(name) for name in names]
        if len({part.source for part in parts}) < len(parts):
            raise InputError(f"source {source!r}: a source is given twice")
        weights = [float(match[1]) for match in matches if match] or None
        if weights and not any(weights):
            raise InputError(f"source {source!r}: every weight is 0; give at least one source a positive weight")
        search_parameters = {part.source: part.search_parameters for part in parts if part.search_parameters}
        return Fusion(parts, weights, {**search_parameters, "fusion_depth": FUSION_DEPTH})

    def _open(self, source: str) -> Retriever:
        kind, _, name = source.partition(":")
        if kind == "bm25":
            return Bm25Retriever(Bm25.open(self.store, name or None, self.corpus), self.corpus)
        if kind == "exact" and name:
            return self._dense(Embeddings.open(self.store, name, self.corpus), None)
        if kind == "index" and name:
            name = self.store.only("index", name)
            [latest] = self.store.generations("index", name)[-1:]
            embeddings = Embeddings.open(self.store, latest.config["embeddings"], self.corpus)
            return self._dense(embeddings, Index.open(self.store, name, embeddings))
        raise InputError(f"source {source!r}: expected bm25, bm25:NAME, exact:EMBEDDINGS, index:NAME, or A+B")

    def _dense(self, embeddings: Embeddings, index: Index | None) -> DenseRetriever:
        encoder = self._encoders.get(embeddings.name) or QueryEncoder(self.store, embeddings, self.options)
        self._encoders[embeddings.name] = encoder
        search_parameters: dict[str, Any] = {}
        if index:
            search_parameters = {
                "nprobe": self.options.nprobe or index.nprobe,
                "depth": self.options.depth or index.depth,
            }
        return DenseRetriever(embeddings, index, self.corpus, encoder, search_parameters)
