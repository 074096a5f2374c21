"""Opens and checks the artifacts that a training run of a retriever needs, before any training and without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.embeddings.embeddings_reader import EmbeddingsReader
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.queries.judged_pairs import JudgedPairs
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.sealed_json import ArtifactReference
from riptide.indexing.store.store import Store, check_name
from riptide.indexing.topics.topics_reader import Topics
from riptide.indexing.training.dev_splits import DevHits
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.training.retriever_data import (
    RetrieverMaker,
    find_passage_embeddings,
    open_training_topics,
    open_tuning_dev_pairs,
    open_tuning_sets,
    topic_agreement,
)
from riptide.indexing.training.training_sets import (
    NO_NEGATIVES,
    OpenSets,
    SetCorpus,
    TrainingSetSpec,
    parse_training_set,
    resolve_stores,
)
from riptide.indexing.work.work import ArtifactTarget
from riptide.jobs.training.resolving import (
    encoder_options,
    loop_options,
    tune_options,
    with_terms,
)
from riptide.jobs.training.start_prompt import check_start, open_start
from riptide.jobs.training.training_options import TrainRetriever
from riptide.jobs.training.training_runs import dev_split_of
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.model.recipe import read_recipe
from riptide.retriever.objectives.flops_term import FlopsWeights
from riptide.retriever.objectives.tune_options import TuneOptions, offsets_of
from riptide.retriever.options import EncoderOptions
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.synthesis import SynthesisOptions
from riptide.retriever.options.topics import TopicOptions
from riptide.retriever.prompts.task_prompt import check_prompt_positions
from riptide.retriever.systems.encoders import trained_recipe
from riptide.retriever.systems.lora import adapter_bytes


@dataclass(frozen=True)
class RetrieverSetup:
    """The artifacts and settings of a retriever's training run, opened and checked.

    Attributes:
        num_queries: The number of training queries.
        spec: The backbone, with the options that turn its texts into vectors.
        maker: Makes the system on each worker.
        loop: Options of the training loop.
        target: The prompts or the model to make.
        topics: The topics whose prompts are trained; None: other prompts, or none.
        topic_agreement: The share of the queries whose text has the topic of their passage; None without prompts of
            topics.
        num_dev_queries: The number of queries of all dev splits.
        dev_hits: The hits of BM25 in the pool of each dev split; None: there are none.
    """

    num_queries: int
    spec: EncoderSpec
    maker: RetrieverMaker
    loop: LoopOptions
    target: ArtifactTarget
    topics: Topics | None = None
    topic_agreement: float | None = None
    num_dev_queries: int = 0
    dev_hits: Sequence[DevHits] | None = None


def open_retriever_setup(store: Store, options: TrainRetriever, cache: ProcessCache | None = None) -> RetrieverSetup:
    """Opens and checks the artifacts that the options name for a retriever's training run.

    Args:
        store: The store.
        options: The options of the job.
        cache: The cache of the job, for several runs; None: an empty one.

    Raises:
        InputError: If an artifact is missing, does not fit the others, or cannot be used for training.
    """
    cache = cache or ProcessCache()
    check_zero(options)
    check_name(options.kind, options.task)
    start = None if options.init is None else open_start(store, options, options.init)
    tuning = tune_options(
        options, None if start is None or start.prompt.synthesis is None else start.prompt.synthesis.options
    )
    spec = open_backbone(store, options)
    tasks = task_names(store, options)
    if tuning.parametrisation == "per-task":
        tuning = replace(tuning, synthesis=synthesis_of_tasks(options, tuning.synthesis, tasks))
    tuning = with_terms(options, tuning, read_recipe(find_model_folder(spec.folder), spec.options).pooling, len(tasks))
    check_tuning(options, tuning, spec)
    backbone_settings = spec.settings("query")
    if start is not None:
        check_start(options, start.prompt, backbone_settings, tuning.length)
    # The options are checked, so data may be opened from here on.
    queries = Queries.open(store, options.queries)
    dev_split_of(options, queries)
    sets = training_sets(store, options, queries)
    training = open_tuning_sets(store, sets, tuning, limit=options.limit, batches=options.batches, cache=cache)
    dev_pairs = open_tuning_dev_pairs(sets, training, options.dev_split, options.dev_limit, cache)
    dev_hits = open_dev_hits(store, options, training, dev_pairs)
    num_queries = len(training.data.queries)
    loop = loop_options(options, tuning, backbone_settings["pooling"], num_queries)
    tuning = replace(tuning, terms=tuple(each.with_steps(loop.steps) for each in tuning.terms))
    topics, topic_agreement = None, None
    if tuning.topics is not None:
        topics, topic_agreement = open_topics(store, options, training, tuning.topics, cache)
    stored = find_stored_passages(store, spec, training.corpora) if tuning.sides == "query" else None
    maker = RetrieverMaker(
        store=store,
        backbone=spec,
        backbone_settings=backbone_settings,
        tuning=tuning,
        corpus=training.corpus,
        sets=sets,
        fingerprints=training.fingerprints(),
        batches=options.batches,
        limit=options.limit,
        dev_split=options.dev_split,
        dev_limit=options.dev_limit,
        dev_passages=options.dev_passages.size,
        checkpointing=options.checkpointing,
        start=None if start is None else start.name,
        refresh_depth=options.refresh_depth if loop.refresh_every else 0,
        embeddings=None if stored is None else tuple(each.name for each in stored),
        topics=None if topics is None else (topics.name, topics.fingerprint),
        cache=cache,
    )
    inputs = {"corpus": training.corpus.generations[-1], **training.inputs, **spec.inputs()}
    inputs |= {} if start is None else {"init": start.artifact}
    inputs |= {} if stored is None else vector_inputs(training.corpora, stored)
    inputs |= {} if topics is None else {"topics": topics.generations[0]}
    for number, each in enumerate(dev_hits or (), 1):
        inputs |= each.inputs(number)
    models = {"backbone": ("backbone", options.backbone)}
    target = ArtifactTarget(options.kind, options.task, inputs, artifact_config(options, maker, loop), models=models)
    num_dev_queries = sum(len(pairs.ids) for _, pairs in dev_pairs)
    return RetrieverSetup(
        num_queries, spec, maker, loop, target, topics, topic_agreement, num_dev_queries, dev_hits=dev_hits
    )


def open_dev_hits(
    store: Store, options: TrainRetriever, training: OpenSets, dev_pairs: Sequence[tuple[int, JudgedPairs]]
) -> list[DevHits] | None:
    """Opens the BM25 indexes whose hits are in the pools of the dev splits; returns None if no pool has hits.

    Args:
        store: The store of the run.
        options: The options of the job.
        training: The training sets.
        dev_pairs: As `open_tuning_dev_pairs` returns them.

    Raises:
        InputError: If a store with a dev split has no BM25 index of its corpus.
    """
    depth = options.dev_passages.hits_per_query
    if not depth:
        return None
    corpora = [(training.corpora[place], pairs) for place, pairs in dev_pairs]
    return [DevHits.open(store, each.corpus, pairs, depth, url=each.store) for each, pairs in corpora]


def check_zero(options: TrainRetriever) -> None:
    """Raises InputError for DeepSpeed's ZeRO stages 2 and 3 unless queries and passages train the same weights."""
    if options.weights.sides != "tied" and (options.loop.zero or 0) >= 2:
        raise InputError(
            f"{Parameter('zero', options.loop.zero)} {Parameter('sides', options.weights.sides)}: in stages 2 and 3 "
            "queries and passages must train the same weights: give 0 or 1"
        )


