"""The requests to the parts of a service and their results, and the clients of parts here or elsewhere.

All requests and results are plain arrays, strings and numbers, so they can be sent to another process. A deadline is a
wall-clock time in seconds (time.time()); None: no deadline. A client returns a Reply at once, so that several parts
work at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from indexing.exact import Hits
from indexing.hit_sources.online import Target

Result = TypeVar("Result", covariant=True)
Passage = tuple[int, str, str, str, str]  # row, id, title, text, metadata as JSON


class LostError(Exception):
    """A part did not answer: its replica or its node is gone, or cannot be reached."""


class Reply(Protocol[Result]):
    """A result that may be pending."""

    def result(self, timeout_s: float | None = None) -> Result:
        """Returns the result. Raises TimeoutError, LostError, or the exception of the part."""


@dataclass(frozen=True)
class EncodeRequest:
    """Texts to encode with the prompts of their tasks.

    Attributes:
        release: Id of the release.
        texts: The texts.
        tasks: Name of the task per text.
        side: "query" or "passage".
        deadline: Wall-clock time in seconds.
    """

    release: str
    texts: Sequence[str]
    tasks: Sequence[str]
    side: str = "query"
    deadline: float | None = None


class Encoded(NamedTuple):
    """Vectors of texts.

    Attributes:
        vectors: float32 [n, dim]; a text that the encoder cannot use has one that is not finite.
        lengths: Tokens of each text, [n].
        num_cut: Tokens that were cut off each text, which was longer than the encoder reads, [n].
        refused: What a text lacks that has no words by which its prompt is found, by its number in the request.
    """

    vectors: np.ndarray
    lengths: np.ndarray
    num_cut: np.ndarray
    refused: dict[int, str]


@dataclass(frozen=True)
class SourceRequest:
    """Queries to a source.

    Attributes:
        release: Id of the release.
        kind: Name of the source's kind.
        target: The target of the source, which its part has opened.
        queries: Texts, or vectors float32 [q, dim], as `SourceKind.queries` says.
        k: Number of hits per query.
        filter: The text of a Filter; None: no filter.
        deadline: Wall-clock time in seconds.
    """

    release: str
    kind: str
    target: Target
    queries: Sequence[str] | np.ndarray
    k: int
    filter: str | None = None
    deadline: float | None = None


class SourceHits(NamedTuple):
    """Hits of a source.

    Attributes:
        hits: The hits of each query; none of a query that is refused.
        refused: Why a query cannot be answered, by its number in the request.
    """

    hits: Hits
    refused: dict[int, str]


@dataclass(frozen=True)
class PassagesRequest:
    """Passages to look up. rows: int64 [n]."""

    release: str
    rows: np.ndarray
    deadline: float | None = None


@dataclass(frozen=True)
class ScoreRequest:
    """Pairs of a query and a passage to score: the query, the title and the text of each pair."""

    release: str
    queries: Sequence[str]
    titles: Sequence[str]
    texts: Sequence[str]
    deadline: float | None = None


class EncoderClient(Protocol):
    """The encoder of a service."""

    def encode(self, request: EncodeRequest) -> Reply[Encoded]: ...

    def describe(self, release: str) -> Reply[dict[str, Any]]:
        """Returns {"dim", "similarity", "numerics"} of the vectors."""


class SearcherClient(Protocol):
    """One shard of a part that searches sources."""

    def search(self, request: SourceRequest) -> Reply[SourceHits]: ...


class PassagesClient(Protocol):
    """The passages of a service."""

    def fetch(self, request: PassagesRequest) -> Reply[list[Passage]]: ...


class RerankerClient(Protocol):
    """The re-ranker of a service."""

    def score(self, request: ScoreRequest) -> Reply[np.ndarray]:
        """Returns the probability of each pair, float32 [n]."""


@dataclass(frozen=True)
class Clients:
    """The parts of a service.

    Attributes:
        encoder: The encoder; None: the service has none.
        searchers: The shards of each part that searches sources, by the name of the part.
        passages: The passages.
        reranker: The re-ranker; None: the service has none.
    """

    encoder: EncoderClient | None
    searchers: Mapping[str, Sequence[SearcherClient]]
    passages: PassagesClient
    reranker: RerankerClient | None = None


class PartControl(Protocol):
    """All replicas of a part, as a service opens, checks and closes releases in them. All methods block."""

    def prepare(self, release_id: str) -> None:
        """Opens a release. Raises InputError if an artifact is missing, or is not that of the release."""

    def retire(self, release_id: str) -> None:
        """Closes a release."""

    def check(self, release_id: str) -> None:
        """Checks the files of a release, and answers a small request from them. Raises StoreError."""

    def read(self, release_id: str, budget: int | None, seconds: float) -> int:
        """Reads the files of a release into memory, as far as `budget` bytes and `seconds` allow; returns the bytes."""
