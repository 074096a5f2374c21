"""Clients of parts in this process: a call returns when the part has answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from serve.calls.protocols import (
    Encoded,
    EncodeRequest,
    Passage,
    PassagesRequest,
    Reply,
    ScoreRequest,
    SourceHits,
    SourceRequest,
)

if TYPE_CHECKING:
    from serve.parts import EncoderPart, PassagesPart, RerankPart, SourcePart

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True)
class DirectEncoder:
    """Client of an encoder."""

    part: EncoderPart

    def encode(self, request: EncodeRequest) -> Reply[Encoded]:
        return _answered(self.part.encode, request)

    def describe(self, release: str) -> Reply[dict[str, Any]]:
        return _answered(self.part.describe, release)


@dataclass(frozen=True)
class DirectSearcher:
    """Client of a shard that searches sources."""

    part: SourcePart

    def search(self, request: SourceRequest) -> Reply[SourceHits]:
        return _answered(self.part.search, request)


@dataclass(frozen=True)
class DirectPassages:
    """Client of the passages."""

    part: PassagesPart

    def fetch(self, request: PassagesRequest) -> Reply[list[Passage]]:
        return _answered(self.part.fetch, request)


@dataclass(frozen=True)
class DirectReranker:
    """Client of a re-ranker."""

    part: RerankPart

    def score(self, request: ScoreRequest) -> Reply[np.ndarray]:
        return _answered(self.part.score, request)


@dataclass(frozen=True)
class _Answer(Generic[Result]):
    value: Result | None
    error: Exception | None = None

    def result(self, timeout_s: float | None = None) -> Result:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def _answered(method: Callable[[Request], Result], request: Request) -> Reply[Result]:
    """Calls a method of a part; its exception is raised when the reply is read, as by a part elsewhere."""
    try:
        return _Answer(method(request))
    except Exception as error:
        return _Answer(None, error)
