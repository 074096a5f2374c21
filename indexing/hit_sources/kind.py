"""The interface of a kind of hit source: its names, and how a job and a service open and search its sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from indexing.corpus.corpus import Corpus
from indexing.corpus.filters import Filter
from indexing.exact import Hits
from indexing.hit_sources.online import OnlineSearch, Target
from indexing.hit_sources.options import SearchOptions
from indexing.store.artifact import Artifact
from indexing.store.store import Store
from indexing.work.tasks import Runner
from retriever.cuts import Cuts


class HitSource(Protocol):
    """Finds passages for queries. One object of a kind, or a fusion of several."""

    search_parameters: dict[str, Any]  # search parameters that shape its hits

    @property
    def source(self) -> str:
        """Returns its name in the grammar, with all names filled in."""

    def inputs(self) -> dict[str, Artifact]:
        """Returns the artifacts that its hits depend on, by role."""

    def search(self, texts: Sequence[str], k: int, runner: Runner) -> Hits:
        """Returns the top k of each query; deleted passages are excluded."""


class PinnedNumerics(Protocol):
    """Something that encodes queries. numerics: the class of its vectors so far, here or in an earlier run."""

    numerics: str | None

    def cuts(self, queries: slice) -> Cuts:
        """Returns how many of the queries that were encoded last were cut, of those with some numbers."""

    def longest(self) -> int | None:
        """Returns the largest length limit of queries that the encoder allows; None: any."""


QueryEncoding = TypeVar("QueryEncoding", bound=PinnedNumerics)


class SearchContext:
    """What the sources of one search share: the store, the corpus, the settings, and the encoders of the queries."""

    def __init__(self, store: Store, corpus: Corpus, options: SearchOptions | None = None):
        self.store, self.corpus, self.options = store, corpus, options or SearchOptions()
        self._encoders: dict[str, Any] = {}

    def query_encoder(self, embeddings: str, open: Callable[[], QueryEncoding]) -> QueryEncoding:
        """Returns the encoder of queries for some embeddings, which all sources over these embeddings share.

        Args:
            embeddings: Name of the embeddings.
            open: Opens the encoder; called for the first source over the embeddings.
        """
        if embeddings not in self._encoders:
            self._encoders[embeddings] = open()
        encoder: QueryEncoding = self._encoders[embeddings]
        return encoder

    def numerics(self) -> dict[str, dict[str, str]]:
        """Returns the numerics classes of the queries' vectors so far, as facts of a part.

        They are {"query_numerics": {embeddings: class}}; empty if no source searches vectors.
        """
        classes = {name: encoder.numerics for name, encoder in self._encoders.items() if encoder.numerics}
        return {"query_numerics": classes} if classes else {}

    def cuts(self, queries: slice = slice(None)) -> dict[str, dict[str, dict[str, int]]]:
        """Returns how many of the queries that were searched last were cut, as facts of a part.

        They are {"query_cuts": {embeddings: counts}}; empty if no source searches vectors.

        Args:
            queries: The numbers of the queries to count; by default all.
        """
        counts = {name: encoder.cuts(queries).stored() for name, encoder in self._encoders.items()}
        return {"query_cuts": counts} if counts else {}

    def longest_query(self, embeddings: str) -> int | None:
        """Returns the largest length limit of the queries of some embeddings; None: their encoder allows any."""
        longest: int | None = self._encoders[embeddings].longest()
        return longest

    def pin(self, facts: Mapping[str, Any]) -> None:
        """Pins the numerics classes of a committed part."""
        for name, numerics in facts.get("query_numerics", {}).items():
            if name in self._encoders:
                self._encoders[name].numerics = numerics


class ServedNames(Protocol):
    """The artifacts that a task of a service names. None: the task has none of that kind."""

    @property
    def embeddings(self) -> str | None: ...

    @property
    def index(self) -> str | None: ...


class SourceKind(ABC):
    """A kind of hit source: how its sources are named, how a job opens one, and how a service searches one.

    A new kind is a module with a subclass, and its entry in `indexing.hit_sources.registry`.

    Attributes:
        name: The word before the colon in the grammar.
        forms: The forms of the grammar that name its sources, as help and errors show them.
        label: The word that stands for it in the names of runs.
        queries: What it searches with: the texts of queries, or the vectors of the task's encoder.
        options: The fields of SearchOptions that change its hits.
        online: The part of a service that searches its sources.
    """

    name: ClassVar[str]
    forms: ClassVar[tuple[str, ...]]
    label: ClassVar[str]
    queries: ClassVar[Literal["texts", "vectors"]]
    options: ClassVar[frozenset[str]] = frozenset()
    online: ClassVar[OnlineSearch]

    def accepts(self, name: str) -> bool:
        """Returns whether the grammar allows a name after the kind; empty: the kind stands alone."""
        return bool(name)

    def text(self, name: str) -> str:
        """Returns the source of a name in the grammar, in its shortest form."""
        return f"{self.name}:{name}"

    @abstractmethod
    def open(self, context: SearchContext, name: str) -> HitSource:
        """Opens a source for a job.

        Args:
            context: What the sources of the search share.
            name: The name in the grammar, which `accepts` allows.

        Raises:
            InputError: If the store lacks an artifact, or if it belongs to another corpus.
        """

    def target(self, name: str, task: ServedNames) -> Target:
        """Returns what the service opens for a source of a task; sources with the same target share a searcher.

        Args:
            name: The name in the grammar.
            task: The other artifacts of the task.
        """
        return (name,)

    def search_online(self, searcher: Any, queries: Any, k: int, filter: Filter | None) -> Hits:
        """Returns the top k of each query in a searcher that the service has opened.

        Args:
            searcher: What `online.open` returned.
            queries: Texts, or vectors float32 [q, dim], as `queries` of the kind says.
            k: Number of hits per query.
            filter: Only passages that match are hits; None: no filter.
        """
        hits: Hits = searcher.search(queries, k, filter)
        return hits
