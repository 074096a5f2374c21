"""Opens the training data of a retriever: queries, mined negatives, stored vectors, topics and dev splits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from riptide.base.errors import InputError
from riptide.base.wording import Command, Parameter
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.named_encoders import (
    EncoderSpec,
    describe_differences,
    differing_settings,
    find_closest,
)
from riptide.indexing.exact import ExactSearch
from riptide.indexing.hit_sources.registry import find_index_kind
from riptide.indexing.queries.judged_pairs import JudgedPairs
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import model_folder
from riptide.indexing.store.store import Store
from riptide.indexing.topics.topics_reader import Topics
from riptide.indexing.training.dev_splits import open_dev_pairs, open_dev_set
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.training.training_sets import OpenSets, SetCorpus, TrainingSetSpec, open_sets
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.objectives.category_term import CategoryOptions
from riptide.retriever.objectives.tune_options import TuneOptions
from riptide.retriever.options.topics import TopicOptions
from riptide.retriever.prompts.task_prompt import load_prompt
from riptide.retriever.systems.dual import DualEncoderSystem
from riptide.retriever.topics.model import with_default_topic
from riptide.retriever.topics.training import TrainingTopics, topics_of_queries
from riptide.retriever.training.dev import DevSet, DevSets
from riptide.retriever.training.mixture_schedule import Batches
from riptide.retriever.training.system import Evaluate, NegativesRefresh
from riptide.retriever.training.training_data import TrainingData

ReadVectors = Callable[[np.ndarray], np.ndarray]
"""Rows int64 [n] to vectors [n, dim]: float16 if they are dense, float32 with all zeros if they are sparse."""

_BLOCK = 65_536  # number of passages whose vectors are in memory at once


@dataclass(frozen=True, kw_only=True)
class RetrieverMaker:
    """The `SystemMaker` of a retriever: creates a DualEncoderSystem with prompts over a backbone or a whole backbone.

    Attributes:
        store: The store.
        backbone: The backbone, with the options that turn its texts into vectors.
        backbone_settings: The settings of the backbone, which must be the same on every node.
        tuning: Options of the trained system.
        corpus: The corpus.
        sets: The training sets. The dev split is one of the first set's query set.
        fingerprints: The fingerprints of their artifacts by role, which must be the same on every node.
        batches: Whether a batch mixes the training sets.
        limit: Use only the first N queries of each training split; None: all.
        dev_split: The split that measures quality; None: no measurement.
        dev_limit: Use only the first N queries of the dev split; None: all.
        dev_passages: Number of passages in which they are searched: relevant ones, and random others.
        dev_hits: For each dev split, the rows of further passages of its corpus, int64 [any]; None: there are none.
        checkpointing: Recompute activations in the backward pass.
        start: Start from this prompt, as `open_prompt` takes it; None: from random values.
        refresh_depth: Negatives per query in each mining by the current model; 0: no such mining.
        embeddings: Read the vectors of passages from embeddings/NAME of the store of each corpus, in the order of
            `OpenSets.corpora`; None: the trained model encodes them.
        topics: The name and the fingerprint of the topics whose prompts are trained; None: other prompts, or none.
        cache: The data that this process has opened.
    """

    store: Store
    backbone: EncoderSpec
    backbone_settings: dict[str, Any]
    tuning: TuneOptions
    corpus: Corpus
    sets: tuple[TrainingSetSpec, ...]
    fingerprints: dict[str, str]
    batches: Batches
    limit: int | None
    dev_split: str | None
    dev_limit: int | None
    dev_passages: int
    checkpointing: bool
    start: str | None = None
    dev_hits: tuple[np.ndarray, ...] | None = field(default=None, compare=False)
    refresh_depth: int = 0
    embeddings: tuple[str, ...] | None = None
    topics: tuple[str, str] | None = None
    cache: ProcessCache = field(default_factory=ProcessCache, repr=False, compare=False)

    def make(
        self, *, device: torch.device, dtype: torch.dtype, rank: int, world: int
    ) -> tuple[DualEncoderSystem, Evaluate | None, NegativesRefresh | None]:
        """Creates the system of a worker; see `SystemMaker`."""
        if self.backbone.settings("query") != self.backbone_settings:
            raise InputError(f"{self.backbone.name}: this node has another one than the node of the job")
        training = open_tuning_sets(
            self.store, self.sets, self.tuning, limit=self.limit, batches=self.batches, cache=self.cache
        )
        training.check(self.fingerprints)
        start = None if self.start is None else load_prompt(model_folder(open_prompt(self.store, self.start)))
        readers = self._vector_readers(training.corpora)
        system = DualEncoderSystem(
            find_model_folder(self.backbone.folder),
            self.backbone.options,
            self.tuning,
            training.data,
            device=device,
            dtype=dtype,
            checkpointing=self.checkpointing,
            start=start,
            vectors=join_vector_readers(readers, [each.corpus.num_rows for each in training.corpora])
            if readers
            else None,
            assignment=self._open_topics(training),
        )
        refresh = RefreshedNegatives(system, self.refresh_depth, rank, world) if self.refresh_depth else None
        if self.dev_split is None:
            return system, None, refresh
        dev_sets = DevSets(self._dev_sets(system, training, readers))
        return system, lambda: dev_sets.mrr(system, rank, world), refresh

    def _vector_readers(self, corpora: Sequence[SetCorpus]) -> list[ReadVectors]:
        """Opens the stored vectors of each corpus; returns [] if the trained model encodes the passages."""
        if self.embeddings is None:
            return []
        reader = find_index_kind(self.backbone_settings).reader
        return [
            reader.open(Store(each.store) if each.store else self.store, name, each.corpus).open_vector_reader()
            for each, name in zip(corpora, self.embeddings, strict=True)
        ]

    def _dev_sets(self, system: DualEncoderSystem, training: OpenSets, readers: Sequence[ReadVectors]) -> list[DevSet]:
        """Opens the dev split of each training set that has one, and checks that the system can encode its queries."""

        compose = partial(system.tokenizer.compose, policy=system.encoder.title)
        dev_sets = []
        dev_pairs = open_tuning_dev_pairs(self.sets, training, self.dev_split, self.dev_limit, self.cache)
        for number, (place, pairs) in enumerate(dev_pairs):
            dev = open_dev_set(
                training.corpora[place].corpus,
                pairs,
                self.dev_passages,
                compose,
                hits=None if self.dev_hits is None else self.dev_hits[number],
                vectors=readers[place] if readers else None,
                categories_field=categories_field_of(self.tuning),
                prompt_numbers=None if system.assignment is None else system.assignment.of_passages,
            )
            system.check_queries(dev.queries)
            if system.assignment is not None:
                # Raises before the first step if a query has no known word.
                system.assignment.infer(dev.queries, "query")
            dev_sets.append(dev)
        return dev_sets

    def _open_topics(self, training: OpenSets) -> TrainingTopics | None:
        """Opens the topics of the training data. Raises InputError if this node has other topics than the job's."""
        if self.topics is None or self.tuning.topics is None:
            return None
        name, fingerprint = self.topics
        stored, topics = open_training_topics(self.store, name, training, self.tuning.topics, self.cache)
        if stored.fingerprint != fingerprint:
            raise InputError(
                f"topics/{name}: this node has {stored.fingerprint[:12]}, the node of the job {fingerprint[:12]}: give "
                "a store that all nodes share, and leave it unchanged"
            )
        return topics

    def judge(self, system: DualEncoderSystem) -> dict[str, Any]:
        """Returns {"temperature": learned temperature} for the notes of the artifact; {} if it is not learned."""
        return {} if system.learned is None else {"temperature": system.learned.value()}


