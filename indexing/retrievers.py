"""Sources of hits, and the one grammar that names them in search, mining, serving and evaluation.

bm25  bm25:NAME          Lucene's BM25; without a name the one called bm25, or the only one
exact:EMB                every vector of embeddings EMB
index:NAME               a FAISS index, its candidates scored again by the vectors
A+B+…                    several of these, by reciprocal rank
0.4*A+0.6*B              several, by the weighted sum of their scores, min-max normalised for each query
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from indexing.artifact import Artifact
from indexing.bm25 import DEFAULT, Bm25, search_bm25
from indexing.corpus import Corpus
from indexing.embeddings import Embeddings
from indexing.encoders import EncoderSpec, differing, spec_of
from indexing.encoding import check_encoder
from indexing.exact import Hits
from indexing.fusion import reciprocal_rank, weighted
from indexing.index import Index
from indexing.searching import search_dense, search_exact
from indexing.store import Store
from indexing.tasks import node_cores, run_tasks
from retriever.encoder import Encoder, EncoderOptions
from retriever.errors import InputError

FUSION_DEPTH = 1_000  # hits of each source that a fusion sees, at least: those of a usual run
_ENCODED = 2  # blocks of queries whose vectors are kept: sources over the same embeddings share them
_WEIGHTED = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\*(.+)")


class Retriever(Protocol):
    """Something that finds passages for questions."""

    dials: dict[str, Any]  # what else decides its hits

    @property
    def source(self) -> str:
        """Its name in the grammar."""

    def inputs(self) -> dict[str, Artifact]:
        """What its hits are made of: role -> artifact."""

    def search(self, texts: Sequence[str], k: int) -> Hits:
        """The top k of some questions, less the corpus' deleted passages."""


@dataclass(frozen=True)
class SearchOptions:
    """What a search may be told beside its source. None: as the artifacts say."""

    encoder: str | None = None  # where the encoder is now
    task: str | None = None  # whose encoder the questions take; the passages' vectors must be what it makes of them
    nprobe: int | None = None
    depth: int | None = None  # candidates of each shard that are scored again


@dataclass
class Bm25Retriever:
    """`bm25:NAME`."""

    bm25: Bm25
    corpus: Corpus
    dials: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return "bm25" if self.bm25.name == DEFAULT else f"bm25:{self.bm25.name}"

    def inputs(self) -> dict[str, Artifact]:
        return {f"{self.source}/{n}": artifact for n, artifact in enumerate(self.bm25.generations)}

    def search(self, texts: Sequence[str], k: int) -> Hits:
        return search_bm25(self.bm25, texts, k, self.corpus.deleted)


