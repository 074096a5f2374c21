"""Encodes a corpus: makes one part of embeddings from each part of the corpus."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.corpus.corpus import Corpus, open_table, save_array
from riptide.indexing.embeddings.copied_vectors import NO_COPIES, CopyPlan, CopyStage, read_copies
from riptide.indexing.embeddings.drift import canaries_of_part, measure_drift
from riptide.indexing.embeddings.embeddings_reader import TOPICS, EmbeddingsReader
from riptide.indexing.embeddings.named_encoders import EncoderSpec, differing_settings
from riptide.indexing.embeddings.vector_kind import PartTexts, VectorKind
from riptide.indexing.files.raw import short_repr
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.chain import RowPart
from riptide.indexing.store.draft import Draft
from riptide.indexing.store.sealed_json import ArtifactPart
from riptide.indexing.store.store import Store, artifact_key, generation
from riptide.indexing.topics.passage_topics import PassageTopics, open_passage_topics
from riptide.indexing.work.work import (
    ArtifactTarget,
    BaseWork,
    DriverStage,
    Progress,
    SpreadStage,
    TaskStage,
    WorkUnit,
)
from riptide.indexing.work.worker_tasks import Allocation, Report, Runner, WorkerResources
from riptide.retriever.options import EncoderOptions
from riptide.telemetry.phases import call_in_thread

if TYPE_CHECKING:
    from riptide.retriever.encoding.encoder import Encoder
    from riptide.retriever.forward.batching import Tokens

MAX_BROKEN = 0.1  # share of passages broken into fragments above which a warning is given
CALLS = 2  # concurrent parts per encoder: one is read, tokenised or written while the device encodes the other
MAX_UNKNOWN = 0.5  # share of unknown tokens above which the tokenizer is damaged or made for other languages


@dataclass(frozen=True)
class PartDone:
    """The result that a worker returns for a part that it committed.

    Attributes:
        rows: Number of passages.
        tokens: Number of tokens of those that were encoded.
        copied: Number of those whose vectors were copied.
        ready: The time at which the encoder was ready, in seconds since the epoch.
        startup: Seconds that the encoder took to start.
        size_bytes: The size of the file; 0 if an earlier attempt had committed the part.
        drift: The warning of `Drift.problem` of the encoder; None: no warning.
    """

    rows: int
    tokens: int
    copied: int
    ready: float
    startup: float
    size_bytes: int
    drift: str | None = None


class EncodeCorpusWork(BaseWork):
    """The work that makes embeddings/NAME: one part of vectors for each part of the corpus.

    Args:
        store: The store with the corpus.
        spec: The encoder.
        reader: The reader of its vectors.
        name: The name of the embeddings.
        resources: The resources of an encoder.
        numerics: The numerics class of the workers; see `numerics_of`.
        limit: Encodes only the first passages of the corpus.
        allow_unknown_tokens: Whether a part may consist mostly of tokens that the tokenizer does not know. Affects no
            vector, so it does not enter the fingerprint.
    """

    def __init__(
        self,
        store: Store,
        spec: EncoderSpec,
        reader: type[EmbeddingsReader],
        name: str,
        *,
        resources: WorkerResources,
        numerics: str,
        limit: int | None = None,
        allow_unknown_tokens: bool = False,
    ):
        self.corpus, self.spec, self.kind, self.name = Corpus.open(store), spec, reader.kind, name
        self.resources, self.numerics, self.allow_unknown_tokens = resources, numerics, allow_unknown_tokens
        self.encoder_settings = spec.settings("passage")
        self.config = {"encoder": self.encoder_settings, "numerics": numerics, "limit": limit}
        self.num_rows = min(limit or self.corpus.num_rows, self.corpus.num_rows)
        prompt = spec.prompt()
        has_topics = prompt is not None and prompt.topics is not None
        self.topics = open_passage_topics(store, spec.task) if spec.task is not None and has_topics else None
        self.copies = CopyPlan.of(store, self.corpus, name, reader, self.encoder_settings["title"], self.num_rows)

    @property
    def targets(self) -> list[ArtifactTarget]:
        """Returns one generation of embeddings for each generation of the corpus."""
        inputs = self.spec.inputs()
        return [
            ArtifactTarget(
                "embeddings",
                f"{self.name}/{generation(number)}",
                {"corpus": artifact, **inputs, **self._topics_of(artifact)},
                self.config,
                models={"encoder": self.spec.named_by},
            )
            for number, artifact in enumerate(self.corpus.generations)
        ]

    def _topics_of(self, corpus: Artifact) -> dict[str, Artifact]:
        """Returns the fitted topics as an input of a generation's embeddings; {} if they do not use them."""
        if self.topics is None or self.topics.fitted is None or not self.topics.covers(corpus):
            return {}
        return {"topics": self.topics.fitted}

    @property
    def stages(self) -> list[SpreadStage | DriverStage]:
        """Returns the stage that finds vectors to copy, if there may be some, and that which encodes each part."""
        generation_numbers = {artifact.key: number for number, artifact in enumerate(self.corpus.generations)}
        units = []
        for index, part in enumerate(self.corpus.parts):
            rows = min(part.part.rows, self.num_rows - part.first_row)
            if rows > 0:
                names = (part.part.name,) if self.topics is None else (topics_name(part), part.part.name)
                units.append(WorkUnit(names, rows, index, target=generation_numbers[part.artifact.key]))
        stages: list[SpreadStage | DriverStage] = [TaskStage("encode", "passages", units, self._encode_task)]
        if self.copied_generations:
            compared = {number: self.corpus.generations[number].rows for number in self.copied_generations}
            stages.insert(0, CopyStage(self.copies, compared))
        return stages

    @property
    def copied_generations(self) -> tuple[int, ...]:
        """The numbers of the generations to which vectors may be copied: none if a vector depends on a topic too."""
        return () if self.topics is not None else self.copies.generations

    def max_copied_vectors(self) -> int:
        """Returns the largest possible number of vectors to copy. One may be copied to several passages."""
        return self.copies.max_sources(self.corpus) if self.copied_generations else 0

    def _encode_task(self, drafts: Sequence[Draft]) -> EncodeTask:
        """Returns the task that encodes parts of the corpus."""
        return EncodeTask(
            self.corpus,
            tuple(drafts),
            self.spec,
            self.kind,
            self.resources,
            self.numerics,
            self.allow_unknown_tokens,
            self.topics,
            self.copies.open_embeddings() if self.copied_generations else None,
            self._find_stored_part(drafts),
        )

    def _find_stored_part(self, drafts: Sequence[Draft]) -> StoredPart | None:
        """Returns the first part that an earlier run or another command has committed; None: no part is committed."""
        for corpus, draft in zip(self.corpus.generations, drafts, strict=True):
            committed = draft.committed_parts()
            if name := min((name for name in committed if name.startswith("part-")), default=None):
                passages = next(each for each in self.corpus.parts if each.label == f"{corpus.name}/{name}")
                return StoredPart(passages, draft, committed[name])
        return None

    def prepare_completion(self, drafts: Sequence[Draft], runner: Runner, progress: Progress) -> None:
        """Adds notes that readers of the embeddings need: encoder, options, task, dimension and similarity."""
        spec = self.spec
        for draft in drafts:
            draft.add_notes(
                encoder=spec.name,
                options=spec.options.to_dict(),
                task=spec.task,
                dim=self.encoder_settings["dim"],
                similarity=similarity_of(self.encoder_settings),
            )