@dataclass(frozen=True)
class RefreshedNegatives:
    """A NegativesRefresh that mines the nearest passages of each training query with the current model.

    A query's positives, other passages with their text, and passages of other corpora are excluded.

    The workers encode the corpus together, block by block, or read its stored vectors. Each searches for its share of
    the queries.

    Attributes:
        system: The system that is trained.
        depth: Negatives per query.
        rank: The rank of this worker.
        world: The number of workers.
    """

    system: DualEncoderSystem
    depth: int
    rank: int = 0
    world: int = 1

    def mine(self) -> torch.Tensor:
        """Mines negatives: returns rows, nearest first, padded with -1: int64 [queries, depth], on the CPU."""
        system, data = self.system, self.system.data
        assert data is not None
        prompt_numbers = None
        if system.assignment is not None:  # uses topics of the training data, as inference may raise for a query
            positives = np.array([rows[0] for rows in data.positives])
            prompt_numbers = system.assignment.of_queries(np.arange(len(positives)), positives)
        queries = system.encode(data.queries, "query", self.rank, self.world, prompt_numbers)
        mined = torch.full((len(queries), self.depth), -1, dtype=torch.int64)
        by_corpus: dict[tuple[int, int], list[int]] = {}
        for query in range(len(queries)):
            by_corpus.setdefault(data.corpus_range_of(query), []).append(query)
        for (begin, end), of_corpus in by_corpus.items():
            share = of_corpus[self.rank :: self.world]
            max_relevant = max(len(data.relevant_rows(query)) for query in of_corpus)
            search = ExactSearch(queries[share], min(self.depth + max_relevant, end - begin))
            for first in range(begin, end, _BLOCK):
                rows = np.arange(first, min(first + _BLOCK, end))
                vectors = system.encode_passages(rows, self.rank, self.world)
                search.add(vectors.astype(np.float16), first, data.deleted)
            for query, hits in zip(share, search.result().rows, strict=True):
                negatives = hits[(hits >= 0) & ~np.isin(hits, data.relevant_rows(query))][: self.depth]
                mined[query, : len(negatives)] = torch.from_numpy(negatives)
        mined = mined.to(system.device)
        if self.world > 1:
            dist.all_reduce(mined, dist.ReduceOp.MAX)
        return mined.cpu()

    def train_on(self, mined_rows: torch.Tensor) -> None:
        """Replaces the negatives by mined rows, from the next batch on."""
        data = self.system.data
        assert data is not None
        self.system.data = replace(data, negatives=[rows[rows >= 0] for rows in mined_rows.numpy()])


