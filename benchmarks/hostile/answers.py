"""Computes the expected answers of a server independently of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder
from riptide.serve.release.release import Release

TOLERANCE = 1e-3  # relative: stored vectors are rounded to float16, and the last bits of a vector depend on its batch


class Answers:
    """The expected answers of a store that grows.

    Attributes:
        queries: The texts of the queries.
        alive: The ids of the passages after each generation of the corpus, in order. Add to it before a generation.
        num_checked: Number of answers that were compared.

    Args:
        store: The store, whose releases say which generation of the corpus they have.
        encoder: An encoder with all tasks.
        documents: All passages that the store will ever have, as in BEIR.
        queries: The queries.
        tasks: The names of the tasks.
        alive: The ids of the passages of the first generation.
    """

    def __init__(
        self,
        store: Store,
        encoder: Encoder,
        documents: Sequence[Mapping[str, Any]],
        queries: Sequence[str],
        tasks: Sequence[str],
        alive: frozenset[str],
    ):
        self._store, self.queries, self.alive, self.num_checked = store, list(queries), [alive], 0
        self._ids = np.array([document["_id"] for document in documents])
        self._number = {id: number for number, id in enumerate(self._ids.tolist())}
        self._texts = {document["_id"]: document["text"] for document in documents}
        titles, texts = ([document[field] for document in documents] for field in ("title", "text"))
        vectors = encoder.encode(encoder.compose(titles, texts), side="passage")
        self._scores = {
            (task, query): vectors @ vector
            for task in tasks
            for query, vector in zip(self.queries, _vectors(encoder, self.queries, task), strict=True)
        }
        self._generations: dict[str, int] = {}
        self._first_answers: dict[tuple[object, ...], dict[str, float]] = {}
        self._lock = threading.Lock()

    def problem_of(self, query: str, mode: str, answer: Mapping[str, Any]) -> str | None:
        """Returns the difference of an answer to a search from the expected one; None: they are equal."""
        alive = self.alive[self._generation(answer["release"])]
        hits, task = answer["results"][0]["hits"], answer["task"]
        with self._lock:
            self.num_checked += 1
        if gone := [hit["id"] for hit in hits if hit["id"] not in alive]:
            return f"passages that the release does not have: {gone}"
        if wrong := [hit["id"] for hit in hits if hit["text"] != self._texts[hit["id"]]]:
            return f"texts of other passages: {wrong}"
        if mode != "exact":
            return self._difference_from_first((query, mode, task if mode == "hybrid" else None, alive), hits)
        scores = self._scores[task, query]
        for hit in hits:
            right = float(scores[self._number[hit["id"]]])
            if not _is_near(hit["score"], right):
                return f"{hit['id']} has the score {hit['score']}, expected {right}"
        hit_ids = {hit["id"] for hit in hits}
        order = np.argsort(-scores, kind="stable")
        best = next(number for number in order if self._ids[number] in alive and self._ids[number] not in hit_ids)
        if len(hits) != 10:
            return f"{len(hits)} hits, expected 10"
        last = hits[-1]["score"]
        if scores[best] > last and not _is_near(scores[best], last):
            return f"the last hit has the score {last}, and {self._ids[best]} has {scores[best]}"
        return None

    def _generation(self, release: str) -> int:
        """Returns the position in `alive` of the passages of a release."""
        if release not in self._generations:
            self._generations[release] = len(Release.load(self._store, release).generation_keys("corpus")) - 1
        return self._generations[release]

    def _difference_from_first(self, key: tuple[object, ...], hits: Sequence[Mapping[str, Any]]) -> str | None:
        """Compares hits with the first answer to the same request.

        Equal scores may change places, and a passage whose score is that of the last hit may be another one.
        """
        scores = {str(hit["id"]): float(hit["score"]) for hit in hits}
        with self._lock:
            first = self._first_answers.setdefault(key, scores)
        last = min(first.values(), default=0.0)
        expected = {id: first.get(id, last) for id in scores}
        if len(first) == len(scores) and all(_is_near(scores[id], expected[id]) for id in scores):
            return None
        return f"hits {scores}, in an earlier answer {first}"


def _vectors(encoder: Encoder, queries: Sequence[str], task: str) -> np.ndarray:
    """Encodes the queries of a task; `default` is the backbone without a prompt."""
    return encoder.encode(queries, task=None if task == "default" else task)


def _is_near(score: float, expected: float) -> bool:
    return abs(score - expected) <= TOLERANCE * abs(expected)
