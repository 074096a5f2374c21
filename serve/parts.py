"""The parts of a service (encoder, searches of sources, passages, re-ranker), which answer batches for open releases.

The same classes run side by side in one process, or in their own replicas on a cluster; `serve.calls.protocols` has
their requests and results. Work past its deadline is dropped before it starts. All parts are thread-safe.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from indexing.artifact import Artifact, Draft
from indexing.artifact import Part as FilePart
from indexing.cache import CorruptError
from indexing.exact import nothing
from indexing.filters import Filter
from indexing.hit_sources.online import PROBE, OnlinePlace, OnlineSearch, Target
from indexing.hit_sources.registry import find_kind
from indexing.models import model_folder, resolve_model
from indexing.online import OpenPassages
from indexing.rescoring import open_reranker
from indexing.store import Store
from retriever.batching import Tokens, text_pieces
from retriever.encoder import Encoder
from retriever.errors import InputError, TextsError
from retriever.memory import free_memory
from retriever.options import Side
from retriever.prompts import load_prompt
from retriever.reranker import Reranker
from retriever.topics.model import NO_TOPIC
from serve.calls.protocols import (
    Encoded,
    EncodeRequest,
    Passage,
    PassagesRequest,
    ScoreRequest,
    SourceHits,
    SourceRequest,
)
from serve.health.failures import RefusedPromptError, StoreError, converted, store_error
from serve.health.files import PartFiles
from serve.health.states import ENCODER, PASSAGES, RERANKER
from serve.release import Opened, Release

T = TypeVar("T")


class ExpiredError(Exception):
    """The deadline has passed."""


def check_deadline(deadline: float | None) -> None:
    """Raises ExpiredError if the deadline has passed."""
    if deadline is not None and time.time() > deadline:
        raise ExpiredError


class Shared(Generic[T]):
    """Objects that releases share: each is opened once, and dropped when the last release that holds it is released."""

    def __init__(self) -> None:
        self._held: dict[Any, tuple[T, set[str]]] = {}
        self._lock = threading.Lock()

    def get(self, key: Any, release: str, make: Callable[[], T]) -> T:
        """Returns the object of `key`; the release holds it from now on.

        Args:
            key: Identifies the object.
            release: Id of the release.
            make: Creates the object if it does not exist.
        """
        with self._lock:
            if key not in self._held:
                self._held[key] = (make(), set())
            value, holders = self._held[key]
            holders.add(release)
            return value

    def held(self, key: Any) -> T:
        """Returns the object of `key`."""
        return self._held[key][0]

    def release(self, release: str) -> list[Any]:
        """Releases the objects of a release, and returns the keys of those that no other release holds."""
        with self._lock:
            removed = []
            for key, (_, holders) in list(self._held.items()):
                holders.discard(release)
                if not holders:
                    del self._held[key]
                    removed.append(key)
            return removed


class Part:
    """Base class of the parts: opens releases by id, and answers requests for each of them.

    If its files are damaged, a part raises StoreError until `check` finds the files as they were committed.

    Args:
        store: Where the artifacts are.
        threads: Threads of one call; None: one for each core.
    """

    name = ""  # in /readyz and in errors

    def __init__(self, store: Store, *, threads: int | None = None):
        self.store, self.threads = store, threads
        self._opened: dict[str, Any] = {}
        self._files: dict[str, PartFiles] = {}
        self._damaged: dict[str, StoreError] = {}
        self._read: set[Path] = set()  # files whose pages were read into memory
        self._preparing = threading.Lock()

    def prepare(self, release_id: str) -> None:
        """Opens the artifacts of a release that this part needs.

        Raises:
            InputError: If an artifact is missing, or has another fingerprint than in the release.
        """
        with self._preparing:
            if release_id not in self._opened:
                artifacts = Opened(self.store, Release.load(self.store, release_id))
                self._files[release_id] = PartFiles(self.store, self._used_files(artifacts))
                self._opened[release_id] = self._open(artifacts)

    def retire(self, release_id: str) -> None:
        """Closes a release."""
        with self._preparing:
            for table in (self._opened, self._files, self._damaged):
                table.pop(release_id, None)
            self._forget(release_id)

    @converted
    def read(self, release_id: str, budget: int | None, seconds: float) -> int:
        """Reads the files of a release that were not read before, so that they are in memory.

        Args:
            release_id: Id of the release.
            budget: Maximum bytes to read; None: half of the free memory, as other parts of the node read too.
            seconds: Maximum time to spend.

        Returns:
            Bytes read.
        """
        self._of(release_id)
        return self._files[release_id].read(free_memory() // 2 if budget is None else budget, seconds, self._read)

    @converted
    def check(self, release_id: str) -> None:
        """Checks the files of a release, and answers a small request from them.

        Raises:
            StoreError: If a file is missing or damaged. Other failures of the request are raised as they are.
        """
        if release_id not in self._opened:
            self.prepare(release_id)
        try:
            self._files[release_id].check()
        except CorruptError as error:
            self._damaged[release_id] = store_error(self.name, error)
            raise
        self._damaged.pop(release_id, None)
        self._try(release_id)

    def _of(self, release_id: str) -> Any:
        if release_id not in self._opened:
            self.prepare(release_id)  # this replica started after the release was prepared
        if damaged := self._damaged.get(release_id):
            raise StoreError(*damaged.args)
        return self._opened[release_id]

    def _open(self, artifacts: Opened) -> Any:
        raise NotImplementedError

    def _used_files(self, artifacts: Opened) -> Iterable[tuple[Artifact | Draft, FilePart]]:
        """Returns the files that requests read, the most important ones first."""
        return []

    def _try(self, release_id: str) -> None:
        """Answers a small request."""

    def _forget(self, release_id: str) -> None:
        pass


class EncoderPart(Part):
    """One backbone, with the prompts of all tasks of all open releases in one table.

    Args:
        store: Where the artifacts are.
        device: Device of the backbone, "cpu" or "cuda".
        threads: Threads of one call; None: one for each core.
        compile: "auto" or "never".
    """

    name = ENCODER

    def __init__(self, store: Store, *, device: str, threads: int | None = None, compile: str = "never"):
        super().__init__(store, threads=threads)
        self.device, self.compile = device, compile
        self._encoders: Shared[Encoder] = Shared()
        self._prompts: Shared[str] = Shared()

    @converted
    def encode(self, request: EncodeRequest) -> Encoded:
        """Encodes texts with the prompts of their tasks.

        Vectors are not checked for being finite, and texts without known words are no error: other texts of the batch
        belong to other requests.
        """
        check_deadline(request.deadline)
        encoders, slots = self._of(request.release)
        side: Side = "query" if request.side == "query" else "passage"
        encoder = encoders[side]
        texts, tasks = list(request.texts), [slots[task] for task in request.tasks]
        if encoder is not encoders["query"]:
            tasks = [None] * len(texts)  # all prompts are of queries
        tokens, topics = _read_texts(encoder, texts, side, tasks, request.deadline)
        refused = encoder.unusable_texts(tokens, side=side, task=tasks, topics=topics)
        vectors = encoder.forward(tokens, side=side, task=tasks, topics=topics, check=False)
        return Encoded(vectors, tokens.lengths, tokens.num_cut, refused)

    @converted
    def describe(self, release_id: str) -> dict[str, Any]:
        """Returns {"dim", "similarity", "numerics"} of the vectors."""
        encoder = self._of(release_id)[0]["query"]
        return {"dim": encoder.dim, "similarity": encoder.similarity, "numerics": encoder.numerics}

    def _open(self, artifacts: Opened) -> tuple[dict[Side, Encoder], dict[str, str | None]]:
        """Returns the encoder of each side, which is the same unless they are untied, and the prompt of each task."""
        release, spec = artifacts.release, artifacts.spec
        if spec is None or release.encoder is None:  # no task has dense embeddings
            return {}, {}
        options = replace(spec.options, compile=self.compile)  # type: ignore[arg-type]

        def start(side: Side) -> Encoder:
            return Encoder(spec.folder_of(side), options, device=self.device, threads=self.threads, tasks={})

        key = (release.encoder, release.fingerprints.get(release.encoder), repr(options))
        encoder = self._encoders.get(key, release.id, partial(start, "query"))
        encoders: dict[Side, Encoder] = {"query": encoder, "passage": encoder}
        if spec.is_untied:
            encoders["passage"] = self._encoders.get((*key, "passage"), release.id, partial(start, "passage"))
        slots: dict[str, str | None] = {}
        for task in release.tasks:
            slots[task.name] = None
            if task.prompt:
                artifact = release.artifact(self.store, f"prompts/{task.prompt}")
                slot = artifact.fingerprint

                def add_prompt(slot: str = slot, name: str = task.prompt, task: str = task.name) -> str:
                    prompt = load_prompt(model_folder(self.store.open("prompts", name)))
                    try:
                        encoder.put_task(slot, prompt)
                        try:
                            encoder.probe(PROBE, task=slot)
                        except InputError:
                            encoder.drop_task(slot)
                            raise
                    except InputError as error:  # the message names the slot, a fingerprint, instead of the task
                        reason = str(error).removeprefix(f"task {slot!r}: ")
                        raise RefusedPromptError(f"task {task}: {reason}") from error
                    return slot

                slots[task.name] = self._prompts.get((key, slot), release.id, add_prompt)
        return encoders, slots

    def _try(self, release_id: str) -> None:
        _, slots = self._of(release_id)
        self.encode(EncodeRequest(release_id, [PROBE], [next(iter(slots))]))

    def _forget(self, release_id: str) -> None:
        for key, slot in self._prompts.release(release_id):
            self._encoders.held(key).drop_task(slot)
        self._encoders.release(release_id)


class SourcePart(Part):
    """Searches the sources of one or several kinds; the dense ones in shard `number` of `of` shards.

    Args:
        store: Where the artifacts are.
        online: How the sources are opened and searched.
        number: Number of the shard, from 0.
        of: Number of shards.
        device: Device of a model that the part holds, "cpu" or "cuda".
        threads: Threads of one call; None: one for each core.
    """

    def __init__(
        self, store: Store, online: OnlineSearch, number: int = 0, of: int = 1, *, device: str,
        threads: int | None = None,
    ):  # fmt: skip
        super().__init__(store, threads=threads)
        self.online, self.name = online, online.name
        self.place = OnlinePlace(number, of, threads, device)
        self._searchers: Shared[Any] = Shared()

    @converted
    def search(self, request: SourceRequest) -> SourceHits:
        """Returns the top k passages of each query in this shard. A query that cannot be used fails alone."""
        check_deadline(request.deadline)
        searcher = self._of(request.release)[request.target]
        kind = find_kind(request.kind)
        assert kind is not None, request.kind
        filter = None if request.filter is None else Filter(request.filter)
        refused: dict[int, str] = {}
        numbers = list(range(len(request.queries)))
        while numbers:
            try:
                answered = kind.search_online(searcher, _those(request.queries, numbers), request.k, filter)
            except TextsError as error:
                refused |= {numbers[place]: reason for place, reason in error.reasons.items()}
                numbers = [number for number in numbers if number not in refused]
                continue
            if not refused:
                return SourceHits(answered, {})
            hits = nothing(len(request.queries), answered.rows.shape[1])
            hits.scores[numbers], hits.rows[numbers] = answered
            return SourceHits(hits, refused)
        return SourceHits(nothing(len(request.queries), request.k), refused)

    def _open(self, artifacts: Opened) -> dict[Target, Any]:
        release = artifacts.release
        searchers = {}
        for target, readers in self._targets(artifacts).items():
            start = partial(self.online.open, readers, artifacts.corpus, self.place)
            searchers[target] = self._searchers.get(release.contents(self.online, target), release.id, start)
        return searchers

    def _used_files(self, artifacts: Opened) -> Iterable[tuple[Artifact | Draft, FilePart]]:
        groups = [self.online.files(readers, self.place) for readers in self._targets(artifacts).values()]
        for alike in itertools.zip_longest(*groups, fillvalue=()):
            for files in alike:
                yield from files

    def _targets(self, artifacts: Opened) -> dict[Target, Any]:
        """Returns the readers of the part's targets."""
        return {target: readers for (online, target), readers in artifacts.readers.items() if online is self.online}

    def _try(self, release_id: str) -> None:
        for searcher in self._of(release_id).values():
            self.online.probe(searcher)

    def _forget(self, release_id: str) -> None:
        self._searchers.release(release_id)