class QueryEncoder:
    """The encoder of some embeddings, for their questions. Raises InputError where it is not the one that made them."""

    def __init__(self, store: Store, embeddings: Embeddings, asked: SearchOptions):
        self.embeddings = embeddings
        own = EncoderOptions(**embeddings.encoder_options)
        if asked.task is not None:
            spec = spec_of(store, None, asked.task, own)
        else:
            spec = EncoderSpec(store, asked.encoder or embeddings.encoder_name, own, embeddings.task)
        self.spec = replace(spec, options=replace(spec.options, compile="never"))
        self._kept: list[tuple[Sequence[str], np.ndarray]] = []
        # A task may ask otherwise than the encoder of its passages: with a prompt, or another prefix, of its own.
        made, found = embeddings.config["encoder"], spec.describe("passage")
        if differ := differing(made, found, passages=asked.task is not None):
            what, way = (f"task {asked.task}", "--task") if asked.task else (f"encoder {spec.name}", "--encoder")
            raise InputError(
                f"{what} is not the one that made embeddings/{embeddings.name} ({', '.join(differ)} differ): name "
                f"that one with {way}, or encode the corpus with this one"
            )
        self.described = spec.describe("query")
        self.numerics: str | None = None  # the class of the vectors so far, here or in an earlier run

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Query vectors float32 [q, dim], by a task on the cluster. Raises InputError for another numerics class."""
        for asked, vectors in self._kept:
            if asked is texts:
                return vectors
        cores = node_cores()
        shared = (self.spec, self.described, cores)
        [(_, (vectors, numerics))] = run_tasks(encode_queries, [list(texts)], *shared, num_cpus=cores)
        if self.numerics not in (None, numerics):
            raise InputError(f"questions' vectors are of the numerics class `{self.numerics}`, this worker's are "
                             f"`{numerics}`: go on with the kind of machine that began it")  # fmt: skip
        self.numerics = numerics
        self._kept = [*self._kept, (texts, vectors)][-_ENCODED:]
        return vectors


@dataclass
class DenseRetriever:
    """`exact:EMB`, or `index:NAME`."""

    embeddings: Embeddings
    index: Index | None
    corpus: Corpus
    encoder: QueryEncoder
    dials: dict[str, Any]

    @property
    def source(self) -> str:
        return f"index:{self.index.name}" if self.index else f"exact:{self.embeddings.name}"

    def inputs(self) -> dict[str, Artifact]:
        found = {f"embeddings:{self.embeddings.name}/{n}": g for n, g in enumerate(self.embeddings.generations)}
        found |= {f"{role}:{self.embeddings.name}": artifact for role, artifact in self.encoder.spec.inputs().items()}
        if self.index:
            found |= {f"{self.source}/{n}": g for n, g in enumerate(self.index.generations)}
        return found

    def search(self, texts: Sequence[str], k: int) -> Hits:
        vectors, deleted = self.encoder.encode(texts), self.corpus.deleted
        if self.index is None:
            return search_exact(self.embeddings, vectors, k, deleted)
        return search_dense(self.index, self.embeddings, vectors, k, deleted, **self.dials)


@dataclass
class Fusion:
    """`A+B` by reciprocal rank, `w*A+v*B` by weighted scores."""

    parts: list[Retriever]
    weights: list[float] | None
    dials: dict[str, Any]

    @property
    def source(self) -> str:
        if self.weights is None:
            return "+".join(part.source for part in self.parts)
        weights = [np.format_float_positional(weight, trim="-") for weight in self.weights]
        return "+".join(f"{weight}*{part.source}" for weight, part in zip(weights, self.parts, strict=True))

    def inputs(self) -> dict[str, Artifact]:
        return {role: artifact for part in self.parts for role, artifact in part.inputs().items()}

    def search(self, texts: Sequence[str], k: int) -> Hits:
        found = [part.search(texts, max(k, self.dials["fusion_depth"])) for part in self.parts]
        return reciprocal_rank(found, k) if self.weights is None else weighted(found, k, self.weights)


class Retrievers:
    """Opens sources over one corpus; those over the same embeddings share their question vectors."""

    def __init__(self, store: Store, corpus: Corpus, options: SearchOptions = SearchOptions()):
        self.store, self.corpus, self.options = store, corpus, options
        self._encoders: dict[str, QueryEncoder] = {}

    def numerics(self) -> dict[str, dict[str, str]]:
        """The numerics classes of the questions' vectors so far, as a part's facts: {"questions": {embeddings: class}}.

        Nothing where no source is of vectors.
        """
        found = {name: encoder.numerics for name, encoder in self._encoders.items() if encoder.numerics}
        return {"questions": found} if found else {}

    def pin(self, facts: Mapping[str, Any]) -> None:
        """Go on with the numerics classes of a part that is there already."""
        for name, numerics in facts.get("questions", {}).items():
            if name in self._encoders:
                self._encoders[name].numerics = numerics

    def open(self, source: str) -> Retriever:
        """Raises InputError for what is not in the grammar or the store, or was made from another corpus."""
        pieces = source.split("+")
        if len(pieces) == 1:
            return self._open(source)
        matches = [_WEIGHTED.fullmatch(piece) for piece in pieces]
        if any(matches) and not all(matches):
            raise InputError(f"source {source!r}: give every one of the sources a weight, or none")
        names = [match[2] if match else piece for match, piece in zip(matches, pieces, strict=True)]
        parts = [self._open(name) for name in names]
        if len({part.source for part in parts}) < len(parts):
            raise InputError(f"source {source!r}: a source comes twice")
        weights = [float(match[1]) for match in matches if match] or None
        if weights and not any(weights):
            raise InputError(f"source {source!r}: every weight is 0; give one source more than that")
        dials = {part.source: part.dials for part in parts if part.dials}
        return Fusion(parts, weights, {**dials, "fusion_depth": FUSION_DEPTH})

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
        dials: dict[str, Any] = {}
        if index:
            dials = {"nprobe": self.options.nprobe or index.nprobe, "depth": self.options.depth or index.depth}
        return DenseRetriever(embeddings, index, self.corpus, encoder, dials)


def encode_queries(
    texts: list[str], spec: EncoderSpec, pinned: Mapping[str, Any], threads: int
) -> tuple[np.ndarray, str]:
    """One task: float32 [q, dim], and their numerics class."""
    encoder = _opened(spec, threads)
    check_encoder(spec.config_of(encoder, "query"), pinned)
    return encoder.encode(texts, side="query", task=spec.task), encoder.numerics


_open_encoder: list[tuple[Any, Encoder]] = []  # the last one of this process, for the next block of questions


def _opened(spec: EncoderSpec, threads: int) -> Encoder:
    key = (spec.store.url, spec.folder, spec.options, spec.task, threads)
    if not _open_encoder or _open_encoder[0][0] != key:
        _open_encoder[:] = [(key, spec.open(threads=threads))]
    return _open_encoder[0][1]
