"""The parts of a service: each answers whole batches, for any release that it was told to prepare.

The same classes stand side by side in one process, or in replicas of their own on a cluster: arguments and results are
plain arrays, strings and numbers. A deadline is a time of day in seconds (time.time()): work that is past it is dropped
before it costs anything. All are thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from indexing.filters import Filter
from indexing.models import model_folder, resolve_model
from indexing.online import DenseShard, OpenPassages, Words
from indexing.rescoring import open_reranker
from indexing.store import Store
from retriever.encoder import Encoder
from retriever.errors import InputError
from retriever.options import SIDES, Side
from retriever.prompts import load_prompt
from retriever.reranker import Reranker
from serve.release import Opened, Release

T = TypeVar("T")

PROBE = "what is a prompt?"  # whose vector by a new prompt must be finite


class ExpiredError(Exception):
    """The deadline has passed."""


def check_deadline(deadline: float | None) -> None:
    """Raises ExpiredError where it has passed."""
    if deadline is not None and time.time() > deadline:
        raise ExpiredError


class Shared(Generic[T]):
    """What several releases have in common is opened once, and let go with the last of them."""

    def __init__(self) -> None:
        self._held: dict[Any, tuple[T, set[str]]] = {}
        self._lock = threading.Lock()

    def get(self, key: Any, release: str, make: Callable[[], T]) -> T:
        """What `key` stands for, made unless it is there; held by the release from now on."""
        with self._lock:
            if key not in self._held:
                self._held[key] = (make(), set())
            value, holders = self._held[key]
            holders.add(release)
            return value

    def held(self, key: Any) -> T:
        """What is there under `key`."""
        return self._held[key][0]

    def release(self, release: str) -> list[Any]:
        """Let go of what a release holds; the keys of what nobody holds any more."""
        with self._lock:
            gone = []
            for key, (_, holders) in list(self._held.items()):
                holders.discard(release)
                if not holders:
                    del self._held[key]
                    gone.append(key)
            return gone


class Part:
    """Prepares releases by id; `retire` forgets one."""

    def __init__(self, store: Store, *, threads: int | None = None):
        self.store, self.threads = store, threads
        self._opened: dict[str, Any] = {}
        self._preparing = threading.Lock()

    def prepare(self, release_id: str) -> None:
        """Open all that a release needs here. Raises InputError where that is missing or is not what it was."""
        with self._preparing:
            if release_id not in self._opened:
                release = Release.load(self.store, release_id)
                self._opened[release_id] = self._open(Opened(self.store, release))

    def retire(self, release_id: str) -> None:
        with self._preparing:
            self._opened.pop(release_id, None)
            self._forget(release_id)

    def _of(self, release_id: str) -> Any:
        if release_id not in self._opened:
            self.prepare(release_id)  # a replica that has started since
        return self._opened[release_id]

    def _open(self, opened: Opened) -> Any:
        raise NotImplementedError

    def _forget(self, release_id: str) -> None:
        pass


class EncoderPart(Part):
    """One backbone, and the prompts of all tasks of all its releases in one table."""

    def __init__(self, store: Store, *, threads: int | None = None, device: str | None = None, compile: str = "never"):
        super().__init__(store, threads=threads)
        self.device, self.compile = device, compile
        self._encoders: Shared[Encoder] = Shared()
        self._prompts: Shared[str] = Shared()

    def encode(
        self, release_id: str, texts: Sequence[str], tasks: Sequence[str], side: Side = "query",
        deadline: float | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Vectors of texts by their tasks' prompts of that side, in one pass: float32 [n, dim]; their tokens: [n].

        One that is not finite is told by its numbers: the others of its batch are somebody else's.
        """
        check_deadline(deadline)
        encoder, slots = self._of(release_id)
        tokens = encoder.tokenize(list(texts), side=side)
        vectors = encoder.forward(tokens, side=side, task=[slots[task] for task in tasks], check=False)
        return vectors, tokens.lengths

    def describe(self, release_id: str) -> dict[str, Any]:
        """dim, similarity and numerics of the vectors."""
        encoder, _ = self._of(release_id)
        return {"dim": encoder.dim, "similarity": encoder.similarity, "numerics": encoder.numerics}

    def _open(self, opened: Opened) -> tuple[Encoder, dict[str, str | None]]:
        release, spec = opened.release, opened.spec
        options = replace(spec.options, compile=self.compile)  # type: ignore[arg-type]

        def start() -> Encoder:
            return Encoder(spec.folder, options, device=self.device, threads=self.threads, tasks={})

        key = (release.encoder, release.fingerprints.get(release.encoder), repr(options))
        encoder = self._encoders.get(key, release.id, start)
        slots: dict[str, str | None] = {}
        for task in release.tasks:
            slots[task.name] = None
            if task.prompt:
                artifact = release.artifact(self.store, f"prompts/{task.prompt}")
                slot = artifact.fingerprint

                def put(slot: str = slot, name: str = task.prompt, task: str = task.name) -> str:
                    encoder.put_task(slot, load_prompt(model_folder(self.store.open("prompts", name))))
                    try:
                        for side in SIDES:
                            encoder.encode([PROBE], side=side, task=slot)
                    except InputError as error:
                        encoder.drop_task(slot)
                        raise InputError(f"task {task}: {error}") from error
                    return slot

                slots[task.name] = self._prompts.get((key, slot), release.id, put)
        return encoder, slots

    def _forget(self, release_id: str) -> None:
        for key, slot in self._prompts.release(release_id):
            self._encoders.held(key).drop_task(slot)
        self._encoders.release(release_id)