def _read_texts(
    encoder: Encoder, texts: list[str], side: Side, tasks: list[str | None], deadline: float | None
) -> tuple[Tokens, np.ndarray]:
    """Returns the tokens and the topics of texts, NO_TOPIC for texts of tasks without topics.

    Raises ExpiredError if the deadline passes, which is checked between pieces of the texts.
    """
    tokens, topics = [], []
    for piece in text_pieces(map(len, texts)):
        check_deadline(deadline)
        tokens.append(encoder.tokenize(texts[piece], side=side))
        inferred = encoder.topics_of(texts[piece], side=side, task=tasks[piece])
        topics.append(np.full(len(tokens[-1]), NO_TOPIC) if inferred is None else inferred)
    return Tokens.joined(tokens), np.concatenate(topics)


def _those(queries: Sequence[str] | np.ndarray, numbers: list[int]) -> Sequence[str] | np.ndarray:
    """Returns the queries of some numbers; the same object if these are all."""
    if len(numbers) == len(queries):
        return queries
    return queries[numbers] if isinstance(queries, np.ndarray) else [queries[number] for number in numbers]


class PassagesPart(Part):
    """Returns passages by row: their ids, titles, texts and metadata."""

    name = PASSAGES

    @converted
    def fetch(self, request: PassagesRequest) -> list[Passage]:
        """Returns (row, id, title, text, metadata as JSON) for each of the rows."""
        check_deadline(request.deadline)
        passages: OpenPassages = self._of(request.release)
        return passages.fetch(request.rows)

    def _open(self, artifacts: Opened) -> OpenPassages:
        return OpenPassages(artifacts.corpus)

    def _used_files(self, artifacts: Opened) -> Iterable[tuple[Artifact | Draft, FilePart]]:
        return ((part.artifact, part.part) for part in artifacts.corpus.parts)

    def _try(self, release_id: str) -> None:
        self._of(release_id).fetch(np.zeros(1, np.int64))