class StoredPart(NamedTuple):
    """A part with committed vectors.

    Attributes:
        passages: The part of the corpus.
        draft: The embeddings.
        vectors: The part of the embeddings.
    """

    passages: RowPart
    draft: Draft
    vectors: ArtifactPart


@dataclass(frozen=True)
class EncodeTask:
    """The task that encodes parts of a corpus and commits their vectors.

    topics: where the topics of passages are from; None unless the task has prompts of topics.
    complete: the embeddings from which vectors are copied; None: none are.
    stored: a part with which the encoder is compared; None: no part is committed.
    """

    corpus: Corpus
    drafts: tuple[Draft, ...]
    spec: EncoderSpec
    kind: VectorKind
    resources: WorkerResources
    numerics: str
    allow_unknown_tokens: bool
    topics: PassageTopics | None = None
    complete: EmbeddingsReader | None = None
    stored: StoredPart | None = None
    reports_progress: bool = True

    def open(self, allocation: Allocation) -> EncodeWorker:
        """Opens the encoder.

        Raises:
            InputError: If its settings or its numerics class are not the pinned ones, or if it gives other vectors than
                those stored.
        """
        return EncodeWorker(self, allocation)


class EncodeWorker:
    """Encodes parts with an open encoder. Two calls may overlap: one reads or writes a part while the other encodes."""

    def __init__(self, task: EncodeTask, allocation: Allocation):
        started = time.time()
        self.task, self.allocation = task, allocation
        # The model runs in this one thread only. OpenMP keeps a thread pool per calling thread; if the pools together
        # exceed the number of cores, their threads sleep between steps instead of spinning.
        self.model_thread = ThreadPoolExecutor(1, "riptide-model")
        self.encoder = call_in_thread(self.model_thread, self._open_encoder)
        self.drift = call_in_thread(self.model_thread, self._find_drift)
        self.ready = 0.0
        self.startup = time.time() - started

    def _open_encoder(self) -> Encoder:
        task, pinned = self.task, self.task.drafts[0]
        spec = replace(task.spec, numerics=task.numerics)
        encoder = spec.open(side="passage", device=self.allocation.device, threads=self.allocation.cores)
        check_encoder(task.spec.config_of(encoder, "passage"), pinned.config["encoder"])
        if encoder.numerics != task.numerics:
            raise InputError(
                f"{pinned.url} is of the numerics class `{task.numerics}`, this worker's is `{encoder.numerics}`: one "
                f"artifact has one class; use workers of one kind, or set {Parameter('dtype')} and "
                f"{Parameter('compile')}"
            )
        return encoder

    def _find_drift(self) -> str | None:
        """Compares the encoder with stored vectors; returns a warning if they differ by more than rounding."""
        task = self.task
        if task.stored is None:
            return None
        drift = measure_drift(canaries_of_part(*task.stored, task.kind), self.encoder, task.kind, task.spec.task)
        drift.refuse()
        return None if drift.problem is None else f"{drift.problem}"

    def __call__(self, unit: WorkUnit, report: Report) -> PartDone:
        """Encodes a part of the corpus and commits the vectors.

        Raises:
            InputError: As `tokenize_part` and `VectorKind.write` do.
        """
        self.ready = self.ready or time.time()
        task, part = self.task, self.task.corpus.parts[unit.payload]
        draft = task.drafts[unit.target]
        if draft.find_part(part.part.name):  # committed by an earlier attempt whose acknowledgement was lost
            return PartDone(unit.rows, 0, 0, self.ready, self.startup, 0, self.drift)
        tokens = tokenize_part(
            self.encoder, part, unit.rows, self.model_thread, allow_unknown_tokens=task.allow_unknown_tokens
        )
        topics = self._commit_topics(draft, part, unit.rows)
        arguments = {"side": "passage", "task": task.spec.task, "topics": topics, "report": report}
        copies = NO_COPIES if task.complete is None else read_copies(draft, part, unit.rows)
        copied_vectors = [] if task.complete is None else task.complete.take_open(copies.sources)
        rows = np.setdiff1d(np.arange(unit.rows), copies.rows)
        pending = tokens.take(rows) if len(copies.rows) else tokens
        texts = PartTexts(self.encoder, pending, rows, arguments, part, self.model_thread, copies.rows, copied_vectors)
        committed = draft.commit(
            part.part.name,
            task.kind.suffix,
            functools.partial(task.kind.write, texts),
            rows=unit.rows,
            corpus_sha256=part.part.sha256,
            cuts=tokens.count_cuts().to_dict(),
            **broken_facts(part, self.encoder.broken_texts(tokens)),
        )
        num_tokens = int(pending.lengths.sum())
        num_copied = len(copies.rows)
        return PartDone(unit.rows, num_tokens, num_copied, self.ready, self.startup, committed.bytes, self.drift)

    def _commit_topics(self, draft: Draft, part: RowPart, rows: int) -> np.ndarray | None:
        """Commits the topics of a part's passages, int32 [rows], and returns them as int64; None without topics.

        They are committed before the vectors, so that a part with vectors has topics.
        """
        inferred = self.encoder.text_topics(self.task.spec.task or "")
        if inferred is None or self.task.topics is None:
            return None
        topics = self.task.topics.topics_of_part(inferred.model, part, rows)
        draft.commit(topics_name(part), ".npy", functools.partial(save_array, topics.astype(np.int32)), rows=rows)
        return topics


