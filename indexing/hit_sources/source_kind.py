"""The interfaces of hit sources and their kinds: names, and how jobs and services open and search sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.corpus.filters import Filter
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.vector_kind import IndexOptions
from riptide.indexing.exact import Hits
from riptide.indexing.exact.score_parts import RowsOfQueries, ScoreParts
from riptide.indexing.hit_sources.online_search import OnlineSearch, SearchTarget
from riptide.indexing.hit_sources.query_encoder import QueryEncoder
from riptide.indexing.hit_sources.search_options import SearchOptions
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.store import Store
from riptide.indexing.work.growth import IndexBuild
from riptide.indexing.work.worker_tasks import Runner


class HitSource(Protocol):
    """The interface of an open source, which finds passages for queries; a single source or a fusion."""

    search_parameters: dict[str, Any]  # search parameters that affect the hits

    @property
    def source_text(self) -> str:
        """The text of the source in the grammar, with all names filled in, such as `index:minilm`."""

    def inputs(self) -> dict[str, Artifact]:
        """Returns role -> artifact for the artifacts that the hits depend on."""

    def search(self, texts: Sequence[str], k: int, runner: Runner, allowed_rows: np.ndarray | None = None) -> Hits:
        """Returns the top k of each query; deleted passages are excluded.

        Args:
            texts: The texts of the queries.
            k: Number of hits per query.
            runner: What spreads the search over workers.
            allowed_rows: Only these rows are hits, int64, ascending, none of them deleted (`Filter.rows`); None: all.
        """


class ExplainedSource(HitSource, Protocol):
    """The interface of an open source of a kind that explains its hits."""

    def explain(self, texts: Sequence[str], rows: RowsOfQueries, runner: Runner) -> list[dict[int, ScoreParts]]:
        """Returns the parts of the scores of passages, by row, for each query.

        Args:
            texts: The texts of the queries.
            rows: The rows of the hits to explain, for each query.
            runner: What encodes the queries.
        """


class SearchContext:
    """The context that the sources of a search share: store, corpus, settings and query encoders.

    Args:
        store: The store.
        corpus: The corpus.
        options: The settings; None: as the artifacts say.
        stays_open: Keep the files of sources open between searches, for many small ones in this process.
    """

    def __init__(self, store: Store, corpus: Corpus, options: SearchOptions | None = None, *, stays_open: bool = False):
        self.store, self.corpus, self.options = store, corpus, options or SearchOptions()
        self.stays_open = stays_open
        self._encoders: dict[str, QueryEncoder[Any]] = {}

    def query_encoder(self, embeddings: EmbeddingsReader) -> QueryEncoder[Any]:
        """Returns the query encoder of embeddings, which all sources over the same embeddings share.

        Raises:
            InputError: If it is not the one that made the embeddings.
        """
        if embeddings.name not in self._encoders:
            self._encoders[embeddings.name] = QueryEncoder(self.store, embeddings, self.options)
        return self._encoders[embeddings.name]

    def numerics(self) -> dict[str, dict[str, str]]:
        """Returns the numerics classes of the query vectors so far, as facts of a part.

        They are {"query_numerics": {embeddings: class}}; empty if no source searches vectors.
        """
        classes = {name: encoder.numerics for name, encoder in self._encoders.items() if encoder.numerics}
        return {"query_numerics": classes} if classes else {}

    def count_cuts(self, queries: slice = slice(None)) -> dict[str, dict[str, dict[str, int]]]:
        """Counts truncated texts among the queries that were searched last, as facts of a part.

        They are {"query_cuts": {embeddings: counts}}; empty if no source searches vectors.

        Args:
            queries: The numbers of the queries to count; by default all.
        """
        counts = {name: encoder.count_cuts(queries).to_dict() for name, encoder in self._encoders.items()}
        return {"query_cuts": counts} if counts else {}

    def describe_broken(self) -> list[str]:
        """Returns a warning for each tokenizer of embeddings that breaks many of the first queries into fragments."""
        from riptide.indexing.embeddings.corpus_encoding import describe_broken_texts

        warnings = [
            describe_broken_texts(
                f"the tokenizer of embeddings/{name}", len(broken), encoder.num_sampled, "query", broken[0]
            )
            for name, encoder in self._encoders.items()
            if (broken := encoder.broken_queries)
        ]
        return list(filter(None, warnings))

    def query_length_limit(self, embeddings: str) -> int | None:
        """Returns the maximum sequence length of queries for embeddings; None if the encoder has no maximum."""
        return self._encoders[embeddings].spec.length_limit("query")

    def pin(self, facts: Mapping[str, Any]) -> None:
        """Sets the numerics classes that a committed part records, which later query vectors must have."""
        for name, numerics in facts.get("query_numerics", {}).items():
            if name in self._encoders:
                self._encoders[name].numerics = numerics


class IndexReader(Protocol):
    """The interface that a source needs from the reader of an index of vectors."""

    name: str
    generations: list[Artifact]


Reader = TypeVar("Reader", bound=EmbeddingsReader)
Index = TypeVar("Index", bound=IndexReader | None)


@dataclass
class VectorSource(Generic[Reader, Index]):
    """Base class of hit sources that search with query vectors.

    Attributes:
        index_kind: The name of the kind of source that searches the index.
        embeddings: The embeddings that are searched.
        index: The index over them; None: every vector is scored.
        corpus: The corpus, for its deleted rows.
        encoder: Encodes the queries.
        search_parameters: Arguments of the search that change its hits, for the configuration of a run.
    """

    embeddings: Reader
    index: Index
    corpus: Corpus
    encoder: QueryEncoder[Any]
    search_parameters: dict[str, Any] = field(default_factory=dict)

    index_kind: ClassVar[str]

    @property
    def source_text(self) -> str:
        return f"exact:{self.embeddings.name}" if self.index is None else f"{self.index_kind}:{self.index.name}"

    def inputs(self) -> dict[str, Artifact]:
        embeddings = self.embeddings
        inputs = {f"embeddings:{embeddings.name}/{n}": made for n, made in enumerate(embeddings.generations)}
        inputs |= {f"{role}:{embeddings.name}": artifact for role, artifact in self.encoder.spec.inputs().items()}
        if self.index is not None:
            inputs |= {f"{self.source_text}/{n}": made for n, made in enumerate(self.index.generations)}
        return inputs


class SourceKind(ABC):
    """Base class of a kind of hit source: how its sources are named, how jobs open and services search them.

    A new kind is a module with a subclass, and its entry in `riptide.indexing.hit_sources.registry`.

    Attributes:
        name: The word before the colon in the grammar.
        forms: The forms of the grammar that name its sources, as help and errors show them.
        label: The word that stands for it in the names of runs.
        queries: What it searches with: the texts of queries, or the vectors of the task's encoder.
        options: The fields of SearchOptions that change its hits.
        explains: Whether its open sources, and its searchers in a service, explain their hits (`explain`).
        online: The part of a service that searches its sources.
    """

    name: ClassVar[str]
    forms: ClassVar[tuple[str, ...]]
    label: ClassVar[str]
    queries: ClassVar[Literal["texts", "vectors"]]
    options: ClassVar[frozenset[str]] = frozenset()
    explains: ClassVar[bool] = False
    online: ClassVar[OnlineSearch]

    def allows_name(self, name: str) -> bool:
        """Returns whether the grammar allows this name after the kind; "" means the kind without a name."""
        return bool(name)

    def source_text(self, name: str) -> str:
        """Returns the shortest text of a source in the grammar, such as `index:minilm` for the name minilm."""
        return f"{self.name}:{name}"

    @abstractmethod
    def open(self, context: SearchContext, name: str) -> HitSource:
        """Opens a source for a job.

        Args:
            context: What the sources of the search share.
            name: The name in the grammar, which `allows_name` accepts.

        Raises:
            InputError: If the store lacks an artifact, or if it belongs to another corpus.
        """

    def search_target(self, name: str, *, embeddings: str | None, index: str | None) -> SearchTarget:
        """Returns the target that a service opens for a source; sources with the same target share a searcher.

        Args:
            name: The name in the grammar.
            embeddings: The dense embeddings of the task; None: it has none.
            index: The index over them; None: it has none.
        """
        return (name,)

    def search_online(
        self, searcher: Any, queries: Any, k: int, filter: Filter | None, effort: int | None = None
    ) -> Hits:
        """Searches an open searcher of a service and returns the top k of each query.

        Args:
            searcher: What `online.open` returned.
            queries: Texts, or vectors float32 [q, dim], as `queries` of the kind says.
            k: Number of hits per query.
            filter: Only passages that match are hits; None: no filter.
            effort: Search effort (nprobe or efSearch) of a FAISS index, which other kinds ignore; None: the one that
                its build measured.
        """
        hits: Hits = searcher.search(queries, k, filter)
        return hits

    def explain_online(
        self, searcher: Any, queries: Any, rows: RowsOfQueries, effort: int | None = None
    ) -> list[dict[int, ScoreParts]]:
        """Returns the parts of the scores of those passages that a searcher of a service holds, by row.

        Args:
            searcher: What `online.open` returned.
            queries, effort: As for `search_online`.
            rows: The rows of the hits, for each query.
        """
        scores: list[dict[int, ScoreParts]] = searcher.explain(queries, rows)
        return scores


def check_explains(sources: Iterable[tuple[SourceKind, str]]) -> None:
    """Raises InputError if the kind of a source, given with its name, cannot explain hits."""
    for kind, name in sources:
        if not kind.explains:
            raise InputError(
                f"the source {kind.source_text(name)} cannot explain its hits: leave {Parameter('explain')} out"
            )


class IndexKind(SourceKind):
    """Base class of kinds of hit source that search index/NAME, built over embeddings of one kind of vector.

    Attributes:
        reader: What reads the embeddings.
        summary: What such an index is, in messages.
        unshaped: Why only the number of shards shapes such an index, as a clause about the vectors in messages; empty:
            all IndexOptions shape it.
    """

    reader: ClassVar[type[EmbeddingsReader]]
    summary: ClassVar[str]
    unshaped: ClassVar[str] = ""

    @abstractmethod
    def is_index(self, config: Mapping[str, Any]) -> bool:
        """Returns whether the kind can search an index with this configuration."""

    @abstractmethod
    def build(self, store: Store, embeddings: Any, name: str, options: IndexOptions) -> IndexBuild:
        """Returns the work, plan and report by which a job builds index/NAME, or its next generation.

        Args:
            store: The store.
            embeddings: What `reader` opened.
            name: The name of the index.
            options: The options of the index; only the number of shards if `unshaped` says so.

        Raises:
            InputError: If the existing generations were built from other embeddings, or with other options.
        """

    def config_of(self, store: Store, name: str) -> dict[str, Any]:
        """Returns the configuration of index/NAME."""
        return store.generations("index", store.only_name("index", name))[-1].config