def open_backbone(store: Store, options: TrainRetriever) -> EncoderSpec:
    """Opens the backbone, with the options that turn its texts into vectors.

    Raises:
        InputError: If it has two models, one for each side.
    """
    spec = EncoderSpec(store, options.backbone, EncoderOptions())
    if spec.is_untied:
        raise InputError(
            f"{Parameter('backbone', options.backbone)}: has an encoder of each side, or of queries only; expected "
            "one model for both sides, for example the one that it was trained from"
        )
    return replace(spec, options=encoder_options(options, spec.folder))


def check_tuning(options: TrainRetriever, tuning: TuneOptions, spec: EncoderSpec) -> None:
    """Raises InputError if the backbone or the training loop cannot train the weights that the options choose."""
    if tuning.learn_temperature and options.loop.zero == 3:
        raise InputError(
            f"{Parameter('learn_temperature')} {Parameter('zero', '3')}: DeepSpeed's stage 3 cannot restore a "
            f"parameter of one number on several workers; give {Parameter('zero', '0')} to 2"
        )
    folder = find_model_folder(spec.folder)
    if tuning.lora is not None:
        # Raises InputError for layers that the backbone lacks.
        adapter_bytes(read_recipe(folder, spec.options), tuning.lora)
    check_prompt_positions(trained_recipe(folder, spec.options, tuning), offsets_of(tuning))
    refresh = options.refresh_epochs
    if refresh is not None and tuning.distills:
        raise InputError(
            f"{Parameter('loss', tuning.loss)} with {Parameter('refresh_epochs')}: negatives that are mined during "
            "training have no teacher scores; leave one of them out"
        )
    if refresh is not None and tuning.term_options(FlopsWeights) is not None:
        raise InputError(
            f"{Parameter('pooling', 'splade')} with {Parameter('refresh_epochs')}: negatives are mined during "
            "training with dense vectors only; leave one of them out"
        )
    if refresh is not None and not tuning.negatives_per_query:
        raise InputError(
            f"{Parameter('refresh_epochs', refresh)}: training uses none of the negatives that it mines; give "
            f"{Parameter('negatives_per_query')} too, at least 1"
        )