def topics_name(part: RowPart) -> str:
    """Returns the name of the embeddings part that holds the passage topics of a corpus part."""
    return f"{TOPICS}-{part.part.name.rpartition('-')[2]}"


def check_encoder(config: Mapping[str, Any], pinned: Mapping[str, Any]) -> None:
    """Raises InputError unless this worker's encoder is the pinned one; the files of a node may differ."""
    if differ := differing_settings(pinned, config):
        names = ", ".join(differ)
        raise InputError(
            f"the encoder on {platform.node()} is not the pinned one ({names} differ): give all nodes the same"
        )


def tokenize_part(
    encoder: Encoder, part: RowPart, rows: int, model_thread: Executor, *, allow_unknown_tokens: bool
) -> Tokens:
    """Tokenises the first `rows` passages of a part.

    On a GPU node, one part is tokenised while another is on the GPU. On the CPU both would compete for all cores, so
    tokenising runs on the model's thread too.

    Args:
        encoder: The encoder.
        part: The part of the corpus.
        rows: The number of passages.
        model_thread: An executor with a single thread.
        allow_unknown_tokens: Whether the part may consist mostly of tokens that the tokenizer does not know.

    Raises:
        InputError: If more than half of the tokens (special tokens excluded) are unknown.
    """
    table = open_table(part).slice(0, rows)
    texts = encoder.compose(table.column("title").to_pylist(), table.column("text").to_pylist())
    if encoder.device.type == "cpu":
        tokens = call_in_thread(model_thread, encoder.tokenize, texts, side="passage")
    else:
        tokens = encoder.tokenize(texts, side="passage")
    if not allow_unknown_tokens:
        check_unknown_tokens(*encoder.unknown_tokens(tokens), f"{part.artifact.url}/{part.part.file}")
    return tokens


