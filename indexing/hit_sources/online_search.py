"""The interface by which a service opens the sources of a release once, and searches them for query batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.hit_sources.query_encoder import QueryEncoder
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowRange
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store

PROBE = "what is a prompt?"  # the query with which a service checks its searchers, encoders and prompts

SearchTarget = tuple[str | None, ...]  # names of artifacts that one searcher searches; the kind defines their meaning
Files = Iterable[tuple[Artifact | Draft, ArtifactPart]]


@dataclass(frozen=True)
class PinnedArtifacts:
    """Opens the artifacts of a release and checks them against the fingerprints in the release.

    Attributes:
        store: The store.
        corpus: The corpus.
        generations: Returns the generations of an artifact by its kind and name; one for an artifact without
            generations.
    """

    store: Store
    corpus: Corpus
    generations: Callable[[str, str], list[Artifact]]


@dataclass(frozen=True)
class SearcherScope:
    """The rows and the threads of a searcher.

    Attributes:
        rows: The rows whose shards and segments it searches.
        threads: Threads of one call; None: one for each core.
    """

    rows: RowRange
    threads: int | None


class OnlineSearch(ABC):
    """Base class of the parts of a service that each search the sources of one or several kinds.

    Attributes:
        name: Its name in /readyz, in errors and, for modes, in the scores of hits.
        encodes: Whether its targets have an encoder of queries (`encoder`).
    """

    name: ClassVar[str]
    encodes: ClassVar[bool] = False

    @abstractmethod
    def artifacts(self, target: SearchTarget) -> list[tuple[str, str]]:
        """Returns (kind, name) of each artifact that a target needs, besides the corpus and the encoder."""

    @abstractmethod
    def read(self, target: SearchTarget, pinned: PinnedArtifacts) -> Any:
        """Opens readers of a target's artifacts. Raises InputError if these do not belong to the corpus."""

    def encoder(self, readers: Any) -> QueryEncoder[Any]:
        """Returns the encoder of a target's queries; the searcher receives its vectors instead of texts.

        readers: What `read` returned.
        """
        raise NotImplementedError

    @abstractmethod
    def open(self, readers: Any, corpus: Corpus, scope: SearcherScope) -> Any:
        """Opens a searcher of a target, which `SourceKind.search_online` uses.

        Args:
            readers: What `read` returned.
            corpus: The corpus.
            scope: Its rows and threads.
        """

    def files(self, readers: Any, scope: SearcherScope) -> Sequence[Files]:
        """Returns the files that searches of a target read, in groups by descending importance."""
        return []

    @abstractmethod
    def probe(self, searcher: Any) -> None:
        """Runs a small search, to check that a searcher can read its files."""
