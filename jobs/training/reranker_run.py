"""Trains a cross-encoder for re-ranking."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from riptide.base.errors import InputError
from riptide.base.wording import Parameter
from riptide.indexing.mining.negatives import mined_corpus
from riptide.indexing.queries.queries import Queries
from riptide.indexing.store.artifact import Artifact
from riptide.indexing.store.model_artifacts import resolve_model, stored_model
from riptide.indexing.store.store import Store, check_name
from riptide.indexing.training.order import count_lists, read_lists
from riptide.indexing.training.process_cache import ProcessCache
from riptide.indexing.training.reranking_data import CrossMaker, open_dev_data, open_mined_queries
from riptide.indexing.work.work import ArtifactTarget
from riptide.jobs.common.printing import say
from riptide.jobs.training.training_options import TrainReranker
from riptide.jobs.training.training_runs import (
    describe_best,
    dev_split_of,
    draw_curves,
    make_artifact,
    report_if_complete,
)
from riptide.process.extras import TRAINING, require
from riptide.process.memory import format_bytes
from riptide.retriever.model.configuration import load_config
from riptide.retriever.model.model_folder import describe_backbone, find_model_folder, weight_files
from riptide.retriever.model.recipe import max_positions_of
from riptide.retriever.options.loop import LoopOptions
from riptide.retriever.options.reranking import CrossEncoderOptions
from riptide.retriever.systems.cross import open_pair_tokenizer


@dataclass(frozen=True)
class RerankerSetup:
    """The artifacts and settings of a re-ranker's training run, opened and checked.

    Attributes:
        num_split_queries: Number of queries of the split.
        num_queries: Number of those queries that have negatives and a positive.
        weights: Size of the backbone's weights in bytes.
        max_length: The largest length limit that the backbone allows; None: any.
        maker: Makes the system on each worker.
        loop: Options of the training loop.
        target: The model to make.
    """

    num_split_queries: int
    num_queries: int
    weights: int
    max_length: int | None
    maker: CrossMaker
    loop: LoopOptions
    target: ArtifactTarget


def train_reranker(store: Store, options: TrainReranker) -> Artifact | None:
    """Trains a re-ranker. Returns the model, or None with --plan."""
    require("training", *TRAINING)
    store.require_not_empty()
    setup = open_reranker_setup(store, options)
    if options.plan:
        if not report_if_complete(options, store, setup.target):
            print_plan(options, setup)
        return None
    counts = {"queries": setup.num_queries, "asked": setup.num_split_queries}

    def prepare(on_ray: bool) -> tuple[CrossMaker, LoopOptions, dict[str, Any]]:
        """Adds the ranked lists that evaluate the model's order; reading them opens the candidates."""
        if on_ray:  # workers open the data in their own processes, so this process frees its memory
            setup.maker.cache.clear()
        pairs = setup.loop.steps * options.pairs.batch * (1 + options.pairs.negatives_per_query)
        negatives, queries = store.open("negatives", setup.maker.negatives), Queries.open(store, setup.maker.queries)
        lists = read_lists(store, negatives, queries, options.split, options.limit, count_lists(pairs))
        return replace(setup.maker, lists=lists), setup.loop, counts

    model = make_artifact(options, store, setup.target, prepare=prepare, max_length=setup.max_length)
    notes = model.notes
    say(
        f"{model.url}: {notes['steps']:,} steps over {notes['queries']:,} of {notes['asked']:,} queries, last loss "
        f"{notes['loss']:.4f}{describe_best(notes)}, {notes['numerics']}"
    )
    say(describe_ranking_change(notes.get("order")))
    draw_curves(options, model)
    return model


def describe_ranking_change(order: dict[str, Any] | None) -> str:
    """Returns a line that compares the model's order of hits with their order in the candidates."""
    if order is None:
        return "order     not compared with that of the hits: the negatives name no candidates that have their ranks"
    figures = ", ".join(
        f"{name.replace('RR@', 'MRR@', 1)} {value:.4f} -> {order['after'][name]:.4f}"
        for name, value in order["before"].items()
    )
    what = f"the first {order['depth']} hits of {order['source']} for {order['lists']:,} training queries: {figures}"
    if all(order["after"][name] >= value for name, value in order["before"].items()):
        return f"order     {what}"
    return (
        f"warning: the model orders hits worse than they were: {what}; train longer, with another {Parameter('lr')}, "
        f"or with more {Parameter('negatives_per_query')}"
    )