def broken_facts(part: RowPart, is_broken: np.ndarray) -> dict[str, Any]:
    """Returns how many texts of a part the tokenizer breaks into fragments, and the id of the first; {}: none."""
    rows = np.flatnonzero(is_broken)
    return {"broken": len(rows), "broken_id": open_table(part)["id"][rows[0]].as_py()} if len(rows) else {}


def describe_broken(parts: Sequence[ArtifactPart]) -> str:
    """Returns a warning if the tokenizer breaks more than MAX_BROKEN of the passages into fragments; otherwise ""."""
    counts, rows = [part.facts.get("broken", 0) for part in parts], sum(part.rows for part in parts)
    example = next((part.facts["broken_id"] for part in parts if "broken" in part.facts), "")
    return describe_broken_texts("the tokenizer", sum(counts), rows, "passage", example)


def describe_broken_texts(
    tokenizer: str, count: int, total: int, noun: Literal["passage", "query"], example: str
) -> str:
    """Returns a warning if a tokenizer breaks more than MAX_BROKEN of the texts into fragments; otherwise "".

    Args:
        tokenizer: What the warning calls the tokenizer.
        count: The number of broken texts.
        total: The number of texts.
        noun: What the texts are.
        example: The id of a broken passage, or a broken query.
    """
    if count <= MAX_BROKEN * total:
        return ""
    nouns, problem = ("passages", "finds them badly") if noun == "passage" else ("queries", "finds little for them")
    return (
        f"{tokenizer} breaks {count:,} of {total:,} {nouns} ({count / total:.0%}) into single letters or unknown "
        f"tokens, such as {noun} {short_repr(example)}; it was not made for their language, and dense search "
        f"{problem}: encode with a multilingual encoder, or search by BM25"
    )


