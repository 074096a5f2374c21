"""What the engine of a service is asked, and its answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from retriever.options import Side
from serve.release.release import Release
from serve.release.tasks import Search, Task


@dataclass(frozen=True)
class Query:
    """One query to one release.

    Attributes:
        release: The release that answers.
        text: The query's text.
        task: A task of the release.
        k: Number of hits to return.
        search: The sources to search.
        deadline: Wall-clock time in seconds (time.time()).
        filter: The text of a Filter; None: no filter.
        rerank: Number of first hits to re-rank; 0: none.
        partial: Whether an answer without some of the shards is allowed.
    """

    release: Release
    text: str
    task: Task
    k: int
    search: Search
    deadline: float
    filter: str | None = None
    rerank: int = 0
    partial: bool = False


class Hit(NamedTuple):
    """One hit with its passage. scores: by source that found it, and the re-ranker's score.

    metadata: JSON text.
    """

    row: int
    id: str
    title: str
    text: str
    metadata: str
    score: float
    scores: dict[str, float]


class Shards(NamedTuple):
    """Number of searchers that a query was sent to, and how many of them answered, failed or timed out."""

    total: int = 0
    successful: int = 0
    failed: int = 0
    timed_out: int = 0


@dataclass
class Answer:
    """The answer to one query.

    Attributes:
        hits: Hits, best first.
        shards: How many searchers answered.
        took: Seconds by stage, for the whole batch.
        error: The exception, if there is no answer.
        json: The result in the response to a request, as bytes.
    """

    hits: list[Hit] = field(default_factory=list)
    shards: Shards = field(default_factory=Shards)
    took: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None
    json: bytes = b""


class Texts(NamedTuple):
    """The texts of one request, whose vectors are computed together."""

    release: Release
    texts: list[str]
    task: str
    side: Side
    deadline: float


class Pairs(NamedTuple):
    """The query and the documents of one request, which the re-ranker scores."""

    release: Release
    query: str
    documents: list[str]
    deadline: float
