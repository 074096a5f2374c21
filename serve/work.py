"""What waits in a service's queues, and how a batch of it is answered, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import orjson

from retriever.cuts import Cuts
from serve.engine import Answer, Engine, Query, finite, unusable
from serve.release import Release

Item = TypeVar("Item")


class Vectors(NamedTuple):
    """Texts that become vectors together."""

    release: Release
    texts: list[str]
    task: str
    side: str
    deadline: float


class Pairs(NamedTuple):
    """A question and documents that are judged by the re-ranker."""

    release: Release
    query: str
    documents: list[str]
    deadline: float


class Asked(NamedTuple):
    """A question, pinned to a release."""

    release: Release
    query: Query


def search_all(engine: Engine, asked: Sequence[Asked]) -> list[Answer]:
    """Answers the queries of each release together and writes the JSON of each answer."""
    answers: list[Answer] = [Answer()] * len(asked)
    for members in _alike(asked, lambda one: one.release.id):
        release = asked[members[0]].release
        found = engine.search(release, [asked[number].query for number in members])
        for number, answer in zip(members, found, strict=True):
            if answer.error is None:
                answer.json = _json(asked[number].query.text, answer)
            answers[number] = answer
    return answers


def embed_all(engine: Engine, asked: Sequence[Vectors]) -> list[tuple[np.ndarray, Cuts] | Exception]:
    """Requests of one release and side are encoded together; one with a text that cannot be used fails alone."""
    found: list[tuple[np.ndarray, Cuts] | Exception] = [(np.empty(0), Cuts())] * len(asked)
    for members in _alike(asked, lambda one: (one.release.id, one.side)):
        release, side = asked[members[0]].release, asked[members[0]].side
        texts = [text for number in members for text in asked[number].texts]
        tasks = [asked[number].task for number in members for _ in asked[number].texts]
        deadline = max(asked[number].deadline for number in members)
        vectors, lengths, num_cut, refused = engine.embed(release, texts, tasks, side, deadline)
        ends = np.cumsum([len(asked[number].texts) for number in members])
        starts = [0, *ends[:-1].tolist()]
        split = (np.split(column, ends[:-1]) for column in (vectors, lengths, num_cut))
        for number, start, rows, own_lengths, own_cut in zip(members, starts, *split, strict=True):
            found[number] = rows, Cuts.of(own_lengths, own_cut)
            if len(bad := np.flatnonzero(~finite(rows))):
                found[number] = unusable(asked[number].task, refused.get(start + int(bad[0])), int(bad[0]))
    return found


def rerank_all(engine: Engine, asked: Sequence[Pairs]) -> list[np.ndarray]:
    """The pairs of all requests of a release are scored together."""
    found: list[np.ndarray] = [np.empty(0)] * len(asked)
    for members in _alike(asked, lambda one: one.release.id):
        questions = [asked[number].query for number in members for _ in asked[number].documents]
        texts = [text for number in members for text in asked[number].documents]
        deadline = max(asked[number].deadline for number in members)
        scores = engine.rerank(asked[members[0]].release, questions, [""] * len(texts), texts, deadline)
        ends = np.cumsum([len(asked[number].documents) for number in members])[:-1]
        for number, share in zip(members, np.split(scores, ends), strict=True):
            found[number] = share
    return found


def _json(text: str, answer: Answer) -> bytes:
    """Returns the result of a query in the response of a search (`protocol.ResultOut`)."""
    shards = answer.shards
    hits = [
        {
            "id": hit.id,
            "rank": rank,
            "score": hit.score,
            "title": hit.title,
            "text": hit.text,
            "metadata": orjson.Fragment(hit.metadata) if hit.metadata else None,
            "scores": hit.scores,
        }
        for rank, hit in enumerate(answer.hits, 1)
    ]
    counts = {
        "total": shards.total,
        "successful": shards.successful,
        "failed": shards.failed,
        "timed_out": shards.timed_out,
    }
    return orjson.dumps({"query": text, "hits": hits, "shards": counts})


def _alike(asked: Sequence[Item], key: Callable[[Item], object]) -> list[list[int]]:
    """The places of items with the same key."""
    groups: dict[object, list[int]] = {}
    for number, one in enumerate(asked):
        groups.setdefault(key(one), []).append(number)
    return list(groups.values())