def check_unknown_tokens(unknown: int, total: int, part: str) -> None:
    """Raises InputError if more than MAX_UNKNOWN of a part's tokens are unknown to the tokenizer."""
    if unknown > MAX_UNKNOWN * total:
        raise InputError(
            f"{part}: the tokenizer does not know {unknown:,} of {total:,} tokens ({unknown / total:.0%}), so the "
            f"vectors say little about the texts: use another encoder, or set {Parameter('allow_unknown_tokens')}"
        )


@dataclass(frozen=True)
class EncoderNumericsTask:
    """The task that returns the numerics class of a worker's encoder, without loading weights.

    model_type: of the backbone; None if its batches are neither packed nor compiled (`VectorKind.batched_model_type`).
    pinned: the class of the embeddings' first vectors; None: there are none.
    """

    options: EncoderOptions
    model_type: str | None
    resources: WorkerResources
    pinned: str | None = None

    def open(self, allocation: Allocation) -> Callable[[None, Report], str]:
        """Returns the function that computes the numerics class of this worker."""
        from riptide.retriever.forward.numerics import expected_numerics

        options = self.options if self.model_type is not None else replace(self.options, compile="never")
        return lambda item, report: expected_numerics(options, allocation.device, self.model_type, self.pinned)


def numerics_of(
    runner: Runner,
    options: EncoderOptions,
    model_type: str | None,
    resources: WorkerResources,
    count: int,
    pinned: str | None = None,
) -> str:
    """Returns the numerics class of the runner's encoders; waits until a worker is available.

    Args:
        runner: The runner.
        options: The options of the encoder.
        model_type: As of `EncoderNumericsTask`.
        resources: The resources of an encoder.
        count: The number of encoders that can work at the same time: of pending parts.
        pinned: As of `EncoderNumericsTask`.
    """
    task = EncoderNumericsTask(options, model_type, resources, pinned)
    numerics: str = runner.run_on_first_available(task, None, count)
    return numerics


def similarity_of(encoder_settings: Mapping[str, Any]) -> str:
    """Returns the similarity of the vectors: "cosine" if the encoder normalises them, else "dot"."""
    return "cosine" if encoder_settings["head"] and encoder_settings["head"][-1] == "normalize" else "dot"


def count_pending(store: Store, name: str, limit: int | None) -> int:
    """Returns the number of corpus parts (within the first `limit` passages) that are not encoded yet."""
    corpus, key = Corpus.open(store), artifact_key("embeddings", name)
    files = {path for path, _ in store.storage.list(key)}
    parts = [part for part in corpus.parts if limit is None or part.first_row < limit]
    return sum(f"{key}/{part.label}.json" not in files for part in parts)


def find_equal_embeddings(store: Store, encoder_settings: Mapping[str, Any], limit: int | None) -> list[str]:
    """Returns the names of complete embeddings of the corpus with the same encoder settings and limit."""
    names = []
    for name in store.names("embeddings"):
        try:
            config = store.generations("embeddings", name)[-1].config
        except InputError:
            continue  # the encoder of damaged embeddings is unknown
        if config["encoder"] == encoder_settings and config["limit"] == limit:
            names.append(name)
    return names


def is_encoded(store: Store, name: str, encoder_settings: Mapping[str, Any], limit: int | None) -> bool:
    """Returns whether all corpus generations have complete embeddings of this encoder, in any numerics class."""
    corpus = Corpus.open(store)
    generations = store.generations("embeddings", name)
    return len(generations) == len(corpus.generations) and all(
        embeddings.inputs["corpus"]["fingerprint"] == artifact.fingerprint
        and embeddings.config["encoder"] == encoder_settings
        and embeddings.config["limit"] == limit
        for embeddings, artifact in zip(generations, corpus.generations, strict=True)
    )