class RerankPart(Part):
    """Scores pairs of a query and a passage with a cross-encoder.

    Args:
        store: Where the artifacts are.
        device: Device of the cross-encoder, "cpu" or "cuda".
        threads: Threads of one call; None: one for each core.
    """

    name = RERANKER

    def __init__(self, store: Store, *, device: str, threads: int | None = None):
        super().__init__(store, threads=threads)
        self.device = device
        self._models: Shared[Reranker] = Shared()

    @converted
    def score(self, request: ScoreRequest) -> np.ndarray:
        """Returns the probability of each (query, passage) pair, float32 [n]."""
        check_deadline(request.deadline)
        model: Reranker | None = self._of(request.release)
        assert model is not None, f"release {request.release} has no re-ranker"
        queries, passages = list(request.queries), model.compose(list(request.titles), list(request.texts))
        pairs = []
        for piece in text_pieces(map(len, passages)):
            check_deadline(request.deadline)
            pairs.append(model.tokenize(queries[piece], passages[piece]))
        tokens, types = (Tokens.joined(own) for own in zip(*pairs, strict=True))
        return model.forward(tokens, types)

    def _open(self, artifacts: Opened) -> Reranker | None:
        name = artifacts.release.reranker
        if name is None:
            return None
        options, config = open_reranker(self.store, name)

        def start() -> Reranker:
            folder = resolve_model(self.store, name)
            return Reranker(folder, options, device=self.device, threads=self.threads)

        return self._models.get(repr(config), artifacts.release.id, start)

    def _try(self, release_id: str) -> None:
        if self._of(release_id) is not None:
            self.score(ScoreRequest(release_id, [PROBE], [""], [PROBE]))

    def _forget(self, release_id: str) -> None:
        self._models.release(release_id)
