"""Where the parts of a service are: each behind a call whose answer may still be on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class LostError(Exception):
    """A part did not answer: what it ran on is gone, or cannot be reached."""


class Reply(Protocol):
    """An answer that may still be on its way."""

    def result(self, timeout_s: float | None = None) -> Any:
        """Raises TimeoutError, LostError, or what the part raised."""


class Place(Protocol):
    """A part, here or elsewhere."""

    def call(self, method: str, *arguments: Any) -> Reply: ...


class Here:
    """A part in this process: it has answered when `call` returns."""

    def __init__(self, part: Any):
        self.part = part

    def call(self, method: str, *arguments: Any) -> Reply:
        try:
            return _Done(getattr(self.part, method)(*arguments), None)
        except Exception as error:
            return _Done(None, error)


@dataclass(frozen=True)
class _Done:
    value: Any
    error: Exception | None

    def result(self, timeout_s: float | None = None) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True)
class Places:
    """Where the parts of a service are. words, reranker: None where there are none."""

    encoder: Place
    shards: Sequence[Place]
    passages: Place
    words: Place | None = None
    reranker: Place | None = None