def vector_inputs(
    corpora: Sequence[SetCorpus], embeddings: Sequence[EmbeddingsReader]
) -> dict[str, Artifact | ArtifactReference]:
    """Returns the embeddings of each corpus as inputs by role, with as many generations as the corpus has."""
    inputs: dict[str, Artifact | ArtifactReference] = {}
    for each, reader in zip(corpora, embeddings, strict=True):
        for number, artifact in enumerate(reader.generations[: len(each.corpus.generations)]):
            role = f"embeddings/{number}" if each.number == 1 else f"embeddings:{each.number}/{number}"
            inputs[role] = ArtifactReference(artifact.url, artifact.fingerprint) if each.store else artifact
    return inputs


def artifact_config(options: TrainRetriever, maker: RetrieverMaker, loop: LoopOptions) -> dict[str, Any]:
    """Returns the configuration of the artifact: settings that determine the trained weights, without the inputs."""
    config: dict[str, Any] = {
        "backbone": maker.backbone_settings,
        "tuning": maker.tuning.to_dict(),
        "loop": loop.fingerprint_options(),
        "split": options.split,
        "limit": options.limit,
        "dev": options.dev_config(),
        "refresh_depth": maker.refresh_depth,
        "cpus": options.worker_cpus,
        "dtype": options.dtype,
    }
    if options.also_train:
        # The location of a store is no part of the configuration, as the inputs identify the content.
        config["also_train"] = [training_set_config(spec) for spec in maker.sets[1:]]
        config["batches"] = options.batches
    if options.task_size is not None:
        config["task_size"] = options.task_size
    return config


def open_topics(
    store: Store, options: TrainRetriever, training: OpenSets, topic_options: TopicOptions, cache: ProcessCache
) -> tuple[Topics, float]:
    """Opens the topics of --topics; also returns the fraction of queries whose text has the topic of their passage.

    Args:
        store: The store.
        options: The options of the job.
        training: The training sets.
        topic_options: The options of the prompts of topics.
        cache: The cache of the job.

    Raises:
        InputError: If the topics are of another corpus, or if a query has no word that they know.
    """
    if len(training.corpora) > 1 or training.corpora[0].store:
        raise InputError(
            f"{Parameter('prompt', 'topics')} {Parameter('also_train')}: the training sets have several corpora, and "
            "topics are those of one: leave out the sets of other stores"
        )
    name = store.only_name("topics", options.topics)
    topics, of_texts = open_training_topics(store, name, training, topic_options, cache)
    return topics, topic_agreement(of_texts, training.data)