def categories_field_of(tuning: TuneOptions) -> str | None:
    """Returns the metadata field with the categories that training uses, or None."""
    categories = tuning.term_options(CategoryOptions)
    return None if categories is None else categories.field


def open_tuning_sets(
    store: Store,
    sets: Sequence[TrainingSetSpec],
    tuning: TuneOptions,
    *,
    limit: int | None,
    batches: Batches,
    cache: ProcessCache,
) -> OpenSets:
    """Opens training sets with the data that the options need, or returns them from the cache; see `open_sets`.

    Args:
        store: The store.
        sets: The training sets.
        tuning: Options of the trained system.
        limit: As of `open_sets`.
        batches: As of `open_sets`.
        cache: The cache of the job.
    """
    request: dict[str, Any] = {
        "limit": limit,
        "batches": batches,
        "weighted": tuning.draw_positive == "weighted",
        "teacher": tuning.distills,
        "categories_field": categories_field_of(tuning),
    }
    return cache.get(("training sets", tuple(sets), *request.values()), lambda: open_sets(store, sets, **request))


def open_tuning_dev_pairs(
    sets: Sequence[TrainingSetSpec], training: OpenSets, split: str | None, limit: int | None, cache: ProcessCache
) -> list[tuple[int, JudgedPairs]]:
    """Opens the dev split of each training set that has one.

    Args:
        sets: The specifications of the training sets.
        training: The training sets.
        split: The dev split of the first set; None: quality is not measured.
        limit: Use only the first N queries of each dev split; None: all.
        cache: The cache of the job.

    Returns:
        For each dev split, the position of its corpus in `training.corpora`, and its queries with their passages.

    Raises:
        InputError: If no query of a split has a relevant passage in the corpus.
    """
    if split is None:
        return []
    splits = [split, *(each.dev for each in sets[1:])]
    return [
        (place, open_dev_pairs(training.corpora[place].corpus, queries, dev, limit, cache))
        for place, queries, dev in zip(training.places, training.queries, splits, strict=True)
        if dev is not None
    ]


def open_training_topics(
    store: Store, name: str, training: OpenSets, options: TopicOptions, cache: ProcessCache
) -> tuple[Topics, TrainingTopics]:
    """Opens topics/NAME, and the topics of training passages and queries, or returns them from the cache.

    Args:
        store: The store.
        name: The name of the topics.
        training: The training sets; they are those of one corpus.
        options: Whether the topic of a query is inferred from its text or that of its passage, and what happens to
            queries without a known word.
        cache: The cache of the job.

    Returns:
        The opened topics, and those of the training data. A passage without a known word has the most probable topic.

    Raises:
        InputError: If the topics are of another corpus or of a part of it, or if a query has no word that they know.
    """
    data = training.data

    def open_topics() -> tuple[Topics, TrainingTopics]:
        topics = Topics.open(store, name, data.num_passages)
        passages = topics.topic_per_row()
        if len(passages) < data.num_passages:
            raise InputError(
                f"{topics.generations[0].url} covers {len(passages):,} of the {data.num_passages:,} passages: fit "
                "topics without a limit under another name"
            )
        model, of_queries = topics.model, None
        if options.queries == "own":
            of_queries = topics_of_queries(model, data.queries, options.wordless)
        known = with_default_topic(passages[: data.num_passages].astype(np.int64), model)
        return topics, TrainingTopics(model, known, of_queries, options.wordless)

    return cache.get(("topics", name, training, options.queries, options.wordless), open_topics)


