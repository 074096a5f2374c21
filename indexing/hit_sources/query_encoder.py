"""Encodes the queries of a search with the encoder that made the embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from riptide.base.cuts import Cuts
from riptide.base.errors import InputError
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.embeddings.vector_kind import VectorKind
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import ALL_CORES, Allocation, Report, Runner, WorkerResources, ignore_progress

if TYPE_CHECKING:
    from riptide.retriever.forward.batching import Tokens

Vectors = TypeVar("Vectors")  # vectors of queries: float32 [q, dim] if the embeddings are dense

SAMPLE = 300  # queries with which a search checks that the tokenizer suits their language
_RECENT = 2  # blocks of queries whose vectors are cached, for sources over the same embeddings


class SelectedTexts(list[str]):
    """A selection of a list of queries. The whole list is encoded once, even if several selections are searched.

    Args:
        whole: The list.
        numbers: The numbers of the selected queries, int64 [n].
    """

    def __init__(self, whole: Sequence[str], numbers: np.ndarray):
        super().__init__(whole[number] for number in numbers.tolist())
        self.whole, self.numbers = whole, numbers


def select_queries(queries: Any, numbers: np.ndarray) -> Any:
    """Selects queries, which are a list of texts, vectors [q, dim] or sparse vectors, by numbers: int64 [n]."""
    if isinstance(queries, list):
        return [queries[number] for number in numbers.tolist()]
    return queries[numbers] if isinstance(queries, np.ndarray) else queries.take(numbers)


class QueryEncoder(Generic[Vectors]):
    """Encodes queries with the encoder of embeddings, and caches the latest vectors.

    Raises:
        InputError: If the encoder is not the one that made the embeddings.
    """

    def __init__(self, store: Store, embeddings: EmbeddingsReader, options: SearchOptions):
        self.embeddings = embeddings
        spec = embeddings.encoder_spec(store, encoder=options.encoder, task=options.task)
        self.spec = replace(spec, options=replace(spec.options, compile="never"))
        self._recent: list[tuple[Sequence[str], Vectors]] = []
        self.encoder_settings = spec.settings("query")
        self.numerics: str | None = None  # numerics class of the vectors so far, in this or an earlier run
        self._tokens: Tokens | None = None  # tokens of the queries that were encoded last
        self.num_sampled = 0  # number of checked queries: the first ones, at most SAMPLE
        self.broken_queries: list[str] = []  # checked queries that the tokenizer breaks into fragments
        self.task = EncodeQueriesTask(self.spec, embeddings.kind, self.encoder_settings, SAMPLE)

    def encode(self, texts: Sequence[str], runner: Runner) -> Vectors:
        """Encodes queries on a worker. Raises InputError if the numerics class differs from that of earlier vectors."""
        if isinstance(texts, SelectedTexts):
            selected: Vectors = select_queries(self.encode(texts.whole, runner), texts.numbers)
            return selected
        for recent_texts, vectors in self._recent:
            if recent_texts is texts:
                return vectors
        [(_, (vectors, numerics, tokens, is_broken))] = runner.run(self.task, [list(texts)])
        if self.numerics not in (None, numerics):
            raise InputError(
                f"the queries' vectors are of the numerics class `{self.numerics}`, this worker's are `{numerics}`: "
                "resume on the kind of machine that began it"
            )
        self.numerics, self._tokens = numerics, tokens
        if not self.num_sampled:
            self.num_sampled = len(is_broken)
            self.broken_queries = [texts[number] for number in np.flatnonzero(is_broken).tolist()]
        self._recent = [*self._recent, (texts, vectors)][-_RECENT:]
        return vectors

    @functools.cached_property
    def vocabulary(self) -> dict[int, str]:
        """The tokens of the encoder of queries by their numbers; empty if it has no tokenizer.json."""
        from tokenizers import Tokenizer

        from riptide.retriever.model.model_folder import find_model_folder

        file = find_model_folder(self.spec.folder_of("query")) / "tokenizer.json"
        if not file.exists():
            return {}
        return {number: token for token, number in Tokenizer.from_file(str(file)).get_vocab().items()}

    @property
    def key(self) -> tuple[object, ...]:
        """The identity of the encoder; embeddings whose encoders have equal keys can share one encoder."""
        spec = self.spec
        return (
            spec.store.url,
            spec.name,
            spec.task,
            repr(spec.options),
            spec.numerics,
            fingerprint_of(self.encoder_settings),
        )

    def open(self, allocation: Allocation) -> Callable[[Sequence[str]], Vectors]:
        """Opens the encoder in this process, and returns a function that encodes queries.

        Raises InputError if the encoder on this node is not the expected one. The function raises TextsError for texts
        that it cannot encode.
        """
        encode = replace(self.task, sample=0).open(allocation)

        def vectors(texts: Sequence[str]) -> Vectors:
            result: Vectors = encode(list(texts), ignore_progress)[0]
            return result

        return vectors

    def count_cuts(self, queries: slice = slice(None)) -> Cuts:
        """Counts truncated texts among the queries that were encoded last; queries: their numbers, by default all."""
        return Cuts() if self._tokens is None else self._tokens.count_cuts(queries)


@dataclass(frozen=True)
class EncodeQueriesTask:
    """The task that encodes queries; returns vectors, numerics class, tokens, and which first queries are broken.

    kind: of the vectors. pinned: the encoder's description. sample: number of queries that are checked.
    """

    spec: EncoderSpec
    kind: VectorKind
    pinned: Mapping[str, Any]
    sample: int
    resources: WorkerResources = ALL_CORES
    stays_open: bool = True

    def open(self, allocation: Allocation) -> Callable[[list[str], Report], tuple[Any, str, Tokens, np.ndarray]]:
        """Returns the function that encodes queries. Raises InputError if the encoder is not the pinned one."""
        from riptide.indexing.embeddings.corpus_encoding import check_encoder

        base_encoder = self.spec.open(side="query", device=allocation.device, threads=allocation.cores)
        check_encoder(self.spec.config_of(base_encoder, "query"), self.pinned)
        encoder = self.kind.query_encoder(base_encoder)

        def encode(texts: list[str], report: Report) -> tuple[Any, str, Tokens, np.ndarray]:
            tokens = base_encoder.tokenize(texts, side="query")
            topics = base_encoder.topics_of(texts, side="query", task=self.spec.task)
            vectors = encoder.forward(tokens, side="query", task=self.spec.task, topics=topics)
            is_broken = base_encoder.broken_texts(tokens)[: self.sample] if self.sample else np.zeros(0, bool)
            return vectors, base_encoder.numerics, tokens, is_broken

        return encode