def synthesis_of_tasks(
    options: TrainRetriever, synthesis: SynthesisOptions | None, tasks: Sequence[str]
) -> SynthesisOptions:
    """Converts the options of a prompt for one task to those of a prompt for each task.

    Args:
        options: The options of the job.
        synthesis: The options for one task.
        tasks: The names of the tasks.

    Raises:
        InputError: If there are too few tasks, if a name cannot be that of prompts, or if options do not fit.
    """
    assert synthesis is not None
    if len(tasks) < 2:
        raise InputError(
            f"{Parameter('prompt', 'per-task')}: there is one task, {tasks[0]}, expected several: name others with "
            f"{Parameter('also_train')}, or give {Parameter('prompt', 'matrix')}"
        )
    if options.refresh_epochs is not None:
        raise InputError(
            f"{Parameter('prompt', 'per-task')} {Parameter('refresh_epochs', options.refresh_epochs)}: negatives are "
            "mined with one prompt for all queries, and each task has another one: leave one of them out"
        )
    for task in tasks:
        check_name("prompts", f"{options.task}-{task}")
    return replace(synthesis, prompts=len(tasks))


def training_set_config(spec: TrainingSetSpec) -> dict[str, Any]:
    """Returns the configuration of a training set, without its store and embeddings, which the inputs identify."""
    extra: dict[str, Any] = {} if spec.size is None else {"size": spec.size}
    later = ("store", "size", "embeddings", "dev")
    extra |= {} if spec.dev is None else {"dev": spec.dev}
    return {key: value for key, value in asdict(spec).items() if key not in later} | extra


def find_stored_passages(store: Store, spec: EncoderSpec, corpora: Sequence[SetCorpus]) -> list[EmbeddingsReader]:
    """Returns the embeddings that the backbone made of each corpus, for training with stored vectors of passages.

    Raises:
        InputError: If there are no such embeddings or several, or if another backbone made them.
    """
    result = []
    for each in corpora:
        try:
            set_store = Store(each.store) if each.store else store
            result.append(find_passage_embeddings(set_store, spec, each.corpus, each.embeddings))
        except InputError as error:
            if not each.store:
                raise
            message = f"{error}".replace(f"{Parameter('embeddings')}", f"embeddings=NAME in {Parameter('also_train')}")
            raise InputError(message if each.store in message else f"{each.store}: {message}") from None
    return result


def task_names(store: Store, options: TrainRetriever) -> list[str]:
    """Returns the names of the tasks of the training sets, sorted; opens no set."""
    further = [parse_training_set(text) for text in options.also_train]
    return sorted({store.only_name("queries", options.queries), *(each.task or each.queries for each in further)})


def training_sets(store: Store, options: TrainRetriever, queries: Queries) -> tuple[TrainingSetSpec, ...]:
    """Returns the training sets that the options name; the set of --queries comes first.

    Raises:
        InputError: If a set cannot be read, or if "none" is the name of mined negatives.
    """
    negatives = None
    is_judged = options.positives == "judged"  # other kinds of positives use no mined negatives
    if is_judged and options.negatives != NO_NEGATIVES:
        negatives = store.only_name("negatives", options.negatives)
    elif is_judged and NO_NEGATIVES in store.names("negatives"):
        raise InputError(
            f"{Parameter('negatives', NO_NEGATIVES)}: {store.url} has negatives of this name, which stands for "
            "training without any; store them under another name"
        )
    name = queries.artifact.name
    first = TrainingSetSpec(queries=name, split=options.split, negatives=negatives, embeddings=options.embeddings)
    further = [parse_training_set(text) for text in options.also_train]
    for other in further:
        if other.embeddings is not None and options.weights.sides != "query":
            raise InputError(
                f"{Parameter('also_train')} embeddings={other.embeddings} {Parameter('sides', options.weights.sides)}: "
                f"stored vectors of passages are for {Parameter('sides', 'query')}, which trains queries only"
            )
        if other.dev is None:
            continue
        if options.dev_split is None:
            raise InputError(
                f"{Parameter('also_train')} dev={other.dev}: is measured together with {Parameter('dev_split')}, the "
                f"split of {Parameter('queries')}: give it too"
            )
        set_store = Store(other.store).require_not_empty() if other.store else store
        Queries.open(set_store, other.queries).require_split(other.dev)
    size = options.task_size
    return resolve_stores(store, [each if each.size else replace(each, size=size) for each in (first, *further)])
