"""The models of a service: encoders of queries and texts, and the re-ranker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from riptide.base.errors import InputError
from riptide.indexing.embeddings.dense_embeddings import DENSE
from riptide.indexing.embeddings.drift import Canaries, Drift, canaries_of, measure_drift, query_canaries
from riptide.indexing.exact import available_threads
from riptide.indexing.hit_sources.online_search import PROBE, OnlineSearch, SearchTarget
from riptide.indexing.search.rescoring import open_reranker
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.indexing.work.worker_tasks import Allocation
from riptide.retriever.encoding.encoder import Encoder
from riptide.retriever.encoding.reranker import Reranker
from riptide.retriever.forward.batching import Tokens, text_pieces
from riptide.retriever.options import EncoderOptions, EncoderPrecision, Side
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.topics.model import NO_TOPIC
from riptide.serve.parts.part import (
    ServicePart,
    SharedObjects,
    UsableQueries,
    call_with_usable_texts,
    check_deadline,
    raises_store_errors,
)
from riptide.serve.parts.part_states import ENCODER, RERANKER
from riptide.serve.release.artifacts import ReleaseArtifacts
from riptide.serve.service_errors import EncoderDriftError, RefusedPromptError, RequestError, client_error

log = logging.getLogger("riptide.serve")

TOGETHER = 64  # number of texts or pairs in one forward pass


class EncodedTexts(NamedTuple):
    """The vectors of texts, with the texts that were cut and those that cannot be used.

    Attributes:
        vectors: float32 [n, dim]; a text that the encoder cannot use has one that is not finite.
        lengths: Tokens of each text, [n].
        num_cut: Tokens that were cut off each text, which was longer than the encoder reads, [n].
        unusable: What a text lacks that has no words by which its prompt is found, by its number in the request.
    """

    vectors: np.ndarray
    lengths: np.ndarray
    num_cut: np.ndarray
    unusable: dict[int, str]


class _OpenEncoders(NamedTuple):
    """The encoders that a release uses.

    Attributes:
        sides: The backbone of each side, which is the same unless they are untied.
        slots: The slot of each task's prompt.
        sources: The encoders of sources that have one.
        drifts: How far an encoder is from stored vectors: those of each dense embeddings, by their name, and those of
            the canaries of the model that encodes queries, by its key.
    """

    sides: dict[Side, Encoder]
    slots: dict[str, str | None]
    sources: dict[tuple[OnlineSearch, SearchTarget], Callable[[Sequence[str]], Any]]
    drifts: dict[str, Drift]


class EncoderPart(ServicePart):
    """The backbone with a table of the prompts of all open releases, and the encoders of sources.

    Args:
        store: Where the artifacts are.
        device: Device of the models, "cpu" or "cuda".
        threads: Threads of one call; None: one for each core.
        compile: "auto" or "never".
    """

    name = ENCODER

    def __init__(self, store: Store, *, device: str, threads: int | None = None, compile: str = "never"):
        super().__init__(store)
        self.device, self.threads, self.compile = device, threads or available_threads(), compile
        self._encoders: SharedObjects[Encoder] = SharedObjects()
        self._prompts: SharedObjects[str | None] = SharedObjects()  # the slot of passages; None: of queries alone
        self._sources: SharedObjects[Callable[[Sequence[str]], Any]] = SharedObjects()
        self._drifts: SharedObjects[Drift] = SharedObjects()
        # By release: why it was refused. It is not loaded again, as the same process would give the same vectors.
        self._refused: dict[str, InputError] = {}

    @raises_store_errors
    def encode(
        self, release_id: str, texts: Sequence[str], tasks: Sequence[str], side: Side, deadline: float | None = None
    ) -> EncodedTexts:
        """Encodes texts with the prompts of their tasks, in batches of TOGETHER, between which the deadline is checked.

        Vectors are not checked for being finite, and texts without known words are no error: other texts of the batch
        belong to other requests.

        Args:
            release_id: Id of the release.
            texts: The texts.
            tasks: Name of the task per text.
            side: Whether the texts are queries or passages.
            deadline: Time of `time.monotonic()` in seconds.
        """
        encoders: _OpenEncoders = self._get_content(release_id)
        encoder, slots = encoders.sides[side], [encoders.slots[task] for task in tasks]
        if encoder is not encoders.sides["query"]:
            slots = [None] * len(texts)  # untied encoders: all prompts are of queries
        batches, unusable = list[tuple[np.ndarray, ...]](), dict[int, str]()
        for start in range(0, len(texts), TOGETHER):
            check_deadline(deadline)
            of_tasks = slots[start : start + TOGETHER]
            tokens, topics = _read_texts(encoder, list(texts[start : start + TOGETHER]), side, of_tasks, deadline)
            reasons = encoder.unusable_texts(tokens, side=side, task=of_tasks, topics=topics)
            unusable |= {start + number: reason for number, reason in reasons.items()}
            vectors = encoder.forward(tokens, side=side, task=of_tasks, topics=topics, check=False)
            batches.append((vectors, tokens.lengths, tokens.num_cut))
        vectors, lengths, num_cut = map(np.concatenate, zip(*batches, strict=True))
        return EncodedTexts(vectors, lengths, num_cut, unusable)

    @raises_store_errors
    def encode_for(
        self,
        release_id: str,
        online: OnlineSearch,
        target: SearchTarget,
        texts: Sequence[str],
        deadline: float | None = None,
    ) -> UsableQueries[Any]:
        """Encodes texts with the encoder of a source for its searchers."""
        check_deadline(deadline)
        encoders: _OpenEncoders = self._get_content(release_id)
        return call_with_usable_texts(encoders.sources[online, target], texts)

    @raises_store_errors
    def describe(self, release_id: str) -> dict[str, Any]:
        """Returns {"dim", "similarity", "numerics"} of the vectors, and "prompt_bytes" of the encoder."""
        encoder = self._get_content(release_id).sides["query"]
        names = ("dim", "similarity", "numerics", "prompt_bytes")
        return {name: getattr(encoder, name) for name in names}

    def stored_similarities(self, release_id: str) -> dict[str, float]:
        """Returns the smallest similarity of the encoder's vectors to those stored in each dense embeddings, by name.

        Leaves out embeddings without passages to compare. The model that encodes queries, by its key, is compared with
        the vectors of its canaries. Returns {} if the release is not open.
        """
        opened_release = self._releases.get(release_id)
        drifts: dict[str, Drift] = {} if opened_release is None else opened_release.content.drifts
        return {name: drift.similarity for name, drift in drifts.items() if drift.num_canaries}

    def _open(self, artifacts: ReleaseArtifacts) -> _OpenEncoders:
        release, spec = artifacts.release, artifacts.spec
        if problem := self._refused.get(release.id):
            raise EncoderDriftError(self.name, problem)
        allocation, sources = Allocation(self.threads, self.device), {}
        for (online, target), readers in artifacts.readers.items():
            if online.encodes:
                queries = online.encoder(readers)
                sources[online, target] = self._sources.get(queries.key, release.id, partial(queries.open, allocation))
        if spec is None or release.encoder is None:  # no task has dense embeddings
            return _OpenEncoders({}, {}, sources, {})

        def options_of(side: Side) -> EncoderOptions:
            return replace(spec.options_of(side), compile=self.compile)  # type: ignore[arg-type]

        def start(side: Side) -> Encoder:
            folder, device, numerics = spec.folder_of(side), spec.choose_device(self.device), spec.numerics
            return Encoder(folder, options_of(side), device=device, threads=self.threads, tasks={}, pinned=numerics)

        def key_of(side: Side, model: str) -> tuple[object, ...]:
            return model, release.fingerprints.get(model), repr(options_of(side)), spec.numerics

        key = passage_key = key_of("query", release.query_model or release.encoder)
        encoder = self._encoders.get(key, release.id, partial(start, "query"))
        encoders: dict[Side, Encoder] = {"query": encoder, "passage": encoder}
        if spec.is_untied:
            # The encoder of a release that encodes queries too is shared with one that has another model for them.
            passage_key = key_of("passage", release.encoder) if release.query_model else (*key, "passage")
            encoders["passage"] = self._encoders.get(passage_key, release.id, partial(start, "passage"))
        slots: dict[str, str | None] = {}
        passage_slots: dict[str, str | None] = {}
        for task in release.tasks:
            slots[task.name] = passage_slots[task.name] = None
            if task.prompt:
                artifact = release.artifact(self.store, f"prompts/{task.prompt}")
                slot = artifact.fingerprint

                def add_prompt(slot: str = slot, name: str = task.prompt, task: str = task.name) -> str | None:
                    prompt = load_prompt(model_folder(self.store.open("prompts", name)))
                    try:
                        encoder.put_task(slot, prompt)
                        try:
                            encoder.probe(PROBE, task=slot)
                        except InputError:
                            encoder.drop_task(slot)
                            raise
                    except InputError as error:
                        shown = client_error(error, self.store.url, str(self.store.cache.folder))
                        if isinstance(shown, RequestError):
                            raise RefusedPromptError(f"task {task}: {shown}") from error
                        raise
                    return slot if prompt.matrices("passage") else None

                slots[task.name] = slot
                passage_slots[task.name] = self._prompts.get((key, slot), release.id, add_prompt)
        drifts: dict[str, Drift] = {}

        def check_drift(name: str, drift_key: tuple[object, ...], measure: Callable[[], Drift]) -> None:
            drifts[name] = drift = self._drifts.get(drift_key, release.id, measure)
            if drift.is_refused and drift.problem:
                self._refused[release.id] = drift.problem
                raise EncoderDriftError(self.name, drift.problem)

        if release.query_model:
            read_canaries = partial(query_canaries, release.artifact(self.store, release.query_model))
            check_drift(release.query_model, key, partial(_measure_drift, read_canaries, encoder, None))
        for task in release.tasks:
            if task.embeddings and task.embeddings not in drifts:
                embeddings = artifacts.embeddings[task.embeddings]
                passage_slot = None if spec.is_untied else passage_slots[task.name]
                drift_key = (passage_key, passage_slot, embeddings.generations[0].fingerprint)
                read_stored = partial(canaries_of, embeddings, artifacts.corpus)
                measure = partial(_measure_drift, read_stored, encoders["passage"], passage_slot)
                check_drift(task.embeddings, drift_key, measure)
        return _OpenEncoders(encoders, slots, sources, drifts)

    def _answer_probe(self, release_id: str) -> None:
        encoders: _OpenEncoders = self._get_content(release_id)
        if encoders.slots:
            self.encode(release_id, [PROBE], [next(iter(encoders.slots))], "query")
        for encode in encoders.sources.values():
            call_with_usable_texts(encode, [PROBE])

    def _forget(self, release_id: str) -> None:
        for key, slot in self._prompts.release(release_id):
            self._encoders.get_existing(key).drop_task(slot)
        self._encoders.release(release_id)
        self._sources.release(release_id)
        self._drifts.release(release_id)


class RerankPart(ServicePart):
    """Scores pairs of a query and a passage with a cross-encoder.

    Args:
        store: Where the artifacts are.
        device: Device of the model, "cpu" or "cuda".
        threads: Threads of one call; None: one for each core.
        dtype: The dtype of its matrix products.
    """

    name = RERANKER

    def __init__(self, store: Store, *, device: str, threads: int | None = None, dtype: EncoderPrecision = "auto"):
        super().__init__(store)
        self._allocation, self._dtype = Allocation(threads or available_threads(), device), dtype
        self._models: SharedObjects[Reranker] = SharedObjects()

    @raises_store_errors
    def score(
        self,
        release_id: str,
        queries: Sequence[str],
        titles: Sequence[str],
        texts: Sequence[str],
        deadline: float | None = None,
    ) -> np.ndarray:
        """Returns the probability of each pair of a query and a passage, float32 [n].

        The pairs are scored TOGETHER at a time, so that the deadline is met.

        Args:
            release_id: Id of the release.
            queries: Query per pair.
            titles: Title of the passage per pair.
            texts: Text of the passage per pair.
            deadline: Time of `time.monotonic()` in seconds.
        """
        model: Reranker | None = self._get_content(release_id)
        assert model is not None, f"release {release_id} has no re-ranker"
        scores = [np.empty(0, np.float32)]
        for start in range(0, len(texts), TOGETHER):
            batch = slice(start, start + TOGETHER)
            check_deadline(deadline)
            passages, pairs = model.compose(list(titles[batch]), list(texts[batch])), []
            for piece in text_pieces(map(len, passages)):
                check_deadline(deadline)
                pairs.append(model.tokenize(list(queries[batch][piece]), passages[piece]))
            tokens, types = (Tokens.join(own) for own in zip(*pairs, strict=True))
            scores.append(model.forward(tokens, types))
        return np.concatenate(scores)

    def _open(self, artifacts: ReleaseArtifacts) -> Reranker | None:
        name = artifacts.release.reranker
        if name is None:
            return None
        spec = open_reranker(self.store, name, self._dtype)
        return self._models.get(repr(spec.config), artifacts.release.id, lambda: spec.open(self._allocation).model)

    def _answer_probe(self, release_id: str) -> None:
        if self._get_content(release_id) is not None:
            self.score(release_id, [PROBE], [""], [PROBE])

    def _forget(self, release_id: str) -> None:
        self._models.release(release_id)


def _measure_drift(read_canaries: Callable[[], Canaries], encoder: Encoder, slot: str | None) -> Drift:
    """Compares an encoder with stored vectors; logs a difference that is more than rounding."""
    drift = measure_drift(read_canaries(), encoder, DENSE, slot)
    if drift.problem and not drift.is_refused:
        log.warning("%s", drift.problem)
    return drift


def _read_texts(
    encoder: Encoder, texts: list[str], side: Side, tasks: list[str | None], deadline: float | None
) -> tuple[Tokens, np.ndarray]:
    """Tokenizes texts and infers their topics; NO_TOPIC for texts of tasks without topics.

    Raises ExpiredError if the deadline passes, which is checked between pieces of the texts.
    """
    tokens, topics = [], []
    for piece in text_pieces(map(len, texts)):
        check_deadline(deadline)
        tokens.append(encoder.tokenize(texts[piece], side=side))
        inferred = encoder.topics_of(texts[piece], side=side, task=tasks[piece])
        topics.append(np.full(len(tokens[-1]), NO_TOPIC) if inferred is None else inferred)
    return Tokens.join(tokens), np.concatenate(topics)


def are_finite(vectors: np.ndarray) -> np.ndarray:
    """Returns whether vectors [..., dim] are finite in all dimensions: bool [...]."""
    result: np.ndarray = np.isfinite(vectors).all(axis=-1)
    return result


def unusable_text_error(task: str, reason: str | None, number: int | None = None) -> RequestError:
    """Returns the error for a text without what its prompt needs, or with a vector that is not finite.

    Args:
        task: The name of its task.
        reason: What it lacks for its prompt; None: nothing, its vector is not finite.
        number: Number of the text in the request, if it has several.
    """
    if reason is not None:
        return RequestError(f"task {task}: {'the text' if number is None else f'text {number}'} {reason}")
    which = "" if number is None else f" of text {number}"
    return RequestError(f"task {task}: the vector{which} is not finite")