def open_reranker_setup(store: Store, options: TrainReranker) -> RerankerSetup:
    """Opens and checks the artifacts that the options name for a re-ranker's training run.

    Raises:
        InputError: If an artifact is missing, does not fit the others, or cannot be used for training.
    """
    negatives = store.open("negatives", store.only_name("negatives", options.negatives))
    queries = Queries.open(store, options.queries)
    corpus = mined_corpus(store, negatives)
    cache = ProcessCache()
    data = open_mined_queries(corpus, queries, options.split, negatives, options.limit, cache)
    cross = CrossEncoderOptions(**vars(options.pairs), seed=options.loop.seed)
    steps = options.count_steps(len(data.queries), options.pairs.batch)
    loop = options.loop_options(steps, lr=2e-5)
    folder = find_model_folder(resolve_model(store, options.backbone))
    backbone_settings = describe_backbone(folder)
    open_pair_tokenizer(folder, cross.max_length)
    inputs: dict[str, Artifact] = {
        "corpus": corpus.generations[-1],
        "queries": queries.artifact,
        "negatives": negatives,
    }
    if backbone := stored_model(store, options.backbone):
        inputs["backbone"] = backbone
    dev = dev_split_of(options, queries)
    if options.dev_negatives is not None and dev is None:
        raise InputError(
            f"{Parameter('dev_negatives', options.dev_negatives)}: expected {Parameter('dev_split')} too, whose "
            f"queries have them"
        )
    if options.dev_negatives is not None:
        inputs["dev_negatives"] = store.open("negatives", options.dev_negatives)
    if dev is not None:
        open_dev_data(store, dev, inputs.get("dev_negatives", negatives), cache)
    maker = CrossMaker(
        store=store,
        backbone=options.backbone,
        backbone_settings=backbone_settings,
        options=cross,
        corpus=corpus,
        queries=queries.artifact.name,
        negatives=negatives.name,
        split=options.split,
        limit=options.limit,
        checkpointing=options.checkpointing,
        dev=dev,
        dev_negatives=options.dev_negatives,
        cache=cache,
    )
    config = {
        "backbone": backbone_settings,
        "training": asdict(cross),
        "loop": loop.fingerprint_options(),
        "split": options.split,
        "limit": options.limit,
        "cpus": options.worker_cpus,
        "dtype": options.dtype,
    }
    if dev is not None:
        config["dev"] = options.dev_config()
    num_queries = len(queries.split(options.split, options.limit).ids)
    weights = sum(file.stat().st_size for file in weight_files(folder))
    max_length = max_positions_of(load_config(folder))
    name = options.name or f"{options.backbone.rstrip('/').rpartition('/')[2]}-reranker"
    check_name("models", name)
    target = ArtifactTarget("models", name, inputs, config, models={"backbone": ("backbone", options.backbone)})
    return RerankerSetup(num_queries, len(data.queries), weights, max_length, maker, loop, target)


def print_plan(options: TrainReranker, setup: RerankerSetup) -> None:
    """Prints the plan of a training run: what it reads and writes."""
    steps, weights = setup.loop.steps, setup.weights
    pairs = steps * options.pairs.batch * (1 + options.pairs.negatives_per_query)
    mined = f"negatives/{setup.maker.negatives}"
    say(
        f"queries   {setup.num_queries:,} of the {setup.num_split_queries:,} of {options.split}, with negatives in "
        f"{mined}"
    )
    say(f"steps     {options.describe_steps(steps)} of {options.pairs.batch} queries on {options.workers} workers")
    say(f"pairs     {pairs:,}, at most {pairs * options.pairs.max_length:,} tokens forward and backward")
    checkpoint = options.checkpoint_bytes(weights)
    say(f"memory    about {format_bytes(weights + checkpoint)} a worker, and a batch's intermediate values")
    every = options.loop.checkpoint_every
    say(f"writes    {format_bytes(weights)}, and a checkpoint of {format_bytes(checkpoint)} every {every} steps")