class SearchPart(Part):
    """Shard `number` of `of` of every index and all embeddings."""

    def __init__(self, store: Store, number: int = 0, of: int = 1, *, threads: int | None = None):
        super().__init__(store, threads=threads)
        self.number, self.of = number, of
        self._shards: Shared[DenseShard] = Shared()

    def search(
        self, release_id: str, embeddings: str, index: str | None, queries: np.ndarray, k: int,
        filter: str | None = None, exact: bool = False, deadline: float | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """The top k of queries float32 [q, dim] here: scores float32 [q, k], rows int64 [q, k]. filter: its text."""
        check_deadline(deadline)
        shard: DenseShard = self._of(release_id)[embeddings, index]
        found = shard.search(queries, k, None if filter is None else Filter(filter), exact=exact)
        return found.scores, found.rows

    def _open(self, opened: Opened) -> dict[tuple[str, str | None], DenseShard]:
        release = opened.release
        corpus = tuple(artifact.fingerprint for artifact in opened.corpus.generations)
        found = {}
        for place in {task.space for task in release.tasks}:
            vectors = opened.embeddings[place[0]]
            index = opened.indexes[place[1]] if place[1] else None
            made = tuple(g.fingerprint for g in [*vectors.generations, *(index.generations if index else [])])

            def start(vectors: Any = vectors, index: Any = index) -> DenseShard:
                return DenseShard(opened.corpus, vectors, index, self.number, self.of, self.threads)

            found[place] = self._shards.get((corpus, made), release.id, start)
        return found

    def _forget(self, release_id: str) -> None:
        self._shards.release(release_id)


class WordsPart(Part):
    """Lucene."""

    def __init__(self, store: Store, *, threads: int | None = None):
        super().__init__(store, threads=threads)
        self._words: Shared[Words] = Shared()

    def search(
        self, release_id: str, bm25: str, texts: Sequence[str], k: int, filter: str | None = None,
        deadline: float | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """The top k of some questions: scores float32 [q, k], rows int64 [q, k]."""
        check_deadline(deadline)
        words: Words = self._of(release_id)[bm25]
        found = words.search(texts, k, None if filter is None else Filter(filter))
        return found.scores, found.rows

    def _open(self, opened: Opened) -> dict[str, Words]:
        corpus = tuple(artifact.fingerprint for artifact in opened.corpus.generations)
        found = {}
        for name, bm25 in opened.bm25.items():
            made = tuple(artifact.fingerprint for artifact in bm25.generations)

            def start(bm25: Any = bm25) -> Words:
                return Words(opened.corpus, bm25, self.threads or 1)

            found[name] = self._words.get((corpus, made), opened.release.id, start)
        return found

    def _forget(self, release_id: str) -> None:
        self._words.release(release_id)


class PassagesPart(Part):
    """The passages' ids, titles, texts and metadata."""

    def fetch(
        self, release_id: str, rows: np.ndarray, deadline: float | None = None
    ) -> list[tuple[int, str, str, str, str]]:
        """(row, id, title, text, metadata as JSON) of some rows, int64 [n]."""
        check_deadline(deadline)
        passages: OpenPassages = self._of(release_id)
        return passages.fetch(rows)

    def _open(self, opened: Opened) -> OpenPassages:
        return OpenPassages(opened.corpus)


class RerankPart(Part):
    """A cross-encoder."""

    def __init__(self, store: Store, *, threads: int | None = None, device: str | None = None):
        super().__init__(store, threads=threads)
        self.device = device
        self._models: Shared[Reranker] = Shared()

    def score(
        self, release_id: str, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str],
        deadline: float | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The probability of each pair: float32 [n]."""
        check_deadline(deadline)
        model: Reranker | None = self._of(release_id)
        assert model is not None, f"release {release_id} has no re-ranker"
        return model.score(list(questions), model.compose(list(titles), list(texts)))

    def _open(self, opened: Opened) -> Reranker | None:
        name = opened.release.reranker
        if name is None:
            return None
        options, config = open_reranker(self.store, name)

        def start() -> Reranker:
            folder = resolve_model(self.store, name)
            return Reranker(folder, options, device=self.device, threads=self.threads)

        return self._models.get(repr(config), opened.release.id, start)

    def _forget(self, release_id: str) -> None:
        self._models.release(release_id)