def topic_agreement(topics: TrainingTopics, data: TrainingData) -> float:
    """Returns the fraction (0 to 1) of training queries whose inferred topic is that of the first positive.

    A query without a known word does not agree.
    """
    inferred = topics.model.infer(data.queries)
    judged = topics.of_passages[[rows[0] for rows in data.positives]]
    return float((inferred == judged).mean())


def open_prompt(store: Store, name: str) -> Artifact:
    """Opens a prompt of the run's store or of another store.

    Args:
        store: The store of the run.
        name: prompts/NAME or NAME, in this store, or STORE/prompts/NAME in another one.

    Raises:
        InputError: If there is no such store or prompt.
    """
    url, found, short = name.rpartition("/prompts/")
    if not found:
        return store.open("prompts", name.removeprefix("prompts/"))
    return Store(url).require_not_empty().open("prompts", short)


def join_vector_readers(readers: Sequence[ReadVectors], sizes: Sequence[int]) -> ReadVectors:
    """Returns a function that reads vectors of several corpora by rows that are numbered consecutively over them.

    Args:
        readers: For each corpus, a function that reads vectors by its own rows.
        sizes: The number of passages of each corpus.
    """
    if len(readers) == 1:
        return readers[0]
    ends = np.cumsum(sizes)

    def read(rows: np.ndarray) -> np.ndarray:
        numbers = np.searchsorted(ends, rows, side="right")
        pieces, order = [], []
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            pieces.append(readers[number](rows[places] - (ends[number] - sizes[number])))
            order.append(places)
        return np.concatenate(pieces)[np.argsort(np.concatenate(order))]

    return read


def find_passage_embeddings(store: Store, backbone: EncoderSpec, corpus: Corpus, name: str | None) -> EmbeddingsReader:
    """Opens the embeddings whose vectors training reads instead of encoding passages with the frozen backbone.

    Args:
        store: The store.
        backbone: The backbone, with the options that turn passages into vectors. The dtype may be another one, and the
            embeddings may keep fewer words of sparse vectors.
        corpus: The corpus that they must cover.
        name: Name of the embeddings; None: the only ones that the backbone made with these options.

    Raises:
        InputError: If there are no such embeddings or several, or if they were made by another encoder, with other
            options, or of a part of the corpus only.
    """
    backbone_settings = backbone.settings("passage")
    free = [name for name in ("dtype", "passage_terms") if name in backbone_settings]
    encoders: dict[str, Any] = {}
    for each in store.names("embeddings") if name is None else [store.only_name("embeddings", name)]:
        try:
            encoder = store.generations("embeddings", each)[-1].config["encoder"]
        except InputError:
            if name is not None:
                raise
            continue  # the manifest is damaged, so the encoder is unknown
        encoders[each] = {**encoder, **{name: backbone_settings[name] for name in free}}
    fitting = [each for each in encoders if not differing_settings(encoders[each], backbone_settings, passages=True)]
    if len(fitting) > 1:
        raise InputError(
            f"{store.url}: the backbone made several embeddings of the passages: {', '.join(fitting)}; "
            f"name one with {Parameter('embeddings')}"
        )
    encode = f"run {Command('encode-corpus', store=shlex.quote(store.url), encoder=shlex.quote(backbone.name))} first"
    if not encoders:
        raise InputError(
            f"{store.url}: there are no embeddings, from which training with {Parameter('sides', 'query')} reads "
            f"the vectors of passages: {encode}"
        )
    if not fitting:
        other = find_closest(encoders, backbone_settings, passages=True)
        reason = describe_differences(encoders[other], backbone_settings, passages=True)
        raise InputError(
            f"embeddings/{other} are not those of the backbone, which would have {reason}: give the "
            f"settings of the embeddings, or {encode} with these under another name"
        )
    embeddings = find_index_kind(backbone_settings).reader.open(store, fitting[0], corpus)
    if embeddings.num_rows < corpus.num_rows:
        raise InputError(
            f"{store.url}/embeddings/{fitting[0]} covers {embeddings.num_rows:,} of the "
            f"{corpus.num_rows:,} passages: encode all of them, under another name"
        )
    return embeddings
